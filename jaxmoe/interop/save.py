"""A folder in the format of Hugging Face: config.json, safetensors, tokenizer; whole or not at all."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from jaxmoe.config.errors import UserError, show_value
from jaxmoe.config.hf.config import CONFIG_FILE
from jaxmoe.interop.folder import DTYPES, INDEX_FILE, SINGLE_FILE
from jaxmoe.interop.tensors import Tensor

#: What goes along with the weights, if the folder that they came from has it.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
#: `dtype` in config.json -> the name in a safetensors file.
FILE_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"}
MAX_SHARD_BYTES = 2_000_000_000

#: A parameter of one layer (or of none) on the host.
Fetch = Callable[[Tensor], np.ndarray]


def check_new_folder(
    name: str, path: str | os.PathLike[str], *, apart_from: Sequence[Path] = (), ignored: Collection[str] = ()
) -> None:
    """Looks whether a folder can be made there, before anything is read or computed.

    Args:
        name: of the setting that says where.
        apart_from: folders that are only read.
        ignored: names of what may be in it already.

    Raises: UserError when it holds something, lies in one of `apart_from`, or cannot be written.
    """
    try:
        target = Path(path).resolve()
    except (ValueError, RuntimeError) as error:  # a NUL in it, a circle of links
        raise UserError(f"{name}={show_value(os.fspath(path))}: is no path ({error}); correct it") from None
    for other in apart_from:
        if target.is_relative_to(other.resolve()):
            raise UserError(f"{name}={target}: lies in {other}, which is only read; choose a folder outside of it")
    if target.exists() and (not target.is_dir() or any(item.name not in ignored for item in target.iterdir())):
        raise UserError(f"{name}={target}: exists already; choose another folder, nothing is overwritten")
    nearest = target
    while not nearest.exists():
        nearest = nearest.parent
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        why = "you may not write there" if nearest.is_dir() else "a file"
        raise UserError(f"{name}={target}: cannot be written ({nearest} is in the way: {why}); choose another folder")


def tensor_values(tensors: Sequence[Tensor], fetch: Fetch) -> Iterator[tuple[str, np.ndarray]]:
    """Names and values, in order. `fetch` is called once for each parameter of each layer."""
    held: tuple[Any, np.ndarray] | None = None
    for tensor in tensors:
        key = (tensor.path, tensor.place)
        if held is None or held[0] != key:
            held = key, fetch(tensor)
        yield tensor.name, tensor.from_parameter(held[1])


def cast(name: str, value: np.ndarray, dtype: str) -> np.ndarray:
    """The value in a file's dtype.

    Raises: UserError when a finite number does not fit in there.
    """
    with np.errstate(over="ignore"):
        narrow = value.astype(DTYPES[dtype])
    if dtype == "F16" and not np.array_equal(np.isfinite(narrow), np.isfinite(value)):
        raise UserError(f"{name}: {np.abs(value).max():g} does not fit in float16; save with --dtype bfloat16")
    return narrow


def shards(tensors: Sequence[Tensor], dtypes: Mapping[str, str], limit: int) -> list[list[Tensor]]:
    """Consecutive tensors, cut so that no file exceeds `limit` bytes unless one tensor does."""
    cut: list[list[Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        own = int(np.prod(tensor.shape)) * DTYPES[dtypes[tensor.name]].itemsize
        if cut[-1] and size + own > limit:
            cut.append([])
            size = 0
        cut[-1].append(tensor)
        size += own
    return cut


def write_folder(
    path: str | os.PathLike[str],
    config: Mapping[str, Any],
    cut: Sequence[Sequence[Tensor]],
    dtypes: Mapping[str, str],
    fetch: Fetch,
    *,
    tokenizer_from: Path | None,
    process: int = 0,
    failed_first: Callable[[bool], bool] | None = None,
) -> None:
    """Writes a new folder under a temporary name and renames it when complete.

    Args:
        cut: the tensors of each file, as `shards` gives them.
        dtypes: the file's dtype of each tensor, by name.
        tokenizer_from: folder whose tokenizer files are copied.
        process: process 0 writes; others only take part in `fetch`.
        failed_first: with several processes, what process 0 passes to it comes out of it in all of them.

    Raises: UserError when the folder exists and is not empty, or cannot be written; in every process.
    """
    values, failure = tensor_values([tensor for own in cut for tensor in own], fetch), None
    if process == 0:
        try:
            _write(Path(path), config, cut, dtypes, values, tokenizer_from)
        except UserError as error:
            failure = error
        except (OSError, SafetensorError) as error:
            failure = UserError(f"{path}: cannot be written ({error}); choose another folder, or make room")
    if failed_first:
        # The others wait in `fetch` for this one.
        for _ in values:
            pass
        if failed_first(failure is not None) and failure is None:
            failure = UserError(f"{path}: is not written; process 0 says why")
    if failure:
        raise failure


def _write(
    target: Path,
    config: Mapping[str, Any],
    cut: Sequence[Sequence[Tensor]],
    dtypes: Mapping[str, str],
    values: Iterator[tuple[str, np.ndarray]],
    tokenizer_from: Path | None,
) -> None:
    check_new_folder("path", target)
    target = target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _write_weights(temporary, cut, dtypes, values)
        _write_json(temporary / CONFIG_FILE, config)
        for name in TOKENIZER_FILES if tokenizer_from else ():
            if tokenizer_from is not None and (tokenizer_from / name).is_file():
                shutil.copyfile(tokenizer_from / name, temporary / name)
        temporary.chmod(0o755)
        if target.exists():
            target.rmdir()
        temporary.rename(target)
    except BaseException:
        shutil.rmtree(temporary)
        raise


def _write_weights(
    folder: Path,
    cut: Sequence[Sequence[Tensor]],
    dtypes: Mapping[str, str],
    values: Iterator[tuple[str, np.ndarray]],
) -> None:
    files, total = {}, 0
    for number, own in enumerate(cut, start=1):
        file = SINGLE_FILE if len(cut) == 1 else f"model-{number:05d}-of-{len(cut):05d}.safetensors"
        arrays = {name: cast(name, value, dtypes[name]) for name, value in islice(values, len(own))}
        save_file(arrays, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(arrays, file)
        total += sum(array.nbytes for array in arrays.values())
    if len(cut) > 1:
        _write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))})


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
