"""What a training step reports."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.losses.objective import AUX, GLOBAL_AUX, INDEXER, MTP, SEQ_AUX, Z
from jaxmoe.metrics.load import load_per_layer, load_scalars
from jaxmoe.metrics.rules import DEFAULT_RULES
from jaxmoe.metrics.tracker import MoEMetricsTracker
from jaxmoe.step.layout import Layout
from jaxmoe.step.parts import MTP_ACCEPTANCE, Parts
from jaxmoe.step.router_bias import bias_range, has_bias

Tree = Any

#: The logged names of the objective's terms.
LOGGED_NAMES = {
    AUX: "load_balancing_loss",
    SEQ_AUX: "seq_load_balancing_loss",
    GLOBAL_AUX: "global_load_balancing_loss",
    Z: "z_loss",
    MTP: "mtp_loss",
    INDEXER: "indexer_loss",
}


def _owning_layers(layout: Layout, name: str) -> int:
    """How many layers own a metric."""
    plan = layout.plan
    if name in (LOGGED_NAMES[MTP], MTP_ACCEPTANCE):
        return len(plan.mtp)
    if name == LOGGED_NAMES[INDEXER]:
        return sum(kind.owns_indexer for kind in plan.kinds)
    return sum(kind.is_moe for kind in plan.kinds)


def record(layout: Layout, parts: Parts, router_bias: Tree, dtype: jnp.dtype) -> MoEMetricsTracker:
    """The step's per-layer values in a tracker, already weighted (`loss_scale=1`), not yet reduced."""
    values = {LOGGED_NAMES[name]: value for name, value in parts.terms.items()} | parts.metrics
    if has_bias(layout.config):
        values["router_bias_range"] = bias_range(layout, router_bias).astype(dtype)
    owning = {name: _owning_layers(layout, name) for name in values}
    rules = {name: DEFAULT_RULES[name] for name in values}
    tracker = MoEMetricsTracker.create(rules, len(layout.plan.kinds), owning, dtype).varying()
    for name, value in values.items():
        tracker = tracker.record_layers(name, value)
    return tracker


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "tracker", "expert_counts", "served"],
    meta_fields=["owns_experts"],
)
@dataclass(frozen=True)
class StepMetrics:
    """Reduced, equal on all ranks. Fetching blocks until the step is done."""

    values: dict[str, jax.Array]
    """Scalars of the step by name."""
    tracker: MoEMetricsTracker
    expert_counts: jax.Array
    """int32 [slots, E], choices by valid tokens over the whole step."""
    served: jax.Array
    """int32 [slots], how many of these choices reached an expert."""
    owns_experts: tuple[bool, ...]

    def scalars(self) -> dict[str, float]:
        """All scalars on the host. A skipped step has no loss."""
        values = {name: float(value) for name, value in jax.device_get(self.values).items()}
        if values["skipped"]:
            del values["loss"], values["total_loss"]
        values |= self.tracker.scalars()
        if any(self.owns_experts):
            values |= load_scalars(*self._load(), np.asarray(self.owns_experts))
        return values

    def per_layer(self) -> dict[str, np.ndarray]:
        """Per-layer values on the host, one slot per layer of the model; zero where a layer owns none."""
        values = self.tracker.per_layer()
        return values | load_per_layer(*self._load()) if any(self.owns_experts) else values

    def _load(self) -> tuple[np.ndarray, np.ndarray]:
        return jax.device_get((self.expert_counts, self.served))
