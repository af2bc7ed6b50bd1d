"""The folder of a run's checkpoints, looked at without JAX: one folder per step, `checkpoints/<step>`."""

from pathlib import Path

#: Beside the checkpoints; it must not be a number.
FOLDER = "checkpoints"


def saved_steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints, ascending.

    A checkpoint is written under a temporary name, which is no number, and renamed when all of it is on disk.
    """
    if not folder.is_dir():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal() and path.is_dir())
