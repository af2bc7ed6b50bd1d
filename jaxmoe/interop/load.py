"""Weights from a folder, straight into the pieces that this process's devices hold."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxmoe.config.errors import UserError
from jaxmoe.interop.folder import DTYPES, WeightFiles
from jaxmoe.interop.names import Names
from jaxmoe.interop.tensors import Range, Stacking, Tensor, by_parameter, flat_parameters, list_tensors

Tree = Any
_MOST_LISTED = 20
#: Buffers that old checkpoints hold and that follow from the config.
_DERIVED = (".rotary_emb.inv_freq",)
_BLOCK_ROWS = 4096


def load_parameters(
    files: WeightFiles, names: Names, like: Tree, stacking: Stacking, *, skip: Sequence[str] = ()
) -> dict[tuple[Any, ...], jax.Array]:
    """The parameters of a checkpoint by path.

    Parameter by parameter: at no time the host holds more than the pieces of the largest one and one tensor.

    Args:
        like: nested dict of `jax.ShapeDtypeStruct` with shardings.
        stacking: how layers lie in it; padding places are filled with zeros.
        skip: starts of names of tensors that are left out knowingly.

    Raises: UserError listing every tensor that is missing, extra, misshapen or of a dtype that is not read.
    """
    leaves = flat_parameters(like)
    tensors = list_tensors({path: leaf.shape for path, leaf in leaves.items()}, names, stacking)
    check_tensors(files, tensors, skip)
    loaded = {}
    for path, own in by_parameter(tensor for tensor in tensors if not tensor.is_copy).items():
        # Until a parameter is on its devices the host holds it: one at a time.
        loaded[path] = jax.block_until_ready(_load_one(files, own, leaves[path]))
        files.release()
    return loaded


def check_tensors(files: WeightFiles, tensors: Sequence[Tensor], skip: Sequence[str] = ()) -> None:
    """Compares what a folder holds with what the model needs.

    Raises: UserError with all differences.
    """
    wanted = {tensor.name: tensor for tensor in tensors}
    found = files.tensors
    lines = []
    for name, tensor in wanted.items():
        if name not in found:
            if not tensor.is_copy:
                lines.append(f"{name} is missing")
        elif found[name].shape != tensor.shape:
            lines.append(f"{name} has shape {list(found[name].shape)}, must be {list(tensor.shape)}")
        elif found[name].dtype not in DTYPES:
            lines.append(f"{name} is {found[name].dtype}; only {', '.join(DTYPES)} are read")
    by_leaf = {tensor.row.leaf: name for name, tensor in wanted.items() if not tensor.is_copy}
    for name in found:
        if name in wanted or name.endswith(_DERIVED) or name.startswith(tuple(skip)):
            continue
        # The head of a tied model that was saved as well.
        table = by_leaf.get("embedding.table_VD", "")
        if name != "lm_head.weight" or not _equal(files, name, table):
            lines.append(f"{name} is extra: the model has no place for it")
    for name, tensor in wanted.items():
        original = by_leaf[tensor.row.leaf]
        if tensor.is_copy and name in found and original in found and not _equal(files, name, original):
            lines.append(f"{name} must equal {original}, of which the model has one only")
    if lines:
        more = [f"... and {len(lines) - _MOST_LISTED} more"] if len(lines) > _MOST_LISTED else []
        head = f"{files.folder}: {len(lines)} tensors do not fit config.json (with overrides):"
        raise UserError("\n  ".join([head, *lines[:_MOST_LISTED], *more]))


def _equal(files: WeightFiles, name: str, other: str) -> bool:
    """Whether two tensors hold the same numbers, compared block by block."""
    if other not in files.tensors:
        return False
    one, two = files.tensors[name], files.tensors[other]
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    for start in range(0, one.shape[0], _BLOCK_ROWS):
        block = (slice(start, min(start + _BLOCK_ROWS, one.shape[0])), *(slice(0, size) for size in one.shape[1:]))
        if files.read(name, block).tobytes() != files.read(other, block).tobytes():
            return False
    return True


def _load_one(files: WeightFiles, tensors: Sequence[Tensor], like: jax.ShapeDtypeStruct) -> jax.Array:
    """One parameter, possibly stacked, from all its tensors."""
    stacked = tensors[0].place is not None
    made: dict[tuple[Range, ...], np.ndarray] = {}

    def piece(index: Any) -> np.ndarray:
        ranges = tuple(part.indices(size)[:2] for part, size in zip(index, like.shape, strict=True))
        if ranges not in made:  # copies of a piece are read once
            made[ranges] = _piece(files, tensors, ranges, like.dtype, stacked=stacked)
        return made[ranges]

    return jax.make_array_from_callback(like.shape, like.sharding, piece, dtype=like.dtype)


def _piece(
    files: WeightFiles, tensors: Sequence[Tensor], ranges: tuple[Range, ...], dtype: Any, *, stacked: bool
) -> np.ndarray:
    # Padding places of the stacked dim belong to no tensor.
    out = np.zeros([stop - start for start, stop in ranges], dtype)
    own = ranges[1:] if stacked else ranges
    for tensor in tensors:
        target = out
        if stacked:
            start, stop = ranges[0]
            assert tensor.place is not None
            if not start <= tensor.place < stop:
                continue
            target = out[tensor.place - start]
        by_letter = dict(zip(tensor.row.letters, own, strict=True))
        tensor.fill(target, by_letter, lambda index, name=tensor.name: files.read(name, index))
    return out
