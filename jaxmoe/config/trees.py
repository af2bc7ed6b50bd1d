"""Trees of plain dicts, as configs are before they are checked."""

from collections.abc import Mapping
from typing import Any


def merge_trees(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Both trees; where both have a section its keys are merged, else `above` wins."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = merge_trees(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def shared_key(first: Mapping[str, Any], second: Mapping[str, Any]) -> str | None:
    """Dotted path of the first key at which the trees do not merge: one or both have a value there, or None."""
    for key, value in second.items():
        if key not in first:
            continue
        if not (isinstance(first[key], Mapping) and isinstance(value, Mapping)):
            return str(key)
        below = shared_key(first[key], value)
        if below is not None:
            return f"{key}.{below}"
    return None
