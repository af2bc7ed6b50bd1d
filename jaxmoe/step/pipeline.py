"""The trunk as a pipeline over pp; all else with the micro-batches split over pp.

Embedding, leading layers, final norm, head, MTP and losses are no stages: pp rank r computes them for the micro-batches
m with m % pp == r, so pp is one more data axis there and no rank waits for a head.

In the trunk, stage r works in tick t on place t - r of a queue: `pp` micro-batches pass chunk 0 of all stages, then
chunk 1, ..., then the next `pp` follow. With one chunk per stage that is GPipe; with more, the output of the last
stage reaches stage 0 just when its next chunk begins. Before and after the queue a stage works on padding, which
touches no loss, metric or count.

Inputs and outputs travel in two rings against the direction of the layers, one place per tick: stage 0 finds the next
micro-batch in the input ring, and an output that the last stage drops into the other is with its owner when the last of
its group of `pp` comes out. So no rank ever holds more than its own M / pp micro-batches.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmoe.spmd.axes import PP
from jaxmoe.spmd.collectives import axis_size, rank, shift, zeros_of
from jaxmoe.step.forward import Arrays, Forward, Weights
from jaxmoe.step.parts import Parts, add_layer_stats

Tree = Any

#: What travels with the hidden states: what the tokens are.
MARKS = ("ids", "positions", "segment_ids")


def _chunk(tree: Tree, index: jax.Array, chunks: int) -> Tree:
    """Chunk `index` of arrays that hold all chunks of this stage along dim 0."""
    if chunks == 1:
        return tree

    def pick(value: jax.Array) -> jax.Array:
        parts = value.reshape(chunks, value.shape[0] // chunks, *value.shape[1:])
        return jax.lax.dynamic_index_in_dim(parts, index, axis=0, keepdims=False)

    return jax.tree.map(pick, tree)


def _run_trunk(
    forward: Forward, parts: Parts, inputs: Arrays, weights: Weights, num_microbatches: int
) -> tuple[Parts, jax.Array]:
    """Inputs [M / pp, B, S, ...] of this rank's micro-batches -> their hidden states after the trunk."""
    stages, chunks = axis_size(PP), forward.layout.chunks
    stage, layer_ids = rank(PP), forward.own_layer_ids()
    graphdef, trunk = nnx.split(forward.model.trunk)
    round_ticks = stages * chunks
    empty = jax.tree.map(lambda value: zeros_of(value[0]), inputs)

    def tick(carry: Tree, time: jax.Array) -> tuple[Tree, None]:
        parts, received, input_ring, output_ring, outputs = carry
        fresh = jax.tree.map(lambda v: v[jnp.minimum(time // round_ticks, v.shape[0] - 1)], inputs)
        input_ring = jax.tree.map(lambda new, old: jnp.where(time % round_ticks == 0, new, old), fresh, input_ring)

        place = time - stage
        active = (place >= 0) & (place < num_microbatches * chunks)
        chunk, member = (place % round_ticks) // stages, place % stages
        microbatch = jnp.clip(place // round_ticks * stages + member, 0, num_microbatches - 1)
        own = jax.tree.map(lambda a, b: jnp.where((stage == 0) & (chunk == 0), a, b), input_ring, received)
        own["segment_ids"] = jnp.where(active, own["segment_ids"], 0)

        tokens = forward.tokens(own)
        layers = nnx.merge(graphdef, _chunk(trunk, chunk, chunks))
        x_BSD, stats = forward.layers(own["x"], tokens, layers, _chunk(layer_ids, chunk, chunks))
        own_weights = {name: value[microbatch] for name, value in weights[0].items()}
        parts = add_layer_stats(parts, forward.layout, stats, tokens.valid_BS, own_weights)

        output_ring = jnp.where((stage == stages - 1) & (chunk == chunks - 1), x_BSD, shift(output_ring, PP, -1))
        done = time - (stages - 1)
        group = jnp.clip(done // round_ticks, 0, outputs.shape[0] - 1)
        complete = (done >= 0) & (done % round_ticks == round_ticks - 1)
        outputs = outputs.at[group].set(jnp.where(complete, output_ring, outputs[group]))

        sent = _shift_all({**own, "x": x_BSD}, 1)
        return (parts, sent, _shift_all(input_ring, -1), output_ring, outputs), None

    carry = (parts, empty, empty, empty["x"], zeros_of(inputs["x"]))
    ticks = num_microbatches * chunks + stages - 1
    (parts, _, _, _, outputs), _ = jax.lax.scan(tick, carry, jnp.arange(ticks, dtype=jnp.int32))
    return parts, outputs


def _shift_all(tree: Tree, by: int) -> Tree:
    """`shift` over pp of every leaf."""
    return jax.tree.map(lambda value: shift(value, PP, by), tree)


def _of_own_microbatches(weights: Weights) -> Weights:
    """The weights [M / pp] of the micro-batches that this pp rank has outside the trunk."""
    return jax.tree.map(lambda value: value.reshape(-1, axis_size(PP), *value.shape[1:])[:, rank(PP)], weights)


def run_pipeline(forward: Forward, parts: Parts, arrays: Arrays, weights: Weights) -> tuple[Parts, jax.Array]:
    """All micro-batches up to the end of the trunk. `arrays` [M / pp, B, S] are this rank's, `weights` [M] all.

    Returns the parts with the terms of the decoder's layers, and the hidden states [M / pp, B, S, D] of this rank's
    micro-batches.
    """

    def before(parts: Parts, own: tuple[Arrays, Weights]) -> tuple[Parts, jax.Array]:
        own_arrays, own_weights = own
        return forward.embed(parts, own_arrays, forward.tokens(own_arrays), own_weights)

    parts, embedded = jax.lax.scan(before, parts, (arrays, _of_own_microbatches(weights)))
    inputs = {"x": embedded} | {name: arrays[name] for name in MARKS}
    return _run_trunk(forward, parts, inputs, weights, arrays["inputs"].shape[0] * axis_size(PP))


def add_losses(forward: Forward, parts: Parts, hidden: jax.Array, arrays: Arrays, weights: Weights) -> Parts:
    """The losses of this rank's micro-batches, from the hidden states that `run_pipeline` returned."""

    def add(parts: Parts, own: Tree) -> tuple[Parts, None]:
        x_BSD, arrays, weights = own
        return forward.add_losses(parts, x_BSD, arrays, weights), None

    mine = _of_own_microbatches(weights)
    return jax.lax.scan(jax.checkpoint(add), parts, (hidden, arrays, mine))[0]
