"""The aux-loss-free update of the routers' selection biases, once per optimiser step."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe.spmd.axes import PP
from jaxmoe.spmd.collectives import own_piece
from jaxmoe.step.layout import Layout, only_indexers


def _load_sign(count_LE: jax.Array) -> jax.Array:
    """sign(sum(C) - E * C_i) per layer, without the product, which could overflow int32."""
    experts = count_LE.shape[-1]
    mean, rest = jnp.divmod(count_LE.sum(axis=-1, keepdims=True), experts)
    below = jnp.where(count_LE == mean, jnp.sign(rest), jnp.where(count_LE < mean, 1, -1))
    return below.astype(jnp.float32)


def updated_bias(layout: Layout, bias: Any, count_LE: jax.Array) -> Any:
    """b_i += rate * sign(sum(C) - E * C_i).

    `count_LE` int32 [L, E] holds the choices of all valid tokens of the step, equal on all ranks; `bias` has one
    leaf [R, E] per position of the period that has a router, R repeats on this pp rank, and one [E] per MTP depth.
    """
    moe = layout.config.model.moe
    if moe is None or not moe.router.selection_bias or only_indexers(layout.config):
        return bias
    step_LE = moe.router.bias_update_rate * _load_sign(count_LE)
    layer_ids = own_piece(jnp.asarray(layout.layer_ids, jnp.int32), PP, dim=0)
    trunk = {}
    for position, leaf in bias["trunk"].items():
        move = jnp.where(layer_ids[:, None] < 0, 0, step_LE[layer_ids + position])
        trunk[position] = jax.tree.map(lambda old, move=move: old + move, leaf)
    moved = {**bias, "trunk": trunk}
    if "mtp" in bias:
        first = layout.plan.num_decoder_layers
        moved["mtp"] = {
            number: jax.tree.map(lambda old, number=number: old + step_LE[first + number], leaf)
            for number, leaf in bias["mtp"].items()
        }
    return moved
