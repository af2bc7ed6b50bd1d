"""Families whose numbers follow from those of a sibling that has golden vectors.

GLM-5 rotates neighbouring channels of its indexer where DeepSeek-V3.2 rotates channel i with i + half. Scores are
products over channels, so V3.2's weights with the indexer's channels reordered are a GLM-5 with V3.2's numbers.
Source: modular_glm_moe_dsa.py of transformers 5. Kimi K2 is DeepSeek-V3 under a `model_type` of its own.
"""

import json

import jax
import numpy as np
import pytest

import jaxmoe
from jaxmoe.config.errors import ConfigError
from tests.interop import golden_cases as goldens
from tests.interop.test_parity import check_logits, exact_products, live_of  # noqa: F401 - a fixture
from tests.interop.test_round_trip import assert_same_tensors, copy_as, one_device, tensors_of

HEADS, WIDTH, ROTATED = 8, 16, 8  # of the golden model's indexer
#: Where the channel of each new place stands in V3.2.
ORDER = np.array([*np.arange(ROTATED).reshape(2, -1).T.reshape(-1), *range(ROTATED, WIDTH)])


def reordered(name, value):
    if name.endswith("indexer.wq_b.weight"):
        return value.reshape(HEADS, WIDTH, -1)[:, ORDER].reshape(value.shape)
    return value[ORDER] if ".indexer.k_norm." in name or name.endswith("indexer.wk.weight") else value


def with_fields(folder, **fields):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return folder


@pytest.fixture
def glm(tmp_path):
    folder = copy_as("deepseek_v32", tmp_path / "in", reordered)
    return with_fields(folder, model_type="glm_moe_dsa", indexer_types=["full"] * 3, indexer_rope_interleave=True)


@pytest.mark.parametrize("case", ["base", "long"])
def test_glm_5(case, glm, tmp_path):
    arrays = goldens.golden("deepseek_v32", case)
    rows, columns = arrays["labels"].shape
    overrides = [f"batch={{global_batch_size: {rows}, seq_len: {columns}}}"]
    state = one_device(glm, *overrides)
    fields = goldens.batch_fields(arrays)
    check_logits(state, jaxmoe.Batch.from_numpy(fields, state.mesh), arrays)
    found = goldens.look(state, fields)
    goldens.close(found["index_scores"], arrays["index_scores"], "index_scores", live_of(arrays))
    np.testing.assert_array_equal(found["index_selected"], arrays["index_selected"])
    jaxmoe.save_hf(state, tmp_path / "out")
    assert_same_tensors(tensors_of(tmp_path / "out"), tensors_of(glm))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("indexer_types", ["full", "full", "shared"]),
        ("index_topk_freq", 2),
        ("index_topk_pattern", "FFS"),
        ("indexer_rope_interleave", False),
    ],
)
def test_layers_that_share_an_indexer_are_refused(glm, name, value):
    with pytest.raises(ConfigError, match=name):
        jaxmoe.load_hf_config(with_fields(glm, **{name: value}))


def test_kimi_k2(tmp_path):
    folder = copy_as("deepseek_v3", tmp_path / "in", lambda _, value: value)
    with_fields(folder, model_type="kimi_k2", architectures=["DeepseekV3ForCausalLM"], auto_map={"AutoConfig": "x.Y"})
    state, sibling = one_device(folder), one_device(goldens.FOLDER / "deepseek_v3")
    assert state.config.model.model_copy(update={"from_hf": None}) == sibling.config.model.model_copy(
        update={"from_hf": None}
    )
    jax.tree.map(np.testing.assert_array_equal, state.params, sibling.params)
    jaxmoe.save_hf(state, tmp_path / "out")
    assert_same_tensors(tensors_of(tmp_path / "out"), tensors_of(folder))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "kimi_k2"
