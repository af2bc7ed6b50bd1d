"""The configs of released models have the published numbers of parameters. No arrays are made."""

from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxmoe.config.load import load_config
from jaxmoe.spmd.axes import AXES
from jaxmoe.step.layout import Layout, make_layout

FOLDER = Path(__file__).parents[2] / "configs" / "models"


@dataclass(frozen=True)
class Published:
    """What is known of a released model."""

    total: int
    """Numbers in its weight files, as the Hugging Face Hub counts them (`safetensors.total`), without scales."""
    active: float
    """Billions that a token meets, as its card or report prints them."""
    digit: float
    """The last digit of `active`: some cards round, some cut."""
    matrices: int = 2
    """Of the two vocabulary matrices those that `active` counts: both, the head alone (1), or neither (0)."""
    mtp: bool = False
    """`total` has an MTP module, which repeats both vocabulary matrices."""


#: DeepSeek-V3: 684,531,386,000 in its files are these, the MTP module (11,610,067,968 and copies of both vocabulary
#: matrices) and 41,555,600 scales and biases; README_WEIGHTS.md prints 36.7 B active. DeepSeek-V3.2-Exp has
#: 685,396,921,376, that is 13,959,424 more and 824 scales in each of 62 layers: the indexers.
#: Active ones: mistral.ai/news/mixtral-of-experts, the model cards, arXiv:2409.02060 (OLMoE), arXiv:2405.04434.
PUBLISHED = {
    "mixtral_8x7b": Published(46_702_792_704, 12.9, 0.1),
    "qwen3_30b_a3b": Published(30_532_122_624, 3.3, 0.1),
    "qwen3_235b_a22b": Published(235_093_634_560, 22, 1),
    "olmoe_1b_7b": Published(6_919_161_856, 1.28, 0.01),
    "deepseek_v2_lite": Published(15_706_484_224, 2.4, 0.1, matrices=1),
    "deepseek_v3": Published(671_026_419_200, 36.7, 0.1, matrices=1),
    "deepseek_v3_2": Published(671_026_419_200 + 61 * 13_959_424, 37, 1, matrices=1),
    "glm_4_5_air": Published(110_468_824_832, 12, 1, matrices=0, mtp=True),
    "kimi_k2": Published(1_026_408_232_448, 32, 1, matrices=1),
}


def sizes(layout: Layout) -> dict[str, int]:
    """Numbers in each parameter and router bias."""
    leaves = jax.tree_util.tree_leaves_with_path((layout.shapes, layout.bias_shapes))
    return {jax.tree_util.keystr(path): int(np.prod(leaf.shape)) for path, leaf in leaves}


def test_every_config_is_here():
    assert {file.stem for file in FOLDER.glob("*.yaml")} == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_number_of_parameters(name):
    published, file = PUBLISHED[name], str(FOLDER / f"{name}.yaml")
    config = load_config(file, ["model.mtp={num_depths: 1}"] if published.mtp else [])
    matrix = config.model.vocab_size * config.model.d_model
    one_device = tuple((axis, 1) for axis in AXES)
    total = sum(sizes(make_layout(config, one_device)).values())
    assert total + (2 * matrix if published.mtp else 0) == published.total

    config = load_config(file, [])
    moe, by_name = config.model.moe, sizes(make_layout(config, one_device))
    experts = sum(size for leaf, size in by_name.items() if "'experts'" in leaf)
    active = sum(by_name.values()) - experts * (1 - moe.experts_per_token / moe.num_experts)
    counted = (active - (2 - published.matrices) * matrix) / 1e9
    # To 0.5 %, where the printed number has as many digits.
    assert abs(counted - published.active) < max(0.005 * published.active, published.digit)
