"""What a user gets wrong ends with code 2, one message, no traceback, at once, and nothing is overwritten."""

import fcntl
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from jaxmoe import generate
from tests.e2e.commands import finish, start, tiny_tree, write_config

Change = Callable[[Path, dict], None]


def _texts(folder: Path, name: str, content: str, kind: str) -> dict:
    (folder / name).write_text(content)
    return {"kind": kind, "path": str(folder / name)}


def _unknown_key(folder: Path, tree: dict) -> None:
    tree["model"]["num_layer"] = 3


def _wrong_type(folder: Path, tree: dict) -> None:
    tree["run"]["steps"] = "many"


def _two_problems(folder: Path, tree: dict) -> None:
    tree["run"]["steps"] = 0
    tree["model"]["moe"]["experts_per_token"] = 9


def _missing_text(folder: Path, tree: dict) -> None:
    tree["data"]["train"]["path"] += "s"


def _empty_text(folder: Path, tree: dict) -> None:
    tree["data"]["train"] = _texts(folder, "empty.txt", "", "txt")


def _blank_jsonl(folder: Path, tree: dict) -> None:
    tree["data"]["train"] = _texts(folder, "blank.jsonl", '{"text": ""}\n', "jsonl")


def _broken_jsonl(folder: Path, tree: dict) -> None:
    tree["data"]["train"] = _texts(folder, "bad.jsonl", '{"text": "one"}\n{"text": "two"\n', "jsonl")


CASES: dict[str, tuple[Change, list[str]]] = {
    "unknown key": (_unknown_key, ["model.num_layer", "num_layers"]),
    "wrong type": (_wrong_type, ["run.steps='many'", "whole number"]),
    "two problems at once": (_two_problems, ["2 problems", "run.steps=0", "experts_per_token=9"]),
    "missing text": (_missing_text, ["data.train.path", "no such file or folder", "did you mean"]),
    "empty text": (_empty_text, ["data.train.path", "empty"]),
    "no text in any line": (_blank_jsonl, ["data.train", "empty"]),
    "broken line": (_broken_jsonl, ["bad.jsonl:2"]),
}


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock"}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_one_message_and_leaves_the_run_alone(
    trained: tuple[Path, str], shared: Path, tmp_path: Path, name: str
):
    change, expected = CASES[name]
    run = tmp_path / "run"
    shutil.copytree(trained[0], run)
    tree = tiny_tree(shared, run)
    tree["run"]["steps"] = 100
    change(tmp_path, tree)
    before = contents(run)
    output = finish(
        start("train", "--config", str(write_config(tmp_path / "c.yaml", tree)), may_use_jax=False), expect=2
    )
    assert "\nerror: " in f"\n{output}", output
    assert "Traceback" not in output
    for text in expected:
        assert text in output, output
    assert contents(run) == before


def refuse(run: Path, *words: str, may_use_jax: bool = True) -> str:
    before = contents(run)
    process = start("train", "--config", str(run / "config.yaml"), *words, may_use_jax=may_use_jax)
    output = finish(process, expect=2)
    assert "Traceback" not in output
    assert contents(run) == before
    return output


def test_a_folder_with_another_model_names_every_field_at_once(trained: tuple[Path, str]):
    output = refuse(trained[0], "model.d_model=16", "model.moe.num_experts=8", "run.steps=100", may_use_jax=False)
    assert "model.d_model: saved 8, asked 16" in output
    assert "model.moe.num_experts: saved 4, asked 8" in output
    assert "another run.dir" in output


def test_a_checkpoint_of_another_model_is_refused_by_what_it_says_itself(trained: tuple[Path, str], tmp_path: Path):
    """The config.yaml beside it may have been exchanged."""
    run = tmp_path / "run"
    shutil.copytree(trained[0], run)
    tree = yaml.safe_load((run / "config.yaml").read_text())
    tree["model"]["moe"]["expert_hidden_dim"] = 16
    tree["run"] |= {"dir": str(run), "steps": 100}
    write_config(run / "config.yaml", tree)
    output = refuse(run)
    assert "model.moe.expert_hidden_dim: saved 8, asked 16" in output


def test_other_batches_are_refused_unless_accepted(trained: tuple[Path, str], tmp_path: Path):
    run = tmp_path / "run"
    shutil.copytree(trained[0], run)
    words = (f"run.dir={run}", "run.steps=9", "run.seed=5")
    output = refuse(run, *words)
    assert "run.seed: saved 0, asked 5" in output
    assert "--accept-other-data" in output
    output = finish(start("train", "--config", str(run / "config.yaml"), "--accept-other-data", *words))
    assert "resuming from step 8 of 9" in output


