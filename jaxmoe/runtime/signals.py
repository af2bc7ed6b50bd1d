"""SIGTERM and Ctrl-C ask the run to stop at the end of a step; a second Ctrl-C ends it at once."""

import os
import signal
import socket
import sys
import threading
from types import FrameType, TracebackType
from typing import Self

#: What a shell reports for a process that SIGINT has ended.
ABORTED = 128 + signal.SIGINT


def _noted(number: int, frame: FrameType | None) -> None:
    """Python's handler does nothing: the watcher reads the signal from the socket."""


class StopSignals:
    """Context manager around a run; made in the main thread.

    Python runs a handler only between two bytecodes of the main thread, which may be minutes away while XLA compiles.
    So the signal's number is written to a socket by the interpreter, and a thread answers at once.
    """

    def __init__(self) -> None:
        self._event = threading.Event()
        self.reason = ""

    @property
    def requested(self) -> bool:
        return self._event.is_set()

    def __enter__(self) -> Self:
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._old_fd = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        self._old = {number: signal.signal(number, _noted) for number in (signal.SIGTERM, signal.SIGINT)}
        self._thread = threading.Thread(target=self._watch, name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_fd)
        self._write.close()
        self._thread.join()
        self._read.close()

    def _watch(self) -> None:
        while received := self._read.recv(1):
            number = received[0]
            if number not in self._old:
                continue
            if self.requested and number == signal.SIGINT:
                print("aborted: what happened after the last checkpoint is lost", file=sys.stderr, flush=True)
                os._exit(ABORTED)
            if not self.requested:
                self.reason = signal.Signals(number).name
                self._event.set()
                print(
                    f"{self.reason}: stopping after this step, then saving (Ctrl-C again aborts without saving)",
                    file=sys.stderr,
                    flush=True,
                )
