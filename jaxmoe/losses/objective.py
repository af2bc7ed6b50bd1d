"""The only file that divides: what weight each term of each micro-batch has in the objective J.

Terms come as sums over this rank's tokens (parts over all axes). Their denominators are counted over the whole step
before the first backward pass. The rules are those of the training objective:

    calculate_per_token_loss (default)    one denominator per step: J depends neither on M nor on the mesh
    not calculate_per_token_loss          mean over micro-batches of each term's own mean: 1/M for all terms alike

An empty set has weight 0: it adds nothing, and still counts in M and R.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxmoe.config.schema import Model, Objective, Router
from jaxmoe.spmd.axes import POSITION_AXES, PP, ROW_AXES
from jaxmoe.spmd.collectives import axis_size, gather_equal, sum_partial

CROSS_ENTROPY = "cross_entropy"
AUX, SEQ_AUX, GLOBAL_AUX, Z = "aux_loss", "seq_aux_loss", "global_aux_loss", "z_loss"
MTP, INDEXER = "mtp", "indexer_loss"
TOKEN_MEAN, TARGET_MEAN = "token_mean", "target_mean"
"""Weights of metrics that are means over the valid tokens, or over the targets, of the step; no terms of J."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepCounts:
    """What a step holds, per micro-batch, [M] each, in order. Equal on all ranks but for `target_replica`.

    An MTP depth has counts of its own: its targets, and the tokens that are valid at it.
    """

    target_M: jax.Array
    """Sum of loss_mask over all replicas."""
    target_replica_MR: jax.Array
    """Sum of loss_mask on each replica of this data-parallel rank (one, but for `objective.replicas`); varies over dp
    and ep."""
    valid_M: jax.Array
    """Number of tokens that are no padding."""
    rows_M: jax.Array
    """Number of rows with at least one such token."""


def replicas_per_rank(objective: Objective) -> int:
    """Replicas that one (dp, ep) rank holds, in contiguous blocks of its rows."""
    return 1 if objective.replicas is None else objective.replicas // axis_size(ROW_AXES)


def count_step(loss_mask_MBS: jax.Array, valid_MBS: jax.Array, objective: Objective, dtype: DTypeLike) -> StepCounts:
    """Count the whole step. Inputs hold this rank's tokens of the M / pp micro-batches of its pp rank.

    Micro-batch m is number m // pp on rank m % pp. Every token is counted by exactly one rank.
    """

    def over_pp(value: jax.Array) -> jax.Array:
        return gather_equal(value[:, None], PP, dim=1).reshape(-1, *value.shape[1:])

    blocks = loss_mask_MBS.reshape(loss_mask_MBS.shape[0], replicas_per_rank(objective), -1)
    target = over_pp(sum_partial(blocks.astype(dtype).sum(axis=2), POSITION_AXES))
    row_MB = sum_partial(valid_MBS.sum(axis=2, dtype=jnp.int32), POSITION_AXES)
    return StepCounts(
        target_M=sum_partial(target.sum(axis=1), ROW_AXES),
        target_replica_MR=target,
        valid_M=over_pp(sum_partial(row_MB.sum(axis=1), ROW_AXES)).astype(dtype),
        rows_M=over_pp(sum_partial((row_MB > 0).sum(axis=1, dtype=jnp.int32), ROW_AXES)).astype(dtype),
    )


def _inverse(value: jax.Array) -> jax.Array:
    """1 / value, and 0 where the set is empty."""
    return jnp.where(value > 0, 1 / jnp.where(value > 0, value, 1), 0)


def term_weights(counts: StepCounts, objective: Objective) -> dict[str, jax.Array]:
    """The weight of each term's sum over micro-batch m, [M]: J = sum_m sum_t c_t * weight_t[m] * term_t(m).

    `cross_entropy`: [M, R], of a sum of loss_mask * CE, for each replica of this rank. `z_loss`: of a sum over valid
    tokens, and so is `indexer_loss`. `seq_aux_loss`: of a sum over rows. `aux_loss`: of a sum over replicas.
    `global_aux_loss` is a step quantity: its weight is 1, always, and it is not listed. All are equal over all axes but
    cross-entropy's with `balance_dp_token: false`. From the counts of an MTP depth come the weights of its layer's
    terms, and that of `mtp` as `cross_entropy`.
    """
    replicas = objective.replicas or axis_size(ROW_AXES)
    num_microbatches = counts.target_M.shape[0]
    ones = jnp.ones_like(counts.target_M)
    token_mean = ones * _inverse(counts.valid_M.sum())
    means = {TOKEN_MEAN: token_mean, TARGET_MEAN: ones * _inverse(counts.target_M.sum())}
    if objective.calculate_per_token_loss:
        return {
            CROSS_ENTROPY: jnp.ones_like(counts.target_replica_MR) * _inverse(counts.target_M.sum()),
            Z: token_mean,
            INDEXER: token_mean,
            SEQ_AUX: ones * _inverse(counts.rows_M.sum()),
            AUX: counts.valid_M * token_mean / replicas,
        } | means
    if objective.balance_dp_token:
        cross_entropy = jnp.ones_like(counts.target_replica_MR) * _inverse(counts.target_M)[:, None]
    else:
        cross_entropy = _inverse(counts.target_replica_MR) / replicas
    weights = {
        CROSS_ENTROPY: cross_entropy,
        Z: _inverse(counts.valid_M),
        INDEXER: _inverse(counts.valid_M),
        SEQ_AUX: _inverse(counts.rows_M),
        AUX: ones / replicas,
    }
    return {name: weight / num_microbatches for name, weight in weights.items()} | means


def router_coefficients(router: Router) -> dict[str, float]:
    """Coefficients of the router's terms that are on, by term."""
    coefficients = {
        AUX: router.aux_loss_coeff,
        SEQ_AUX: router.seq_aux_loss_coeff,
        GLOBAL_AUX: router.global_aux_loss_coeff,
        Z: router.z_loss_coeff,
    }
    return {name: value for name, value in coefficients.items() if value > 0}


def term_coefficients(model: Model) -> dict[str, float]:
    """Coefficients of all terms but the cross-entropy that are on, by term."""
    coefficients = router_coefficients(model.moe.router) if model.moe else {}
    if model.attention.dsa is not None and model.attention.dsa.indexer_loss_coeff > 0:
        coefficients[INDEXER] = model.attention.dsa.indexer_loss_coeff
    if model.mtp is not None:
        coefficients[MTP] = model.mtp.loss_coeff / model.mtp.num_depths
    return coefficients
