"""Folders that are wrong: each is refused by name with exit code 2, and nothing is written."""

import json
import os
import pickle
import shutil
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxmoe.convert import main
from jaxmoe.runtime.run_folder import RunFolder
from tests.interop.golden_cases import FOLDER
from tests.interop.test_round_trip import assert_same_tensors, tensors_of

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
SHARD = "model-0000{}-of-00004.safetensors"
INDEX = "model.safetensors.index.json"


def rewritten(folder, change):
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file)


def spoiled(values):
    """The last number of each tensor named replaced."""

    def change(tensors):
        for name, value in values.items():
            tensors[name].flat[-1] = value
        return tensors

    return change


def narrow(tensors):
    return {name: value.astype(ml_dtypes.bfloat16) for name, value in tensors.items()}


def without(name):
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


def with_index(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def point_to(file):
    return lambda folder: with_index(folder, lambda files: files.update({"lm_head.weight": file}))


def cut_short(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def only_a_pickle(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"lm_head.weight": [1.0]}))


def with_config(**values):
    def change(folder):
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return change


WRONG = {
    "missing_expert": ("qwen3_moe", lambda f: rewritten(f, without(EXPERT)), [f"{EXPERT} is missing"]),
    "transposed_weight": (
        "qwen3_moe",
        lambda f: rewritten(f, lambda t: t | {EXPERT: np.ascontiguousarray(t[EXPERT].T)}),
        [f"{EXPERT} has shape [32, 12], must be [12, 32]"],
    ),
    "extra_tensor": (
        "qwen3_moe",
        lambda f: rewritten(f, lambda t: t | {"model.layers.4.mlp.gate.weight": np.ones((8, 32), np.float32)}),
        ["model.layers.4.mlp.gate.weight is extra"],
    ),
    "integers": (
        "qwen3_moe",
        lambda f: rewritten(f, lambda t: t | {EXPERT: t[EXPERT].astype(np.int8)}),
        [f"{EXPERT} is I8"],
    ),
    "wrong_vocabulary": (
        "qwen3_moe",
        with_config(vocab_size=130),
        ["model.embed_tokens.weight has shape [128, 32], must be [130, 32]", "lm_head.weight has shape"],
    ),
    "two_at_once": (
        "qwen3_moe",
        lambda f: rewritten(f, lambda t: without("lm_head.weight")(without(EXPERT)(t))),
        [f"{EXPERT} is missing", "lm_head.weight is missing"],
    ),
    "truncated_file": ("qwen3_moe", cut_short, ["model.safetensors is damaged or cut short"]),
    "pickle": ("qwen3_moe", only_a_pickle, ["pytorch_model.bin", "can run code"]),
    "unknown_rope": (
        "qwen3_moe",
        with_config(rope_parameters={"rope_type": "spiral", "rope_theta": 1.0}),
        ["rope_parameters.rope_type='spiral'"],
    ),
    "wrong_number_of_experts": (
        "qwen3_moe",
        with_config(num_local_experts=6),
        ["mlp.gate.weight has shape [8, 32], must be [6, 32]", "experts.6.up_proj.weight is extra"],
    ),
    "float8": (
        "qwen3_moe",
        lambda f: rewritten(f, lambda t: t | {EXPERT: t[EXPERT].astype(ml_dtypes.float8_e4m3fn)}),
        [f"{EXPERT} is F8_E4M3; only F64, F32, F16, BF16 are read"],
    ),
    "tensor_in_two_shards": (
        "mixtral_sharded",
        lambda f: save_file(
            load_file(f / SHARD.format(1)) | load_file(f / SHARD.format(2)),
            f / SHARD.format(2),
        ),
        [f"lm_head.weight stands in {SHARD.format(1)} and in {SHARD.format(2)}"],
    ),
    "pointer_to_a_file_that_was_not_fetched": (
        "qwen3_moe",
        lambda f: (f / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n"),
        ["model.safetensors is damaged or cut short"],
    ),
    "no_config": ("qwen3_moe", lambda f: (f / "config.json").unlink(), ["config.json: no such file"]),
    "no_weights": ("qwen3_moe", lambda f: (f / "model.safetensors").unlink(), ["holds neither"]),
    "missing_shard": (
        "mixtral_sharded",
        lambda f: (f / "model-00003-of-00004.safetensors").unlink(),
        ["model-00003-of-00004.safetensors is missing"],
    ),
    "index_of_a_missing_shard": (
        "mixtral_sharded",
        point_to("model-9.safetensors"),
        ["model-9.safetensors is missing"],
    ),
    "index_out_of_the_folder": (
        "mixtral_sharded",
        point_to("../model.safetensors"),
        ["'../model.safetensors' is no plain file name"],
    ),
    "index_of_an_absolute_path": ("mixtral_sharded", point_to("/etc/x.safetensors"), ["is no plain file name"]),
    "index_of_a_pickle": ("mixtral_sharded", point_to("x.bin"), ["'x.bin' is no .safetensors file"]),
    "index_of_another_file": (
        "mixtral_sharded",
        point_to("model-00004-of-00004.safetensors"),
        ["model-00004-of-00004.safetensors holds lm_head.weight, and it does not"],
    ),
    "index_that_is_no_index": ("mixtral_sharded", lambda f: (f / INDEX).write_text("[1]"), ["is no index"]),
    "index_of_nothing": ("mixtral_sharded", lambda f: with_index(f, dict.clear), ["is no index", "weight_map must"]),
    "index_of_a_number": ("mixtral_sharded", point_to(3), ["is no index", "weight_map must name the file"]),
    "index_of_a_control_character": ("mixtral_sharded", point_to("\0.safetensors"), ["is no plain file name"]),
    "tensor_that_the_index_leaves_out": (
        "mixtral_sharded",
        lambda f: with_index(f, lambda files: (files.pop("lm_head.weight"), files.pop("model.norm.weight"))),
        [f"{SHARD.format(1)} holds lm_head.weight, and {INDEX} does not name it", "holds model.norm.weight, and"],
    ),
    "single_file_beside_an_index": (
        "mixtral_sharded",
        lambda f: shutil.copy(f / SHARD.format(1), f / "model.safetensors"),
        ["holds model.safetensors and model.safetensors.index.json of other files"],
    ),
    "not_finite": (
        "qwen3_moe",
        lambda f: rewritten(f, spoiled({EXPERT: np.nan, "model.norm.weight": -np.inf, "lm_head.weight": np.nan})),
        ["3 tensors", f"{EXPERT} holds NaN", "model.norm.weight holds Inf", "lm_head.weight holds NaN"],
    ),
    "not_finite_in_bfloat16": (
        "qwen3_moe",
        lambda f: rewritten(f, lambda t: narrow(spoiled({EXPERT: np.inf})(t))),
        [f"{EXPERT} holds Inf"],
    ),
    "selection_bias_not_finite": ("glm4_moe", lambda f: rewritten(f, spoiled({BIAS: np.nan})), [f"{BIAS} holds NaN"]),
    "too_large_for_float32": (
        "qwen3_moe",
        lambda f: rewritten(f, lambda t: t | {EXPERT: t[EXPERT] * np.float64(1e300)}),
        [f"{EXPERT} holds numbers too large for float32"],
    ),
    "name_that_upsets_a_terminal": (
        "qwen3_moe",
        lambda f: rewritten(f, lambda t: t | {"a\x1b[31m": np.ones(1, np.float32)}),
        [r"'a\x1b[31m is extra"],
    ),
    "empty_tensor": (
        "qwen3_moe",
        lambda f: rewritten(f, lambda t: t | {EXPERT: np.zeros((0, 32), np.float32)}),
        [f"{EXPERT} has shape [0, 32]"],
    ),
    "empty_file": ("qwen3_moe", lambda f: (f / "model.safetensors").write_bytes(b""), ["is damaged or cut short"]),
    "head_of_a_file_too_long": (
        "qwen3_moe",
        lambda f: (f / "model.safetensors").write_bytes((2**62).to_bytes(8, "little") + b"{}"),
        ["is damaged or cut short"],
    ),
    "config_is_a_folder": (
        "qwen3_moe",
        lambda f: ((f / "config.json").unlink(), (f / "config.json").mkdir()),
        ["config.json: Is a directory; name a folder"],
    ),
    "quantized": (
        "deepseek_v3",
        with_config(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}),
        ["quantization_config={quant_method: 'fp8'"],
    ),
    "no_experts": ("qwen3_moe", with_config(num_local_experts=0), ["num_experts=0"]),
    "mtp_modules_that_are_no_number": (
        "deepseek_v2_lite",
        with_config(num_nextn_predict_layers="x"),
        ["num_nextn_predict_layers='x'"],
    ),
}
#: What only the model's own list of parameters, or the numbers, can show; all else is told before JAX starts.
NEEDS_JAX = {
    "missing_expert",
    "transposed_weight",
    "extra_tensor",
    "integers",
    "wrong_vocabulary",
    "two_at_once",
    "wrong_number_of_experts",
    "float8",
    "not_finite",
    "not_finite_in_bfloat16",
    "selection_bias_not_finite",
    "too_large_for_float32",
    "name_that_upsets_a_terminal",
    "empty_tensor",
}


