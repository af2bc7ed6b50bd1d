"""Errors that a user can mend, and how a command shows them. Does not import jax."""

import errno
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

USER_ERROR_EXIT_CODE = 2
_LONGEST_VALUE = 200


class UserError(ValueError):
    """Something the user can mend: wrong config, broken data, a checkpoint of another model.

    Its text is shown to the user as it is, without a traceback: say the place, the value, the rule and a fix.
    """


class _Absent:
    def __repr__(self) -> str:
        return "ABSENT"


#: The value of a problem about a key that is not there.
ABSENT: Final = _Absent()


@dataclass(frozen=True)
class Problem:
    """One broken rule: `path=value: rule; fix`."""

    path: str
    value: object
    rule: str
    fix: str

    def __str__(self) -> str:
        path = self.path if self.path.isprintable() and 0 < len(self.path) <= _LONGEST_VALUE else show_value(self.path)
        place = path if self.value is ABSENT else f"{path}={show_value(self.value)}"
        return f"{place}: {self.rule}; {self.fix}"


class ConfigError(UserError):
    """All problems of one configuration."""

    def __init__(self, problems: Sequence[Problem], source: str | None = None) -> None:
        assert problems, "an error needs a problem"
        self.problems = tuple(problems)
        self.source = source
        super().__init__(self.problems, source)

    def __str__(self) -> str:
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        head = f"{count} in {self.source or 'the configuration'}:"
        return "\n".join([head, *(f"  {problem}" for problem in self.problems)])


def show_value(value: object) -> str:
    """The value as a user would write it in YAML, shortened."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else f"{'-' if value < 0 else ''}.inf"
    if isinstance(value, Mapping):
        text = "{" + _joined(f"{key}: {show_value(item)}" for key, item in value.items()) + "}"
    elif isinstance(value, list | tuple):
        text = "[" + _joined(show_value(item) for item in value) + "]"
    else:
        text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."


def _joined(parts: Iterator[str]) -> str:
    """With commas, no more of them than are shown: an item may stand in many places, and they multiply."""
    text = ""
    for part in parts:
        text += f", {part}" if text else part
        if len(text) >= _LONGEST_VALUE:
            break
    return text


#: What the system and the libraries below say when a disk takes no more.
_FULL_DISK = ("No space left", "Disk quota exceeded", "File too large", "Read-only file system", "Input/output error")


@contextmanager
def refuse_full_disk(place: str, fix: str) -> Iterator[None]:
    """Turns a failed write into a `UserError`; any other exception passes through."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        reason = next((text for text in _FULL_DISK if text in str(error)), None)
        if reason is None:
            raise
        raise UserError(f"{place}: cannot be written ({reason}); {fix}") from error


#: Why the system refuses a path, as far as a user can mend it.
_REFUSED_PATH = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR}


@contextmanager
def fail_on_user_error(*, is_told: bool = True) -> Iterator[None]:
    """For commands: ends the process with exit code 2 and the message on stderr when a `UserError` comes out; without
    the message where another process tells it.

    So does a path that the system refuses. Context manager and decorator. Any other exception passes through: it is a
    bug and keeps its traceback.
    """
    try:
        yield
    except (UserError, OSError) as error:
        message = str(error)
        if isinstance(error, OSError):
            if error.filename is None or error.errno not in _REFUSED_PATH:
                raise
            message = f"{show_value(str(error.filename))}: {error.strerror}; choose another path, or get access to this"
        if is_told:
            print(f"error: {message}", file=sys.stderr, flush=True)
        raise SystemExit(USER_ERROR_EXIT_CODE) from None
