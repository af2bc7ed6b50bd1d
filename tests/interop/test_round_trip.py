"""Folders that come back as they were: tensors bit for bit, config.json, tokenizer; the same bytes from any layout."""

import json
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

import jaxmoe
from jaxmoe.config.errors import UserError
from jaxmoe.interop.folder import SINGLE_FILE
from tests.interop import golden_cases as goldens

SGD = "optimizer.kind=sgd"
#: Two stages of layers, of which one is padded where three are left over; experts and heads split; weights too.
LAYOUTS = [
    ({}, ()),
    ({"tp": 2, "ep": 2, "sp": 2}, ()),
    ({"pp": 2, "tp": 2, "dp": 2}, ("parallel.zero=3",)),
    ({"dp": 2, "ep": 2, "tp": 2}, ("parallel.experts_over=ep", "parallel.zero=0")),
]


def tensors_of(folder):
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def assert_same_tensors(got, want):
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name].dtype == value.dtype, name
        assert got[name].tobytes() == value.tobytes(), name


def one_device(folder, *overrides):
    mesh = jaxmoe.make_mesh(jaxmoe.load_hf_config(folder, ["parallel.dp=1"]), jax.devices()[:1])
    return jaxmoe.load_hf(folder, mesh, [SGD, *overrides])


def copy_as(family, target, convert):
    """The golden folder with every tensor changed by `convert(name, value)`."""
    shutil.copytree(goldens.FOLDER / family, target, ignore=shutil.ignore_patterns("*.npz", "*.safetensors*"))
    tensors = tensors_of(goldens.FOLDER / family)
    save_file({name: convert(name, value) for name, value in tensors.items()}, target / "model.safetensors")
    return target


@pytest.mark.parametrize("family", goldens.CASES)
def test_loading_and_saving_changes_nothing(family, tmp_path):
    source = goldens.FOLDER / family
    jaxmoe.save_hf(one_device(source), tmp_path / "out")
    assert_same_tensors(tensors_of(tmp_path / "out"), tensors_of(source))
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == json.loads(
        (source / "config.json").read_text()
    )


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_narrow_tensors_come_back_bit_equal_beside_wide_ones(dtype, tmp_path):
    """Released checkpoints keep the selection bias in float32 among bfloat16 weights."""
    source = copy_as(
        "glm4_moe", tmp_path / "in", lambda name, v: v if name.endswith("correction_bias") else v.astype(dtype)
    )
    (source / "tokenizer.json").write_text("{}")
    jaxmoe.save_hf(one_device(source), tmp_path / "out")
    want = tensors_of(source)
    assert {value.dtype for value in want.values()} == {np.dtype(dtype), np.dtype(np.float32)}
    assert_same_tensors(tensors_of(tmp_path / "out"), want)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


FAST = ("qwen3_moe", "mixtral", "glm4_moe", "gpt_oss")
ALL = [pytest.param(family, marks=() if family in FAST else pytest.mark.slow) for family in goldens.CASES]


@pytest.mark.parametrize("family", ALL)
def test_bytes_do_not_depend_on_the_layout(family, tmp_path):
    contents = []
    for number, (sizes, overrides) in enumerate(LAYOUTS):
        state = goldens.load(family, goldens.fitting(family, sizes), (8, 16), SGD, *overrides)
        target = tmp_path / str(number)
        jaxmoe.save_hf(state, target, max_shard_bytes=100_000)
        contents.append({file.name: file.read_bytes() for file in sorted(target.iterdir())})
    assert "model.safetensors.index.json" in contents[0]
    assert all(content == contents[0] for content in contents)
    assert_same_tensors(tensors_of(tmp_path / "0"), tensors_of(goldens.FOLDER / family))


@pytest.mark.parametrize(
    ("layers", "overrides", "order"),
    [
        (6, [], (0, 1, 2, 3, 4, 5)),
        (5, [], (0, 1, 2, 3, 4, -1)),
        (6, ["parallel.pipeline_schedule=circular", "parallel.pipeline_chunks=3"], (0, 2, 4, 1, 3, 5)),
        (5, ["parallel.pipeline_schedule=circular", "parallel.pipeline_chunks=2"], (0, 1, 4, -1, 2, 3, -1, -1)),
    ],
)
def test_every_layer_lies_where_its_stage_runs_it(layers, overrides, order, tmp_path):
    source = copy_as("llama", tmp_path / "in", lambda _, value: value)
    values = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(values | {"num_hidden_layers": layers}))
    tensors = tensors_of(source)
    first = {name: value for name, value in tensors.items() if name.startswith("model.layers.0.")}
    for layer in range(layers):
        tensors |= {name.replace("layers.0.", f"layers.{layer}."): value + layer for name, value in first.items()}
    save_file(tensors, source / "model.safetensors")
    own = ["parallel.pp=2", "parallel.dp=1", "batch.num_microbatches=2", "batch.global_batch_size=2", *overrides]
    mesh = jaxmoe.make_mesh(jaxmoe.load_hf_config(source, own), jax.devices()[:2])
    state = jaxmoe.load_hf(source, mesh, [SGD, *own])
    assert state.layout.trunk_order == order
    stacked = np.asarray(state.params["trunk"][0]["attention_norm"]["scale_D"])
    for place, layer in enumerate(order):
        want = tensors[f"model.layers.{layer}.input_layernorm.weight"] if layer >= 0 else 0 * stacked[place]
        np.testing.assert_array_equal(stacked[place], want)
    assert_same_tensors(jaxmoe.to_hf_tree(state.params, state.config), tensors)


