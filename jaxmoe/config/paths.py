"""What to say about a file or folder that is not there."""

import difflib
from pathlib import Path


def missing_path_fix(path: Path) -> str:
    """Names the nearest existing folder, and a similar name in it when there is one."""
    absolute = path.absolute()
    wanted, parent = absolute.name, absolute.parent
    while not parent.is_dir() and parent != parent.parent:
        wanted, parent = parent.name, parent.parent
    try:
        names = sorted(item.name for item in parent.iterdir())
    except PermissionError:
        names = []
    similar = difflib.get_close_matches(wanted, names, n=1, cutoff=0.6)
    if similar:
        return f"did you mean {parent / similar[0]}?"
    return f"the nearest existing folder is {parent}"
