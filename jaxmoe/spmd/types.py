"""Glossary of the letters that name array dims. Letters are logical: a shard keeps the letter.

    G  rows of the global batch        B  rows here               S  positions (of a row, or here)
    T  tokens here, B * S              D  model width             F  hidden width of an MLP
    V  vocabulary                      L  layers                  M  micro-batches
    N  query heads                     K  experts per token, or key/value heads beside N
    H  head width                      E  routed experts          A  assignments, T * K
    C  latent width

"axis" is a mesh axis, "dim" an array dimension, "rank" an index along an axis.
"""

from collections.abc import Iterable

Axes = str | Iterable[str]


def as_tuple(axes: Axes) -> tuple[str, ...]:
    """`"tp"` and `("sp", "tp")` alike as a tuple."""
    return (axes,) if isinstance(axes, str) else tuple(axes)
