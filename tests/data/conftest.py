"""What the data tests share: configurations and stores made in a moment."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxmoe.config.schema import Config
from jaxmoe.data.token_store import TokenStore

MODEL = {
    "vocab_size": 512,
    "d_model": 8,
    "num_layers": 1,
    "attention": {"num_heads": 1, "num_kv_heads": 1, "head_dim": 8},
}


@pytest.fixture
def speeches() -> Path:
    """83 kB of speeches by Washington and Adams: folders train and validation."""
    return Path(__file__).parent / "fixtures" / "speeches"


@pytest.fixture
def make_config(tmp_path: Path, speeches: Path) -> Callable[..., Config]:
    def make(*, vocab_size: int = 512, seed: int = 0, **data: Any) -> Config:
        defaults = {
            "train": {"kind": "txt", "path": str(speeches / "train")},
            "validation": {"kind": "txt", "path": str(speeches / "validation")},
            "cache_dir": str(tmp_path / "cache"),
        }
        return Config.model_validate(
            {
                "run": {"dir": str(tmp_path / "run"), "steps": 1, "seed": seed},
                "model": MODEL | {"vocab_size": vocab_size},
                "batch": {"global_batch_size": 4, "seq_len": 64},
                "data": defaults | data,
            }
        )

    return make


@pytest.fixture
def make_store() -> Callable[[list[int]], TokenStore]:
    def make(lengths: list[int]) -> TokenStore:
        """Documents of these lengths whose tokens are 0, 1, 2, ... throughout: a token says where it comes from."""
        offsets = np.cumsum([0, *lengths])
        tokens = np.arange(offsets[-1], dtype=np.uint32)
        return TokenStore(tokens, offsets, np.ones(len(tokens), np.int64), f"numbers {lengths}")

    return make
