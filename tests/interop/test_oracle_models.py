"""Whole tiny models in float64, loaded as Hugging Face folders, against an oracle in PyTorch: all of the objective.

Not compared: `alt/*` (other readings, for diagnosis), `*/margin` (how far choices are from ties), `count/*_M*` and
`fwd/kl_*` (per micro-batch and per token: their sums are compared), `fwd/rope_*` (the logits say it).
"""

from dataclasses import replace

import jax
import numpy as np
import pytest

import jaxmoe
from jaxmoe.step.metrics import LOGGED_NAMES
from jaxmoe.step.train import probe_step
from tests.golden import oracle_io
from tests.interop import golden_cases as goldens
from tests.interop.oracle_cases import (
    MODELS,
    MODES,
    STEPS,
    close,
    close_stats,
    load,
    oracle,
    tag_of,
    term_gradients,
    terms_of,
)
from tests.reference.cases import float64

#: With as many replicas as the oracle has.
MESHES = [{"dp": 2, "sp": 2, "tp": 2}, {"pp": 2, "ep": 2, "tp": 2}]
#: Gradients of single terms; with one micro-batch both modes are the same.
ALONE = [
    pytest.param(name, mode, number, marks=() if (name, number) == ("qwen3_moe", 4) else pytest.mark.slow)
    for name in MODELS
    for mode, number in STEPS
    if mode != "false_balance_false" and (mode, number) != ("false", 1)
]


@pytest.fixture(scope="module", autouse=True)
def wide():
    # Layers broadcast vectors over tokens.
    with float64(), jax.numpy_rank_promotion("allow"):
        yield


def check_gradients(name, tag, gradients):
    meta, _, expected = oracle(name)
    close_stats(name, gradients, expected[f"gradstat/J/{tag}"])
    if f"grad/{tag}" in expected:
        for item, want in oracle_io.unflatten(meta, expected, expected[f"grad/{tag}"]).items():
            close(gradients[item], want, item)


def check_terms(name, step, metrics):
    """What a step reports: J, the cross-entropy, each term per layer and as logged."""
    expected, scalars, per_layer = oracle(name)[2], metrics.scalars(), metrics.per_layer()
    close(scalars["total_loss"], expected[f"{step}J"], "J")
    close(scalars["loss"], expected[f"{step}ce"], "ce")
    assert scalars["target_tokens"] == expected["count/V"]
    assert scalars["valid_tokens"] == expected["count/N"]
    for term in terms_of(name) if f"{step}term/z_loss" in expected else ():
        logged = LOGGED_NAMES[term]
        close(per_layer[logged], expected[f"{step}per_layer/{term}"], term)
        close(per_layer[logged].sum(), expected[f"{step}term/{term}"], term)
        close(scalars[logged], expected[f"{step}logged/{term}"], term)


def check_bias(name, state, key):
    """The routers' biases of a state, exactly: they are float32 by contract."""
    meta, _, expected = oracle(name)
    found = jaxmoe.to_hf_tree(state.router_bias, state.config)
    assert bool(found) == meta["has_router_bias"]
    for place, layer in enumerate(meta["moe_layers"] if found else ()):
        got = found[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"]
        want = expected[key][place] if key in expected else expected[f"{key}{layer}"]
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, want)


def check_counts(name, counts):
    for layer in oracle(name)[0]["moe_layers"]:
        np.testing.assert_array_equal(np.asarray(counts)[layer], oracle(name)[2][f"bias/counts_layer{layer}"])


def three_more_steps(name, key, state, batch):
    """Descent on one batch: J and the cross-entropy on the way, the biases and parameters at the end."""
    expected = oracle(name)[2]
    for number in range(4):
        moved, metrics, _ = probe_step(state, batch)
        values = metrics.scalars()
        close(values["total_loss"], expected[f"{key}/J"][number], f"J {number}")
        close(values["loss"], expected[f"{key}/ce"][number], f"ce {number}")
        if number < 3:
            state = moved
    check_bias(name, state, f"{key}/bias")
    close_stats(name, jaxmoe.to_hf_tree(state.params, state.config), expected[f"{key}/param_stat"])


