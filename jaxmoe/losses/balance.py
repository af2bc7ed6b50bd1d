"""The balance losses, from the statistics that the layers return.

Every function returns this rank's *part* of the value: parts over all axes add up to it. Counts are pooled over ranks
and never differentiated; scores stay local, so no gradient crosses a collective. Nothing here knows a coefficient, the
number of micro-batches or a mean over rows, replicas or layers: `objective.py` does that.

Balanced routing gives exactly 1. Sources: Fedus et al. 2021, arXiv:2101.03961; DeepSeek-V3, arXiv:2412.19437,
equations 17-20; Qiu et al. 2025, arXiv:2501.11873 (the global one).
"""

import jax
import jax.numpy as jnp

from jaxmoe.spmd.collectives import sum_partial
from jaxmoe.spmd.types import Axes


def _pool(value: jax.Array, axes: Axes) -> jax.Array:
    return sum_partial(jax.lax.stop_gradient(value), axes)


def _safe_inverse(value: jax.Array) -> jax.Array:
    """1 / value, and 0 where value is 0: an empty set adds nothing."""
    return jnp.where(value > 0, 1.0 / jnp.where(value > 0, value, 1), 0)


def row_balance(
    balance_count_LBE: jax.Array, score_sum_LBE: jax.Array, valid_B: jax.Array, k: int, axes: Axes
) -> jax.Array:
    """`seq_aux_loss`: E / (k n^2) * sum_i C_i Q_i for each row, summed over the rows here; [L].

    A packed row counts as one sequence. `axes` are those over which a row's positions are split.
    """
    experts, dtype = score_sum_LBE.shape[-1], score_sum_LBE.dtype
    count = _pool(balance_count_LBE, axes).astype(dtype)
    inverse_B = _safe_inverse(_pool(valid_B, axes).astype(dtype))
    product_LB = jnp.sum(count * score_sum_LBE, axis=-1)
    return jnp.sum(product_LB * (experts / k * inverse_B * inverse_B), axis=-1)


def set_balance(
    balance_count_LE: jax.Array, score_sum_LE: jax.Array, num_tokens: jax.Array, k: int, axes: Axes
) -> jax.Array:
    """E / (k n^2) * sum_i C_i Q_i over one set of `num_tokens` valid tokens, spread over `axes`; [L].

    More than one set at once: give all three a first dim of sets, and get [sets, L].

    `aux_loss`: the tokens of a micro-batch on one replica, `axes` = sp, tp. `global_aux_loss`: those of the whole step,
    `axes` = all.
    """
    experts, dtype = score_sum_LE.shape[-1], score_sum_LE.dtype
    count = _pool(balance_count_LE, axes).astype(dtype)
    inverse = _safe_inverse(num_tokens.astype(dtype))[..., None]
    return jnp.sum(count * score_sum_LE, axis=-1) * (experts / k * inverse * inverse)
