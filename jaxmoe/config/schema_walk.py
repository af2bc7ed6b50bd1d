"""Reads the schema itself: which section a field holds, where a name occurs, which values a field takes in words."""

import types
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

from jaxmoe.config.errors import show_value
from jaxmoe.config.schema import LARGEST, Config, Section

_WORDS: dict[type, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def section_class(annotation: Any) -> type[Section] | None:
    """The section class in an annotation such as `Mlp | None`; None when it holds none."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next((found for part in get_args(annotation) if (found := section_class(part))), None)


def dotted(parent: str, name: str) -> str:
    return f"{parent}.{name}" if parent else name


@cache
def all_paths() -> dict[str, FieldInfo]:
    """Every dotted path of the config, sections included, in the order of the schema."""
    return dict(_walk(Config, ""))


def _walk(section: type[Section], parent: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section.model_fields.items():
        path = dotted(parent, name)
        yield path, field
        inner = section_class(field.annotation)
        if inner:
            yield from _walk(inner, path)


def options(field: FieldInfo) -> list[tuple[Any, list[Any]]]:
    """What a field may hold: (type without `Annotated`, its bounds) for each member of its union."""
    return _options(field.annotation, list(field.metadata))


def _options(annotation: Any, bounds: list[Any]) -> list[tuple[Any, list[Any]]]:
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return [found for part in get_args(annotation) for found in _options(part, bounds)]
    if origin is Annotated:
        inner, *extra = get_args(annotation)
        more = [item for part in extra for item in (part.metadata if isinstance(part, FieldInfo) else [part])]
        return _options(inner, [*bounds, *more])
    return [(annotation, bounds)]


def describe(field: FieldInfo) -> str:
    """The values a field takes, in words: "a whole number >= 1 or null"."""
    return " or ".join(_describe_option(kind, bounds) for kind, bounds in options(field))


def _describe_option(kind: Any, bounds: list[Any]) -> str:
    if kind is type(None):
        return "null"
    if get_origin(kind) is Literal:
        return f"one of {', '.join(show_value(value) for value in get_args(kind))}"
    if get_origin(kind) is tuple:
        item, _ = _options(get_args(kind)[0], [])[0]
        return f"a list of {' and '.join(show_value(value) for value in get_args(item))}"
    section = section_class(kind)
    if section:
        return f"a section with keys among {', '.join(section.model_fields)}"
    # The limit that all whole numbers have is told to those who pass it.
    limits = [f"{sign} {value}" for sign, value in limits_of(bounds) if value != LARGEST]
    return " ".join([_WORDS[kind], *limits[:1], *(f"and {limit}" for limit in limits[1:])])


def limits_of(bounds: list[Any]) -> list[tuple[str, int | float]]:
    """(sign, number) of each numeric bound, whole numbers without a decimal point."""
    found: list[tuple[str, Any]] = []
    for bound in bounds:
        if isinstance(bound, annotated_types.Ge):
            found.append((">=", bound.ge))
        elif isinstance(bound, annotated_types.Gt):
            found.append((">", bound.gt))
        elif isinstance(bound, annotated_types.Le):
            found.append(("<=", bound.le))
        elif isinstance(bound, annotated_types.Lt):
            found.append(("<", bound.lt))
    return [(sign, int(value) if value == int(value) else value) for sign, value in found]
