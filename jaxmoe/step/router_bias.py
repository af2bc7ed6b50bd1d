"""The aux-loss-free update of the routers' selection biases, once per optimiser step."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe.config.schema import Config
from jaxmoe.spmd.axes import AXES, PP
from jaxmoe.spmd.collectives import keep_one_copy, own_piece
from jaxmoe.step.layout import Layout, only_indexers


def has_bias(config: Config) -> bool:
    """Whether the model's routers have a selection bias."""
    return config.model.moe is not None and config.model.moe.router.selection_bias


def _own_layer_ids(layout: Layout) -> jax.Array:
    return own_piece(jnp.asarray(layout.layer_ids, jnp.int32), PP, dim=0)


def bias_range(layout: Layout, bias: Any) -> jax.Array:
    """Largest minus smallest bias of each router, [slots]; zero where a layer has none. A part over all axes."""
    slots = len(layout.plan.kinds)
    layer_ids = _own_layer_ids(layout)
    here_L = keep_one_copy(jnp.zeros(slots, jnp.float32), PP)
    for position, leaf in bias["trunk"].items():
        (bias_RE,) = jax.tree.leaves(leaf)
        # Padding repeats write out of bounds, which drops them.
        index_R = jnp.where(layer_ids < 0, slots, layer_ids + position)
        here_L = here_L.at[index_R].set(jnp.ptp(bias_RE, axis=1), mode="drop")
    for depth, leaf in bias.get("mtp", {}).items():
        (bias_E,) = jax.tree.leaves(leaf)
        slot = layout.plan.num_decoder_layers + depth
        here_L = here_L.at[slot].set(keep_one_copy(jnp.ptp(bias_E), PP))
    return keep_one_copy(here_L, [axis for axis in AXES if axis != PP])


def _load_sign(count_LE: jax.Array) -> jax.Array:
    """sign(sum(C) - E * C_i) per layer, without the product, which could overflow int32."""
    experts = count_LE.shape[-1]
    mean, rest = jnp.divmod(count_LE.sum(axis=-1, keepdims=True), experts)
    below = jnp.where(count_LE == mean, jnp.sign(rest), jnp.where(count_LE < mean, 1, -1))
    return below.astype(jnp.float32)


def updated_bias(layout: Layout, bias: Any, count_LE: jax.Array) -> Any:
    """b_i += rate * sign(sum(C) - E * C_i).

    `count_LE` int32 [L, E] holds the choices of all valid tokens of the step, equal on all ranks; `bias` has one
    leaf [R, E] per position of the period that has a router, R repeats on this pp rank, and one [E] per leading layer
    and MTP depth that has one.
    """
    moe = layout.config.model.moe
    if moe is None or not has_bias(layout.config) or only_indexers(layout.config):
        return bias
    step_LE = moe.router.bias_update_rate * _load_sign(count_LE)
    layer_ids = _own_layer_ids(layout)
    trunk = {}
    for position, leaf in bias["trunk"].items():
        move = jnp.where(layer_ids[:, None] < 0, 0, step_LE[layer_ids + position])
        trunk[position] = jax.tree.map(lambda old, move=move: old + move, leaf)
    moved = {**bias, "trunk": trunk}
    firsts = {"lead": 0, "mtp": layout.plan.num_decoder_layers}
    for part in firsts.keys() & bias.keys():
        moved[part] = {
            number: jax.tree.map(lambda old, slot=firsts[part] + number: old + step_LE[slot], leaf)
            for number, leaf in bias[part].items()
        }
    return moved
