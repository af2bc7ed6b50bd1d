"""The five arrays of one optimiser step, on the mesh."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmoe.spmd.axes import POSITION_AXES, ROW_AXES

DTYPES = {
    "inputs": np.int32,
    "targets": np.int32,
    "loss_mask": np.float32,
    "positions": np.int32,
    "segment_ids": np.int32,
}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """All rows of one optimiser step, [G, S] each.

    Layout: rows over ("dp", "ep"), positions over ("sp", "tp").
    """

    inputs: jax.Array
    """int32 token ids."""
    targets: jax.Array
    """int32, next token within the same document."""
    loss_mask: jax.Array
    """float32 >= 0, weight of the target; 0 is not trained."""
    positions: jax.Array
    """int32, from 0 in every document."""
    segment_ids: jax.Array
    """int32, 1, 2, ... per document of a row; 0 is padding."""

    @classmethod
    def from_numpy(cls, arrays: Mapping[str, np.ndarray], mesh: Mesh) -> "Batch":
        """Global arrays from host arrays of the whole batch; each process puts only what its devices own.

        Raises:
            ValueError: fields missing, unknown, of unequal or indivisible shape, of a wrong kind, or a loss_mask that
                is negative, not finite, or positive in padding.
        """
        problems = _field_problems(arrays)
        if not _wrong_structure(arrays):
            problems += _shape_problems(np.shape(arrays["inputs"]), mesh)
        _require(problems)
        sharding = NamedSharding(mesh, P(ROW_AXES, POSITION_AXES))

        def put(name: str) -> jax.Array:
            host = np.asarray(arrays[name]).astype(DTYPES[name])
            return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

        return cls(**{name: put(name) for name in DTYPES})

    @classmethod
    def from_rows(
        cls, load: Callable[[int, int], Mapping[str, np.ndarray]], shape: tuple[int, int], mesh: Mesh
    ) -> "Batch":
        """As `from_numpy`, for processes that each make their own rows only.

        Args:
            load: gives rows [start, stop) of the batch, fields [stop - start, S]; called once for every run of rows
                that devices of this process own.
            shape: G, S of the whole batch.

        Raises: ValueError as `from_numpy`.
        """
        sharding = NamedSharding(mesh, P(ROW_AXES, POSITION_AXES))
        _require(_shape_problems(shape, mesh))
        pieces = {}
        for start, stop in _own_rows(sharding, shape):
            arrays = load(start, stop)
            _require(_field_problems(arrays))
            assert np.shape(arrays["inputs"]) == (stop - start, shape[1]), (np.shape(arrays["inputs"]), start, stop)
            pieces[start, stop] = arrays

        def put(name: str) -> jax.Array:
            def piece(index: Any) -> np.ndarray:
                first, last, _ = index[0].indices(shape[0])
                start, stop = next(run for run in pieces if run[0] <= first and last <= run[1])
                host = np.asarray(pieces[start, stop][name]).astype(DTYPES[name])
                return host[first - start : last - start, index[1]]

            return jax.make_array_from_callback(shape, sharding, piece)

        return cls(**{name: put(name) for name in DTYPES})


def _own_rows(sharding: NamedSharding, shape: tuple[int, int]) -> list[tuple[int, int]]:
    """Runs of rows that devices of this process own, joined where they touch, ascending."""
    indices = sharding.addressable_devices_indices_map(shape).values()
    runs: list[tuple[int, int]] = []
    for start, stop in sorted({index[0].indices(shape[0])[:2] for index in indices if index is not None}):
        if runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], stop)
        else:
            runs.append((start, stop))
    return runs


def _require(problems: list[str]) -> None:
    if problems:
        raise ValueError("batch: " + "; ".join(problems))


def _wrong_structure(arrays: Mapping[str, np.ndarray]) -> list[str]:
    names = [field.name for field in fields(Batch)]
    missing = [name for name in names if name not in arrays]
    unknown = [name for name in arrays if name not in names]
    if missing or unknown:
        return [f"fields must be {names}; missing {missing}, unknown {unknown}"]
    shapes = {name: np.shape(arrays[name]) for name in names}
    if len(shapes["inputs"]) != 2 or len(set(shapes.values())) > 1:
        return [f"all fields must have one shape [G, S]; got {shapes}"]
    return []


def _field_problems(arrays: Mapping[str, np.ndarray]) -> list[str]:
    problems = _wrong_structure(arrays)
    if problems:
        return problems
    values = {name: np.asarray(arrays[name]) for name in DTYPES}
    problems = [
        f"{name} has dtype {value.dtype}, must be an integer"
        for name, value in values.items()
        if name != "loss_mask" and not np.issubdtype(value.dtype, np.integer)
    ]
    mask = values["loss_mask"].astype(np.float64)
    if not np.isfinite(mask).all() or (mask < 0).any():
        problems.append("loss_mask must be finite and >= 0")
    elif (mask[values["segment_ids"] == 0] > 0).any():
        problems.append("loss_mask must be 0 in padding (segment_ids == 0)")
    return problems


def _shape_problems(shape: tuple[int, ...], mesh: Mesh) -> list[str]:
    problems = []
    rows, columns = (int(np.prod([mesh.shape[a] for a in axes])) for axes in (ROW_AXES, POSITION_AXES))
    if shape[0] % rows:
        problems.append(f"{shape[0]} rows must be a multiple of dp * ep = {rows}")
    if shape[1] % columns:
        problems.append(f"{shape[1]} positions must be a multiple of sp * tp = {columns}")
    return problems


def zigzag_order(seq_len: int, ranks: int) -> np.ndarray:
    """A row's columns in the order of the sp ranks that hold them: rank r holds chunks r and 2 * ranks - 1 - r."""
    chunks = np.arange(seq_len).reshape(2 * ranks, -1)
    return np.concatenate([chunks[[r, 2 * ranks - 1 - r]].reshape(-1) for r in range(ranks)])


