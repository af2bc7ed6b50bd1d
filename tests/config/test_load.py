"""Files, bases and overrides in; the same config out again."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxmoe.config import (
    ConfigError,
    UserError,
    config_from_dict,
    config_to_dict,
    fail_on_user_error,
    load_config,
    save_config,
)
from jaxmoe.config.load import merge_trees, read_tree
from jaxmoe.config.yaml_io import dump_yaml, parse_yaml

ROOT = Path(__file__).parents[2]
MINIMAL = Path(__file__).parent / "minimal.yaml"
#: One config takes its model from a checkpoint folder that the user brings: tests/interop loads it with one.
WITH_A_CHECKPOINT = ROOT / "configs" / "finetune_hf.yaml"
CONFIGS = [MINIMAL, *(path for path in sorted((ROOT / "configs").rglob("*.yaml")) if path != WITH_A_CHECKPOINT)]


def message_of(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1E5", 100000.0),
        ("-2.5e+3", -2500.0),
        (".5", 0.5),
        ("3.", 3.0),
        ("8_192", 8192),
        ("010", 10),
        ("0x10", 16),
        ("-7", -7),
        ("yes", "yes"),
        ("off", "off"),
        ("1:30", "1:30"),
        ("2024-01-02", "2024-01-02"),
        ("true", True),
        ("~", None),
        ("", None),
        ("1e", "1e"),
        ("[1, 0, 1e1]", [1, 0, 10.0]),
        ("{a: 1e-3}", {"a": 0.001}),
    ],
)
def test_yaml_scalars_mean_what_they_look_like(text: str, value: object):
    parsed = parse_yaml(text, "test")
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    "value", ["1e-3", "yes", "010", "1:30", "null", "", "true", "a: b", "x\ny\n", "\u00e9", " x ", "<<"]
)
def test_a_text_that_looks_like_something_else_is_written_so_that_it_stays_a_text(value: str):
    assert parse_yaml(dump_yaml({"key": value}), "test") == {"key": value}


def test_overrides_set_values_make_sections_and_take_them_away():
    overrides = [
        "optimizer.learning_rate=1e-3",
        "model.attention.rope.scaling.type=yarn",
        "model.attention.rope.scaling.factor=2",
        "model.attention.rope.scaling.original_seq_len=64",
        "model.moe.layer_pattern=[1, 0, 1]",
        "data.validation=null",
        "run.sample_prompt=a=b.c",
        "run.steps=5",
        "run.steps=7",
    ]
    config = load_config(MINIMAL, overrides)
    assert config.optimizer.learning_rate == 1e-3
    assert config.model.attention.rope.scaling is not None
    assert config.model.attention.rope.scaling.factor == 2.0
    assert config.model.moe is not None
    assert config.model.moe.layer_pattern == (1, 0, 1)
    assert config.data.validation is None
    assert config.run.sample_prompt == "a=b.c"
    assert config.run.steps == 7, "the last override wins"
    assert config.model.moe.num_experts == 16, "what no override names stays"


def test_overrides_do_not_touch_the_tree_they_are_laid_over():
    tree = read_tree(MINIMAL)
    config_from_dict(tree, ["model.moe.num_experts=32", "optimizer.eps=1e-6"])
    assert tree == read_tree(MINIMAL)


@pytest.mark.parametrize("overrides", [[], ["run.sample_prompt='1e-3'", "optimizer.eps=1e-05", "data.validation=null"]])
def test_a_saved_config_is_whole_and_reads_back_equal(tmp_path: Path, overrides: list[str]):
    config = load_config(MINIMAL, overrides)
    path = tmp_path / "run" / "config.yaml"
    save_config(config, path)
    assert load_config(path) == config
    assert config_from_dict(config_to_dict(config)) == config
    assert read_tree(path)["logging"]["every"] == 10, "defaults are written too"
    assert os.listdir(path.parent) == ["config.yaml"]


def test_a_save_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "config.yaml"
    path.write_text("old")

    def no_space(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="no space left"):
        save_config(load_config(MINIMAL), path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["config.yaml"]


def test_bases_are_merged_in_order_relative_to_their_file(tmp_path: Path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "wide.yaml").write_text("base: deep.yaml\nmodel: {d_model: 96}\n")
    (tmp_path / "models" / "deep.yaml").write_text("model: {d_model: 80, num_layers: 6}\n")
    (tmp_path / "mesh.yaml").write_text("parallel: {tp: 2, sp: 2}\n")
    child = tmp_path / "child.yaml"
    child.write_text(
        f"base: [{MINIMAL}, models/wide.yaml, mesh.yaml]\nparallel: {{sp: 4}}\ndata: {{validation: null}}\n"
    )
    config = load_config(child, ["parallel.ep=4"])
    assert (config.model.d_model, config.model.num_layers, config.model.vocab_size) == (96, 6, 512)
    assert (config.parallel.tp, config.parallel.sp, config.parallel.ep) == (2, 4, 4)
    assert config.data.validation is None


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("base: bad.yaml\n", ["is its own base", "remove one `base`"]),
        ("base: 3\n", ["base=3: must be a file name or a list"]),
        ("base: gone.yaml\n", ["gone.yaml: no such file"]),
        ("run: {dir: a}\nrun: {dir: b}\n", ["bad.yaml:2:1", "'run' stands here a second time, first in line 1"]),
        ("run:\n  dir: a\n  dir: b\n", ["bad.yaml:3:3", "'dir'", "first in line 2"]),
        ("1: x\n", ["bad.yaml:1:1", "the key '1' is not a name"]),
        ("run: [1\nx: 3\n", ["bad.yaml:2:2", "not readable"]),
        ("run: !!python/object:os.system {}\n", ["bad.yaml:1:6", "!!python/object:os.system is no kind of value"]),
        ("run: !own {}\n", ["bad.yaml:1:6", "could not determine a constructor"]),
        ("run: !!timestamp x\n", ["bad.yaml:1:6", "!!timestamp is no kind of value", "leave the tag out"]),
        ("run: {steps: !!int x}\n", ["bad.yaml:1:14", "'x' is no int"]),
        ("run: {steps: !!float x}\n", ["bad.yaml:1:14", "'x' is no float"]),
        ("run: {steps: !!bool yes}\n", ["bad.yaml:1:14", "'yes' is no bool"]),
        ("run: {steps: " + 5000 * "9" + "}\n", ["bad.yaml:1:14", "a whole number of 5000 digits"]),
        ('run: {dir: "\\ud800"}\n', ["bad.yaml:1:12", "half a character"]),
        ("run: &r {dir: *r}\n", ["bad.yaml:1:6", "this anchor stands within itself"]),
        ("run: " + 60 * "[" + 60 * "]" + "\n", ["bad.yaml:1:56", "more than 50 levels deep"]),
        ("run: " + 5000 * "[" + "\n", ["bad.yaml", "more than 50 levels deep"]),
        ('base: "a\\0"\n', ["cannot be read: embedded null byte; correct the name"]),
        (f"base: {5000 * 'x'}\n", ["cannot be read", "File name too long"]),
        ("run: *x\n", ["bad.yaml:1:6", "undefined alias"]),
        ("a: 1\n---\nb: 2\n", ["bad.yaml:2:1", "expected a single document"]),
        ("", ["is empty", "write sections"]),
        ("just words\n", ["holds no sections"]),
        ("a: \x00\n", ["not readable"]),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_the_place(tmp_path: Path, text: str, parts: list[str]):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    message = message_of(path)
    assert [part for part in parts if part not in message] == [], message


def test_a_key_with_dots_is_told_to_be_sections():
    with pytest.raises(ConfigError) as caught:
        config_from_dict({**read_tree(MINIMAL), "run.steps": 5, "a\nb": 1})
    assert [str(problem).partition(" the keys ")[0] for problem in caught.value.problems] == [
        "run.steps=5: unknown key; the file has sections: write `steps:` below `run:`",
        "'a\\nb'=1: unknown key; the top level has",
    ]


def test_a_value_that_multiplies_is_shown_short():
    """Each line has its anchor nine times in the next: 3 ** 38 items when written out."""
    lines = ["a0: &a0 x"] + [f"a{i + 1}: &a{i + 1} [{', '.join(9 * [f'*a{i}'])}]" for i in range(20)]
    with pytest.raises(ConfigError) as caught:
        config_from_dict(parse_yaml("\n".join(lines), "x"))
    assert max(len(line) for line in str(caught.value).splitlines()) < 600


def test_a_file_that_is_not_there_is_told_from_folder_and_from_other_encodings(tmp_path: Path):
    (tmp_path / "quickstart.yaml").write_text("")
    assert f"did you mean {tmp_path / 'quickstart.yaml'}?" in message_of(tmp_path / "quikstart.yaml")
    assert f"the nearest existing folder is {tmp_path}" in message_of(tmp_path / "no" / "such" / "x.yaml")
    assert "is a folder" in message_of(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"run: \xe9\n")
    assert "is not UTF-8 text (byte 5)" in message_of(tmp_path / "latin.yaml")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_config_of_the_project_loads_and_round_trips(path: Path, tmp_path: Path):
    tree = read_tree(path)
    if "from_hf" in tree.get("model", {}):  # the folder is the user's
        tree["model"]["from_hf"] = str(ROOT / "tests" / "golden" / "hf" / "qwen3_moe")
    if path.parent.name in ("models", "meshes"):  # parts of a config, to be named as a base
        tree = merge_trees(read_tree(MINIMAL), tree)
    config = config_from_dict(tree)
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config


def test_the_command_helper_prints_the_message_and_exits_with_2(capsys: pytest.CaptureFixture[str]):
    @fail_on_user_error()
    def command() -> None:
        raise UserError("data.jsonl:3: not JSON; mend the line")

    with pytest.raises(SystemExit) as exit_:
        command()
    assert exit_.value.code == 2
    assert capsys.readouterr().err == "error: data.jsonl:3: not JSON; mend the line\n"
    with pytest.raises(SystemExit), fail_on_user_error():
        Path("x" * 300).exists()
    assert capsys.readouterr().err.endswith("xxx...: File name too long; choose another path, or get access to this\n")
    with pytest.raises(FileNotFoundError), fail_on_user_error():
        Path("x").read_text()  # nobody looked before: a bug of ours
    with pytest.raises(ZeroDivisionError), fail_on_user_error():
        divmod(1, 0)  # a bug of ours keeps its traceback


def test_a_bad_config_ends_a_process_soon_without_traceback_and_without_jax():
    program = """
import sys
from jaxmoe.config import fail_on_user_error, load_config
try:
    with fail_on_user_error():
        load_config(sys.argv[1], ["parallel.tp=3", "run.steps=x"], require_files=True)
finally:
    print("jax" in sys.modules)
"""
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program, str(MINIMAL)], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    seconds = time.monotonic() - started
    assert done.returncode == 2, done.stderr
    assert done.stdout == "False\n"
    assert "Traceback" not in done.stderr
    assert "run.steps='x'" in done.stderr
    assert "parallel.tp=3" in done.stderr
    assert seconds < 3.0
