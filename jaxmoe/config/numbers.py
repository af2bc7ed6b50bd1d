"""Numbers that work, for the fix in a message."""

from collections.abc import Iterable


def divisors(number: int) -> list[int]:
    """All divisors, smallest first."""
    small = [value for value in range(1, int(number**0.5) + 1) if number % value == 0]
    return small + [number // value for value in reversed(small) if value * value != number]


def next_multiple(number: int, unit: int) -> int:
    """The smallest multiple of `unit` that is at least `number`."""
    return -(-number // unit) * unit


def one_of(values: Iterable[int]) -> str:
    """`{1, 2, 4}`; long sets are cut."""
    listed = sorted(values)
    text = ", ".join(str(value) for value in listed[:12])
    return "{" + text + (", ..." if len(listed) > 12 else "") + "}"
