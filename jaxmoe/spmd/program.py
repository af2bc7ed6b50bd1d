"""The mesh, and the one way to run a function on it: fully manual, always type-checked."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmoe.spmd.axes import AXES


def build_mesh(sizes: Mapping[str, int], devices: Any = None) -> Mesh:
    """A mesh with all five axes, in order, from the size of each.

    Turns on `jax_remove_size_one_mesh_axis_from_type`, without which axes of size one would need collectives to
    satisfy the type check.
    """
    jax.config.update("jax_remove_size_one_mesh_axis_from_type", True)
    shape = tuple(sizes[axis] for axis in AXES)
    if devices is not None:
        return Mesh(np.asarray(devices).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def abstract_mesh(sizes: Mapping[str, int]) -> AbstractMesh:
    """A mesh without devices, to trace programs for any number of them."""
    jax.config.update("jax_remove_size_one_mesh_axis_from_type", True)
    shape = tuple(sizes[axis] for axis in AXES)
    return AbstractMesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def manual(function: Callable[..., Any], mesh: Any, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`function` on local arrays, one call per rank. The only `shard_map` of the project; it is always checked."""
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True)


def _as_jit_writes(spec: P, mesh: Mesh) -> P:
    """`spec` as the outputs of a jitted step carry it: without axes of size one, without None at the end."""
    groups = [(entry,) if isinstance(entry, str) else entry or () for entry in spec]
    wide = [tuple(axis for axis in group if mesh.shape[axis] > 1) for group in groups]
    while wide and not wide[-1]:
        wide.pop()
    return P(*(group[0] if len(group) == 1 else group or None for group in wide))


def shardings(mesh: Mesh, specs: Any) -> Any:
    """A tree of `PartitionSpec` as a tree of `NamedSharding`.

    Equal to those of a step's outputs, so that the second step finds the program of the first.
    """
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, _as_jit_writes(spec, mesh)), specs, is_leaf=lambda x: isinstance(x, P)
    )
