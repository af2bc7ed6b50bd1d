"""Sinks: the same numbers everywhere, resume, broken files, places that fail."""

import io
import json
import logging
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxmoe.config import UserError, load_config
from jaxmoe.runtime.heat_map import encode_png, load_image
from jaxmoe.runtime.metrics_file import METRICS_FILE, Record, decode_record, encode_record, iterate_metrics
from jaxmoe.runtime.sinks import ConsoleSink, Sinks, open_sinks

ROOT = Path(__file__).parents[2]
SCALARS = {"loss": 3.25, "grad_norm": 1.5, "z_loss": 7.0}
PER_LAYER = {"z_loss": np.array([0.0, 6.5, 7.5])}
COUNTS = np.array([[0, 0, 0, 0], [4, 4, 4, 4], [10, 2, 0, 4]])


def config(*overrides):
    return load_config(ROOT / "tests" / "config" / "minimal.yaml", ["run.steps=1000", *overrides])


def lines_of(run_dir):
    return [json.loads(line) for line in (run_dir / METRICS_FILE).read_text().splitlines()]


def read(run_dir):
    found = list(iterate_metrics(run_dir / METRICS_FILE))
    return [item for item in found if isinstance(item, Record)], [item for item in found if isinstance(item, str)]


class Place:
    """A sink that keeps what it is given and fails when told to."""

    name = "place"
    errors = (OSError,)

    def __init__(self, error=None):
        self.error, self.steps, self.closed = error, [], 0

    def write(self, step, scalars, per_layer, counts=None, kind="train"):
        if self.error:
            raise self.error
        self.steps.append(step)

    def close(self):
        self.closed += 1
        if isinstance(self.error, OSError):
            raise self.error


# ---------------------------------------------------------------- metrics.jsonl


def test_a_line_holds_everything_and_is_strict_json(tmp_path):
    sinks = open_sinks(config("logging.tensorboard=false"), tmp_path, emit=lambda line: None)
    hidden = np.ma.masked_array([0.0, np.nan], mask=[True, False])
    sinks.write(3, {"loss": 0.5, "x": np.inf}, {"load": hidden, **PER_LAYER}, COUNTS)
    sinks.write(3, {"loss": 2.0}, {}, kind="eval")
    sinks.close()

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    text = (tmp_path / METRICS_FILE).read_text().splitlines()
    first, second = (json.loads(line, parse_constant=refuse) for line in text)
    assert first.pop("time") <= second.pop("time")
    assert first == {
        "step": 3,
        "kind": "train",
        "loss": 0.5,
        "x": "inf",
        "per_layer": {"load": [None, "nan"], "z_loss": [0.0, 6.5, 7.5]},
        "expert_counts": COUNTS.tolist(),
    }
    assert second == {"step": 3, "kind": "eval", "loss": 2.0}


def test_a_line_reads_back_equal():
    values = {"loss": 1 / 3, "a": np.nan, "b": -np.inf}
    record = decode_record(encode_record(7, "eval", values, PER_LAYER, COUNTS))
    assert (record.step, record.kind) == (7, "eval")
    np.testing.assert_equal(record.scalars, values)
    np.testing.assert_array_equal(record.per_layer["z_loss"], PER_LAYER["z_loss"])
    np.testing.assert_array_equal(record.expert_counts, COUNTS)


def test_resuming_drops_later_steps_and_a_broken_last_line(tmp_path, caplog):
    sinks = open_sinks(config("logging.tensorboard=false"), tmp_path, emit=lambda line: None)
    for step in range(1, 6):
        sinks.write(step, {"loss": float(step)}, {})
    sinks.close()
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"step": 6, "ti')
    sinks = open_sinks(config("logging.tensorboard=false"), tmp_path, resume_step=3, emit=lambda line: None)
    sinks.write(4, {"loss": 40.0}, {})
    sinks.close()
    assert [(line["step"], line["loss"]) for line in lines_of(tmp_path)] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]
    assert "removed a broken line, metrics.jsonl:6" in caplog.text


def test_a_file_that_fits_is_left_alone(tmp_path):
    open_sinks(config("logging.tensorboard=false"), tmp_path).close()
    (tmp_path / METRICS_FILE).write_text(encode_record(2, "train", SCALARS, {}, None))
    before = (tmp_path / METRICS_FILE).stat().st_ino
    open_sinks(config("logging.tensorboard=false"), tmp_path, resume_step=2).close()
    assert (tmp_path / METRICS_FILE).stat().st_ino == before


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 6, "ti',
        "[]",
        "3",
        '{"step": 1}',
        '{"step": 1, "kind": "x", "time": "2026-01-01"}',
        "null",
        '{"a": NaN',
    ],
)
def test_lines_that_are_not_ours_are_named_and_skipped(tmp_path, line):
    good = encode_record(1, "train", SCALARS, {}, None)
    (tmp_path / METRICS_FILE).write_text(good + line + "\n" + good)
    records, problems = read(tmp_path)
    assert [record.step for record in records] == [1, 1]
    assert len(problems) == 1
    assert problems[0].startswith("metrics.jsonl:2: ")


