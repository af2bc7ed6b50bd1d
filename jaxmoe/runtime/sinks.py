"""Where a run's numbers go: console line, metrics.jsonl, TensorBoard, W&B. All get the same reported values.

Training never dies of a full disk or a lost network: a sink that fails warns once and is left out from then on.
"""

import importlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from tensorboardX import summary
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.record_writer import RecordWriter

from jaxmoe.config import Config, UserError, config_to_dict
from jaxmoe.config.whole_file import write_whole
from jaxmoe.metrics import layer_key
from jaxmoe.runtime.console_line import console_line
from jaxmoe.runtime.heat_map import encode_png, load_image
from jaxmoe.runtime.metrics_file import METRICS_FILE, Kind, encode_record, rewind_metrics

LOGGER = logging.getLogger("jaxmoe")

Scalars = Mapping[str, float]
PerLayer = Mapping[str, np.ndarray]


class Sink(Protocol):
    """One place for numbers."""

    @property
    def name(self) -> str: ...

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """Exceptions that mean "the place failed", not "our code is wrong"."""
        ...

    def write(
        self, step: int, scalars: Scalars, per_layer: PerLayer, counts: np.ndarray | None = None, kind: Kind = "train"
    ) -> None:
        """Take the numbers of one step: scalars, float [slots] per metric, tokens per expert [slots, E]."""
        ...

    def close(self) -> None: ...


def _flat(scalars: Scalars, per_layer: PerLayer, kind: Kind) -> dict[str, float]:
    """All numbers by their name in TensorBoard and W&B; masked slots are left out."""
    prefix = "" if kind == "train" else f"{kind}/"
    values = {prefix + name: float(value) for name, value in scalars.items()}
    for name, row in per_layer.items():
        hidden = np.ma.getmaskarray(row)
        values |= {prefix + layer_key(name, i): float(row[i]) for i in range(len(row)) if not hidden[i]}
    return values


# ---------------------------------------------------------------- console


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


# ---------------------------------------------------------------- metrics.jsonl


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


# ---------------------------------------------------------------- TensorBoard


class TensorBoardSink:
    """Event files under RUN/tensorboard: scalars, `moe/{name}_layer_{i}`, expert load as image and histogram.

    Writes in the caller's thread: tensorboardX's own SummaryWriter queues to a thread, and once that thread has died
    of a full disk the queue fills and the training loop hangs; its EventsWriter leaves the file open when the disk is
    full; and its summaries of scalars complain in the log of each NaN.
    """

    name = "tensorboard"
    errors = (OSError,)
    _FLUSH_SECONDS = 5.0
    #: Images are the bulk of an event file; TensorBoard shows ten of them.
    _WRITES_PER_IMAGE = 10

    def __init__(self, run_dir: Path, resume_step: int) -> None:
        folder = run_dir / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        self._records = RecordWriter(str(folder / name))
        self._last_flush = time.monotonic()
        self._writes_with_counts = 0
        self._add(Event(file_version="brain.Event:2"))
        # TensorBoard drops what an earlier life of the run wrote from this step on.
        start = SessionLog(status=SessionLog.START)
        self._add(Event(step=resume_step + 1, session_log=start))

    def write(
        self, step: int, scalars: Scalars, per_layer: PerLayer, counts: np.ndarray | None = None, kind: Kind = "train"
    ) -> None:
        values = _flat(scalars, per_layer, kind).items()
        self._add_summary(step, Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values]))
        if counts is not None and kind == "train" and counts.any():
            self._add_load(step, counts)
        if time.monotonic() - self._last_flush > self._FLUSH_SECONDS:
            self._last_flush = time.monotonic()
            self._records.flush()

    def close(self) -> None:
        self._records.close()

    def _add_load(self, step: int, counts_LE: np.ndarray) -> None:
        counts_LE = counts_LE[counts_LE.any(axis=1)]
        load_LE = counts_LE / counts_LE.mean(axis=1, keepdims=True)
        bins = np.append(np.linspace(0.0, 4.0, 41), max(5, load_LE.shape[1]))  # E / mean is the most there can be
        self._add_summary(step, summary.histogram("moe/expert_load", load_LE.ravel(), bins))
        if self._writes_with_counts % self._WRITES_PER_IMAGE == 0:
            pixels = load_image(load_LE)
            image = Summary.Image(
                height=pixels.shape[0], width=pixels.shape[1], colorspace=3, encoded_image_string=encode_png(pixels)
            )
            value = Summary.Value(tag="moe/expert_load_heat_map", image=image)
            self._add_summary(step, Summary(value=[value]))
        self._writes_with_counts += 1

    def _add_summary(self, step: int, content: Any) -> None:
        self._add(Event(step=step, summary=content))

    def _add(self, event: Any) -> None:
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())


# ---------------------------------------------------------------- W&B


def require_wandb(config: Config) -> None:
    """Fail at start, before any work, when the run asks for W&B and the package is missing.

    Raises:
        UserError: `logging.wandb` is set and `wandb` cannot be imported.
    """
    if config.logging.wandb:
        _import_wandb()


def _import_wandb() -> Any:
    try:
        return importlib.import_module("wandb")
    except ImportError as error:
        raise UserError(
            f"logging.wandb=true: needs the package wandb, which cannot be imported ({error}); "
            "pip install 'jaxmoe[wandb]', or set logging.wandb=false"
        ) from error


class WandbSink:
    """One W&B run per run folder; a resumed run goes on in it."""

    name = "wandb"

    def __init__(self, config: Config, run_dir: Path) -> None:
        wandb = _import_wandb()
        self.errors: tuple[type[Exception], ...] = (OSError, wandb.Error)
        id_file = run_dir / "wandb_id"
        run_id = id_file.read_text().strip() if id_file.exists() else secrets.token_hex(8)
        try:
            self._run = wandb.init(
                project=config.logging.wandb_project,
                name=run_dir.resolve().name,
                id=run_id,
                resume="allow",
                dir=str(run_dir),
                config=config_to_dict(config),
            )
        except wandb.UsageError as error:
            raise UserError(
                f"logging.wandb=true: W&B refuses to start: {error}; run `wandb login`, or set WANDB_MODE=offline, "
                "or set logging.wandb=false"
            ) from error
        write_whole(id_file, run_id + "\n")
        # Steps as a metric of ours: W&B's own counter cannot go back when a run resumes from an older checkpoint.
        self._run.define_metric("*", step_metric="step")

    def write(
        self, step: int, scalars: Scalars, per_layer: PerLayer, counts: np.ndarray | None = None, kind: Kind = "train"
    ) -> None:
        self._run.log({"step": step, **_flat(scalars, per_layer, kind)})

    def close(self) -> None:
        self._run.finish()


# ---------------------------------------------------------------- all together


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
        failures += (_import_wandb().Error,)
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
