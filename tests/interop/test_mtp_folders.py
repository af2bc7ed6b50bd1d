"""Multi-token-prediction modules of a checkpoint: layers numbered on, with copies of embedding and head."""

import json
import math
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxmoe
from jaxmoe.config.errors import UserError
from tests.interop.golden_cases import FOLDER
from tests.interop.test_round_trip import LAYOUTS, assert_same_tensors, one_device, tensors_of

WIDTH = 32
COPIES = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}


@pytest.fixture
def folder(tmp_path):
    """GLM-4.5 with one module: its golden weights, the last layer's again under the next number."""
    target = shutil.copytree(FOLDER / "glm4_moe", tmp_path / "in", ignore=shutil.ignore_patterns("*.npz"))
    values = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(values | {"num_nextn_predict_layers": 1}))
    tensors = load_file(target / "model.safetensors")
    layer = {name: value + 1 for name, value in tensors.items() if name.startswith("model.layers.2.")}
    tensors |= {name.replace("layers.2.", "layers.3."): value for name, value in layer.items()}
    random = np.random.default_rng(0)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"model.layers.3.{name}.weight"] = random.normal(size=WIDTH).astype(np.float32)
    tensors["model.layers.3.eh_proj.weight"] = random.normal(size=(WIDTH, 2 * WIDTH)).astype(np.float32)
    save_file(tensors, target / "model.safetensors")
    return target


def add_copies(folder, **changes):
    tensors = load_file(folder / "model.safetensors")
    copies = {
        f"model.layers.3.{name}": tensors[original] + changes.get(original, 0) for name, original in COPIES.items()
    }
    save_file(tensors | copies, folder / "model.safetensors")


@pytest.mark.parametrize("with_copies", [False, True])
def test_round_trip(folder, with_copies, tmp_path):
    if with_copies:
        add_copies(folder)
    state = one_device(folder)
    mtp = state.config.model.mtp
    assert mtp is not None
    assert mtp.num_depths == 1
    tensors = tensors_of(folder)
    # The token's half of the projection comes first.
    join = np.asarray(state.params["mtp"][0]["join_2DF"])
    np.testing.assert_array_equal(join[0], tensors["model.layers.3.eh_proj.weight"][:, :WIDTH].T)
    jaxmoe.save_hf(state, tmp_path / "out")
    assert_same_tensors(tensors_of(tmp_path / "out"), tensors)


def test_bytes_do_not_depend_on_the_layout(folder, tmp_path):
    add_copies(folder)
    for number, (sizes, overrides) in enumerate(LAYOUTS):
        own = [f"parallel.{axis}={sizes.get(axis, 1)}" for axis in ("pp", "dp", "ep", "sp", "tp")]
        own += [f"batch={{global_batch_size: 8, seq_len: 16, num_microbatches: {sizes.get('pp', 1)}}}", *overrides]
        devices = jax.devices()[: math.prod(sizes.values())]
        mesh = jaxmoe.make_mesh(jaxmoe.load_hf_config(folder, own), devices)
        jaxmoe.save_hf(jaxmoe.load_hf(folder, mesh, [*own, "optimizer.kind=sgd"]), tmp_path / str(number))
        assert_same_tensors(tensors_of(tmp_path / str(number)), tensors_of(folder))


def test_a_copy_that_differs_is_refused(folder):
    add_copies(folder, **{"lm_head.weight": 1})
    with pytest.raises(UserError, match=r"shared_head\.head\.weight must equal lm_head\.weight"):
        one_device(folder)


def test_modules_can_be_left_out(folder, tmp_path):
    add_copies(folder)
    state = one_device(folder, "model.mtp=null")
    jaxmoe.save_hf(state, tmp_path / "out")
    assert_same_tensors(tensors_of(tmp_path / "out"), tensors_of(FOLDER / "glm4_moe"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 0


def test_a_missing_module_is_named(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.3.eh_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"model\.layers\.3\.eh_proj\.weight is missing"):
        one_device(folder)


def test_gradients_name_a_parameter_once(folder):
    state = one_device(folder)
    names = jaxmoe.to_hf_tree(jax.tree.map(np.asarray, state.params), state.config)
    assert "model.layers.3.enorm.weight" in names
    assert "model.layers.3.embed_tokens.weight" not in names