@pytest.mark.parametrize(("mode", "microbatches"), STEPS)
@pytest.mark.parametrize("name", MODELS)
def test_steps_of_descent(name, mode, microbatches):
    expected = oracle(name)[2]
    state, batch = load(name, mode, microbatches, {})
    after, metrics, gradients = probe_step(state, batch)
    step, tag = f"step/{mode}_M{microbatches}/", tag_of(mode, microbatches)
    check_terms(name, step, metrics)
    check_gradients(name, tag, jaxmoe.to_hf_tree(gradients, state.config))
    check_counts(name, metrics.expert_counts)
    check_bias(name, after, "bias/new_float32_layer")
    if f"{step}ce_after_sgd_bias_old" in expected:
        unmoved = replace(after, router_bias=state.router_bias)
        close(probe_step(unmoved, batch)[1].scalars()["loss"], expected[f"{step}ce_after_sgd_bias_old"], "after SGD")
    if f"{step}ce_after_sgd_bias_new" in expected:
        close(
            probe_step(after, batch)[1].scalars()["loss"], expected[f"{step}ce_after_sgd_bias_new"], "after SGD, bias"
        )
    if f"sgd3/{tag}/J" in expected:
        three_more_steps(name, f"sgd3/{tag}", state, batch)


@pytest.mark.parametrize(("name", "mode", "microbatches"), ALONE)
def test_the_gradient_of_each_term_alone(name, mode, microbatches):
    found = term_gradients(*load(name, mode, microbatches, {}))
    assert set(found) == {*terms_of(name), "ce"}
    for term, gradients in found.items():
        # What the number of micro-batches does not change is stored once.
        once = term == "global_aux_loss" or (mode == "true" and term != "aux_loss")
        close_stats(
            name, gradients, oracle(name)[2][f"gradstat/{term}/{'true_M1' if once else tag_of(mode, microbatches)}"]
        )


@pytest.mark.slow
@pytest.mark.parametrize("sizes", MESHES, ids=lambda sizes: "_".join(f"{axis}{size}" for axis, size in sizes.items()))
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_a_step_of_descent_on_eight_devices(name, mode, sizes):
    state, batch = load(name, mode, 4, sizes)
    after, metrics, gradients = probe_step(state, batch)
    check_terms(name, f"step/{mode}_M4/", metrics)
    check_gradients(name, f"{mode}_M4", jaxmoe.to_hf_tree(gradients, state.config))
    check_counts(name, metrics.expert_counts)
    check_bias(name, after, "bias/new_float32_layer")
    if mode == "false":
        three_more_steps(name, "sgd3/false_M4", state, batch)


@pytest.mark.parametrize("name", MODELS)
def test_what_a_forward_pass_sees(name):
    meta, fields, expected = oracle(name)
    state, batch = load(name, "true", 1, {})
    live = fields["segment_ids"] != 0
    logits = np.asarray(jaxmoe.forward(state, batch))
    close(logits[0][live[0]], expected["fwd/logits_row0"][live[0]], "logits")
    tokens = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, fields["targets"][..., None], -1)[..., 0]
    trained = fields["loss_mask"] > 0
    close(tokens[trained], expected["fwd/ce_tokens"][trained], "CE of each token")
    close(jaxmoe.eval_step(state, batch).loss_sum, (expected["fwd/ce_tokens"] * fields["loss_mask"]).sum(), "sum")
    found = goldens.look(state, fields)
    close(found["router_logits"][:, live], expected["fwd/router_logits"][:, live], "router logits")
    np.testing.assert_array_equal(found["topk_idx"][:, live], expected["fwd/topk_idx_ascending"][:, live])
    for layer in meta["indexer_layers"]:
        want = np.unpackbits(expected[f"fwd/index_selected_layer{layer}"], axis=-1, count=live.shape[1])
        np.testing.assert_array_equal(found["index_selected"][layer][live], want[live])


@pytest.mark.parametrize(("mode", "microbatches"), [("true", 1), ("false", 4)])
def test_indexer_loss_over_the_chosen_keys(mode, microbatches):
    meta, _, expected = oracle("deepseek_v32")
    tag = f"{mode}_M{microbatches}"
    only = ("model.attention.dsa.indexer_loss=sparse", "model.attention.dsa.indexer_loss_coeff=1.0")
    state, batch = load("deepseek_v32", mode, microbatches, {}, only)
    out = jaxmoe.loss_and_grads(state, batch)
    close(out.per_layer["indexer_loss"], expected[f"step/{tag}/per_layer/indexer_loss_sparse"], "KL")
    close(out.terms["indexer_loss"], expected[f"step/{tag}/term/indexer_loss_sparse"], "KL")
    gradients = jaxmoe.to_hf_tree(out.grads, state.config)
    flat = expected[f"grad_indexer_sparse/{tag}"]
    for item, want in oracle_io.unflatten(meta, expected, flat, ".indexer.").items():
        close(gradients[item], want, item)
    close_stats(
        "deepseek_v32", term_gradients(state, batch)["indexer_loss"], expected[f"gradstat/indexer_loss_sparse/{tag}"]
    )
