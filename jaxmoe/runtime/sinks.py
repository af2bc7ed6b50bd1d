"""Where a run's numbers go, all places as one.

Training never dies of a full disk or a lost network: a sink that fails warns once and is left out from then on.
"""

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from jaxmoe.config import Config
from jaxmoe.runtime.console_line import console_line
from jaxmoe.runtime.metrics_file import METRICS_FILE, Kind, encode_record, rewind_metrics
from jaxmoe.runtime.sink import PerLayer, Scalars, Sink
from jaxmoe.runtime.tensorboard_sink import TensorBoardSink
from jaxmoe.runtime.wandb_sink import WandbSink, import_wandb, require_wandb

LOGGER = logging.getLogger("jaxmoe")


class ConsoleSink:
    """One line of plain text per write."""

    name = "console"
    errors = (OSError,)

    def __init__(self, num_steps: int, emit: Callable[[str], object]) -> None:
        self._num_steps, self._emit = num_steps, emit

    def write(
        self, step: int, scalars: Scalars, per_layer: PerLayer, counts: np.ndarray | None = None, kind: Kind = "train"
    ) -> None:
        self._emit(console_line(step, self._num_steps, scalars, kind))

    def close(self) -> None:
        """Nothing is held open."""


class JsonlSink:
    """Appends to metrics.jsonl. Lines after `resume_step`, and broken ones, are removed first."""

    name = METRICS_FILE
    errors = (OSError,)

    def __init__(self, run_dir: Path, resume_step: int) -> None:
        path = run_dir / METRICS_FILE
        for problem in rewind_metrics(path, resume_step):
            LOGGER.warning("removed a broken line, %s", problem)
        self._file = path.open("a", encoding="utf-8", newline="\n")

    def write(
        self, step: int, scalars: Scalars, per_layer: PerLayer, counts: np.ndarray | None = None, kind: Kind = "train"
    ) -> None:
        self._file.write(encode_record(step, kind, scalars, per_layer, counts))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class Sinks:
    """Several sinks as one. What a sink's own `errors` name removes that sink; other exceptions are bugs and pass."""

    def __init__(self, sinks: Sequence[Sink] = ()) -> None:
        self._sinks = list(sinks)

    @property
    def names(self) -> list[str]:
        """Sinks that still work."""
        return [sink.name for sink in self._sinks]

    def write(
        self, step: int, scalars: Scalars, per_layer: PerLayer, counts: np.ndarray | None = None, kind: Kind = "train"
    ) -> None:
        """Hand one step's numbers to every sink."""
        for sink in list(self._sinks):
            try:
                sink.write(step, scalars, per_layer, counts, kind)
            except sink.errors as error:
                self._drop(sink, f"failed at step {step}", error)

    def close(self) -> None:
        """Flush and close all; may be called again."""
        for sink in list(self._sinks):
            self._sinks.remove(sink)
            try:
                sink.close()
            except sink.errors as error:
                LOGGER.warning("%s failed while closing (%s); its last values may be missing", sink.name, error)

    def _drop(self, sink: Sink, when: str, error: Exception) -> None:
        self._sinks.remove(sink)
        LOGGER.warning("%s %s (%s); training goes on without it", sink.name, when, error)
        try:
            sink.close()
        except sink.errors as second:
            LOGGER.debug("%s failed again while closing: %s", sink.name, second)


def open_sinks(
    config: Config,
    run_dir: str | os.PathLike[str],
    resume_step: int = 0,
    *,
    primary: bool = True,
    emit: Callable[[str], object] = print,
) -> Sinks:
    """The sinks that a config asks for, on the process that writes.

    Args:
        run_dir: the run folder, which exists.
        resume_step: the last step that is kept of an earlier life of the run; 0 for a new run.
        primary: False on all processes but one: these get no sinks.
        emit: prints a console line; a progress bar passes its own.

    Raises:
        UserError: W&B is asked for and missing, or not logged in. Other failures of a sink only warn.
    """
    require_wandb(config)
    if not primary:
        return Sinks()
    run_dir = Path(run_dir)
    makers: list[Callable[[], Sink]] = [lambda: JsonlSink(run_dir, resume_step)]
    if config.logging.tensorboard:
        makers.append(lambda: TensorBoardSink(run_dir, resume_step))
    failures: tuple[type[Exception], ...] = (OSError,)
    if config.logging.wandb:
        failures += (import_wandb().Error,)
        makers.append(lambda: WandbSink(config, run_dir))
    sinks: list[Sink] = [ConsoleSink(config.run.steps, emit)]
    with ExitStack() as opened:  # closes what is open if W&B refuses
        for make in makers:
            try:
                sinks.append(make())
            except failures as error:
                LOGGER.warning("a log cannot be opened (%s); training goes on without it", error)
            else:
                opened.callback(sinks[-1].close)
        opened.pop_all()
    return Sinks(sinks)
