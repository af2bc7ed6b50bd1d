"""What a layer must know about its tokens besides their vectors. Positions and documents are data, never counted."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxmoe.config.schema import Rope
from jaxmoe.model.rope import rope_tables
from jaxmoe.spmd.axes import POSITION_AXES, TP
from jaxmoe.spmd.collectives import gather


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tokens:
    """One micro-batch's tokens on this rank, [B, S]; S is the piece of this (sp, tp) rank, Q of this sp rank (gathered
    over tp), T the whole row.

    Layout: vary over dp, ep, sp and tp, `*_BQ` equal in value over tp, `*_BT` over sp and tp.
    """

    valid_BS: jax.Array
    """bool; False is padding."""
    id_BS: jax.Array
    """int32, place in the global batch: row * seq_len + column. Seeds randomness that no layout changes."""
    id_BT: jax.Array
    position_BQ: jax.Array
    segment_BQ: jax.Array
    position_BT: jax.Array
    segment_BT: jax.Array
    cos_BQR: jax.Array
    sin_BQR: jax.Array


def make_tokens(
    id_BS: jax.Array, position_BS: jax.Array, segment_BS: jax.Array, rope: Rope, rope_dim: int, dtype: jnp.dtype
) -> Tokens:
    """Gathers, once per micro-batch, what every layer's attention needs. Inputs hold this (sp, tp) rank's positions."""
    position_BQ = gather(position_BS, TP, dim=1)
    cos_BQR, sin_BQR = rope_tables(rope, rope_dim, position_BQ, dtype)
    return Tokens(
        valid_BS=segment_BS != 0,
        id_BS=id_BS,
        id_BT=gather(id_BS, POSITION_AXES, dim=1),
        position_BQ=position_BQ,
        segment_BQ=gather(segment_BS, TP, dim=1),
        position_BT=gather(position_BS, POSITION_AXES, dim=1),
        segment_BT=gather(segment_BS, POSITION_AXES, dim=1),
        cos_BQR=cos_BQR,
        sin_BQR=sin_BQR,
    )
