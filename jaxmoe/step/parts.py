"""What the micro-batches of a step add up to."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe.losses.balance import row_balance, set_balance
from jaxmoe.losses.objective import (
    AUX,
    GLOBAL_AUX,
    INDEXER,
    MTP,
    SEQ_AUX,
    TOKEN_MEAN,
    StepCounts,
    Z,
    replicas_per_rank,
    term_coefficients,
)
from jaxmoe.model.layer import LayerStats
from jaxmoe.model.router import RouterStats
from jaxmoe.spmd.axes import AXES, REPLICA_AXES
from jaxmoe.spmd.collectives import as_part, sum_partial, to_varying, vary_like
from jaxmoe.step.layout import Layout

#: Share of the targets of an MTP depth that are its most likely word, weighted as the loss.
MTP_ACCEPTANCE = "mtp_acceptance"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Parts:
    """Sums that carry their weight in J already. L slots, one per layer of the model.

    Layout: a part over all axes, until `summed`.
    """

    cross_entropy: jax.Array
    terms: dict[str, jax.Array]
    """Per term of the objective, without coefficient, [L]."""
    metrics: dict[str, jax.Array]
    """Means over the valid tokens, or the targets, of the step, [L]; no part of J."""
    count_LE: jax.Array
    """int32, times each expert was chosen by a valid token."""
    served_L: jax.Array
    """int32, choices by valid tokens that reached an expert."""
    score_sum_LE: jax.Array
    """Pooled over the step, for `global_aux_loss`."""
    balance_count_LE: jax.Array

    @classmethod
    def zeros(cls, layout: Layout, dtype: jnp.dtype) -> "Parts":
        """Nothing yet, typed as a part over all axes: the initial carry of a scan."""
        slots = len(layout.plan.kinds)
        moe = layout.config.model.moe
        experts = moe.num_experts if moe else 0
        terms = term_coefficients(layout.config.model)
        metrics = ("router_entropy", "top1_weight") if moe else ()
        metrics += (MTP_ACCEPTANCE,) if MTP in terms else ()
        zero_L, zero_LE = jnp.zeros(slots, dtype), jnp.zeros((slots, experts), dtype)
        parts = cls(
            cross_entropy=jnp.zeros((), dtype),
            terms=dict.fromkeys((name for name in terms if name != GLOBAL_AUX), zero_L),
            metrics=dict.fromkeys(metrics, zero_L),
            count_LE=zero_LE.astype(jnp.int32),
            served_L=zero_L.astype(jnp.int32),
            score_sum_LE=zero_LE,
            balance_count_LE=zero_LE.astype(jnp.int32),
        )
        return jax.tree.map(lambda value: to_varying(value, AXES), parts)

    def add(self, **values: Any) -> "Parts":
        """With values added to the named fields, or to some entries of a field; each must be a part over all axes."""

        def sum_of(old: Any, new: Any) -> Any:
            if isinstance(old, dict):
                return old | {name: sum_of(old[name], value) for name, value in new.items()}
            return old + as_part(new)

        return replace(self, **{name: sum_of(getattr(self, name), value) for name, value in values.items()})

    def objective(self, layout: Layout, num_valid_L: jax.Array) -> tuple[jax.Array, "Parts"]:
        """This rank's part of J, and the parts with the step's own terms added.

        `num_valid_L`: valid tokens of the whole step, as the layer of each slot sees them.
        """
        moe = layout.config.model.moe
        coefficients = term_coefficients(layout.config.model)
        terms = dict(self.terms)
        if moe and GLOBAL_AUX in coefficients:
            counts, scores = self.balance_count_LE[:, None], self.score_sum_LE[:, None]
            terms[GLOBAL_AUX] = set_balance(counts, scores, num_valid_L, moe.experts_per_token, AXES)[:, 0]
        total = self.cross_entropy
        for name, coefficient in coefficients.items():
            total = total + coefficient * terms[name].sum()
        return total, replace(self, terms=terms)

    def summed(self) -> "Parts":
        """The whole step's numbers, equal on all ranks."""
        return jax.tree.map(lambda value: sum_partial(value, AXES), self)


