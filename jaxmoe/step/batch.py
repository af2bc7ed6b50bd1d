"""The five arrays of one optimiser step, on the mesh."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

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
        problems = _problems(arrays, mesh)
        if problems:
            raise ValueError("batch: " + "; ".join(problems))
        sharding = NamedSharding(mesh, P(ROW_AXES, POSITION_AXES))

        def put(name: str) -> jax.Array:
            host = np.asarray(arrays[name]).astype(DTYPES[name])
            return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

        return cls(**{name: put(name) for name in DTYPES})


def _problems(arrays: Mapping[str, np.ndarray], mesh: Mesh) -> list[str]:
    names = [field.name for field in fields(Batch)]
    missing = [name for name in names if name not in arrays]
    unknown = [name for name in arrays if name not in names]
    if missing or unknown:
        return [f"fields must be {names}; missing {missing}, unknown {unknown}"]
    values = {name: np.asarray(arrays[name]) for name in names}
    shape = values["inputs"].shape
    if len(shape) != 2 or any(value.shape != shape for value in values.values()):
        return [f"all fields must have one shape [G, S]; got { {n: v.shape for n, v in values.items()} }"]
    problems = [
        f"{name} has dtype {value.dtype}, must be an integer"
        for name, value in values.items()
        if name != "loss_mask" and not np.issubdtype(value.dtype, np.integer)
    ]
    rows, columns = (int(np.prod([mesh.shape[a] for a in axes])) for axes in (ROW_AXES, POSITION_AXES))
    if shape[0] % rows:
        problems.append(f"{shape[0]} rows must be a multiple of dp * ep = {rows}")
    if shape[1] % columns:
        problems.append(f"{shape[1]} positions must be a multiple of sp * tp = {columns}")
    mask = values["loss_mask"].astype(np.float64)
    if not np.isfinite(mask).all() or (mask < 0).any():
        problems.append("loss_mask must be finite and >= 0")
    elif (mask[values["segment_ids"] == 0] > 0).any():
        problems.append("loss_mask must be 0 in padding (segment_ids == 0)")
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
