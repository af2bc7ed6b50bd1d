"""The host's half of a metric: from synced values per slot to scalars, percentiles and one line of text. No JAX."""

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Protocol

import numpy as np

from jaxmoe.metrics.rules import MetricError


class MetricWriter(Protocol):
    """Where reported numbers go. `per_layer` may hold masked arrays: masked slots are not written."""

    def write(
        self,
        step: int,
        scalars: Mapping[str, float],
        per_layer: Mapping[str, np.ndarray],
        counts: np.ndarray | None = None,
    ) -> None: ...


def layer_key(name: str, slot: int) -> str:
    """Name of one slot's value in TensorBoard and W&B; slots count from 0."""
    return f"moe/{name}_layer_{slot}"


def count_moe_layers(
    num_layers: int | None, moe_layer_freq: int | Sequence[int] | None = None, mtp_num_layers: int | None = None
) -> int:
    """Number of MoE layers of a model.

    `moe_layer_freq`: None means every layer, an int f every f-th from the first, a sequence of 0 and 1 the layers
    themselves. `mtp_num_layers` are added.

    Raises:
        MetricError: `num_layers` is missing where it is needed, or the pattern has another type.
    """
    if isinstance(moe_layer_freq, Sequence) and not isinstance(moe_layer_freq, str):
        count = int(sum(moe_layer_freq))
    elif moe_layer_freq is not None and (isinstance(moe_layer_freq, bool) or not isinstance(moe_layer_freq, int)):
        raise MetricError(f"moe_layer_freq={moe_layer_freq!r} must be an int, a sequence of 0 and 1, or None")
    elif num_layers is None:
        raise MetricError("num_layers=None must be given to count MoE layers; pass num_moe_layers or num_layers")
    elif moe_layer_freq is not None and moe_layer_freq < 1:
        raise MetricError(f"moe_layer_freq={moe_layer_freq} must be at least 1")
    else:
        count = len(range(0, num_layers, moe_layer_freq or 1))
    return count + (mtp_num_layers or 0)


def mean_over_owning(name: str, values_L: np.ndarray, num_owning: int) -> float:
    """Sum over all slots / number of layers that own the statistic. NaN stays NaN.

    Raises:
        MetricError: `num_owning` is not positive.
    """
    if num_owning <= 0:
        raise MetricError(f"{name}: num_moe_layers={num_owning} must be at least 1, the layers that own the metric")
    return float(np.sum(values_L, dtype=np.float64) / num_owning)


def percentile_scalars(name: str, values_L: np.ndarray, quantiles: Sequence[float]) -> dict[str, float]:
    """`{name}_p{int(100 q)}` over the slots with a positive value, linear interpolation; empty if there is none.

    A NaN slot takes part, so it shows. The name truncates (0.29 -> p28), as in Megatron-Core.
    """
    wrong = [q for q in quantiles if not 0.0 <= q <= 1.0]
    if wrong:
        raise MetricError(f"percentiles[{name!r}]={list(quantiles)}: {wrong} must lie in [0, 1]")
    keys = [f"{name}_p{int(q * 100)}" for q in quantiles]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise MetricError(f"percentiles[{name!r}]={list(quantiles)}: {twice} would name two of them; leave out one")
    shown = values_L[(values_L > 0) | np.isnan(values_L)]
    return {key: float(np.quantile(shown, q)) for key, q in zip(keys, quantiles, strict=True)} if shown.size else {}


def hide_zero_slots(values_L: np.ndarray) -> np.ndarray:
    """The same values with zero slots masked, for metrics that are reported by percentiles."""
    return np.ma.masked_array(values_L, mask=values_L == 0)


def take_losses(scalars: Mapping[str, float], total_loss_dict: MutableMapping[str, float]) -> dict[str, float]:
    """Add each scalar whose name ends in "loss" into `total_loss_dict`; return the others."""
    rest = {}
    for name, value in scalars.items():
        if name.lower().endswith("loss"):
            total_loss_dict[name] = total_loss_dict.get(name, 0.0) + value
        else:
            rest[name] = value
    return rest


def console_text(scalars: Mapping[str, float]) -> str:
    """`" name: 1.23 |"` for every scalar, joined; NaN reads nan."""
    return "".join(f" {name}: {value:.2f} |" for name, value in scalars.items())
