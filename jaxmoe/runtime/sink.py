"""What a place for a run's numbers is: console, file, TensorBoard and W&B all get the same reported values."""

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from jaxmoe.metrics import layer_key
from jaxmoe.runtime.metrics_file import Kind

Scalars = Mapping[str, float]
PerLayer = Mapping[str, np.ndarray]


class Sink(Protocol):
    """One place for numbers."""

    @property
    def name(self) -> str: ...

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """Exceptions that mean "the place failed", not "our code is wrong"."""
        ...

    def write(
        self, step: int, scalars: Scalars, per_layer: PerLayer, counts: np.ndarray | None = None, kind: Kind = "train"
    ) -> None:
        """Take the numbers of one step: scalars, float [slots] per metric, tokens per expert [slots, E]."""
        ...

    def close(self) -> None: ...


def flat_values(scalars: Scalars, per_layer: PerLayer, kind: Kind) -> dict[str, float]:
    """All numbers by their name in TensorBoard and W&B; masked slots are left out."""
    prefix = "" if kind == "train" else f"{kind}/"
    values = {prefix + name: float(value) for name, value in scalars.items()}
    for name, row in per_layer.items():
        hidden = np.ma.getmaskarray(row)
        values |= {prefix + layer_key(name, i): float(row[i]) for i in range(len(row)) if not hidden[i]}
    return values
