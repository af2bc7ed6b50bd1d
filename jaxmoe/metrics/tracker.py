"""The life of a MoE metric: record, sync, report, clear.

`MoEMetricsTracker` is an immutable pytree with one vector of slots per metric, a slot per layer of the model
(MTP layers after the decoder layers). It is carried through scans, so recomputation cannot count twice: what a
rematerialised forward pass returns is returned once. A model's tracker is part of the model's own state.

    tracker = MoEMetricsTracker.create(rules, num_slots=L, num_owning=4).varying()   # inside shard_map
    tracker = tracker.record("z_loss", value, layer_number)                          # in any scan
    tracker = tracker.sync()                                                         # once, after the scans
    text = tracker.report(iteration=step, writers=sinks)                             # on the host
    tracker = tracker.clear()
"""

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.metrics import reporting
from jaxmoe.metrics.reporting import MetricWriter
from jaxmoe.metrics.rules import MetricError, MetricRule
from jaxmoe.spmd.axes import AXES
from jaxmoe.spmd.collectives import ReductionError, axis_size, mean_over, sum_partial, to_varying, varying_axes

Names = str | Iterable[str] | None


def _inside_shard_map() -> bool:
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def _check_varying(name: str, rule: MetricRule, value: jax.Array) -> None:
    """A part must differ over the axes that are summed; nothing may differ over an axis that no step covers."""
    varying = varying_axes(value)
    copies = [a for a in rule.sum_axes if axis_size(a) > 1 and a not in varying]
    if copies:
        raise ReductionError(
            f"metric {name!r}: its rule sums over {rule.sum_axes}, but the recorded value {jax.typeof(value)} is equal "
            f"over {copies}, so copies would be counted; record a part (keep_one_copy) or change the rule"
        )
    left = [a for a in AXES if a in varying and a not in rule.axes]
    if left:
        raise ReductionError(
            f"metric {name!r}: the recorded value {jax.typeof(value)} differs over {left}, which its rule {rule} "
            "neither sums nor averages; add the axes to the rule or reduce the value before recording"
        )


