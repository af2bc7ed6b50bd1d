"""Rates of the steps since the last log line, pauses left out."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StepClock:
    """Counts tokens of finished steps against the time that went into steps."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._start = now()
        self._paused = 0.0
        self._steps = 0
        self._tokens = {"tokens": 0.0, "target_tokens": 0.0}

    def add(self, valid_tokens: float, target_tokens: float) -> None:
        """A step has finished."""
        self._steps += 1
        self._tokens["tokens"] += valid_tokens
        self._tokens["target_tokens"] += target_tokens

    @contextmanager
    def paused(self) -> Iterator[None]:
        """For what is no training: validation, waiting for a checkpoint."""
        start = self._now()
        yield
        self._paused += self._now() - start

    def rates(self) -> dict[str, float]:
        """`tokens_per_second` (all but padding), `target_tokens_per_second` (those with a loss), `step_seconds`."""
        seconds = self._now() - self._start - self._paused
        if not self._steps or seconds <= 0:
            return {}
        rates = {f"{name}_per_second": count / seconds for name, count in self._tokens.items()}
        return rates | {"step_seconds": seconds / self._steps}

    def restart(self) -> None:
        """Forgets all; the next rates are of what follows."""
        self._start, self._paused, self._steps = self._now(), 0.0, 0
        self._tokens = dict.fromkeys(self._tokens, 0.0)
