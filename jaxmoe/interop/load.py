"""Weights from a folder, straight into the pieces that this process's devices hold."""

from collections.abc import Mapping, Sequence
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


def load_parameters(
    files: WeightFiles, names: Names, like: Tree, stacking: Stacking
) -> dict[tuple[Any, ...], jax.Array]:
    """The parameters of a checkpoint by path.

    Parameter by parameter: at no time the host holds more than the pieces of the largest one and one tensor.

    Args:
        like: nested dict of `jax.ShapeDtypeStruct` with shardings.
        stacking: how layers lie in it; padding places are filled with zeros.

    Raises: UserError listing every tensor that is missing, extra, misshapen or of a dtype that is not read.
    """
    leaves = flat_parameters(like)
    tensors = list_tensors({path: leaf.shape for path, leaf in leaves.items()}, names, stacking)
    check_tensors(files, tensors)
    loaded = {}
    for path, own in by_parameter(tensors).items():
        loaded[path] = _load_one(files, own, leaves[path])
        files.release()
    return loaded


def check_tensors(files: WeightFiles, tensors: Sequence[Tensor]) -> None:
    """Compares what a folder holds with what the model needs.

    Raises: UserError with all differences.
    """
    wanted = {tensor.name: tensor for tensor in tensors}
    found = files.tensors
    lines = []
    for name, tensor in wanted.items():
        if name not in found:
            lines.append(f"{name} is missing")
        elif found[name].shape != tensor.shape:
            lines.append(f"{name} has shape {list(found[name].shape)}, must be {list(tensor.shape)}")
        elif found[name].dtype not in DTYPES:
            lines.append(f"{name} is {found[name].dtype}; only {', '.join(DTYPES)} are read")
    lines += [
        f"{name} is extra: the model has no place for it"
        for name in found
        if name not in wanted and not name.endswith(_DERIVED) and not _repeats_embedding(files, name, wanted)
    ]
    if lines:
        more = [f"... and {len(lines) - _MOST_LISTED} more"] if len(lines) > _MOST_LISTED else []
        head = f"{files.folder}: {len(lines)} tensors do not fit config.json (with overrides):"
        raise UserError("\n  ".join([head, *lines[:_MOST_LISTED], *more]))


def _repeats_embedding(files: WeightFiles, name: str, wanted: Mapping[str, Tensor]) -> bool:
    """Whether this is the head of a tied model that was saved as well, with the embedding's numbers."""
    table = next((t.name for t in wanted.values() if t.row.leaf == "embedding.table_VD"), None)
    if name != "lm_head.weight" or table not in files.tensors:
        return False
    head, embedding = files.tensors[name], files.tensors[table]
    if head.shape != embedding.shape or head.dtype != embedding.dtype:
        return False
    whole = tuple(slice(0, size) for size in head.shape)
    return bool(np.array_equal(files.read(name, whole), files.read(table, whole)))


def _load_one(files: WeightFiles, tensors: Sequence[Tensor], like: jax.ShapeDtypeStruct) -> jax.Array:
    """One parameter, possibly stacked, from all its tensors."""
    stacked = tensors[0].place is not None
    made: dict[tuple[Range, ...], np.ndarray] = {}

    def piece(index: tuple[slice, ...]) -> np.ndarray:
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
            if not start <= tensor.place < stop:
                continue
            target = out[tensor.place - start]
        by_letter = dict(zip(tensor.row.letters, own, strict=True))
        tensor.fill(target, by_letter, lambda index, name=tensor.name: files.read(name, index))
    return out