def _reduce(name: str, rule: MetricRule, value: jax.Array) -> jax.Array:
    value = sum_partial(value, "pp")
    value = sum_partial(value, rule.reduce_axes)
    value = mean_over(value, rule.avg_axes)
    value = mean_over(value, rule.dp_mean_axes)
    assert not varying_axes(value), f"metric {name!r} still differs over {varying_axes(value)} after {rule}"
    return value


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["values"],
    meta_fields=["rule_items", "owning_items", "synced"],
)
@dataclass(frozen=True)
class MoEMetricsTracker:
    """Values per metric and slot, with the static rule of each metric. Every method returns a new tracker.

    Layout: before `sync` a value varies over the axes of its rule; after it, it is equal everywhere. Outside
    shard_map arrays are global, so there is nothing to reduce and `sync` only marks the values as whole.
    """

    values: dict[str, jax.Array]
    rule_items: tuple[tuple[str, MetricRule], ...] = ()
    owning_items: tuple[tuple[str, int | None], ...] = ()
    synced: frozenset[str] = field(default=frozenset())

    @classmethod
    def create(
        cls,
        rules: Mapping[str, MetricRule],
        num_slots: int,
        num_owning: int | Mapping[str, int] | None = None,
        dtype: jax.typing.DTypeLike | None = None,
    ) -> "MoEMetricsTracker":
        """A tracker of zeros.

        Args:
            rules: the metrics, in the order in which they are reported, each with its rule.
            num_slots: layers of the model, dense ones and MTP layers included.
            num_owning: how many layers own each metric (or all of them); None if `report` is told.
            dtype: of the sums; at least float32. float64 in JAX's 64-bit mode where not given.
        """
        tracker = cls(values={})
        for name, rule in rules.items():
            owning = num_owning.get(name) if isinstance(num_owning, Mapping) else num_owning
            tracker = tracker.with_metric(name, rule, num_slots, owning, dtype)
        return tracker

    @classmethod
    def get_instance(cls) -> "TrackerHolder":
        """The process-wide default, `get_moe_metrics_tracker()`."""
        return get_moe_metrics_tracker()

    def with_metric(
        self,
        name: str,
        rule: MetricRule,
        num_slots: int,
        num_owning: int | None = None,
        dtype: jax.typing.DTypeLike | None = None,
    ) -> "MoEMetricsTracker":
        """One more metric, all zero.

        Raises:
            MetricError: the name exists, `num_slots` is below 1, or `dtype` is no float of at least 32 bits.
        """
        dtype = jnp.dtype(jnp.result_type(float) if dtype is None else dtype)
        if dtype not in (jnp.float32, jnp.float64):
            raise MetricError(f"metric {name!r}: dtype={dtype} must be float32 or float64; sums need at least 32 bits")
        if name in self.values:
            raise MetricError(f"metric {name!r} exists; known: {list(self.names)}")
        if num_slots < 1:
            raise MetricError(f"metric {name!r}: num_slots={num_slots} must be at least 1")
        return replace(
            self,
            values={**self.values, name: jnp.zeros(num_slots, dtype)},
            rule_items=(*self.rule_items, (name, rule)),
            owning_items=(*self.owning_items, (name, num_owning)),
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Metrics in the order in which they were declared (a pytree's dict forgets it)."""
        return tuple(name for name, _ in self.rule_items)

    def rule(self, name: str) -> MetricRule:
        """The rule of one metric."""
        return dict(self.rule_items)[self.known([name])[0]]

    def num_slots(self, name: str) -> int:
        """Slots of one metric."""
        return self.values[self.known([name])[0]].shape[0]

    def varying(self) -> "MoEMetricsTracker":
        """The same numbers, each varying over the axes of its rule: the type of a scan's carry stays the same."""
        return replace(self, values={n: to_varying(self.values[n], rule.axes) for n, rule in self.rule_items})

    def record(self, name: str, value: jax.Array | float, layer_number: int | None) -> "MoEMetricsTracker":
        """Add a scalar into the slot of layer `layer_number`, counted from 1. None records nothing.

        The gradient stops here.

        Raises:
            MetricError: unknown name, a layer that has no slot, a value that is no scalar, or a synced metric.
            ReductionError: the value's varying axes do not fit the metric's rule.
        """
        if layer_number is None:
            return self
        slots = self.num_slots(name)
        if isinstance(layer_number, bool) or not isinstance(layer_number, int | np.integer):
            raise MetricError(
                f"metric {name!r}: layer_number={layer_number!r} must be a Python int, known while tracing; a scan "
                "over layers returns its values, which record_layers adds at once"
            )
        if not 1 <= layer_number <= slots:
            raise MetricError(f"metric {name!r}: layer_number={layer_number} must lie in 1..{slots}")
        value = jnp.asarray(value)
        if value.shape != ():
            raise MetricError(f"metric {name!r}: value of shape {value.shape} must be a scalar; see record_layers")
        return self._add(name, value, lambda old, new: old.at[layer_number - 1].add(new))

    def record_layers(self, name: str, values_L: jax.Array) -> "MoEMetricsTracker":
        """Add a vector with one value per slot (zero where a layer owns none).

        Raises:
            MetricError: unknown name, another length than the metric's slots, or a synced metric.
            ReductionError: the values' varying axes do not fit the metric's rule.
        """
        slots = self.num_slots(name)
        values_L = jnp.asarray(values_L)
        if values_L.shape != (slots,):
            raise MetricError(f"metric {name!r}: values of shape {values_L.shape} must have shape ({slots},)")
        return self._add(name, values_L, lambda old, new: old + new)

    def _add(
        self, name: str, value: jax.Array, add: Callable[[jax.Array, jax.Array], jax.Array]
    ) -> "MoEMetricsTracker":
        if name in self.synced:
            raise MetricError(f"metric {name!r} is synced and takes no values; clear() it first")
        old, rule = self.values[name], self.rule(name)
        value = jax.lax.stop_gradient(value).astype(old.dtype)
        if _inside_shard_map():
            _check_varying(name, rule, value)
            old, value = to_varying(old, rule.axes), to_varying(value, rule.axes)
        return replace(self, values={**self.values, name: add(old, value)})

    def sync(self, names: Names = None) -> "MoEMetricsTracker":
        """Reduce over the mesh by each metric's rule: pp sum, sum, mean, dp mean. Inside shard_map, once.

        Raises:
            MetricError: a metric is synced already (a second reduction would multiply it), or is unknown.
        """
        chosen = self.known(names)
        again = [name for name in chosen if name in self.synced]
        if again:
            raise MetricError(f"metrics {again} are synced already; a second sync would multiply them; clear() first")
        values = dict(self.values)
        if _inside_shard_map():
            ready = self.varying().values
            values |= {name: _reduce(name, self.rule(name), ready[name]) for name in chosen}
        return replace(self, values=values, synced=self.synced | frozenset(chosen))

    def clear(self, names: Names = None) -> "MoEMetricsTracker":
        """Zeros again, ready to record; metrics, sizes and rules stay."""
        chosen = self.known(names)
        zeros = {name: jnp.zeros_like(self.values[name]) for name in chosen}
        return replace(self, values={**self.values, **zeros}, synced=self.synced - frozenset(chosen))

    def per_layer(self, loss_scale: float = 1.0, track_names: Names = None) -> dict[str, np.ndarray]:
        """Synced values x `loss_scale` per metric as float64 [slots], on the host.

        Raises:
            MetricError: a metric is unknown or not synced (its values are one rank's part).
        """
        chosen = self.known(track_names)
        parts = [name for name in chosen if name not in self.synced]
        if parts:
            raise MetricError(f"metrics {parts} are not synced: their values are one rank's part; call sync() first")
        host = jax.device_get({name: self.values[name] for name in chosen})
        return {name: np.asarray(host[name], np.float64) * loss_scale for name in chosen}

    def scalars(
        self,
        loss_scale: float = 1.0,
        track_names: Names = None,
        num_moe_layers: int | None = None,
        percentiles: Mapping[str, Sequence[float]] | None = None,
    ) -> dict[str, float]:
        """Per metric: sum over slots x `loss_scale` / number of owning layers; asked percentiles stand before it.

        Raises:
            MetricError: as `per_layer`; the number of owning layers is neither declared nor given, or below 1; a
                percentile has the name of a metric or of another percentile.
        """
        per_layer, owning, out = self.per_layer(loss_scale, track_names), dict(self.owning_items), {}
        self.known(percentiles or ())
        for name, values_L in per_layer.items():
            shown = reporting.percentile_scalars(name, values_L, (percentiles or {}).get(name, ()))
            taken = [key for key in shown if key in self.values]
            if taken:
                raise MetricError(
                    f"percentiles[{name!r}]: {taken} are metrics themselves; ask for others or rename one"
                )
            out |= shown
            count = owning[name] if num_moe_layers is None else num_moe_layers
            if count is None:
                raise MetricError(f"metric {name!r}: the number of layers that own it is unknown; pass num_moe_layers")
            out[name] = reporting.mean_over_owning(name, values_L, count)
        return out

    def report(
        self,
        loss_scale: float = 1.0,
        iteration: int = 0,
        writers: Sequence[MetricWriter] = (),
        per_layer_logging: bool = False,
        *,
        track_names: Names = None,
        num_moe_layers: int | None = None,
        total_loss_dict: MutableMapping[str, float] | None = None,
        percentiles: Mapping[str, Sequence[float]] | None = None,
    ) -> str:
        """Write scalars (and slots) to the writers; return the console text of the scalars. Host only.

        Scalars whose name ends in "loss" go into `total_loss_dict`, if given, and leave the text.
        """
        scalars = self.scalars(loss_scale, track_names, num_moe_layers, percentiles)
        slots = self.per_layer(loss_scale, track_names) if per_layer_logging else {}
        slots |= {name: reporting.hide_zero_slots(slots[name]) for name in slots if name in (percentiles or {})}
        for writer in writers:
            writer.write(iteration, scalars, slots)
        return reporting.console_text(
            scalars if total_loss_dict is None else reporting.take_losses(scalars, total_loss_dict)
        )

    def known(self, names: Names) -> list[str]:
        """`names` (None: all) as a list. Names are exact."""
        chosen = list(self.names) if names is None else [names] if isinstance(names, str) else list(names)
        unknown = [name for name in chosen if name not in self.values]
        if unknown:
            raise MetricError(f"unknown metrics {unknown}; known: {list(self.names)}")
        return chosen


class TrackerHolder:
    """A mutable place for one immutable tracker, for programs that want a process-wide one.

    Metrics come into being when first recorded. `report` syncs what is not synced, and clears what it reported and
    nothing else. Values recorded inside a traced function must be synced and read inside it: JAX refuses them later.
    """

    def __init__(self, tracker: MoEMetricsTracker | None = None) -> None:
        self.tracker = MoEMetricsTracker(values={}) if tracker is None else tracker

    def ensure_initialized(self, name: str, rule: MetricRule, num_slots: int) -> None:
        """Declare a metric where it is unknown.

        Raises:
            MetricError: it is known with another rule. Rules belong to the name, not to the call.
        """
        if name not in self.tracker.values:
            self.tracker = self.tracker.with_metric(name, rule, num_slots)
        elif self.tracker.rule(name) != rule:
            raise MetricError(f"metric {name!r} has the rule {self.tracker.rule(name)}; {rule} contradicts it")

    def record(
        self,
        name: str,
        value: jax.Array | float,
        layer_number: int | None,
        num_layers: int,
        *,
        rule: MetricRule,
    ) -> None:
        """Add into a layer's slot; `num_layers` sizes the metric when its name is new. None records nothing."""
        if layer_number is not None:
            self.ensure_initialized(name, rule, num_layers)
            self.tracker = self.tracker.record(name, value, layer_number)

    def sync(self, names: Names = None) -> None:
        """`MoEMetricsTracker.sync` in place."""
        self.tracker = self.tracker.sync(names)

    def clear(self, names: Names = None) -> None:
        """`MoEMetricsTracker.clear` in place."""
        self.tracker = self.tracker.clear(names)

    def report(self, loss_scale: float, iteration: int, *, track_names: Names = None, **options: Any) -> str:
        """`MoEMetricsTracker.report` after a sync, then a clear of the reported metrics; same options."""
        chosen = self.tracker.known(track_names)
        self.sync([name for name in chosen if name not in self.tracker.synced])
        text = self.tracker.report(loss_scale, iteration, track_names=chosen, **options)
        self.clear(chosen)
        return text


_default: list[TrackerHolder] = []


def get_moe_metrics_tracker() -> TrackerHolder:
    """The process-wide default, made on first use. The trainer itself does not use it."""
    if not _default:
        _default.append(TrackerHolder())
    return _default[0]


def set_moe_metrics_tracker(tracker: TrackerHolder | MoEMetricsTracker) -> None:
    """Make `tracker` the process-wide default."""
    _default[:] = [TrackerHolder(tracker) if isinstance(tracker, MoEMetricsTracker) else tracker]


def destroy_moe_metrics_tracker() -> None:
    """Forget the process-wide default; the next get makes a new one."""
    _default.clear()
