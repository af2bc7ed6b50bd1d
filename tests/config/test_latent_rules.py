"""Bad latent attention, sparse attention and their stages: what is said, and that its advice works."""

from pathlib import Path

import pytest

from jaxmoe.config import ConfigError, load_config

MINIMAL = Path(__file__).parent / "minimal.yaml"
GOOD = [
    "model.attention={num_heads: 8, num_kv_heads: 8, head_dim: 24}",
    "model.attention.mla={kv_lora_rank: 32, qk_nope_head_dim: 16, qk_rope_head_dim: 8, v_head_dim: 16}",
    "model.attention.dsa={index_num_heads: 4, index_head_dim: 16, index_topk: 32, indexer_loss_coeff: 0.1}",
]
#: (change, path, a part of the message, the advice followed)
BAD = [
    ("model.attention.num_kv_heads=4", "model.attention.num_kv_heads", "use 8", "model.attention.num_kv_heads=8"),
    ("model.attention.head_dim=16", "model.attention.head_dim", "use 24", "model.attention.head_dim=24"),
    ("model.attention.qk_norm=true", "model.attention.qk_norm", "use false", "model.attention.qk_norm=false"),
    ("model.attention.sliding_window=9", "model.attention.sliding_window", "null",
     "model.attention.sliding_window=null"),
    ("model.attention.rope.fraction=0.5", "model.attention.rope.fraction", "1.0", "model.attention.rope.fraction=1.0"),
    ("parallel.sp_attention=ulysses", "parallel.sp_attention", "allgather", "parallel.sp_attention=allgather"),
    ("model.attention.mla=null", "model.attention.dsa", "mla is null", "model.attention.dsa=null"),
    ("model.attention.dsa.index_head_dim=4", "model.attention.dsa.index_head_dim", "8", "model.attention.dsa=null"),
    ("model.attention.dsa.stage=warmup model.attention.dsa.indexer_loss=sparse", "model.attention.dsa.indexer_loss",
     "use dense", "model.attention.dsa.indexer_loss=dense"),
    ("model.attention.dsa.stage=dense model.attention.dsa.indexer_loss=sparse", "model.attention.dsa.indexer_loss",
     "use dense", "model.attention.dsa.indexer_loss_coeff=0.0"),
    ("model.attention.dsa.stage=warmup model.attention.dsa.indexer_loss_coeff=0.0",
     "model.attention.dsa.indexer_loss_coeff", "use 1.0", "model.attention.dsa.indexer_loss_coeff=1.0"),
    ("model.attention.dsa.hadamard=true model.attention.dsa.index_head_dim=24", "model.attention.dsa.index_head_dim",
     "use 32", "model.attention.dsa.index_head_dim=32"),
    ("model.attention.dsa.indexer_pattern=[1,0]", "model.attention.dsa.indexer_pattern", "num_layers, not 2",
     "model.attention.dsa.indexer_pattern=1"),
    ("model.attention.dsa.indexer_pattern=[0,1,1,1]", "model.attention.dsa.indexer_pattern", "use [1, 1, 1, 1]",
     "model.attention.dsa.indexer_pattern=[1,1,1,1]"),
    ("model.attention.dsa.indexer_pattern=[1,0,0,0] model.moe.num_dense_layers=1",
     "model.attention.dsa.indexer_pattern", "use [1, 1, 0, 0]", "model.attention.dsa.indexer_pattern=[1,1,0,0]"),
]  # fmt: skip


def test_the_unchanged_config_is_fine():
    load_config(MINIMAL, GOOD)


@pytest.mark.parametrize(("change", "path", "says", "mend"), BAD, ids=[row[0] for row in BAD])
def test_a_bad_config_gets_path_rule_and_fix(change, path, says, mend):
    with pytest.raises(ConfigError) as caught:
        load_config(MINIMAL, [*GOOD, *change.split()])
    assert [problem.path for problem in caught.value.problems] == [path]
    assert says in str(caught.value)
    load_config(MINIMAL, [*GOOD, *change.split(), mend])
