"""The safetensors files of a Hugging Face folder: what they hold, and pieces of it read on demand. No pickle."""

import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxmoe.config.errors import UserError, show_value

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
#: Dtypes that are read and written, by their name in the file.
DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
#: Bytes that are read before files are closed and opened again; a parameter of many layers may be far larger.
_MOST_MAPPED = 256 * 2**20
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_MOST_LISTED = 20
_LONGEST_LINE = 400


@dataclass(frozen=True)
class Stored:
    """One tensor on disk."""

    file: str
    dtype: str
    """As the file spells it: F32, BF16, ..."""
    shape: tuple[int, ...]


class WeightFiles:
    """The tensors of a folder, by name. A context manager for reading: files stay open, mapped, until it is left."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Reads the index and the head of every file, no weights.

        Raises: UserError with everything that is wrong with the files.
        """
        self.folder = Path(folder)
        wanted = _files(self.folder)
        self.tensors: dict[str, Stored] = {}
        problems: list[str] = []
        for file in [SINGLE_FILE] if wanted is None else sorted(set(wanted.values())):
            self._read_head(file, problems)
        for name, stored in self.tensors.items() if wanted is not None else ():
            if wanted is not None and name not in wanted:
                problems.append(f"{stored.file} holds {name}, and {INDEX_FILE} does not name it")
        for name, file in (wanted or {}).items():
            found = self.tensors.get(name)
            if (found is None or found.file != file) and (self.folder / file).is_file():
                problems.append(f"{INDEX_FILE} says that {file} holds {name}, and it does not")
        if problems:
            raise UserError(listed(f"{self.folder}: the weights are not whole", problems))
        self._stack = ExitStack()
        self._open: dict[str, Any] = {}
        self._mapped_bytes = 0

    def _read_head(self, file: str, problems: list[str]) -> None:
        path = self.folder / file
        if not path.is_file():
            problems.append(f"{file} is missing")
            return
        try:
            with safe_open(path, framework="np") as opened:
                for name in opened.keys():  # noqa: SIM118 - no mapping
                    piece = opened.get_slice(name)
                    if name in self.tensors:
                        problems.append(f"{name} stands in {self.tensors[name].file} and in {file}")
                    self.tensors[name] = Stored(file, piece.get_dtype(), tuple(piece.get_shape()))
        except (SafetensorError, OSError) as error:
            problems.append(f"{file} is damaged or cut short ({error}); fetch it again")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        """Closes the files, so that the pages they were mapped to leave memory."""
        self._stack.close()
        self._stack, self._open, self._mapped_bytes = ExitStack(), {}, 0

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """A piece of a tensor, in the dtype it is stored in."""
        stored = self.tensors[name]
        if self._mapped_bytes > _MOST_MAPPED:
            self.release()
        if stored.file not in self._open:
            opened = safe_open(self.folder / stored.file, framework="np")
            self._open[stored.file] = self._stack.enter_context(opened)
        value = self._open[stored.file].get_slice(name)[index]
        self._mapped_bytes += value.nbytes
        return value


def _files(folder: Path) -> dict[str, str] | None:
    """The file of each tensor, from the index; None where there is one file only.

    Raises: UserError when there is nothing to read, the index points out of the folder, or a single file stands beside
        an index of others: who reads which is not the same everywhere.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; name one with config.json and *.safetensors")
    index = folder / INDEX_FILE
    if not index.is_file():
        if (folder / SINGLE_FILE).is_file():
            return None
        pickles = sorted(item.name for item in folder.iterdir() if item.suffix in _PICKLES)
        if pickles:
            raise UserError(
                f"{folder}: holds {', '.join(pickles[:3])} but no {SINGLE_FILE}; such files can run code when they are "
                f"opened and are not read: convert them to safetensors first"
            )
        raise UserError(f"{folder}: holds neither {SINGLE_FILE} nor {INDEX_FILE}; fetch the weights")
    try:
        files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if not files or not all(isinstance(file, str) for file in files.values()):
            raise ValueError("weight_map must name the file of every tensor")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{index}: is no index of safetensors ({type(error).__name__}: {error})") from None
    problems = []
    for file in sorted(set(files.values())):
        if Path(file).name != file or file in ("", ".", "..") or not file.isprintable():
            problems.append(f"{file!r} is no plain file name: an index may only name files of its own folder")
        elif Path(file).suffix != ".safetensors":
            problems.append(f"{file!r} is no .safetensors file; others are not read")
    if problems:
        raise UserError(listed(f"{index}: cannot be followed", problems))
    if (folder / SINGLE_FILE).exists() and SINGLE_FILE not in files.values():
        raise UserError(f"{folder}: holds {SINGLE_FILE} and {INDEX_FILE} of other files; remove what is not the model")
    return files


def listed(head: str, problems: Sequence[str]) -> str:
    """One problem a line, the first of many. What a file has made up is shown so that it cannot upset a terminal."""
    shown = [
        text if text.isprintable() and len(text) <= _LONGEST_LINE else show_value(text)
        for text in problems[:_MOST_LISTED]
    ]
    more = [f"... and {len(problems) - _MOST_LISTED} more"] if len(problems) > _MOST_LISTED else []
    return "\n  ".join([f"{head}:", *shown, *more])
