"""Every collective of a traced program: which, over what axes, in which loops, how often, how many bytes.

Read from the jaxpr, so it needs no devices and no arrays. A jaxpr states what was written; XLA may still merge or split
collectives, but none is added that is not here.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

#: Primitive -> verb.
_VERBS = {
    "psum": "all_reduce",
    "psum2": "all_reduce",
    "psum_invariant": "all_reduce",
    "pmax": "all_reduce",
    "pmin": "all_reduce",
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "all_gather_reduced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "unreduced_psum": "all_reduce",
    "unreduced_reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "ragged_all_to_all": "all_to_all",
    "ppermute": "permute",
    "pgather": "all_gather",
    "psend": "permute",
    "precv": "permute",
    "pbroadcast": "broadcast",
}
#: These name axes and move nothing.
_LOCAL = frozenset({"pvary", "pcast", "axis_index"})


@dataclass(frozen=True)
class Loop:
    """A `lax.scan` around a collective."""

    function: str
    """The project's function that wrote it."""
    length: int


@dataclass(frozen=True)
class Collective:
    """One place in a program."""

    verb: str
    axes: tuple[str, ...]
    loops: tuple[Loop, ...]
    """Outermost first."""
    local_bytes: int
    """Bytes of the larger side, input or output, on one rank."""
    sent_bytes: int
    """Bytes that a rank sends each time, by an algorithm that sends as little as possible (ring)."""
    where: str
    """file:function that wrote it."""

    @property
    def times(self) -> int:
        """How often a program runs it."""
        return math.prod(loop.length for loop in self.loops)

    def inside(self, function: str) -> bool:
        """Whether a loop of this function is around it."""
        return any(loop.function == function for loop in self.loops)

    def times_each(self, function: str) -> int:
        """How often each turn of the loop of this function, which is around it, runs it."""
        at = next(place for place, loop in enumerate(self.loops) if loop.function == function)
        return math.prod(loop.length for loop in self.loops[at + 1 :])


def collectives(traced: Any, sizes: Mapping[str, int], package: str = "jaxmoe") -> list[Collective]:
    """All collectives of a program.

    Of the branches of a condition, the one that sends most counts.

    Args:
        traced: a jaxpr, or what `jax.jit(f).trace(...)` returns.
        sizes: ranks along each mesh axis.
        package: whose functions name loops and places.

    Raises: ValueError for a collective of an unknown kind, or in a loop whose length the program does not know.
    """
    return list(_walk(_open(traced), (), sizes, package))


def _open(value: Any) -> Any:
    """The jaxpr with equations inside of `value`."""
    while not hasattr(value, "eqns"):
        value = value.jaxpr
    return value


def _walk(jaxpr: Any, loops: tuple[Loop, ...], sizes: Mapping[str, int], package: str) -> Iterator[Collective]:
    for equation in jaxpr.eqns:
        name, inner = equation.primitive.name, list(_inner_jaxprs(equation.params))
        if name == "cond":
            branches = [list(_walk(branch, loops, sizes, package)) for branch in inner]
            yield from max(branches, key=lambda found: sum(c.sent_bytes * c.times for c in found))
        elif name == "scan":
            loop = Loop(_place(equation, package)[1], equation.params["length"])
            for body in inner:
                yield from _walk(body, (*loops, loop), sizes, package)
        elif inner:
            found = [c for body in inner for c in _walk(body, loops, sizes, package)]
            if found and name == "while":
                raise ValueError(f"{found[0].where}: a collective in a loop of unknown length cannot be counted")
            yield from found
        else:
            axes = _axes(equation.params, sizes)
            if axes and name not in _LOCAL:
                yield _collective(equation, axes, loops, sizes, package)


def _inner_jaxprs(params: Mapping[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if hasattr(item, "eqns") or hasattr(getattr(item, "jaxpr", None), "eqns"):
                yield _open(item)


def _axes(params: Mapping[str, Any], sizes: Mapping[str, int]) -> tuple[str, ...]:
    named = params.get("axes", params.get("axis_name", ()))
    named = named if isinstance(named, tuple | list | frozenset | set) else (named,)
    return tuple(axis for axis in sizes if axis in named)


def _collective(
    equation: Any, axes: tuple[str, ...], loops: tuple[Loop, ...], sizes: Mapping[str, int], package: str
) -> Collective:
    name = equation.primitive.name
    file, function = _place(equation, package)
    if name not in _VERBS:
        raise ValueError(f"{file}:{function}: {name} over {axes} is no collective that is known here; add it")
    ranks = math.prod(sizes[axis] for axis in axes)
    small, large = sorted((_bytes(equation.invars), _bytes(equation.outvars)))
    verb = _VERBS[name]
    others = large * (ranks - 1) // ranks
    sent = {"all_reduce": 2 * others, "permute": small, "broadcast": small}.get(verb, others)
    return Collective(verb, axes, loops, large, sent, f"{file}:{function}")


def _bytes(variables: Iterable[Any]) -> int:
    return sum(math.prod(v.aval.shape) * v.aval.dtype.itemsize for v in variables)


def _place(equation: Any, package: str) -> tuple[str, str]:
    """File and function of the innermost frame of the package, verbs of `spmd` left out."""
    traceback = equation.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        _, found, file = frame.file_name.replace("\\", "/").rpartition(f"/{package}/")
        if found and not file.startswith("spmd/"):
            return file, frame.function_name.rpartition(".")[2]
    return "?", "?"


def count(found: Iterable[Collective], each: str | None = None) -> dict[str, dict[str, int]]:
    """verb -> axes joined by "," -> how often a program runs them, or one turn of the loop of function `each`."""
    counts: dict[str, dict[str, int]] = {}
    for one in found:
        by_axes = counts.setdefault(one.verb, {})
        times = one.times if each is None else one.times_each(each)
        by_axes[",".join(one.axes)] = by_axes.get(",".join(one.axes), 0) + times
    return {verb: dict(sorted(counts[verb].items())) for verb in sorted(counts)}


def sent_bytes(found: Iterable[Collective]) -> dict[str, int]:
    """Axes joined by "," -> bytes that a rank sends over them in one run of the program."""
    total: dict[str, int] = {}
    for one in found:
        key = ",".join(one.axes)
        total[key] = total.get(key, 0) + one.sent_bytes * one.times
    return dict(sorted(total.items()))
