"""The loop over steps: dispatch, report the step before, log, validate, save, stop when asked."""

import time
from dataclasses import dataclass

import jax
import numpy as np

from jaxmoe.checkpoint.about import about
from jaxmoe.checkpoint.store import Checkpoints
from jaxmoe.config import Config
from jaxmoe.data import Prefetcher, TrainingData
from jaxmoe.runtime.agreement import AgreedStop
from jaxmoe.runtime.clock import StepClock
from jaxmoe.runtime.evaluation import Validation, validate
from jaxmoe.runtime.progress import Display
from jaxmoe.runtime.restore import state_arrays
from jaxmoe.runtime.signals import StopSignals
from jaxmoe.runtime.sinks import Sinks
from jaxmoe.step.batch import Batch
from jaxmoe.step.metrics import StepMetrics
from jaxmoe.step.state import TrainState
from jaxmoe.step.train import train_step


class TrainingFailedError(RuntimeError):
    """Training cannot go on, though the configuration is valid. The command ends with exit code 1 and this text."""


@dataclass(frozen=True)
class Places:
    """Where a run writes."""

    sinks: Sinks
    display: Display
    checkpoints: Checkpoints


class Loop:
    """Trains a state from its step to `run.steps`, or until a signal.

    The metrics of a step are fetched after the next one is dispatched, so the devices never wait for the host; before
    a validation or a checkpoint, and at the end, they are fetched at once.
    """

    def __init__(self, config: Config, data: TrainingData, places: Places, stop: StopSignals) -> None:
        self.config = config
        self.data = data
        self.places = places
        self.stop = stop
        self.validation: tuple[int, Validation] | None = None
        """The last one: (step, result)."""
        self._clock = StepClock()
        self._saved_step: int | None = None
        self._rates: dict[str, float] = {}

    def run(self, state: TrainState) -> TrainState:
        """The state after the last step that was done; it is saved, and so is the way to it.

        Raises: TrainingFailedError when too many steps in a row were skipped.
        """
        first, steps = int(state.step), self.config.run.steps
        self._saved_step = first or None

        train, shape = self.data.train, (self.config.batch.global_batch_size, self.config.batch.seq_len)

        def load(step: int) -> Batch:
            return Batch.from_rows(lambda start, stop: train.rows(step, start, stop), shape, state.mesh)

        self.places.display.start_steps(first, steps)
        with Prefetcher(load, range(first, steps), self.config.data.prefetch) as batches:
            state = self._steps(state, first, batches)
        self.places.display.end_steps()
        self.places.checkpoints.wait()
        return state

    def _steps(self, state: TrainState, first: int, batches: Prefetcher[int, Batch]) -> TrainState:
        waiting: tuple[int, StepMetrics] | None = None
        done = first
        stop = AgreedStop(self.stop, state.mesh)
        for batch in batches:
            if stop.ask():
                break
            start = time.perf_counter()
            state, metrics = self._dispatch(state, batch, first_call=done == first)
            done += 1
            if waiting is not None:
                self._report(*waiting)
            waiting = (done, metrics)
            if done == first + 1:
                self._finish_first(state, start, done)
            if self._has_pause(done):
                self._report(*waiting)
                waiting = None
                self._pause(state, done)
        if waiting is not None:
            self._report(*waiting)
        if done > first:
            self._save(state, done)
        return state

    def _dispatch(self, state: TrainState, batch: Batch, *, first_call: bool) -> tuple[TrainState, StepMetrics]:
        if first_call:  # compiling puts constants on the devices
            return train_step(state, batch)
        # Nothing but the batch may go to the devices while training, and that was put there ahead.
        with jax.transfer_guard("disallow"):
            return train_step(state, batch)

    def _finish_first(self, state: TrainState, start: float, done: int) -> None:
        jax.block_until_ready(state.step)
        self.places.display.emit(f"step {done}: {time.perf_counter() - start:.1f} s, compilation included")
        self._clock.restart()

    def _has_pause(self, done: int) -> bool:
        run = self.config.run
        last = done == run.steps
        return last or done % self.config.checkpoint.every == 0 or bool(run.eval_every and done % run.eval_every == 0)

    def _pause(self, state: TrainState, done: int) -> None:
        run = self.config.run
        with self._clock.paused():
            if done == run.steps or done % self.config.checkpoint.every == 0:
                self._save(state, done)
            if run.eval_every and done % run.eval_every == 0 and done < run.steps:
                self.validate(state, done)

    def _save(self, state: TrainState, done: int) -> None:
        if done == self._saved_step:
            return
        saved = about(self.config, state.mesh.shape, done, self.data.train.fingerprint)
        self.places.checkpoints.save(done, state_arrays(state), state.layout.trunk_order, saved)
        self._saved_step = done

    def validate(self, state: TrainState, done: int) -> None:
        """Validates, and writes the result to the sinks."""
        if self.data.validation is None:
            return
        found = validate(state, self.data.validation, state.mesh, self.config.data.prefetch)
        self.validation = (done, found)
        scalars = {"loss": found.loss, "bits_per_byte": found.bits_per_byte}
        self.places.sinks.write(done, scalars, {}, kind="eval")

    def _report(self, step: int, metrics: StepMetrics) -> None:
        """Fetches the metrics of a step, shows them and, at log intervals, writes them."""
        scalars = metrics.scalars()
        self._clock.add(scalars["valid_tokens"], scalars["target_tokens"])
        logging = self.config.logging
        if step % logging.every == 0 or step == self.config.run.steps or scalars["skipped"]:
            self._rates = self._clock.rates()
            per_layer = metrics.per_layer() if logging.per_layer else {}
            counts = np.asarray(metrics.expert_counts) if logging.per_layer and any(metrics.owns_experts) else None
            self.places.sinks.write(step, scalars | self._rates, per_layer, counts)
            self._clock.restart()
        self.places.display.step(step, scalars.get("loss"), self._rates.get("tokens_per_second"))
        self._check_skipped(step, scalars)

    def _check_skipped(self, step: int, scalars: dict[str, float]) -> None:
        most = self.config.optimizer.max_skipped_steps
        if scalars["skipped_in_a_row"] < most:
            return
        why = "a gradient was not finite" if scalars["target_tokens"] else "the batch had no target"
        fix = (
            "lower optimizer.learning_rate, set optimizer.clip_norm, or use float32"
            if scalars["target_tokens"]
            else "check the data"
        )
        saved = self.places.checkpoints.steps()
        since = f"the last checkpoint is of step {saved[-1]}" if saved else "there is no checkpoint yet"
        raise TrainingFailedError(
            f"step {step}: optimizer.max_skipped_steps={most} steps in a row were skipped (in the last, {why}); "
            f"parameters are unchanged since, {since}; {fix}"
        )
