"""How a config's parameters lie on a mesh: made abstractly once, then read by init, step and checkpoints."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import jax
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxmoe.config.layer_plan import LayerPlan, layer_plan
from jaxmoe.config.schema import Config
from jaxmoe.model.decoder import Decoder
from jaxmoe.model.params import RouterBias
from jaxmoe.spmd.axes import AXES, PP
from jaxmoe.spmd.collectives import gather, scatter_sum, sum_partial, to_varying, zeros_of

Tree = Any


def _spec_axes(spec: P) -> tuple[str, ...]:
    return tuple(axis for entry in spec if entry for axis in ((entry,) if isinstance(entry, str) else entry))


@dataclass(frozen=True)
class Placement:
    """Where one parameter lies. Under `zero` 1, 3 `gather_axes` split it further, at dim `gather_dim` from the end."""

    spec: P
    gather_axes: tuple[str, ...]
    gather_dim: int
    decay: bool
    by_layer: bool
    """Gathered inside the scan over layers, not once per step."""
    group: str
    """The part of the model under which its gradient's norm is reported."""
    trained: bool
    """False: it stays as it is, its gradient is zero."""

    @property
    def state_spec(self) -> P:
        """The spec of the state between steps: master weight, optimiser moments."""
        if not self.gather_axes:
            return self.spec
        entries = list(self.spec) + [None] * (-self.gather_dim - len(self.spec))
        old = entries[self.gather_dim] or ()
        entries[self.gather_dim] = ((old,) if isinstance(old, str) else tuple(old)) + self.gather_axes
        return P(*(entry[0] if isinstance(entry, tuple) and len(entry) == 1 else entry for entry in entries))

    def collect(self, value: jax.Array) -> jax.Array:
        """This rank's piece of the state -> the weight as the layers use it, typed as varying over all axes."""
        if self.gather_axes:
            value = gather(value, self.gather_axes, dim=value.ndim + self.gather_dim)
        return to_varying(value, AXES)

    def reduce(self, gradient: jax.Array) -> jax.Array:
        """A rank's own gradient -> the summed gradient of its piece of the state. Once per step."""
        if self.gather_axes and not self.by_layer:
            gradient = scatter_sum(gradient, self.gather_axes, dim=gradient.ndim + self.gather_dim)
        rest = [axis for axis in AXES if axis not in _spec_axes(self.spec) and axis not in self.gather_axes]
        return self.if_trained(sum_partial(gradient, rest))

    def if_trained(self, change: jax.Array) -> jax.Array:
        """A gradient or an update of the state, or zeros."""
        return change if self.trained else zeros_of(change)


@dataclass(frozen=True)
class Layout:
    """Everything static about a model on a mesh. Trees are nested dicts with the structure of the parameters."""

    config: Config
    sizes: tuple[tuple[str, int], ...]
    plan: LayerPlan
    trunk_order: tuple[int, ...]
    """The repeat of the trunk's period that stands at each place of the stacked dim; -1 is padding."""
    graphdef: nnx.GraphDef
    placements: Tree
    shapes: Tree
    bias_shapes: Tree
    bias_specs: Tree

    @property
    def stages(self) -> int:
        return dict(self.sizes)[PP]

    @property
    def chunks(self) -> int:
        """Chunks of layers per stage."""
        return _chunks(self.config, self.stages)

    @property
    def has_padding(self) -> bool:
        return -1 in self.trunk_order

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Number of the first layer of each repeat, in the order of the stacked dim; -1 is padding."""
        lead, period = len(self.plan.lead), len(self.plan.period)
        return tuple(-1 if r < 0 else lead + r * period for r in self.trunk_order)

    @property
    def state_specs(self) -> Tree:
        return self.map_placements(lambda p: p.state_spec)

    def map_placements(self, function: Callable[..., Any], *trees: Tree) -> Tree:
        """`function(placement, leaf, ...)` over the parameters."""
        return jax.tree.map(function, self.placements, *trees, is_leaf=lambda x: isinstance(x, Placement))

    def merge(self, weights: Tree, bias: Tree) -> Decoder:
        """The model with these arrays in place."""
        return nnx.merge(self.graphdef, nnx.State(weights), nnx.State(bias))

    def collect_once(self, params: Tree) -> Tree:
        """Pieces of the state -> weights; those that are gathered layer by layer stay pieces."""
        return self.map_placements(lambda p, v: to_varying(v, AXES) if p.by_layer else p.collect(v), params)

    def collect_layer(self, state: nnx.State) -> nnx.State:
        """The same inside the scan, for the state of one layer (or period of layers)."""
        if self.config.parallel.zero != 3:
            return state
        return jax.tree.map(_collect_variable, state, is_leaf=lambda x: isinstance(x, nnx.Variable))

    def reduce_gradients(self, gradients: Tree) -> Tree:
        """Every rank's own gradients -> the gradient of the step. The one place where gradients are reduced."""
        return self.map_placements(lambda p, g: p.reduce(g), gradients)


