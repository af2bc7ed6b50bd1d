"""Values of the commands' options that argparse cannot judge by itself. Does not import JAX."""

import argparse
import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

from jaxmoe.config.schema import LARGEST

#: A search over meshes of more devices has no end.
MOST_DEVICES = 2**20


def whole_number(least: int, most: int = LARGEST) -> Callable[[str], int]:
    """An option's `type`: a whole number within the limits."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{text[:40]!r} must be a whole number from {least} to {most}")
        return number

    return parse


def whole_numbers(text: str) -> tuple[int, ...]:
    """An option's `type`: whole numbers from 1, with commas between them."""
    return tuple(whole_number(1)(part) for part in text.split(","))


def unicode_text(text: str) -> str:
    """An option's `type`: any text. Python keeps bytes of a command line that are not UTF-8 as halves of characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not UTF-8; set the terminal to UTF-8") from None
    return text


def new_file(text: str) -> Path:
    """An option's `type`: a file to write, looked at before hours of work.

    An earlier one is replaced when the work is done.
    """
    path = Path(text)
    if not text or path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is no file name; add one, as in result.png")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: there is no folder {path.parent}; make it, or name another")
    if not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r}: the folder {path.parent} cannot be written; name another")
    return path


def new_picture(text: str) -> Path:
    """An option's `type`: a PNG to write, and the package that draws it."""
    if find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError('needs the package matplotlib; pip install "jaxmoe[demo]"')
    return new_file(text)


def refuse_idle(parser: argparse.ArgumentParser, options: Mapping[str, object], where: str) -> None:
    """Ends the command when one of these options was given, where it would have no effect."""
    for name, value in options.items():
        if value is not None:
            parser.error(f"{name}: has no effect {where}; leave it out")
