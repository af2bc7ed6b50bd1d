"""The order of things in the loop, with a step that computes nothing."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.config import Config, load_config
from jaxmoe.runtime import loop
from jaxmoe.runtime.clock import StepClock
from jaxmoe.runtime.loop import Loop, Places, TrainingFailedError
from jaxmoe.spmd.axes import AXES
from jaxmoe.spmd.program import build_mesh

MINIMAL = Path(__file__).parents[1] / "config" / "minimal.yaml"


class Metrics:
    """What a step reports; tells when it is fetched."""

    owns_experts = ()

    def __init__(self, step: int, events: list, skipped: Callable[[int], int]) -> None:
        self.step, self.events, self.skipped = step, events, skipped

    def scalars(self) -> dict[str, float]:
        self.events.append(("fetch", self.step))
        in_a_row = self.skipped(self.step)
        values = {"valid_tokens": 8.0, "target_tokens": 4.0, "skipped": float(in_a_row > 0)}
        return values | {"skipped_in_a_row": float(in_a_row)} | ({} if in_a_row else {"loss": 1.0})

    def per_layer(self) -> dict[str, np.ndarray]:
        return {}


class Recorder:
    """Stands in for sinks, display and checkpoints."""

    def __init__(self, events: list) -> None:
        self.events = events

    def write(self, step: int, *_: Any, kind: str = "train") -> None:
        self.events.append((kind, step))

    def save(self, step: int, *_: Any) -> None:
        self.events.append(("save", step))

    def wait(self) -> None:
        self.events.append(("wait", None))

    def steps(self) -> list[int]:
        return [step for name, step in self.events if name == "save"]

    def emit(self, text: str) -> None: ...

    def step(self, *_: Any) -> None: ...

    def start_steps(self, *_: Any) -> None: ...

    def end_steps(self) -> None: ...


def run(
    monkeypatch: pytest.MonkeyPatch,
    *overrides: str,
    first: int = 0,
    stop_after: int | None = None,
    skipped: Callable[[int], int] = lambda step: 0,
) -> list[tuple[str, int | None]]:
    """(what, step) in order; steps are counted from 1 as they are done."""
    events: list[tuple[str, int | None]] = []
    config = load_config(MINIMAL, ["logging.every=1", *overrides])
    stop = SimpleNamespace(requested=False, reason="SIGTERM")

    def step(state: SimpleNamespace, batch: int) -> tuple[SimpleNamespace, Metrics]:
        done = int(state.step) + 1
        assert batch == done - 1, "batches come in the order of steps"
        events.append(("dispatch", done))
        stop.requested = done == stop_after
        return state_at(config, done), Metrics(done, events, skipped)

    monkeypatch.setattr(loop, "train_step", step)
    monkeypatch.setattr(loop, "Batch", SimpleNamespace(from_rows=lambda rows, *_: rows(0, 0)))
    monkeypatch.setattr(loop, "state_arrays", lambda state: {})
    monkeypatch.setattr(loop, "validate", lambda *_: SimpleNamespace(loss=1.0, bits_per_byte=1.0))
    data: Any = SimpleNamespace(
        train=SimpleNamespace(rows=lambda step, *_: step, fingerprint="f"), validation=SimpleNamespace()
    )
    recorder: Any = Recorder(events)
    state: Any = state_at(config, first)
    signals: Any = stop
    Loop(config, data, Places(recorder, recorder, recorder), signals).run(state)
    return events


def state_at(config: Config, step: int) -> Any:
    mesh = build_mesh(dict.fromkeys(AXES, 1), jax.devices()[:1])
    return SimpleNamespace(step=np.int32(step), mesh=mesh, layout=SimpleNamespace(trunk_order=(0,)))


def test_metrics_of_a_step_are_fetched_after_the_next_is_dispatched(monkeypatch: pytest.MonkeyPatch):
    events = run(monkeypatch, "run.steps=4", "optimizer.schedule.warmup_steps=0")
    assert [event for event in events if event[0] in ("dispatch", "fetch")] == [
        ("dispatch", 1),
        ("dispatch", 2),
        ("fetch", 1),
        ("dispatch", 3),
        ("fetch", 2),
        ("dispatch", 4),
        ("fetch", 3),
        ("fetch", 4),
    ]


def test_numbers_stand_in_the_log_before_the_checkpoint_that_they_lead_to(monkeypatch: pytest.MonkeyPatch):
    events = run(monkeypatch, "run.steps=6", "checkpoint.every=2", "run.eval_every=3")
    assert [event for event in events if event[0] in ("train", "eval", "save", "wait")] == [
        ("train", 1),
        ("train", 2),
        ("save", 2),
        ("train", 3),
        ("eval", 3),
        ("train", 4),
        ("save", 4),
        ("train", 5),
        ("train", 6),
        ("save", 6),
        ("wait", None),
    ]


def test_a_stop_finishes_the_step_and_saves_it(monkeypatch: pytest.MonkeyPatch):
    events = run(monkeypatch, "run.steps=6", stop_after=2)
    assert events[-4:] == [("fetch", 2), ("train", 2), ("save", 2), ("wait", None)]
    assert ("dispatch", 3) not in events


def test_a_stop_before_any_step_saves_nothing(monkeypatch: pytest.MonkeyPatch):
    config = load_config(MINIMAL)
    stop: Any = SimpleNamespace(requested=True, reason="SIGINT")
    events: list = []
    recorder: Any = Recorder(events)
    data: Any = SimpleNamespace(train=SimpleNamespace(rows=lambda step, *_: step))
    monkeypatch.setattr(loop, "Batch", SimpleNamespace(from_rows=lambda rows, *_: rows(0, 0)))
    Loop(config, data, Places(recorder, recorder, recorder), stop).run(state_at(config, 0))
    assert events == [("wait", None)]


def test_a_resumed_run_starts_with_the_next_batch_and_saves_no_step_twice(monkeypatch: pytest.MonkeyPatch):
    events = run(monkeypatch, "run.steps=6", "checkpoint.every=2", first=4)
    assert [step for name, step in events if name == "dispatch"] == [5, 6]
    assert [step for name, step in events if name == "save"] == [6]


@pytest.mark.parametrize("every", [1, 100])
def test_steps_skipped_in_a_row_end_the_run(monkeypatch: pytest.MonkeyPatch, every: int):
    settings = ("run.steps=9", "optimizer.max_skipped_steps=3", f"logging.every={every}", "checkpoint.every=2")
    with pytest.raises(TrainingFailedError, match=r"step 5: .*=3 steps in a row .*last checkpoint is of step 4"):
        run(monkeypatch, *settings, skipped=lambda step: max(0, step - 2))


def test_a_step_that_is_skipped_is_logged_between_log_lines(monkeypatch: pytest.MonkeyPatch):
    events = run(monkeypatch, "run.steps=6", "logging.every=5", skipped=lambda step: int(step == 3))
    assert [step for name, step in events if name == "train"] == [3, 5, 6]


def test_nothing_but_the_batch_reaches_the_devices_in_a_step(monkeypatch: pytest.MonkeyPatch):
    """A host array that slips into a step is an error from the second step on."""
    run_step = Loop.__dict__["_dispatch"]
    monkeypatch.setattr(loop, "train_step", lambda state, batch: jnp.add(np.ones(2), batch))
    with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
        run_step(None, None, np.ones(2), first_call=False)
    assert run_step(None, None, np.ones(2), first_call=True) is not None


def test_rates_leave_pauses_out_and_count_all_tokens_but_padding():
    now = [0.0]
    clock = StepClock(lambda: now[0])
    for _ in range(4):
        now[0] += 2.0
        clock.add(valid_tokens=100.0, target_tokens=50.0)
    with clock.paused():
        now[0] += 1000.0
    assert clock.rates() == {"tokens_per_second": 50.0, "target_tokens_per_second": 25.0, "step_seconds": 2.0}
    clock.restart()
    assert clock.rates() == {}