def _collect_variable(variable: nnx.Variable) -> nnx.Variable:
    if not isinstance(variable, nnx.Param):
        return variable
    placement = variable.get_metadata("placement")
    return variable.replace(placement.collect(variable.get_raw_value()))


def _chunks(config: Config, stages: int) -> int:
    circular = config.parallel.pipeline_schedule == "circular" and stages > 1
    return config.parallel.pipeline_chunks if circular else 1


def trunk_order(config: Config, stages: int) -> tuple[int, ...]:
    """Stage r holds chunks r, r + stages, ...; each chunk is a run of consecutive repeats. Short ends are padded."""
    repeats, chunks = layer_plan(config.model).repeats, _chunks(config, stages)
    length = math.ceil(repeats / (stages * chunks))
    starts = [(chunk * stages + stage) * length for stage in range(stages) for chunk in range(chunks)]
    order = [start + i for start in starts for i in range(length)]
    return tuple(repeat if repeat < repeats else -1 for repeat in order)


def only_indexers(config: Config) -> bool:
    """Whether all parameters but those of the indexers, and the router biases, stay as they are."""
    dsa = config.model.attention.dsa
    return dsa is not None and dsa.stage == "warmup"


#: Module on a parameter's path -> its group; the first that stands on the path counts.
_GROUPS = {
    "router": "router",
    "experts": "experts",
    "attention": "attention",
    "embedding": "embedding",
    "head": "embedding",
    "mlp": "dense",
    "shared": "dense",
    "moe": "dense",
    "mtp": "dense",
}


def parameter_group(path: tuple[Any, ...]) -> str:
    """embedding (with the head), attention, router, experts (routed), norms, or dense.

    dense: MLPs without routing, the shared experts and their gate, the projection into an MTP depth. Norms are norms
    wherever they stand; the indexer counts as attention.
    """
    modules = [str(step) for step in path[:-1]]
    if any(module.endswith("norm") for module in modules):
        return "norms"
    return next(group for module, group in _GROUPS.items() if module in modules)


def _placement(variable: nnx.Variable, sizes: dict[str, int], config: Config, path: tuple[Any, ...]) -> Placement:
    zero, in_trunk, in_layer = config.parallel.zero, path[0] == "trunk", path[0] in ("trunk", "lead", "mtp")
    spec, shape = variable.get_metadata("spec"), variable.get_raw_value().shape
    spec = P(*spec, *(None,) * (len(shape) - len(spec)))
    axes = tuple(a for a in AXES if a not in _spec_axes(spec) and a != "tp" and sizes[a] > 1)
    ranks = math.prod(sizes[a] for a in axes)
    local = [size // math.prod(sizes[a] for a in _spec_axes(P(entry))) for size, entry in zip(shape, spec, strict=True)]
    fits = [d for d in range(1 if in_trunk else 0, len(shape)) if local[d] % ranks == 0]
    split = bool(zero and axes and fits)
    return Placement(
        spec=spec,
        gather_axes=axes if split else (),
        gather_dim=max(fits, key=lambda d: local[d]) - len(shape) if split else -1,
        decay=variable.get_metadata("decay"),
        by_layer=zero == 3 and in_layer,
        group=parameter_group(path),
        trained="indexer" in path or not only_indexers(config),
    )


@lru_cache(maxsize=64)
def make_layout(config: Config, sizes: tuple[tuple[str, int], ...]) -> Layout:
    """The layout of `config` on a mesh of these sizes. No arrays are made."""
    by_axis = dict(sizes)
    order = trunk_order(config, by_axis[PP])
    model = nnx.eval_shape(lambda: Decoder(config, by_axis, jax.random.key(0), order))
    for path, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Param):
            node.set_metadata(placement=_placement(node, by_axis, config, path))
    graphdef, params, bias = nnx.split(model, nnx.Param, RouterBias)
    placements = {path: v.get_metadata("placement") for path, v in nnx.to_flat_state(params)}
    return Layout(
        config=config,
        sizes=sizes,
        plan=layer_plan(config.model),
        trunk_order=order,
        graphdef=graphdef,
        placements=nnx.traversals.unflatten_mapping(placements),
        shapes=nnx.to_pure_dict(params),
        bias_shapes=nnx.to_pure_dict(bias),
        bias_specs=nnx.traversals.unflatten_mapping({p: v.get_metadata("spec") for p, v in nnx.to_flat_state(bias)}),
    )


def layout_of(config: Config, mesh: Any) -> Layout:
    """`make_layout` for a mesh, real or abstract."""
    # Frozen pydantic models are hashable, which a type checker cannot see.
    return make_layout(cast(Any, config), tuple(mesh.shape.items()))
