"""The objective of a step and its gradient, from micro-batches. Inside shard_map."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe.losses.objective import GLOBAL_AUX, StepCounts, term_coefficients, term_weights
from jaxmoe.spmd.collectives import zeros_of
from jaxmoe.step.forward import Arrays, Forward, Weights
from jaxmoe.step.layout import Layout
from jaxmoe.step.parts import Parts, valid_by_slot
from jaxmoe.step.pipeline import add_losses, run_pipeline

Tree = Any


def wide_dtype(layout: Layout) -> jnp.dtype:
    """The dtype of losses and counts: at least float32."""
    return jnp.promote_types(layout.config.model.compute_dtype, jnp.float32)


def needs_whole_step(layout: Layout) -> bool:
    """Whether a term depends on more than one micro-batch, so that J is no sum over micro-batches."""
    return GLOBAL_AUX in term_coefficients(layout.config.model)


def add_step(forward: Forward, parts: Parts, arrays: Arrays, weights: Weights) -> Parts:
    """The parts of all micro-batches of a step, as one function that can be differentiated.

    `arrays` [M / pp, B, S] are those of this pp rank, `weights` [M] of all micro-batches. MTP depths without weights
    are left out.
    """
    if forward.layout.stages > 1:
        parts, hidden = run_pipeline(forward, parts, arrays, weights)
        return add_losses(forward, parts, hidden, arrays, weights)
    body = jax.checkpoint(lambda parts, own: (forward.add_microbatch(parts, *own), None))
    return jax.lax.scan(body, parts, (arrays, weights))[0]


def all_hidden(forward: Forward, arrays: Arrays, weights: Weights) -> jax.Array:
    """Hidden states [M / pp, B, S, D] after the trunk, of this pp rank's micro-batches. Terms of layers are dropped."""
    parts = Parts.zeros(forward.layout, wide_dtype(forward.layout))
    if forward.layout.stages == 1:
        return jax.lax.map(lambda own: forward.hidden(parts, *own)[1], (arrays, weights))
    return run_pipeline(forward, parts, arrays, weights)[1]


def objective_and_gradients(
    layout: Layout,
    weights: Tree,
    bias: Tree,
    arrays: Arrays,
    counts: tuple[StepCounts, ...],
    noise_key: jax.Array | None,
) -> tuple[jax.Array, Parts, Tree]:
    """This rank's part of J, the step's parts, and this rank's own gradients (not reduced).

    `weights` vary over all axes, so every rank differentiates its own copy: no gradient is reduced in here. `counts`
    are those of the batch and of each MTP depth.
    """
    by_microbatch = tuple(term_weights(count, layout.config.objective) for count in counts)
    num_valid_L = valid_by_slot(layout, counts)
    zeros = Parts.zeros(layout, wide_dtype(layout))

    def one(weights: Tree, own: tuple[Arrays, Weights]) -> tuple[jax.Array, Parts]:
        forward = Forward(layout, layout.merge(weights, bias), noise_key)
        return forward.add_microbatch(zeros, *own).objective(layout, num_valid_L)

    def whole(weights: Tree) -> tuple[jax.Array, Parts]:
        forward = Forward(layout, layout.merge(weights, bias), noise_key)
        return add_step(forward, zeros, arrays, by_microbatch).objective(layout, num_valid_L)

    if layout.stages > 1 or needs_whole_step(layout):
        (total, parts), gradients = jax.value_and_grad(whole, has_aux=True)(weights)
        return total, parts, gradients
    return _by_microbatch(one, zeros, weights, (arrays, by_microbatch))


def _by_microbatch(
    one: Callable[..., Any], zeros: Parts, weights: Tree, inputs: tuple[Arrays, Weights]
) -> tuple[jax.Array, Parts, Tree]:
    """Sum of `one` and its gradient over the micro-batches; memory does not grow with their number."""
    differentiate = jax.value_and_grad(one, has_aux=True)

    def outcome(own: tuple[Arrays, Weights]) -> tuple[jax.Array, Parts, Tree]:
        (total, parts), gradients = differentiate(weights, own)
        return total, parts, gradients

    first = jax.tree.map(lambda value: value[0], inputs)
    if inputs[0]["inputs"].shape[0] == 1:
        return outcome(first)

    def add(sums: tuple, own: tuple[Arrays, Weights]) -> tuple[tuple, None]:
        return jax.tree.map(jnp.add, sums, outcome(own)), None

    start = (zeros.cross_entropy, zeros, jax.tree.map(zeros_of, weights))
    return jax.lax.scan(add, start, inputs)[0]
