"""How far apart two runs of the same steps are."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

#: A leaf is measured against its own largest element, or this share of the largest of its kind: what is zero but
#: for rounding has no relative difference.
FLOOR = 1e-4


@dataclass(frozen=True)
class Outcome:
    """Host copies of what one layout computed, trunk layers in the order of the model."""

    kinds: Mapping[str, Mapping[str, np.ndarray]]
    """kind ("gradients", ...) -> name -> array."""
    expert_counts: np.ndarray
    """[slots, E] of the first step."""
    seconds: float


@dataclass(frozen=True)
class Difference:
    """The worst relative difference of one kind."""

    kind: str
    value: float
    worst_leaf: str


def flat_tree(tree: Any) -> dict[str, np.ndarray]:
    """Leaves by their path, on the host."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {".".join(str(getattr(k, "key", k)) for k in path): np.asarray(leaf) for path, leaf in leaves}


def _scale(value: np.ndarray) -> float:
    return float(np.max(np.abs(value), initial=0.0))


def difference(kind: str, one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> Difference:
    """The worst of max|a - b| / max|a| over the leaves. A missing or misshapen leaf, or a NaN, is infinitely far."""
    if one.keys() != other.keys():
        return Difference(kind, float("inf"), f"names differ: {sorted(one.keys() ^ other.keys())}")
    floor = FLOOR * max((_scale(value) for value in one.values()), default=0.0)
    worst = Difference(kind, 0.0, "-")
    for name, value in one.items():
        a, b = value.astype(np.float64), other[name].astype(np.float64)
        distance = float("inf") if a.shape != b.shape else _scale(a - b)
        scale = max(_scale(a), floor)
        relative = distance / scale if scale > 0 else (float("inf") if distance else 0.0)
        if not relative <= worst.value:
            worst = Difference(kind, float("inf") if np.isnan(relative) else relative, name)
    return worst


def differences(reference: Outcome, outcome: Outcome) -> list[Difference]:
    """One worst difference per kind."""
    return [difference(kind, reference.kinds[kind], outcome.kinds[kind]) for kind in reference.kinds]


def flipped_routes(reference: Outcome, outcome: Outcome) -> int:
    """At least this many choices of an expert differ."""
    return int(np.abs(reference.expert_counts.astype(np.int64) - outcome.expert_counts).sum() // 2)
