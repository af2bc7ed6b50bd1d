"""What a config needs on a mesh of any size, by tracing its step without devices: memory and communication."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmoe.config.check import mesh_shape
from jaxmoe.config.schema import Config
from jaxmoe.spmd.axes import EP, POSITION_AXES, ROW_AXES
from jaxmoe.spmd.inventory import Collective, collectives, count, sent_bytes
from jaxmoe.spmd.program import abstract_mesh, shardings
from jaxmoe.step.batch import DTYPES, Batch
from jaxmoe.step.layout import Layout, Placement
from jaxmoe.step.state import TrainState, fresh_arrays, state_specs
from jaxmoe.step.train import train_step

#: The function whose loop runs over the layers of a stage.
LAYER_LOOP = "scan_layers"


@dataclass(frozen=True)
class Plan:
    """Numbers of one config on one mesh."""

    sizes: dict[str, int]
    """Ranks along each axis."""
    parameters: int
    active_parameters: int
    """That one token passes: of the routed experts only the chosen."""
    device_bytes: dict[str, int]
    """On the fullest device; all devices hold the same but for padding."""
    collectives: list[Collective]

    @property
    def in_layers(self) -> list[Collective]:
        """Those inside the loop over layers."""
        return [one for one in self.collectives if one.inside(LAYER_LOOP)]


def abstract_state(config: Config, mesh: Any) -> TrainState:
    """A state of shapes with shardings."""
    shapes = jax.eval_shape(partial(fresh_arrays, config, mesh), jax.ShapeDtypeStruct((), np.uint32))
    return jax.tree.map(_abstract, shapes, shardings(mesh, state_specs(config, mesh)))


def _abstract(shape: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def abstract_batch(config: Config, mesh: Any) -> Batch:
    """A batch of shapes with shardings."""
    sharding = NamedSharding(mesh, P(ROW_AXES, POSITION_AXES))
    shape = (config.batch.global_batch_size, config.batch.seq_len)
    arrays: dict[str, Any] = {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for name, dtype in DTYPES.items()
    }
    return Batch(**arrays)


def trace_step(config: Config, sizes: Mapping[str, int]) -> Any:
    """`train_step` of a config on a mesh of these sizes, traced. No devices, no arrays.

    Turns on JAX's 64-bit mode for a float64 config.
    """
    if config.model.param_dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    mesh = abstract_mesh(sizes)
    return train_step.trace(abstract_state(config, mesh), abstract_batch(config, mesh))


def make_plan(config: Config, num_devices: int) -> Plan:
    """The plan of a config on this many devices.

    Raises: ConfigError when the config does not run on them.
    """
    sizes = mesh_shape(config, num_devices)
    traced = trace_step(config, sizes)
    layout = state_specs(config, abstract_mesh(sizes)).layout
    parameters, routed = _count_parameters(layout)
    moe = config.model.moe
    idle = routed * (moe.num_experts - moe.experts_per_token) // moe.num_experts if moe else 0
    return Plan(sizes, parameters, parameters - idle, _device_bytes(layout), collectives(traced.jaxpr, sizes))


def _axes_of(spec: P) -> list[str]:
    return [axis for entry in spec if entry for axis in ((entry,) if isinstance(entry, str) else entry)]


def _count_parameters(layout: Layout) -> tuple[int, int]:
    """All, and those of routed experts; repeats that are padding left out."""
    order = layout.trunk_order
    total = routed = 0
    for path, shape in jax.tree_util.tree_leaves_with_path(layout.shapes):
        size = shape.size
        if jax.tree_util.keystr(path[:1], simple=True) == "trunk":
            size = size // len(order) * sum(repeat >= 0 for repeat in order)
        placement = _at(layout.placements, path)
        total += size
        routed += size if EP in _axes_of(placement.spec) else 0
    return total, routed


def _at(tree: Any, path: tuple) -> Placement:
    for key in path:
        tree = tree[key.key]
    return tree


def _device_bytes(layout: Layout) -> dict[str, int]:
    """Bytes that the parameters take on one device, in their dtype, by what they are there for."""
    sizes = dict(layout.sizes)

    def local(shape: Any, spec: P) -> int:
        return math.prod(shape.shape) * shape.dtype.itemsize // math.prod(sizes[axis] for axis in _axes_of(spec))

    def gathered(placement: Placement, shape: Any) -> int:
        return local(shape, placement.state_spec if placement.by_layer else placement.spec)

    mesh = abstract_mesh(sizes)
    state, specs = abstract_state(layout.config, mesh), state_specs(layout.config, mesh)

    def total(name: str) -> int:
        return sum(jax.tree.leaves(jax.tree.map(local, getattr(state, name), getattr(specs, name))))

    whole = sum(jax.tree.leaves(layout.map_placements(gathered, layout.shapes)))
    weights = total("params")
    return {
        "weights": weights,
        "optimizer state": total("opt_state"),
        "weights gathered for the step": whole - weights,
        "gradients": whole,
    }


def show(plan: Plan) -> str:
    """The plan as text."""
    mesh = " ".join(f"{axis}={size}" for axis, size in plan.sizes.items() if size > 1) or "one device"
    lines = [
        f"parameters: {_number(plan.parameters)}, of which a token passes {_number(plan.active_parameters)}",
        f"mesh: {math.prod(plan.sizes.values())} devices, {mesh}",
        "on each device, activations not counted:",
    ]
    memory = plan.device_bytes | {"together": sum(plan.device_bytes.values())}
    lines += [f"  {name:<30} {_size(value):>12}" for name, value in memory.items()]
    lines += ["collectives of one step: how often, and what each device sends in all"]
    lines += _table(plan.collectives, count(plan.collectives))
    lines += ["of these in one turn of the loop over layers, forward and backward:"]
    lines += _table(plan.in_layers, count(plan.in_layers, each=LAYER_LOOP))
    lines += ["what each device sends in one step, by axes:"]
    lines += [f"  {axes:<25} {_size(value):>12}" for axes, value in sent_bytes(plan.collectives).items()]
    return "\n".join(lines)


def _number(value: float) -> str:
    for unit in ("", "thousand", "million"):
        if value < 1000:
            return f"{value:.4g} {unit}".strip()
        value /= 1000
    return f"{value:.4g} billion"


def _size(value: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:,.2f} GiB"


def _table(found: list[Collective], counts: dict[str, dict[str, int]]) -> list[str]:
    lines = []
    for verb, by_axes in counts.items():
        for axes, times in by_axes.items():
            sent = sum(c.sent_bytes * c.times for c in found if c.verb == verb and ",".join(c.axes) == axes)
            lines.append(f"  {verb:<16} {axes:<20} {times:>8} x {_size(sent):>14}")
    return lines or ["  none"]


def as_tree(plan: Plan) -> dict[str, Any]:
    """The plan as a tree for JSON."""
    return {
        "mesh": plan.sizes,
        "parameters": plan.parameters,
        "active_parameters": plan.active_parameters,
        "device_bytes": plan.device_bytes,
        "collectives": count(plan.collectives),
        "collectives_of_a_layer": count(plan.in_layers, each=LAYER_LOOP),
        "sent_bytes": sent_bytes(plan.collectives),
    }