def test_an_index_names_the_file_of_every_tensor(tmp_path):
    jaxmoe.save_hf(one_device(goldens.FOLDER / "mixtral"), tmp_path / "out", max_shard_bytes=60_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    tensors = tensors_of(tmp_path / "out")
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in tensors.values())
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / "out" / file)
    assert index["weight_map"].keys() == tensors.keys()
    again = one_device(tmp_path / "out")
    assert_same_tensors(jaxmoe.to_hf_tree(again.params, again.config), tensors)


def test_another_dtype_can_be_asked_for(tmp_path):
    jaxmoe.save_hf(one_device(goldens.FOLDER / "glm4_moe"), tmp_path / "out", dtype="bfloat16")
    for name, value in tensors_of(tmp_path / "out").items():
        assert value.dtype == (np.float32 if name.endswith("correction_bias") else ml_dtypes.bfloat16)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_number_too_large_for_float16_is_an_error_and_leaves_nothing(tmp_path):
    state = one_device(copy_as("llama", tmp_path / "in", lambda _, value: value * np.float32(1e5)))
    with pytest.raises(UserError, match="does not fit in float16"):
        jaxmoe.save_hf(state, tmp_path / "out", dtype="float16")
    assert [item.name for item in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("I/O error")])
def test_a_full_disk_is_an_error_and_leaves_nothing(error, tmp_path, monkeypatch):
    def full(arrays, path, metadata):
        path.write_bytes(b"half")
        raise error

    monkeypatch.setattr("jaxmoe.interop.save.save_file", full)
    with pytest.raises(UserError, match="cannot be written"):
        jaxmoe.save_hf(one_device(goldens.FOLDER / "llama"), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way_of_a_folder_is_an_error(tmp_path):
    (tmp_path / "note").write_text("mine")
    with pytest.raises(UserError, match="cannot be written"):
        jaxmoe.save_hf(one_device(goldens.FOLDER / "llama"), tmp_path / "note" / "out")
    assert [item.name for item in tmp_path.iterdir()] == ["note"]


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "note").write_text("mine")
    with pytest.raises(UserError, match="exists already"):
        jaxmoe.save_hf(one_device(goldens.FOLDER / "llama"), tmp_path)
    assert [item.name for item in tmp_path.iterdir()] == ["note"]


def test_a_tied_head_that_was_saved_as_well_is_accepted_only_if_equal(tmp_path):
    source = copy_as("qwen3", tmp_path / "in", lambda _, value: value)
    tensors = tensors_of(source)
    table = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": table}, source / "model.safetensors")
    one_device(source)
    save_file(tensors | {"lm_head.weight": table + 1}, source / "model.safetensors")
    with pytest.raises(UserError, match=r"lm_head\.weight is extra"):
        one_device(source)


def test_a_source_that_changed_is_followed_where_it_can_be(tmp_path):
    source = copy_as("llama", tmp_path / "in", lambda _, value: value)
    state = one_device(source)
    values = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(values | {"vocab_size": "x"}))
    (tmp_path / "link").symlink_to(tmp_path / "out")
    jaxmoe.save_hf(state, tmp_path / "link")
    (source / "config.json").write_text(json.dumps(values))
    written, first = (jaxmoe.load_hf_config(folder).model for folder in (tmp_path / "out", source))
    assert written.model_copy(update={"from_hf": first.from_hf}) == first
    tensors = tensors_of(source)
    save_file(tensors | {"model.norm.weight": tensors["model.norm.weight"].astype(np.int8)}, source / SINGLE_FILE)
    with pytest.raises(UserError, match=r"model\.norm\.weight is I8; only F64"):
        jaxmoe.save_hf(state, tmp_path / "again")


def test_router_biases_have_names_too():
    state = one_device(goldens.FOLDER / "glm4_moe")
    biases = jaxmoe.to_hf_tree(state.router_bias, state.config)
    want = tensors_of(goldens.FOLDER / "glm4_moe")
    assert_same_tensors(biases, {name: value for name, value in want.items() if name.endswith("correction_bias")})
