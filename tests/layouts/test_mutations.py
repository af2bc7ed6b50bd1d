"""The proof can fail: every fault of `mutations.py` is refused while tracing, or differs from one device.

The one-device runs that the faults are compared with are those of the unchanged code: a fault in a reduction does
nothing on one device, and one in 1/M nothing for M = 1.
"""

from collections.abc import Callable
from functools import cache

import pytest

from jaxmoe.config.load import config_from_dict
from jaxmoe.config.schema import Config
from jaxmoe.runtime.proof.compare import Outcome, differences
from jaxmoe.runtime.proof.layouts import chosen_layouts, variant
from jaxmoe.runtime.proof.run import initial_weights, run_layout
from jaxmoe.runtime.proof.shrink import shrink
from tests.layouts.mutations import MUTATIONS, Mutation, applied

TOLERANCE = 1e-10
SEED = 0


GROUPED_HEADS = {"attention": {"num_heads": 8, "num_kv_heads": 2, "head_dim": 16}}
LATENT = {
    "attention": {
        "num_heads": 8,
        "num_kv_heads": 8,
        "head_dim": 16,
        "mla": {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8},
        "dsa": {
            "index_num_heads": 2,
            "index_head_dim": 8,
            "index_topk": 8,
            "indexer_loss": "sparse",
            "indexer_loss_coeff": 0.5,
        },
    },
    "mtp": {"num_depths": 1, "loss_coeff": 0.5},
}


def _config(*, latent: bool, per_token: bool) -> Config:
    return config_from_dict(
        {
            "run": {"dir": "unused", "steps": 10},
            "model": {
                "vocab_size": 512,
                "d_model": 64,
                "num_layers": 6,
                **(LATENT if latent else GROUPED_HEADS),
                "moe": {
                    "num_experts": 8,
                    "experts_per_token": 2,
                    "expert_hidden_dim": 32,
                    "router": {
                        "score_function": "sigmoid",
                        "selection_bias": True,
                        "aux_loss_coeff": 0.01,
                        "seq_aux_loss_coeff": 0.02,
                        "z_loss_coeff": 0.03,
                    },
                    "num_shared_experts": 1,
                },
            },
            "objective": {"calculate_per_token_loss": per_token},
            "batch": {"global_batch_size": 8, "seq_len": 64},
            "data": {"train": {"kind": "sotu"}, "tokenizer": {"kind": "bpe"}},
        }
    )


@cache
def _small(latent: bool, per_token: bool) -> Config:
    return shrink(_config(latent=latent, per_token=per_token), "float64")


@cache
def _reference(latent: bool, per_token: bool, num_microbatches: int) -> Outcome:
    config = variant(_small(latent, per_token), {"zero": 0}, num_microbatches)
    assert isinstance(config, Config)
    return run_layout(config, _start(latent), "ragged" if per_token else "identical", SEED)


@cache
def _start(latent: bool) -> dict:
    return initial_weights(_small(latent, True))


def _run(mutation: Mutation) -> Outcome:
    per_token = mutation.batch == "ragged"
    named = mutation.layout if "dp=" in mutation.layout else f"dp=1,{mutation.layout}"
    (layout,) = chosen_layouts(named, devices=8)
    config = variant(_small(mutation.latent, per_token), layout, mutation.num_microbatches)
    assert isinstance(config, Config), config
    return run_layout(config, _start(mutation.latent), mutation.batch, SEED)


def _caught_by(mutation: Mutation) -> str:
    per_token = mutation.batch == "ragged"
    # aux_loss depends on M by definition, so a ragged batch is compared at the same M.
    reference = _reference(mutation.latent, per_token, mutation.num_microbatches if per_token else 1)
    with applied(mutation):
        try:
            outcome = _run(mutation)
        except (ValueError, TypeError) as error:
            return f"tracing ({type(error).__name__})"
    worst = max(differences(reference, outcome), key=lambda d: d.value)
    return f"verify ({worst.kind}, {worst.value:.0e})" if worst.value > TOLERANCE else "nothing"


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name.replace(" ", "_"))
def test_a_fault_is_caught(mutation: Mutation, x64: None, record_property: Callable[[str, object], None]) -> None:
    caught_by = _caught_by(mutation)
    record_property("caught_by", caught_by)
    assert caught_by.startswith(mutation.caught_by), f"{mutation.name}: {caught_by}"


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("layout", ["dp=2,sp=2", "pp=2"])
def test_without_a_fault_nothing_differs(layout: str, latent: bool, x64: None) -> None:
    healthy = Mutation("none", "step.norms:clip_scale", "1.0", "1.0", layout, "verify", 2, latent=latent)
    assert max(d.value for d in differences(_reference(latent, True, 2), _run(healthy))) < TOLERANCE
