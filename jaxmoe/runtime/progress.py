"""What a person sees of a run: a progress bar on a terminal, plain lines anywhere else."""

import logging
import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


class Display:
    """Prints lines, and shows the bar while steps run. Context manager: messages of the package's loggers join in.

    With `primary` False, on processes other than the first, it shows warnings alone.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.primary = True
        self._console = console or Console(file=sys.stdout)
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._handler = _LogHandler(self)

    def emit(self, text: str) -> None:
        """One line (or more) of text, above the bar where there is one."""
        if not self.primary:
            return
        if self._console.is_terminal:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=self._console.file, flush=True)

    def start_steps(self, done: int, total: int) -> None:
        """Shows the bar, on a terminal."""
        if not (self.primary and self._console.is_terminal):
            return
        columns = (
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[numbers]}"),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=self._console, transient=True)
        self._task = self._bar.add_task("steps", total=total, completed=done, numbers="")
        self._bar.start()

    def step(self, done: int, loss: float | None, tokens_per_second: float | None) -> None:
        """Moves the bar."""
        if self._bar is None:
            return
        numbers = [] if loss is None else [f"loss {loss:.4f}"]
        numbers += [] if tokens_per_second is None else [f"{tokens_per_second:,.0f} tokens/s"]
        self._bar.update(self._task, completed=done, numbers="  ".join(numbers))

    def end_steps(self) -> None:
        """Removes the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __enter__(self) -> Self:
        logger = logging.getLogger("jaxmoe")
        logger.addHandler(self._handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False  # libraries give the root logger a handler, which would say it again
        _BACKGROUND.addFilter(_has_no_traceback)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end_steps()
        logger = logging.getLogger("jaxmoe")
        logger.removeHandler(self._handler)
        logger.propagate = True
        _BACKGROUND.removeFilter(_has_no_traceback)

    def log(self, record: logging.LogRecord) -> None:
        """A message of a logger: as it is, warnings marked as such, from every process."""
        text = record.getMessage()
        if record.levelno < logging.WARNING:
            self.emit(text)
        elif self._bar is not None:
            self._console.print(f"warning: {text}", markup=False, highlight=False, soft_wrap=True)
        else:
            print(f"warning: {text}", file=sys.stderr, flush=True)


#: Where orbax logs each exception of its threads, which `Checkpoints.wait` raises as well, once.
_BACKGROUND = logging.getLogger("absl")


def _has_no_traceback(record: logging.LogRecord) -> bool:
    return record.exc_info is None


class _LogHandler(logging.Handler):
    def __init__(self, display: Display) -> None:
        super().__init__()
        self._display = display

    def emit(self, record: logging.LogRecord) -> None:
        self._display.log(record)