def valid_by_slot(layout: Layout, counts: tuple[StepCounts, ...]) -> jax.Array:
    """Valid tokens of the step as the layer of each slot sees them, [L]: those of the batch, then of each depth."""
    totals = [count.valid_M.sum() for count in counts]
    return jnp.stack([totals[0]] * layout.plan.num_decoder_layers + totals[1:])


def to_slots(layout: Layout, stats: list[LayerStats], layer_ids: jax.Array) -> LayerStats:
    """Statistics per position of the period, [R, ...], as one with a slot per layer of the model, [L, ...]."""
    slots = len(layout.plan.kinds)
    merged = LayerStats()
    for position, stat in enumerate(stats):
        # Padding repeats write out of bounds, which drops them.
        index = jnp.where(layer_ids < 0, slots, layer_ids + position)

        def place(value: jax.Array, index: jax.Array = index) -> jax.Array:
            empty = vary_like(jnp.zeros((slots, *value.shape[1:]), value.dtype), value)
            return empty.at[index].set(value, mode="drop")

        merged = _merge(merged, jax.tree.map(place, stat))
    return merged


def one_to_slot(layout: Layout, stats: LayerStats, layer_id: int) -> LayerStats:
    """Statistics of one layer that is not scanned, in its slot."""
    return to_slots(layout, [jax.tree.map(lambda value: value[None], stats)], jnp.asarray([layer_id], jnp.int32))


def _merge(one: LayerStats, other: LayerStats) -> LayerStats:
    """Sums, of what both have."""

    def both(a: Any, b: Any) -> Any:
        return b if a is None else a if b is None else jax.tree.map(jnp.add, a, b)

    return LayerStats(**{name: both(value, vars(other)[name]) for name, value in vars(one).items()})


def add_layer_stats(
    parts: Parts, layout: Layout, stats: LayerStats, valid_BS: jax.Array, weights: dict[str, jax.Array]
) -> Parts:
    """Add one micro-batch's terms of layers, by slot, weighted. `weights` holds the scalars of this micro-batch."""
    if stats.router is not None:
        parts = _add_router_stats(parts, layout, stats.router, valid_BS, weights).add(served_L=stats.served)
    if stats.indexer_loss_sum is not None:
        parts = parts.add(terms={INDEXER: weights[INDEXER] * stats.indexer_loss_sum})
    return parts


def _add_router_stats(
    parts: Parts, layout: Layout, stats: RouterStats, valid_BS: jax.Array, weights: dict[str, jax.Array]
) -> Parts:
    moe = layout.config.model.moe
    assert moe is not None
    k = moe.experts_per_token
    valid_B = valid_BS.sum(axis=1, dtype=jnp.int32)
    score_sum_LE = stats.score_sum_BE.sum(axis=1)
    balance_count_LE = stats.balance_count_BE.sum(axis=1, dtype=jnp.int32)
    values = {}
    for name in parts.terms:
        if name == AUX:
            values[name] = _replica_balance(layout, stats, valid_B, k)
        elif name == SEQ_AUX:
            values[name] = row_balance(stats.balance_count_BE, stats.score_sum_BE, valid_B, k, REPLICA_AXES)
        elif name == Z:
            values[name] = stats.z_sum
    metrics = {"router_entropy": stats.entropy_sum, "top1_weight": stats.top1_sum}
    return parts.add(
        terms={name: weights[name] * value for name, value in values.items()},
        metrics={name: weights[TOKEN_MEAN] * value for name, value in metrics.items()},
        count_LE=stats.count_E,
        score_sum_LE=score_sum_LE,
        balance_count_LE=balance_count_LE,
    )


def _replica_balance(layout: Layout, stats: RouterStats, valid_B: jax.Array, k: int) -> jax.Array:
    """`aux_loss` of each replica on this rank, summed over them, [L]."""
    replicas = replicas_per_rank(layout.config.objective)

    def by_replica(value_LBE: jax.Array) -> jax.Array:
        layers, rows, experts = value_LBE.shape
        return value_LBE.reshape(layers, replicas, rows // replicas, experts).sum(axis=2).swapaxes(0, 1)

    num_tokens = sum_partial(valid_B.reshape(replicas, -1).sum(axis=1), REPLICA_AXES)
    counts, scores = by_replica(stats.balance_count_BE), by_replica(stats.score_sum_BE)
    return set_balance(counts, scores, num_tokens, k, REPLICA_AXES).sum(axis=0)
