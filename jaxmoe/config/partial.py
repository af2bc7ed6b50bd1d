"""A config of which some fields could not be read, so that rules between the other fields still run."""

from collections.abc import Mapping
from typing import Any, cast

from jaxmoe.config.schema import Config, Section
from jaxmoe.config.schema_walk import dotted, section_class


class UnreadableFieldError(Exception):
    """A rule asked for a field that has a problem of its own; the rule cannot be judged."""


class _PartialSection:
    """Answers like a section; a field with a problem raises `UnreadableFieldError`."""

    def __init__(self, section: type[Section], data: Mapping[str, Any], path: str, unreadable: frozenset[str]) -> None:
        self._section, self._data, self._path, self._unreadable = section, data, path, unreadable

    def __getattr__(self, name: str) -> Any:
        path = dotted(self._path, name)
        if path in self._unreadable:
            raise UnreadableFieldError(path)
        field = self._section.model_fields[name]
        if name not in self._data:
            return field.get_default(call_default_factory=True)
        value = self._data[name]
        inner = section_class(field.annotation)
        if inner and isinstance(value, Mapping):
            return _PartialSection(inner, value, path, self._unreadable)
        return value


def readable_part(data: Mapping[str, Any], unreadable: frozenset[str]) -> Config:
    """The tree with the fields of `Config`; reading one of the paths in `unreadable` raises `UnreadableFieldError`."""
    return cast(Config, _PartialSection(Config, data, "", unreadable))
