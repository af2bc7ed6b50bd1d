"""Which layers a model has, and how they are stacked. Does not import jax."""

from dataclasses import dataclass, replace

from jaxmoe.config.schema import Model, Moe


@dataclass(frozen=True)
class LayerKind:
    """What tells one decoder layer from another."""

    is_moe: bool
    window: int | None = None
    """Keys that a query sees; None is all."""
    owns_indexer: bool = False
    """Chooses the keys of sparse attention, for itself and the layers after it that do not."""


@dataclass(frozen=True)
class LayerPlan:
    """`lead` layers run one by one, outside the pipeline; then `period` is repeated `repeats` times (the trunk).

    Chosen keys pass from layer to layer within the lead and within a period, never between them.
    """

    lead: tuple[LayerKind, ...]
    period: tuple[LayerKind, ...]
    repeats: int
    mtp: tuple[LayerKind, ...] = ()
    """The layer of each multi-token-prediction depth; outside the pipeline, after the decoder."""

    @property
    def num_decoder_layers(self) -> int:
        return len(self.lead) + len(self.period) * self.repeats

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """All layers in order, those of MTP last: one slot each."""
        return self.lead + self.period * self.repeats + self.mtp


def layer_plan(model: Model) -> LayerPlan:
    """The plan of a model: leading dense layers, with those that attend to keys that these chose; then the shortest
    period that the others repeat."""
    facts = zip(_has_experts(model), _windows(model), _have_indexers(model), strict=True)
    kinds = tuple(LayerKind(*fact) for fact in facts)
    has_indexers = model.attention.dsa is not None
    lead = model.moe.num_dense_layers if model.moe else 0
    while has_indexers and not kinds[lead].owns_indexer:
        lead += 1
    trunk = kinds[lead:]
    length = next(n for n in range(1, len(trunk) + 1) if len(trunk) % n == 0 and trunk == trunk[:n] * (len(trunk) // n))
    depths = model.mtp.num_depths if model.mtp else 0
    mtp = replace(kinds[-1], owns_indexer=has_indexers)
    return LayerPlan(kinds[:lead], trunk[:length], len(trunk) // length, (mtp,) * depths)


def _has_experts(model: Model) -> list[bool]:
    return [False] * model.num_layers if model.moe is None else moe_layers(model.moe, model.num_layers)


def moe_layers(moe: Moe, num_layers: int) -> list[bool]:
    """For each layer of the model whether it has experts, as far as the pattern reaches."""
    trunk = max(num_layers - moe.num_dense_layers, 0)
    pattern = moe.layer_pattern
    if isinstance(pattern, int):
        chosen = [layer_id % pattern == 0 for layer_id in range(trunk)]
    else:
        chosen = [flag == 1 for flag in pattern]
    return [False] * moe.num_dense_layers + chosen


def _windows(model: Model) -> list[int | None]:
    attention = model.attention
    flags = attention.sliding_window_layers or (1,) * model.num_layers
    return [attention.sliding_window if flag else None for flag in flags]


def _have_indexers(model: Model) -> list[bool]:
    if model.attention.dsa is None:
        return [False] * model.num_layers
    lead, pattern = model.moe.num_dense_layers if model.moe else 0, model.attention.dsa.indexer_pattern
    if isinstance(pattern, int):
        return [i < lead or (i - lead) % pattern == 0 for i in range(model.num_layers)]
    return [bool(flag) for flag in pattern]
