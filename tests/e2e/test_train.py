"""The train command as a user meets it: a run, its folder, its end, its resumption."""

import hashlib
import json
import platform
import signal
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import yaml

from jaxmoe.runtime.metrics_file import Record, iterate_metrics
from tests.e2e.commands import STEPS, finish, read_until, start, tiny_tree, write_config


def records(run: Path) -> list[Record]:
    found = list(iterate_metrics(run / "metrics.jsonl"))
    assert all(isinstance(item, Record) for item in found), found
    return [item for item in found if isinstance(item, Record)]


def bits(run: Path, step: int) -> dict[str, bytes]:
    """Every array of a checkpoint, as bytes, by path."""
    item = run / "checkpoints" / str(step) / "arrays"
    checkpointer = ocp.PyTreeCheckpointer()
    saved = checkpointer.metadata(item).item_metadata
    assert saved is not None
    plain = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), dict(saved.tree))
    tree = checkpointer.restore(item, ocp.args.PyTreeRestore(restore_args=plain))
    return {jax.tree_util.keystr(path): leaf.tobytes() for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def numbers(run: Path) -> list[tuple]:
    """What metrics.jsonl says, without what depends on the clock."""
    kept = [
        (item.step, item.kind, {k: v for k, v in item.scalars.items() if "second" not in k}) for item in records(run)
    ]
    return sorted(kept, key=lambda item: item[:2])


def test_a_run_prints_its_baseline_its_validation_and_a_sample(trained: tuple[Path, str]):
    run, output = trained
    assert "a unigram model reaches" in output
    assert "step 1: " in output
    last = [item for item in records(run) if item.kind == "eval"][-1].scalars
    assert f"validation loss {last['loss']:.4f}, {last['bits_per_byte']:.4f} bits per byte (unigram baseline" in output
    assert 'sample: "The people" ->' in output
    assert f"run folder: {run}" in output


def test_metrics_stand_in_order_one_line_a_step_and_one_a_validation(trained: tuple[Path, str]):
    found = [(item.step, item.kind) for item in records(trained[0])]
    expected = [(step, "train") for step in range(1, STEPS + 1)]
    expected.insert(4, (4, "eval"))
    assert found == [*expected, (STEPS, "eval")]
    first = records(trained[0])[0].scalars
    assert first["valid_tokens"] == 4 * 64
    assert {"loss", "tokens_per_second", "target_tokens_per_second"} <= set(records(trained[0])[1].scalars)


def test_the_run_folder_says_how_it_was_made(trained: tuple[Path, str]):
    run, _ = trained
    [only] = json.loads((run / "run.json").read_text())["starts"]
    # The command starts itself anew for it (runtime/environment.py).
    assert "glibc.malloc.hugetlb=1" in only["variables"].get("GLIBC_TUNABLES", "") or platform.libc_ver()[0] != "glibc"
    assert only["versions"]["jax"] == jax.__version__
    assert only["mesh"] == {"pp": 1, "dp": 1, "ep": 1, "sp": 1, "tp": 1}
    assert only["first_step"] == 0
    assert {path.name for path in (run / "tokenizer").iterdir()} == {"tokenizer.json", "tokenizer_config.json"}
    assert only["device"]["count"] == 1
    assert len(only["data"]["train"]) == 64
    assert yaml.safe_load((run / "config.yaml").read_text())["optimizer"]["beta2"] == 0.95
    assert sorted(int(path.name) for path in (run / "checkpoints").iterdir()) == [6, STEPS]


def test_a_finished_run_says_so_without_starting_jax(shared: Path, trained: tuple[Path, str]):
    before = {path: path.stat().st_mtime_ns for path in trained[0].rglob("*")}
    output = finish(start("train", "--config", str(shared / "tiny.yaml"), may_use_jax=False))
    assert "already trained" in output
    assert "bits per byte" in output
    assert {path: path.stat().st_mtime_ns for path in trained[0].rglob("*")} == before


@pytest.mark.parametrize("last_line", ["step 1/", "step 5/"], ids=["before-any-checkpoint", "after-a-checkpoint"])
def test_a_killed_run_ends_with_the_bits_of_one_never_stopped(
    shared: Path, trained: tuple[Path, str], tmp_path: Path, last_line: str
):
    config = write_config(tmp_path / "c.yaml", tiny_tree(shared, tmp_path / "run"))
    process = start("train", "--config", str(config))
    read_until(process, last_line)
    process.kill()
    finish(process, expect=-signal.SIGKILL)
    output = finish(start("train", "--config", str(config)))
    assert ("resuming from step" in output) == (last_line == "step 5/")
    assert bits(tmp_path / "run", STEPS) == bits(trained[0], STEPS)
    assert numbers(tmp_path / "run") == numbers(trained[0])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_the_same_command_goes_on(
    shared: Path, trained: tuple[Path, str], tmp_path: Path, number: signal.Signals
):
    tree = tiny_tree(shared, tmp_path / "run")
    tree["checkpoint"]["every"] = 100
    config = write_config(tmp_path / "c.yaml", tree)
    process = start("train", "--config", str(config))
    read_until(process, "step 2/")
    process.send_signal(number)
    output = finish(process)
    assert f"stopped by {number.name}: saved step" in output
    assert "the same command goes on from there" in output
    output = finish(start("train", "--config", str(config)))
    assert "resuming from step" in output
    assert bits(tmp_path / "run", STEPS) == bits(trained[0], STEPS)


def test_a_second_interrupt_aborts(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "false")  # else the run may end between the two
    config = write_config(tmp_path / "c.yaml", tiny_tree(shared, tmp_path / "run"))
    process = start("train", "--config", str(config), "run.steps=100000", "checkpoint.every=100000")
    read_until(process, "training text")  # compiling follows: the first answer comes while it lasts
    process.send_signal(signal.SIGINT)
    read_until(process, "stopping after this step")
    process.send_signal(signal.SIGINT)
    finish(process, expect=130)
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def test_a_resumed_run_may_have_more_steps(trained: tuple[Path, str], tmp_path: Path, shared: Path):
    """And the folder keeps a record of both starts."""
    config = write_config(tmp_path / "c.yaml", tiny_tree(shared, tmp_path / "run"))
    finish(start("train", "--config", str(config), "run.steps=3"))
    output = finish(start("train", "--config", str(config), "run.steps=5"))
    assert "resuming from step 3 of 5" in output
    starts = json.loads((tmp_path / "run" / "run.json").read_text())["starts"]
    assert [item["first_step"] for item in starts] == [0, 3]
    assert [item.step for item in records(tmp_path / "run") if item.kind == "train"] == [1, 2, 3, 4, 5]


def test_too_many_skipped_steps_end_the_run_with_code_1(shared: Path, tmp_path: Path):
    tree = tiny_tree(shared, tmp_path / "run")
    tree["optimizer"] |= {"learning_rate": 1e30, "max_skipped_steps": 3, "clip_norm": None}
    tree["optimizer"]["schedule"] = {"kind": "constant"}
    output = finish(start("train", "--config", str(write_config(tmp_path / "c.yaml", tree))), expect=1)
    assert "optimizer.max_skipped_steps=3 steps in a row were skipped" in output
    assert "Traceback" not in output


def test_generate_continues_a_prompt_the_same_way_each_time(trained: tuple[Path, str], tmp_path: Path):
    words = ("--run", str(trained[0]), "--prompt", "The people", "--tokens", "6", "--seed", "3")
    first = finish(start("generate", *words))
    # The run keeps its tokenizer: the training text may be gone.
    second = finish(start("generate", *words, "data.train={kind: txt, path: nowhere}", f"data.cache_dir={tmp_path}"))
    assert first.startswith("The people")
    assert first == second
    other = finish(start("generate", *words[:-1], "4"))
    assert hashlib.sha256(other.encode()).digest() != hashlib.sha256(first.encode()).digest()
