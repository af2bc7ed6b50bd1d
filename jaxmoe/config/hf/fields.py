"""The fields of one config.json, which remembers what was read, and the pieces that translate some of them."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from jaxmoe.config.errors import ABSENT, Problem
from jaxmoe.config.schema import LARGEST, MOST_LAYERS, Model

Tree = dict[str, Any]

#: Marks a field that has no default.
REQUIRED: Final = ABSENT
_LARGEST = sys.float_info.max


class Fields:
    """The fields of a config.json. Problems are collected, so that a user sees all of them at once.

    `get` hands on what the schema checks later. What is computed with here is read by its type: where the value is of
    another one that is a problem, and something usable stands in for it.
    """

    def __init__(self, values: Mapping[str, Any], place: str = "", problems: list[Problem] | None = None) -> None:
        self.values = dict(values)
        self.place = place
        self.read: set[str] = set()
        self.problems: list[Problem] = [] if problems is None else problems

    def get(self, name: str, default: Any = REQUIRED) -> Any:
        """The value of a field, or the default where the file leaves it out; a `null` is a value."""
        self.read.add(name)
        if name in self.values:
            return self.values[name]
        if default is REQUIRED:
            self.refuse(name, ABSENT, "is missing", "take the config.json that belongs to these weights")
            return None
        return default

    def number(self, name: str, default: Any = REQUIRED) -> Any:
        """A finite number; 1 stands in. A default of None allows `null`."""
        value = self.get(name, default)
        if value is None and default is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not -_LARGEST <= value <= _LARGEST:
            return self._wrong(name, value, "must be a number that 64 bits hold", 1)
        return value

    def whole(self, name: str, default: Any = REQUIRED, *, at_least: int = 0, at_most: int = LARGEST) -> Any:
        """A whole number; the larger of 1 and `at_least` stands in. A default of None allows `null`."""
        value = self.get(name, default)
        if value is None and default is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value <= at_most:
            rule = f"must be a whole number from {at_least} to {at_most}"
            return self._wrong(name, value, rule, max(1, at_least))
        return value

    def count(self, name: str, *, otherwise: int) -> int:
        """A whole number, which files that have none of it leave out or set to `null`, or to 0."""
        return self.whole(name, None) or otherwise

    def layers(self) -> int:
        """How many layers the model has; few enough to go through them one by one."""
        return self.whole("num_hidden_layers", at_least=1, at_most=MOST_LAYERS)

    def flag(self, name: str, default: bool) -> bool:
        """True or false; `null` is false."""
        value = self.get(name, default)
        if value is not None and not isinstance(value, bool):
            return self._wrong(name, value, "must be true or false", False)
        return bool(value)

    def listed(self, name: str, kind: type) -> list[Any] | None:
        """A list of `kind`; None where there is none, or an empty one."""
        value = self.get(name, None)
        if value is not None and not (isinstance(value, list) and all(type(item) is kind for item in value)):
            return self._wrong(name, value, f"must be a list of {kind.__name__}", None)
        return value or None

    def section(self, name: str) -> "Fields | None":
        """The fields of an object, whose problems are this one's; None where there is none, or an empty one."""
        value = self.get(name, None)
        if value is not None and not isinstance(value, Mapping):
            return self._wrong(name, value, "must be an object", None)
        return Fields(value, f"{self.place}{name}.", self.problems) if value else None

    def expect(self, name: str, value: Any, default: Any = None) -> None:
        """The field must have the one value that is supported."""
        found = self.get(name, value if default is None else default)
        if found != value:
            self.refuse(name, found, "would change the numbers, and is not supported", f"only {value!r} is")

    def agree(self, name: str, other: str, one: Any, two: Any) -> None:
        """Two spellings of the same field must say the same, where both are there."""
        if one is not None and two is not None and one != two:
            self.refuse(name, one, f"and {other}={two!r} contradict each other", "remove the one that is wrong")

    def refuse(self, name: str, value: Any, rule: str, fix: str) -> None:
        # Many pieces may read a field that is missing.
        path = self.place + name
        if path not in (problem.path for problem in self.problems):
            self.problems.append(Problem(path, value, rule, fix))

    def _wrong(self, name: str, value: Any, rule: str, instead: Any) -> Any:
        if name in self.values:
            self.refuse(name, value, rule, "correct it")
        return instead

    def unread(self) -> list[str]:
        """Fields that nobody asked for, in the order of the file."""
        return [name for name in self.values if name not in self.read]


@dataclass(frozen=True)
class Piece:
    """Translates some fields of config.json to a part of the `model` section (`decode`) and back (`encode`).

    `encode` may write what does not say everything: the caller decodes it again and compares.
    """

    decode: Callable[[Fields], Tree]
    encode: Callable[[Model], Tree]


def at(path: str, value: Any) -> Tree:
    """`{"a": {"b": value}}` of "a.b"."""
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


def value_at(model: Model, path: str) -> Any:
    """The field at a dotted path; None where a section on the way is None."""
    found: Any = model
    for key in path.split("."):
        if found is None:
            return None
        found = getattr(found, key)
    return found


def same(name: str, path: str, default: Any = REQUIRED) -> Piece:
    """A field with the same meaning under another name."""
    return Piece(lambda fields: at(path, fields.get(name, default)), lambda model: {name: value_at(model, path)})


def real(name: str, path: str, default: Any = REQUIRED) -> Piece:
    """As `same`, for numbers that files also write without a decimal point."""
    return Piece(
        lambda fields: at(path, float(fields.number(name, default))), lambda model: {name: value_at(model, path)}
    )


def only(name: str, value: Any, default: Any = None) -> Piece:
    """A field of which one value is supported; `default` is what a file means that leaves it out."""

    def decode(fields: Fields) -> Tree:
        fields.expect(name, value, default)
        return {}

    return Piece(decode, lambda model: {name: value})


def unused(*names: str) -> Piece:
    """Fields of a family that change no number."""

    def decode(fields: Fields) -> Tree:
        fields.read.update(names)
        return {}

    return Piece(decode, lambda model: {})