def test_a_damaged_checkpoint_names_itself_and_the_one_before(trained: tuple[Path, str], tmp_path: Path):
    run = tmp_path / "run"
    shutil.copytree(trained[0], run)
    broken = run / "checkpoints" / "8" / "arrays"
    for path in broken.rglob("*"):
        if path.is_file() and path.stat().st_size > 1000:
            path.write_bytes(path.read_bytes()[:100])
    words = (f"run.dir={run}", "run.steps=9")
    output = refuse(run, *words)
    assert "checkpoints/8: this checkpoint cannot be read" in output
    assert "remove that folder to continue from step 6" in output
    shutil.rmtree(run / "checkpoints" / "8")
    (run / "checkpoints" / "9.orbax-checkpoint-tmp").mkdir()  # half written
    output = finish(start("train", "--config", str(run / "config.yaml"), *words))
    assert "resuming from step 6 of 9" in output


def test_a_folder_in_use_is_refused(shared: Path, tmp_path: Path):
    config = write_config(tmp_path / "c.yaml", tiny_tree(shared, tmp_path / "run"))
    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        output = finish(start("train", "--config", str(config), may_use_jax=False), expect=2)
    assert "another process is training in it" in output


def test_a_mesh_that_does_not_fit_the_devices_is_refused_before_training(shared: Path, tmp_path: Path):
    config = write_config(tmp_path / "c.yaml", tiny_tree(shared, tmp_path / "run"))
    output = finish(start("train", "--config", str(config), "parallel.tp=2"), expect=2)
    assert "parallel" in output
    assert "Traceback" not in output
    assert not (tmp_path / "run" / "config.yaml").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--step", "4"], "has checkpoints of steps [6, 8]"),
        (["--tokens", "0"], "tokens=0: must be at least 1"),
        (["--prompt", ""], "prompt: is empty"),
        (["--run", "/nowhere"], "run=/nowhere: holds no config.yaml"),
        (["model.d_model=16"], "model.d_model: saved 8, asked 16"),
        (["--temperature", "-1", "--top-k", "0"], "top-k=0: must be at least 1"),
        (["--prompt", "\udcff"], "argument --prompt: '\\udcff' is not UTF-8"),
    ],
)
def test_generate_refuses_what_it_cannot_do(trained: tuple[Path, str], words: list[str], expected: str):
    output = finish(start("generate", "--run", str(trained[0]), "--prompt", "x", *words, may_use_jax=False), expect=2)
    assert expected in output
    assert "Traceback" not in output


def test_a_prompt_longer_than_a_row_is_refused_by_its_number(
    trained: tuple[Path, str], capsys: pytest.CaptureFixture[str]
):
    words = ["--run", str(trained[0]), "--prompt", "x", "--prompt", "x " * 100, "batch.global_batch_size=16"]
    with pytest.raises(SystemExit) as exit_:
        generate.main(words)
    assert exit_.value.code == 2
    said = capsys.readouterr().err
    assert "error: prompt 2: has " in said
    assert "tokens, more than the batch.seq_len=64 that the model reads; shorten it, or add batch.seq_len=" in said
    assert "prompt 1" not in said


@pytest.mark.parametrize(("kilobytes", "new_cache"), [(17, False), (4, True)], ids=["checkpoint", "cache"])
def test_a_full_disk_is_said_in_one_line(shared: Path, trained, tmp_path: Path, kilobytes: int, new_cache: bool):
    tree = tiny_tree(shared, tmp_path / "run")
    tree["logging"]["tensorboard"] = False
    if new_cache:
        tree["data"]["cache_dir"] = str(tmp_path / "cache")
    process = start("train", "--config", str(write_config(tmp_path / "c.yaml", tree)))
    # A limit on the size of files stands for the disk.
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (kilobytes * 1024, kilobytes * 1024))
    output = finish(process, expect=2)
    # Threads of orbax may print what they met too.
    assert "Traceback" not in output or not new_cache
    [line] = [line for line in output.splitlines() if line.startswith("error: ")]
    assert "cannot be written (File too large); make room" in line
    place = tmp_path / ("cache" if new_cache else "run/checkpoints")
    assert str(place) in line
    assert ("no checkpoint is complete yet" in line) != new_cache
