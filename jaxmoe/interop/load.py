"""Weights from a folder, straight into the pieces that this process's devices hold."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxmoe.config.errors import UserError
from jaxmoe.interop.folder import DTYPES, WeightFiles, listed
from jaxmoe.interop.names import Names
from jaxmoe.interop.tensors import Range, Stacking, Tensor, by_parameter, flat_parameters, list_tensors

Tree = Any
_LOGGER = logging.getLogger(__name__)
#: Buffers that old checkpoints hold and that follow from the config.
_DERIVED = (".rotary_emb.inv_freq",)
_BLOCK_ROWS = 4096
#: Numbers that are looked at at a time, so that looking takes no memory to speak of.
_BLOCK = 2**22


def load_parameters(
    files: WeightFiles, names: Names, like: Tree, stacking: Stacking, *, skip: Sequence[str] = ()
) -> dict[tuple[Any, ...], jax.Array]:
    """The parameters of a checkpoint by path.

    Parameter by parameter: at no time the host holds more than the pieces of the largest one and one tensor.

    Args:
        like: nested dict of `jax.ShapeDtypeStruct` with shardings.
        stacking: how layers lie in it; padding places are filled with zeros.
        skip: starts of names of tensors that are left out knowingly.

    Raises: UserError listing every tensor that is missing, extra, misshapen or of a dtype that is not read; or every
        one that holds NaN, Inf, or a number that its parameter's dtype cannot hold, in all processes.
    """
    leaves = flat_parameters(like)
    tensors = list_tensors({path: leaf.shape for path, leaf in leaves.items()}, names, stacking)
    check_tensors(files, tensors, skip)
    own_tensors = by_parameter(tensor for tensor in tensors if not tensor.is_copy)
    _warn_of_narrowing(files, own_tensors, leaves)
    loaded, faults = {}, {}
    for path, own in own_tensors.items():
        # Until a parameter is on its devices the host holds it: one at a time.
        loaded[path] = jax.block_until_ready(_load_one(files, own, leaves[path], faults))
        files.release()
    _refuse_faults(files, faults)
    return loaded


def _warn_of_narrowing(
    files: WeightFiles, own_tensors: Mapping[tuple[Any, ...], Sequence[Tensor]], leaves: Mapping[tuple[Any, ...], Any]
) -> None:
    """Says how many tensors are finer than their parameters: what training goes on from is not the very checkpoint."""
    narrowed = Counter(
        (files.tensors[tensor.name].dtype, np.dtype(leaves[path].dtype))
        for path, own in own_tensors.items()
        for tensor in own
    )
    for (stored, kept), count in narrowed.items():
        if not np.can_cast(DTYPES[stored], kept, "safe") and jax.process_index() == 0:
            text = "%s: %d tensors are %s and are rounded to %s, the dtype of their parameters (model.param_dtype)"
            _LOGGER.warning(text, files.folder, count, stored, kept.name)


def _refuse_faults(files: WeightFiles, faults: Mapping[str, str]) -> None:
    count = len(faults)
    if jax.process_count() > 1:
        # Each process reads its own pieces; one that stopped alone would leave the others waiting.
        count = int(np.max(multihost_utils.process_allgather(np.int32(count))))
    if faults:
        lines = [f"{name} {fault}" for name, fault in faults.items()]
        head = f"{files.folder}: {len(faults)} tensors hold numbers that no model can have; fetch the weights again"
        raise UserError(listed(head, lines))
    if count:
        raise UserError(
            f"{files.folder}: {count} tensors hold numbers that no model can have; another process says which"
        )


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
        raise UserError(listed(f"{files.folder}: {len(lines)} tensors do not fit config.json (with overrides)", lines))


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


def _load_one(
    files: WeightFiles, tensors: Sequence[Tensor], like: jax.ShapeDtypeStruct, faults: dict[str, str]
) -> jax.Array:
    """One parameter, possibly stacked, from all its tensors; what is wrong with their numbers goes to `faults`."""
    stacked = tensors[0].place is not None

    def read(name: str, index: tuple[slice, ...]) -> np.ndarray:
        value = files.read(name, index)
        fault = _fault(value, like.dtype)
        if fault:
            faults[name] = fault
        return value

    made: dict[tuple[Range, ...], np.ndarray] = {}

    def piece(index: Any) -> np.ndarray:
        ranges = tuple(part.indices(size)[:2] for part, size in zip(index, like.shape, strict=True))
        if ranges not in made:  # copies of a piece are read once
            made[ranges] = _piece(read, tensors, ranges, like.dtype, stacked=stacked)
        return made[ranges]

    return jax.make_array_from_callback(like.shape, like.sharding, piece, dtype=like.dtype)


def _fault(value: np.ndarray, dtype: Any) -> str | None:
    """Why a parameter of this dtype cannot hold the numbers, if it cannot."""
    flat = value.reshape(-1)
    for start in range(0, flat.size, _BLOCK):
        block = flat[start : start + _BLOCK]
        with np.errstate(over="ignore", invalid="ignore"):
            if np.isfinite(block.astype(dtype, copy=False)).all():
                continue
        if np.isnan(block).any():
            return "holds NaN"
        return (
            f"holds numbers too large for {np.dtype(dtype).name} (model.param_dtype)"
            if np.isfinite(block).all()
            else "holds Inf"
        )
    return None


def _piece(
    read: Callable[[str, tuple[slice, ...]], np.ndarray],
    tensors: Sequence[Tensor],
    ranges: tuple[Range, ...],
    dtype: Any,
    *,
    stacked: bool,
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
        with np.errstate(over="ignore"):  # is refused by name in the end
            tensor.fill(target, by_letter, partial(read, tensor.name))
    return out
