"""A run's numbers for TensorBoard."""

import os
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
from tensorboardX import summary
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.record_writer import RecordWriter

from jaxmoe.runtime.heat_map import encode_png, load_image
from jaxmoe.runtime.metrics_file import Kind
from jaxmoe.runtime.sink import PerLayer, Scalars, flat_values


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
        values = flat_values(scalars, per_layer, kind).items()
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