@pytest.fixture
def copied(tmp_path):
    def make(family):
        return shutil.copytree(FOLDER / family, tmp_path / "in", ignore=shutil.ignore_patterns("*.npz"))

    return make


@pytest.fixture
def without_jax(monkeypatch):
    """Commands that ask for JAX end with an ImportError, as if it had not been imported yet."""
    for module in ("jax", "jaxmoe.runtime.convert"):
        monkeypatch.setitem(sys.modules, module, None)


def contents(folder):
    return {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_folder_is_refused_by_name(name, copied, tmp_path, capsys, request):
    family, spoil, texts = WRONG[name]
    folder = copied(family)
    spoil(folder)
    if name not in NEEDS_JAX:
        request.getfixturevalue("without_jax")
    with pytest.raises(SystemExit) as caught:
        main(["hf-to-jaxmoe", "--from", str(folder), "--run", str(tmp_path / "run")])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert all(text in error for text in texts), error
    assert not (tmp_path / "run").exists()


def test_in_and_out_again_by_the_commands(tmp_path, capsys):
    run, out = tmp_path / "run", tmp_path / "out"
    assert main(["hf-to-jaxmoe", "--from", str(FOLDER / "glm4_moe"), "--run", str(run), "optimizer.kind=sgd"]) == 0
    assert RunFolder(run).steps == [0]
    assert main(["jaxmoe-to-hf", "--run", str(run), "--to", str(out)]) == 0
    assert_same_tensors(tensors_of(out), tensors_of(FOLDER / "glm4_moe"))
    with pytest.raises(SystemExit) as caught:
        main(["jaxmoe-to-hf", "--run", str(run), "--to", str(out)])
    assert caught.value.code == 2
    with pytest.raises(SystemExit) as caught:
        main(["hf-to-jaxmoe", "--from", str(FOLDER / "glm4_moe"), "--run", str(run)])
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("exists already") == 2


def a_file(folder):
    (folder / "note").write_text("mine")


def a_link(folder):
    (folder / "link").symlink_to(folder / "in")


#: Where a run cannot be made: what is there before, its path, further words, the error.
WRONG_RUNS = {
    "holds_something": (a_file, ".", [], "exists already"),
    "is_a_file": (a_file, "note", [], "exists already"),
    "below_a_file": (a_file, "note/run", [], "note is in the way: a file"),
    "is_the_input": (None, "in", [], "lies in"),
    "in_the_input": (None, "x/../in/run", [], "lies in"),
    "in_the_input_by_a_link": (a_link, "link/run", [], "lies in"),
    "name_too_long": (None, "x" * 300, [], "File name too long"),
    "no_folder_of_weights": (None, "run", ["model.from_hf=null"], "model.from_hf=null: contradicts --from"),
    "another_folder_of_weights": (None, "run", [f"model.from_hf={FOLDER / 'llama'}"], "contradicts --from"),
    "no_such_config": (None, "run", ["--config", "nowhere.yaml"], "nowhere.yaml: no such file"),
}


@pytest.mark.parametrize("name", WRONG_RUNS)
def test_a_run_that_cannot_be_made_is_refused_before_jax_starts(name, copied, tmp_path, capsys, without_jax):
    prepare, run, words, text = WRONG_RUNS[name]
    folder = copied("qwen3_moe")
    if prepare:
        prepare(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(["hf-to-jaxmoe", "--from", str(folder), "--run", f"{tmp_path}/{run}", *words])
    assert caught.value.code == 2
    assert text in capsys.readouterr().err
    assert contents(tmp_path) == before


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """A run made from `in`; tests work on copies, whose config says where theirs is."""
    folder = tmp_path_factory.mktemp("converted")
    shutil.copytree(FOLDER / "glm4_moe", folder / "in", ignore=shutil.ignore_patterns("*.npz"))
    words = ["hf-to-jaxmoe", "--from", str(folder / "in"), "--run", str(folder / "run"), "optimizer.kind=sgd"]
    assert main(words) == 0
    return folder


def in_source(change):
    return lambda folder: change(folder / "in")


#: What stands in the way of an export: what happened before, --to, further words, the error.
WRONG_EXPORTS = {
    "in_the_checkpoints": (None, "run/checkpoints/hf", [], "only read"),
    "in_the_source": (None, "in/out", [], "only read"),
    "over_a_run": (None, "run", [], "exists already"),
    "no_path": (None, "a\0b", [], "is no path"),
    "no_such_step": (None, "out", ["--step", "7"], "holds [0]; choose one of those"),
    "source_gone": (lambda f: shutil.rmtree(f / "in"), "out", [], "config.json: no such file"),
    "source_without_weights": (in_source(lambda f: (f / "model.safetensors").unlink()), "out", [], "holds neither"),
    "source_of_no_family": (in_source(with_config(model_type=None)), "out", [], "model_type=null"),
    "source_of_another_kind": (in_source(with_config(model_type=["x"])), "out", [], "model_type=['x']"),
    "source_that_changed": (in_source(with_config(softcap=3)), "out", [], "softcap=3"),
    "another_width": (None, "out", ["model.d_model=64"], "model.d_model: saved 32, asked 64"),
    "fewer_layers": (None, "out", ["model.num_layers=2"], "model.num_layers: saved 3, asked 2"),
    "another_norm": (None, "out", ["model.norm_eps=0.5"], "model.norm_eps: saved"),
}


@pytest.mark.parametrize("name", WRONG_EXPORTS)
def test_an_export_that_cannot_be_is_refused_before_jax_starts(name, converted, tmp_path, capsys, without_jax):
    prepare, target, words, text = WRONG_EXPORTS[name]
    shutil.copytree(converted, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "run" / "config.yaml"
    file.write_text(file.read_text().replace(str(converted), str(tmp_path)))
    if prepare:
        prepare(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(["jaxmoe-to-hf", "--run", str(tmp_path / "run"), "--to", f"{tmp_path}/{target}", *words])
    assert caught.value.code == 2
    assert text in capsys.readouterr().err
    assert contents(tmp_path) == before


def test_a_folder_is_taken_by_its_name_whatever_that_means_in_yaml(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(FOLDER / "llama", "1e3")
    assert main(["hf-to-jaxmoe", "--from", "1e3", "--run", "2026"]) == 0
    assert RunFolder(tmp_path / "2026").steps == [0]


def test_numbers_that_are_rounded_are_not_rounded_in_silence(copied, tmp_path, capsys, caplog):
    folder = copied("qwen3_moe")
    rewritten(folder, lambda t: t | {name: t[name].astype(np.float64) for name in (EXPERT, "model.norm.weight")})
    assert main(["hf-to-jaxmoe", "--from", str(folder), "--run", str(tmp_path / "run")]) == 0
    assert [record.getMessage() for record in caplog.records if record.name == "jaxmoe.interop.load"] == [
        f"{folder}: 2 tensors are F64 and are rounded to float32, the dtype of their parameters (model.param_dtype)"
    ]


def test_a_run_that_is_none_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["jaxmoe-to-hf", "--run", str(tmp_path), "--to", str(tmp_path / "out")])
    assert caught.value.code == 2
    assert "holds no config.yaml" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_exit_code_of_the_process(tmp_path):
    command = [
        sys.executable,
        "-m",
        "jaxmoe.convert",
        "hf-to-jaxmoe",
        "--from",
        str(tmp_path),
        "--run",
        str(tmp_path / "r"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 2
    assert "config.json: no such file" in done.stderr
    assert "Traceback" not in done.stderr
