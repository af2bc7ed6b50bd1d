"""Which layers a model has, and how they are stacked."""

from dataclasses import dataclass

from jaxmoe.config.schema import Model


@dataclass(frozen=True)
class LayerKind:
    """What tells one decoder layer from another."""

    is_moe: bool


@dataclass(frozen=True)
class LayerPlan:
    """`lead` layers run one by one, outside the pipeline; then `period` is repeated `repeats` times (the trunk)."""

    lead: tuple[LayerKind, ...]
    period: tuple[LayerKind, ...]
    repeats: int

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """All decoder layers in order."""
        return self.lead + self.period * self.repeats

    def trunk_slots(self, position: int) -> tuple[int, ...]:
        """The layer numbers (from 0) of the layers at one position of the period, in order of repeats."""
        return tuple(len(self.lead) + r * len(self.period) + position for r in range(self.repeats))


def layer_plan(model: Model) -> LayerPlan:
    """The plan of a model: leading dense layers, then the shortest period that the others repeat."""
    if model.moe is None:
        return LayerPlan((), (LayerKind(is_moe=False),), model.num_layers)
    lead = model.moe.num_dense_layers
    pattern = model.moe.layer_pattern
    rest = model.num_layers - lead
    flags = [i % pattern == 0 for i in range(rest)] if isinstance(pattern, int) else [bool(p) for p in pattern]
    kinds = tuple(LayerKind(is_moe=flag) for flag in flags)
    length = next(n for n in range(1, rest + 1) if rest % n == 0 and kinds == kinds[:n] * (rest // n))
    return LayerPlan((LayerKind(is_moe=False),) * lead, kinds[:length], rest // length)