# ---------------------------------------------------------------- console


def test_console_lines_are_clean_and_short():
    lines = []
    sinks = open_sinks_to_console(lines)
    sinks.write(12, {**SCALARS, "tokens_per_second": 12345.6, "load_balancing_loss": 1.01}, {})
    sinks.write(13, {"skipped": 1.0, "grad_norm": np.nan}, {})
    sinks.write(13, {"loss": 3.0, "bits_per_byte": 1.25}, {}, kind="eval")
    assert lines == [
        "step   12/1000  loss 3.2500  load_balancing_loss 1.010  grad_norm 1.5  tokens_per_second 12,346",
        "step   13/1000  grad_norm nan  skipped: parameters unchanged",
        "step   13/1000  validation  loss 3.0000  bits_per_byte 1.2500",
    ]


def open_sinks_to_console(lines):
    return Sinks([ConsoleSink(1000, lines.append)])


# ---------------------------------------------------------------- TensorBoard


def read_board(run_dir):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0, "images": 0})
    return board.Reload()


def test_tensorboards_own_reader_finds_the_values_of_metrics_jsonl(tmp_path):
    sinks = open_sinks(config(), tmp_path, emit=lambda line: None)
    for step in range(1, 13):
        sinks.write(step, {"loss": 1 / step, "x": np.nan}, {"z_loss": PER_LAYER["z_loss"] / step}, COUNTS)
    sinks.write(12, {"loss": 0.75}, {}, kind="eval")
    sinks.close()
    board = read_board(tmp_path)
    want = {}
    for line in lines_of(tmp_path):
        prefix = "" if line["kind"] == "train" else "eval/"
        for name in {"loss", "x"} & set(line):
            want.setdefault(prefix + name, []).append((line["step"], float(line[name])))
        for name, row in line.get("per_layer", {}).items():
            for i, value in enumerate(row):
                want.setdefault(f"moe/{name}_layer_{i}", []).append((line["step"], value))
    assert sorted(board.Tags()["scalars"]) == sorted(want)
    for tag, points in want.items():
        got = [(event.step, event.value) for event in board.Scalars(tag)]
        np.testing.assert_allclose(got, points, rtol=1e-6, err_msg=tag)  # event files hold float32
    images = board.Images("moe/expert_load_heat_map")
    assert [image.step for image in images] == [1, 11]
    assert images[0].encoded_image_string.startswith(b"\x89PNG")
    histogram = board.Histograms("moe/expert_load")[0].histogram_value
    assert (histogram.min, histogram.max, histogram.num) == (0.0, 2.5, 8)


def test_a_resumed_run_replaces_later_points_in_tensorboard(tmp_path):
    for resume_step, values in ((0, [1.0, 2.0, 3.0, 4.0]), (2, [30.0, 40.0])):
        sinks = open_sinks(config(), tmp_path, resume_step, emit=lambda line: None)
        for step, value in enumerate(values, start=resume_step + 1):
            sinks.write(step, {"loss": value}, {})
        sinks.close()
    points = [(event.step, event.value) for event in read_board(tmp_path).Scalars("loss")]
    assert points == [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0)]


def test_numbers_that_are_not_finite_arrive_without_a_word(tmp_path, caplog):
    odd = {"a": np.nan, "a/b": np.inf, "ab": -np.inf, "abc": 1e300, "abcd": 1.0}
    sinks = open_sinks(config(), tmp_path, emit=lambda line: None)
    with caplog.at_level(logging.DEBUG):
        sinks.write(1, odd, {"a": np.array([np.nan, 2.0])}, COUNTS)
    assert sinks.names == ["console", METRICS_FILE, "tensorboard"]
    sinks.close()
    assert caplog.text == ""
    board = read_board(tmp_path)
    got = {tag: board.Scalars(tag)[0].value for tag in board.Tags()["scalars"]}
    layers = {"moe/a_layer_0": np.nan, "moe/a_layer_1": 2.0}
    np.testing.assert_equal(got, odd | layers | {"abc": np.inf})  # beyond what event files hold
    (record,), problems = read(tmp_path)
    np.testing.assert_equal((record.scalars, problems), (odd, []))


def test_masked_slots_are_not_written(tmp_path):
    sinks = open_sinks(config(), tmp_path, emit=lambda line: None)
    sinks.write(1, {}, {"z": np.ma.masked_array([0.0, 2.0], mask=[True, False])})
    sinks.close()
    assert read_board(tmp_path).Tags()["scalars"] == ["moe/z_layer_1"]


def test_png_pixels_read_back():
    from PIL import Image

    pixels = load_image(np.array([[0.0, 1.0], [2.0, 9.0]]))
    assert pixels.shape == (16, 16, 3)
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(encode_png(pixels)))), pixels)
    assert pixels[0, 15].tolist() == [247, 247, 247]


