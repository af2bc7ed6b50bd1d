"""The configs of released models have the published numbers of parameters. No arrays are made."""

from pathlib import Path

import jax
import numpy as np
import pytest

from jaxmoe.config.load import load_config
from jaxmoe.config.schema import Config
from jaxmoe.spmd.axes import AXES
from jaxmoe.step.layout import make_layout

FOLDER = Path(__file__).parents[2] / "configs" / "models"
#: In billions as the models' cards and reports print them: total without MTP layers, active, the last digit of active.
#: Cards count the active ones with both vocabulary matrices (2), with the head alone (1), or with neither (0).
PUBLISHED = {
    "mixtral_8x7b": (46.7, 12.9, 0.1, 2),
    "qwen3_30b_a3b": (30.5, 3.3, 0.1, 2),
    "qwen3_235b_a22b": (235, 22, 1, 2),
    "olmoe_1b_7b": (6.92, 1.28, 0.01, 2),
    "deepseek_v2_lite": (15.7, 2.4, 0.1, 1),
    "deepseek_v3": (671, 37, 1, 1),
    "deepseek_v3_2": (671, 37, 1, 1),
    "glm_4_5_air": (106.85, 12, 1, 0),  # its card cuts the total to 106
    "kimi_k2": (1026, 32, 1, 1),
}


def counts(config: Config) -> tuple[float, float]:
    """Parameters, and those that a token meets, in billions."""
    layout = make_layout(config, tuple((axis, 1) for axis in AXES))
    leaves = jax.tree_util.tree_leaves_with_path(layout.shapes)
    total = sum(int(np.prod(leaf.shape)) for _, leaf in leaves)
    experts = sum(int(np.prod(leaf.shape)) for path, leaf in leaves if "'experts'" in jax.tree_util.keystr(path))
    moe = config.model.moe
    assert moe is not None
    return total / 1e9, (total - experts * (1 - moe.experts_per_token / moe.num_experts)) / 1e9


def test_every_config_is_here():
    assert {file.stem for file in FOLDER.glob("*.yaml")} == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_number_of_parameters(name):
    config = load_config(str(FOLDER / f"{name}.yaml"), [])
    total, active = counts(config)
    published_total, published_active, digit, matrices = PUBLISHED[name]
    np.testing.assert_allclose(total, published_total, rtol=0.005)
    left_out = (2 - matrices) * config.model.vocab_size * config.model.d_model / 1e9
    np.testing.assert_allclose(active - left_out, published_active, rtol=0, atol=digit)
