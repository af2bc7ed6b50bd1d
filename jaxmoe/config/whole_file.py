"""A file is written whole or not at all: under a temporary name, then renamed. Does not import jax."""

import os
import uuid
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Puts `content` (text as UTF-8) in `path`; a crash or a full disk leaves what was there before.

    Raises: OSError as the system says it; nothing of the new file is left behind.
    """
    fresh = path.with_name(f".{path.name[:64]}.new-{uuid.uuid4().hex}")
    try:
        with fresh.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