# ---------------------------------------------------------------- W&B


def fake_wandb(monkeypatch, **changes):
    class Error(Exception):
        pass

    class UsageError(Error):
        pass

    class Run:
        def __init__(self):
            self.logged, self.finished, self.defined = [], 0, []

        def log(self, values):
            self.logged.append(values)

        def define_metric(self, name, step_metric):
            self.defined.append((name, step_metric))

        def finish(self):
            self.finished += 1

    inits: list[dict] = []
    module: Any = types.ModuleType("wandb")
    vars(module).update(Error=Error, UsageError=UsageError, inits=inits, run=Run())

    def init(**options):
        module.inits.append(options)
        if "init" in changes:
            raise changes["init"](module)
        return module.run

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_wandb_gets_all_values_under_one_run_that_resumes(tmp_path, monkeypatch):
    wandb = fake_wandb(monkeypatch)
    for _ in range(2):
        sinks = open_sinks(config("logging.wandb=true", "logging.wandb_project=p"), tmp_path, emit=lambda line: None)
        sinks.write(4, SCALARS, PER_LAYER, COUNTS)
        sinks.close()
    first, second = wandb.inits
    assert first["id"] == second["id"]
    assert (first["project"], first["name"], first["resume"]) == ("p", tmp_path.name, "allow")
    assert first["config"]["run"]["steps"] == 1000
    layers = {f"moe/z_loss_layer_{i}": value for i, value in enumerate(PER_LAYER["z_loss"])}
    assert wandb.run.logged[0] == {"step": 4, **SCALARS, **layers}
    assert wandb.run.finished == 2


def test_a_missing_wandb_is_an_error_at_start_that_names_the_fix(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"logging\.wandb=true: .*pip install 'jaxmoe\[wandb\]'"):
        open_sinks(config("logging.wandb=true"), tmp_path)
    assert not any(tmp_path.iterdir())


def test_wandb_is_not_imported_unless_asked_for(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    open_sinks(config(), tmp_path).close()


def test_wandb_without_a_login_is_an_error_and_without_a_network_a_warning(tmp_path, monkeypatch, caplog):
    fake_wandb(monkeypatch, init=lambda wandb: wandb.UsageError("api_key not configured"))
    with pytest.raises(UserError, match="wandb login"):
        open_sinks(config("logging.wandb=true"), tmp_path)
    fake_wandb(monkeypatch, init=lambda wandb: wandb.Error("no network"))
    sinks = open_sinks(config("logging.wandb=true"), tmp_path, emit=lambda line: None)
    assert sinks.names == ["console", METRICS_FILE, "tensorboard"]
    assert "no network" in caplog.text
    sinks.close()


# ---------------------------------------------------------------- failures


def test_a_sink_that_fails_warns_once_and_the_others_go_on(caplog):
    good, bad = Place(), Place(OSError("No space left on device"))
    sinks = Sinks([bad, good])
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            sinks.write(step, SCALARS, PER_LAYER)
        sinks.close()
    assert good.steps == [1, 2, 3]
    assert (bad.closed, good.closed) == (1, 1)
    assert len(caplog.records) == 1
    assert "place failed at step 1 (No space left on device); training goes on without it" in caplog.text


def test_a_bug_in_a_sink_is_not_swallowed():
    with pytest.raises(KeyError):
        Sinks([Place(KeyError("x"))]).write(1, {}, {})


def test_closing_twice_is_harmless():
    place = Place()
    sinks = Sinks([place])
    sinks.close()
    sinks.close()
    assert place.closed == 1


def test_a_process_that_does_not_write_has_no_sinks(tmp_path):
    sinks = open_sinks(config(), tmp_path, primary=False)
    sinks.write(1, SCALARS, PER_LAYER, COUNTS)
    assert sinks.names == []
    assert not any(tmp_path.iterdir())


def test_a_full_disk_does_not_end_the_run(tmp_path):
    """A limit on file sizes stands in for the disk: every file fails after 20 kB, as the kernel reports it."""
    program = f"""
import resource, numpy as np
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
from jaxmoe.config import load_config
from jaxmoe.runtime.sinks import open_sinks
sinks = open_sinks(load_config({str(ROOT / "tests/config/minimal.yaml")!r}), {str(tmp_path)!r}, emit=lambda line: None)
for step in range(1, 1001):
    sinks.write(step, {{"loss": 1.0 / step}}, {{"z": np.arange(8.0)}}, np.ones((8, 4), int))
print("names at the end:", sinks.names)
sinks.close()
"""
    run = subprocess.run(
        [sys.executable, "-X", "dev", "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "Exception ignored" not in run.stderr  # a file that stayed open
    assert "names at the end: ['console']" in run.stdout
    assert run.stderr.count("training goes on without it") == 2, run.stderr
    records, problems = read(tmp_path)
    assert len(records) > 50
    assert len(problems) <= 1
