"""Entry points under Megatron-Core's old names, for people who port code: each warns, then calls the default tracker.

Where Megatron-Core takes process groups, these take mesh axes: TP+CP is `("sp", "tp")`, DP is `("dp", "ep")`,
TP+DP+CP is all four.
"""

import warnings
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from jaxmoe.metrics.reporting import MetricWriter, count_moe_layers, layer_key
from jaxmoe.metrics.rules import MEGATRON_RULES, MetricError, MetricRule
from jaxmoe.metrics.tracker import Names, get_moe_metrics_tracker
from jaxmoe.spmd.types import Axes


class TensorBoardLike(Protocol):
    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object: ...


class WandbLike(Protocol):
    def log(self, data: dict[str, float], step: int) -> object: ...


class _PlainWriter:
    """A TensorBoard writer and a W&B run, either or both, as one `MetricWriter`."""

    def __init__(self, writer: TensorBoardLike | None, wandb_writer: WandbLike | None) -> None:
        self._writer, self._wandb = writer, wandb_writer

    def write(
        self,
        step: int,
        scalars: Mapping[str, float],
        per_layer: Mapping[str, np.ndarray],
        counts: np.ndarray | None = None,
    ) -> None:
        assert counts is None, "the tracker reports no counts"
        values = dict(scalars)
        values |= {layer_key(name, i): float(v) for name, row in per_layer.items() for i, v in enumerate(row)}
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(values, step)


def _warn(old: str, new: str) -> None:
    warnings.warn(f"{old} is deprecated; use {new}", DeprecationWarning, stacklevel=3)


def _no_groups(pg_collection: object) -> None:
    if pg_collection is not None:
        raise MetricError("pg_collection must be None: reductions are named by mesh axes, in each metric's rule")


def save_to_aux_losses_tracker(
    name: str,
    loss: jax.Array | float,
    layer_number: int | None,
    num_layers: int,
    reduce_group: Axes | None = None,
    avg_group: Axes | None = None,
    reduce_group_has_dp: bool = False,
) -> None:
    """`record` with a rule made of the groups; `needs_dp_avg = not reduce_group_has_dp`."""
    _warn("save_to_aux_losses_tracker", "MoEMetricsTracker.record")
    rule = MetricRule(reduce_group or (), avg_group or (), needs_dp_avg=not reduce_group_has_dp)
    get_moe_metrics_tracker().record(name, loss, layer_number, num_layers, rule=rule)


def reduce_aux_losses_tracker_across_ranks(track_names: Names = None, pg_collection: object = None) -> None:
    """`sync` of the named metrics, inside shard_map."""
    _warn("reduce_aux_losses_tracker_across_ranks", "MoEMetricsTracker.sync")
    _no_groups(pg_collection)
    get_moe_metrics_tracker().sync(track_names)


def clear_aux_losses_tracker() -> None:
    """`clear` of all metrics."""
    _warn("clear_aux_losses_tracker", "MoEMetricsTracker.clear")
    get_moe_metrics_tracker().clear()


def get_moe_layer_wise_logging_tracker() -> dict[str, dict[str, Any]]:
    """Values and rule per metric, as plain dicts. A snapshot: arrays are immutable."""
    _warn("get_moe_layer_wise_logging_tracker", "MoEMetricsTracker.per_layer")
    tracker = get_moe_metrics_tracker().tracker
    return {
        name: {
            "values": tracker.values[name],
            "reduce_group": tracker.rule(name).reduce_axes or None,
            "avg_group": tracker.rule(name).avg_axes or None,
            "needs_dp_avg": tracker.rule(name).needs_dp_avg,
        }
        for name in tracker.names
    }


def track_moe_metrics(  # noqa: PLR0913 - the signature is Megatron-Core's
    loss_scale: float,
    iteration: int,
    writer: TensorBoardLike | None = None,
    wandb_writer: WandbLike | None = None,
    total_loss_dict: MutableMapping[str, float] | None = None,
    per_layer_logging: bool = False,
    force_initialize: bool = False,
    track_names: str | Sequence[str] | None = None,
    num_layers: int | None = None,
    moe_layer_freq: int | Sequence[int] | None = None,
    mtp_num_layers: int | None = None,
    pg_collection: object = None,
    num_moe_layers: int | None = None,
) -> str:
    """`report` of the default tracker.

    `force_initialize` declares tracked metrics that nothing recorded, with the rule that stands for the name in
    `MEGATRON_RULES`, so that they print 0 and every rank reduces alike.

    Raises:
        MetricError: `force_initialize` without `num_layers` or for a name without a rule; else as `report`.
    """
    _warn("track_moe_metrics", "MoEMetricsTracker.report")
    _no_groups(pg_collection)
    holder = get_moe_metrics_tracker()
    names = [track_names] if isinstance(track_names, str) else track_names
    if force_initialize:
        if num_layers is None:
            raise MetricError("num_layers=None must be given with force_initialize=True: it sizes new metrics")
        for name in names or ():
            if name not in holder.tracker.values:
                if name not in MEGATRON_RULES:
                    raise MetricError(f"metric {name!r} was never recorded and has no rule; known: {[*MEGATRON_RULES]}")
                holder.ensure_initialized(name, MEGATRON_RULES[name], num_layers + (mtp_num_layers or 0))
    if not (holder.tracker.names if names is None else names):
        return ""
    if num_moe_layers is None:
        num_moe_layers = count_moe_layers(num_layers, moe_layer_freq, mtp_num_layers)
    writers: list[MetricWriter] = [_PlainWriter(writer, wandb_writer)]
    return holder.report(
        loss_scale,
        iteration,
        writers=writers,
        per_layer_logging=per_layer_logging,
        track_names=names,
        num_moe_layers=num_moe_layers,
        total_loss_dict=total_loss_dict,
    )
