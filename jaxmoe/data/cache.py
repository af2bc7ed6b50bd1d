"""Folders of prepared data that are made once, whole or not at all, and checked whenever they are used.

A folder's name carries a fingerprint of everything that its content depends on. Beside its files stands
`manifest.json` with the size and SHA-256 of each. Safe with many processes, also on a shared file system: one builds
while the others wait for its lock; the folder is built under a temporary name and appears by one rename.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxmoe.config.errors import UserError, refuse_full_disk

FORMAT_VERSION = 1
_MANIFEST = "manifest.json"
_log = logging.getLogger(__name__)


def fingerprint(*parts: object) -> str:
    """SHA-256 (hex) of the parts' JSON and of the format's version."""
    return hashlib.sha256(json.dumps([FORMAT_VERSION, *parts], sort_keys=True).encode()).hexdigest()


def cached_folder(cache_dir: str | Path, name: str, build: Callable[[Path], None]) -> Path:
    """The folder `cache_dir/name`, after calling `build(new_folder)` if there is no intact one.

    Raises: UserError when `cache_dir` cannot be written; whatever `build` raises, leaving nothing behind.
    """
    root = Path(cache_dir)
    folder = root / name
    if folder.is_dir() and _damage(folder) is None:
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock_file = (root / f"{name}.lock").open("w")
    except OSError as error:
        raise UserError(
            f"data.cache_dir={cache_dir}: cannot be written ({error.strerror}); name another folder"
        ) from error
    with lock_file, _locked(lock_file.fileno(), folder) as is_alone:
        damage = _damage(folder) if folder.is_dir() else "absent"
        if damage is None:
            return folder
        if damage != "absent":
            _log.warning("%s is built again: %s", folder, damage)
        if is_alone:
            for left_over in root.glob(f"{name}.new-*"):
                shutil.rmtree(left_over)
        _build_and_publish(folder, build)
    return folder


def _build_and_publish(folder: Path, build: Callable[[Path], None]) -> None:
    new = folder.with_name(f"{folder.name}.new-{uuid.uuid4().hex}")
    new.mkdir()
    try:
        with refuse_full_disk(str(folder.parent), "make room, or name another folder as data.cache_dir"):
            build(new)
        files = {file.name: {"bytes": file.stat().st_size, "sha256": _sha256(file)} for file in sorted(new.iterdir())}
        (new / _MANIFEST).write_text(json.dumps({"format": FORMAT_VERSION, "files": files}, indent=1) + "\n")
        for file in new.iterdir():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
        if folder.exists():
            if _damage(folder) is None:  # only without locks: another process was faster
                return
            old = folder.with_name(f"{folder.name}.new-old-{uuid.uuid4().hex}")
            folder.rename(old)  # moved, not deleted in place: another process may still read from it
            shutil.rmtree(old)
        new.rename(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)  # gone already after the rename


def _damage(folder: Path) -> str | None:
    """What is wrong with the folder's files, or None."""
    try:
        files = json.loads((folder / _MANIFEST).read_text())["files"]
        for name, expected in files.items():
            size = (folder / name).stat().st_size
            if size != expected["bytes"]:
                return f"{name} has {size} bytes in place of {expected['bytes']}"
            if _sha256(folder / name) != expected["sha256"]:
                return f"the content of {name} has changed (SHA-256)"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{_MANIFEST} is broken ({error})"
    return None


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextlib.contextmanager
def _locked(descriptor: int, folder: Path) -> Iterator[bool]:
    """Holds the lock; False where the file system has none: then two processes may both build, which is only slower."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _log.info("waiting for the process that prepares %s", folder)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        _log.warning("no lock for %s (%s): processes do not wait for each other", folder, error.strerror)
        yield False
        return
    try:
        yield True
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