#: Fields that an MTP depth has of its own.
SHIFTED = ("inputs", "targets", "loss_mask", "segment_ids")


def at_depth(name: str, depth: int) -> str:
    """The name of an array of `SHIFTED` at an MTP depth; depth 0 is the batch itself."""
    return f"{name}_{depth}" if depth else name


def shifted(batch: Batch, depth: int) -> dict[str, jax.Array]:
    """The arrays [G, S] of an MTP depth, from whole rows in their own order: before they are placed on sp and tp.

    Position t reads and predicts what stands at t + depth, if that lies in the same document; else it is padding.
    """

    def ahead(value: jax.Array) -> jax.Array:
        return jnp.pad(value[:, depth:], ((0, 0), (0, min(depth, value.shape[1]))))

    inside = (batch.segment_ids != 0) & (batch.segment_ids == ahead(batch.segment_ids))
    sources = {name: ahead(getattr(batch, name)) for name in SHIFTED} | {"segment_ids": batch.segment_ids}
    return {at_depth(name, depth): jnp.where(inside, value, 0) for name, value in sources.items()}


def microbatches(
    batch: Batch, num_microbatches: int, stages: int, order: np.ndarray | None, num_depths: int = 0
) -> dict[str, jax.Array]:
    """The batch as [M / pp, pp, G / M, S], with each token's place in it; columns in the given order.

    Micro-batch m, rows [m G / M, (m + 1) G / M) in the global order, stands at [m // pp, m % pp]. `num_depths` adds
    the arrays of that many MTP depths.
    """
    rows, seq_len = batch.inputs.shape
    arrays = {name: getattr(batch, name) for name in DTYPES}
    for depth in range(1, num_depths + 1):
        arrays |= shifted(batch, depth)
    arrays["ids"] = jnp.arange(rows * seq_len, dtype=jnp.int32).reshape(rows, seq_len)
    if order is not None:
        arrays = {name: jnp.take(value, order, axis=1) for name, value in arrays.items()}
    shape = (num_microbatches // stages, stages, rows // num_microbatches, seq_len)
    return {name: value.reshape(shape) for name, value in arrays.items()}
