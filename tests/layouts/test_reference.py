"""One device against an independent implementation: the objective, its terms and gradients, every kind of layer."""

from typing import Any

import jax
import numpy as np
import pytest

import jaxmoe
from tests.reference import cases, naive

MICRO_MEANS = {"calculate_per_token_loss": False}
CASES: dict[str, dict[str, Any]] = {
    "softmax_over_the_chosen": {
        "microbatches": 4,
        "attention": {"qk_norm": False, "qkv_bias": True, "output_bias": True},
        "moe": {"num_dense_layers": 0, "layer_pattern": [1, 0, 1]},
        "router": {"softmax_before_topk": False},
    },
    "softmax_over_all_in_groups": {
        "microbatches": 2,
        "attention": {"sliding_window": 3},
        "moe": {"experts_per_token": 3},
        "router": {
            "renormalize": False,
            "num_groups": 4,
            "topk_groups": 2,
            "group_score_experts": 1,
            "scaling_factor": 4.0,
        },
        "model": {"tie_embeddings": True},
        "objective": MICRO_MEANS,
    },
    "softmax_renormalized_gated_shared_experts": {
        "microbatches": 4,
        "layers": 5,
        "attention": {"num_kv_heads": 1, "rope": {"theta": 100.0, "fraction": 0.5}},
        "moe": {"num_shared_experts": 2, "shared_hidden_dim": 6, "shared_expert_gate": True, "layer_pattern": 2},
        "objective": MICRO_MEANS,
        "remat": "dots",
    },
    "sigmoid_with_bias_in_groups": {
        "microbatches": 2,
        "moe": {"experts_per_token": 3, "num_shared_experts": 0},
        "router": cases.SIGMOID_BIAS | {"num_groups": 4, "topk_groups": 2, "scaling_factor": 2.5},
    },
    "one_expert_a_token_without_global_aux": {
        "microbatches": 4,
        "moe": {"experts_per_token": 1},
        "router": {"score_function": "sigmoid", "renormalize": False, "global_aux_loss_coeff": 0.0},
        "objective": MICRO_MEANS | {"balance_dp_token": False},
        "remat": "none",
    },
    "square_root_of_softplus_two_leading_layers": {
        "layers": 4,
        "moe": {"num_dense_layers": 2},
        "router": cases.SIGMOID_BIAS | {"score_function": "sqrtsoftplus"},
    },
    "no_experts": {"microbatches": 4, "model": {"moe": None}, "objective": MICRO_MEANS},
}


@pytest.fixture(scope="module", autouse=True)
def float64():
    with cases.float64():
        yield


def test_the_batch_has_every_kind_of_raggedness():
    batch = cases.ragged_batch()
    valid = batch["segment_ids"] != 0
    by_microbatch = [batch["loss_mask"].reshape(4, -1), valid.reshape(4, -1)]
    assert (by_microbatch[0].sum(1) == 0).tolist() == [False, True, True, False]
    assert (by_microbatch[1].sum(1) == 0).tolist() == [False, True, False, False]
    assert (batch["segment_ids"].max(1) > 1).any(), "packed documents"
    inner = [np.flatnonzero(row) for row in valid if row.any()]
    assert any((np.diff(places) > 1).any() for places in inner), "padding inside a row"
    assert len(set(valid.sum(1).tolist())) > 4
    assert (batch["loss_mask"] % 1 > 0).any()


@pytest.mark.parametrize("name", CASES)
def test_equal_to_the_naive_implementation(name):
    config = cases.make_config(**CASES[name])
    params, bias = cases.natural_arrays(config)
    batch = cases.ragged_batch()
    state = cases.make_state(config, 1)
    got = cases.run(jaxmoe.loss_and_grads, state, batch)
    want, gradient = naive.value_and_grad(params, bias, config, batch, 1, config.batch.num_microbatches)
    cases.assert_close(got.total, want.total, what="J")
    cases.assert_close(got.terms, want.terms, what="terms")
    cases.assert_close(got.per_layer, want.per_layer, what="per layer")
    np.testing.assert_array_equal(got.expert_counts, want.counts_LE)
    cases.assert_close(cases.to_natural(got.grads, state), gradient, what="gradient of")


@pytest.mark.parametrize("name", ["softmax_over_the_chosen", "no_experts"])
def test_logits_equal_to_the_naive_implementation(name):
    config = cases.make_config(**CASES[name])
    params, bias = cases.natural_arrays(config)
    batch = cases.ragged_batch()
    state = cases.make_state(config, 1)
    logits = cases.run(jaxmoe.forward, state, batch)
    sums = cases.run(jaxmoe.eval_step, state, batch)
    rows = naive.compiled_rows(params, bias, batch, config=config)
    valid = batch["segment_ids"] != 0
    cases.assert_close(np.asarray(logits)[valid], np.asarray(rows.logits_SV)[valid])
    cases.assert_close(sums.loss_sum, (batch["loss_mask"] * np.asarray(rows.ce_S)).sum())
    assert float(sums.weight_sum) == batch["loss_mask"].sum()
    assert jax.tree.leaves(sums)[0].dtype == np.float64
