"""Expert load per layer, from integer counts of tokens per expert. On the host, in float64.

L  layers of the model (MTP layers last)      E  routed experts
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from jaxmoe.metrics.rules import MetricError


def _checked(counts_LE: np.ndarray) -> np.ndarray:
    counts_LE = np.asarray(counts_LE)
    if counts_LE.ndim != 2 or not np.issubdtype(counts_LE.dtype, np.integer) or (counts_LE < 0).any():
        raise MetricError(
            f"expert counts of shape {counts_LE.shape} and dtype {counts_LE.dtype} must be integers >= 0, "
            "[layers, experts]"
        )
    return counts_LE


def _over_mean(spread_L: np.ndarray, counts_LE: np.ndarray) -> np.ndarray:
    mean_L = counts_LE.mean(axis=1)
    return np.divide(spread_L, mean_L, out=np.zeros_like(mean_L), where=mean_L > 0)


def load_max_over_mean(counts_LE: np.ndarray) -> np.ndarray:
    """Tokens of the busiest expert / mean over experts, [L]: 1 when balanced, E at worst, 0 without tokens."""
    counts_LE = _checked(counts_LE)
    return _over_mean(counts_LE.max(axis=1).astype(np.float64), counts_LE)


def load_variation(counts_LE: np.ndarray) -> np.ndarray:
    """Coefficient of variation of tokens per expert (population deviation / mean), [L]: 0 when balanced."""
    counts_LE = _checked(counts_LE)
    return _over_mean(counts_LE.std(axis=1), counts_LE)


def dead_experts(counts_LE: np.ndarray) -> np.ndarray:
    """Experts that got no token, [L]; 0 for a layer without any tokens."""
    counts_LE = _checked(counts_LE)
    return np.where(counts_LE.any(axis=1), (counts_LE == 0).sum(axis=1), 0).astype(np.float64)


def dropped_share(counts_LE: np.ndarray, served_L: np.ndarray) -> np.ndarray:
    """Share of the choices that reached no expert, [L]; 0 for a layer without any tokens.

    Below 0 when experts computed choices that no router made.
    """
    chosen_L = _checked(counts_LE).sum(axis=1)
    lost_L = (chosen_L - np.asarray(served_L)).astype(np.float64)
    return np.divide(lost_L, chosen_L, out=np.zeros_like(lost_L), where=chosen_L > 0)


#: Names under which the three are reported.
LOAD_METRICS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = MappingProxyType(
    {"load_max_over_mean": load_max_over_mean, "load_variation": load_variation, "dead_experts": dead_experts}
)


def load_per_layer(counts_LE: np.ndarray, served_L: np.ndarray) -> dict[str, np.ndarray]:
    """Every load metric per layer, [L] each; zero where a layer has no experts.

    Args:
        served_L: choices of each layer that reached an expert.
    """
    by_counts = {name: metric(counts_LE) for name, metric in LOAD_METRICS.items()}
    return by_counts | {"dropped_share": dropped_share(counts_LE, served_L)}


def load_scalars(counts_LE: np.ndarray, served_L: np.ndarray, owns_L: np.ndarray) -> dict[str, float]:
    """Every load metric as the mean over the layers that have experts.

    Args:
        owns_L: bool, which layers have experts; the others must hold zeros.

    Raises:
        MetricError: no layer owns experts, the lengths differ, or a layer without experts holds counts.
    """
    counts_LE, owns_L = _checked(counts_LE), np.asarray(owns_L, bool)
    if owns_L.shape != counts_LE.shape[:1] or not owns_L.any():
        raise MetricError(f"owns_L={owns_L.tolist()} must mark at least one of the {len(counts_LE)} layers")
    if counts_LE[~owns_L].any():
        raise MetricError(
            f"layers {np.flatnonzero(~owns_L & counts_LE.any(axis=1)).tolist()} have counts but no experts"
        )
    return {name: float(values_L[owns_L].mean()) for name, values_L in load_per_layer(counts_LE, served_L).items()}
