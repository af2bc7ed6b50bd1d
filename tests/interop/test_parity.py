"""Numbers of Hugging Face's implementations: hidden states, routing, logits, loss, gradients, one SGD step.

Tolerances are those of the golden vectors' own README: what their makers saw between kernels, times about ten.
"""

from dataclasses import replace

import jax
import numpy as np
import pytest

import jaxmoe
from tests.interop import golden_cases as goldens

#: Two meshes of eight devices; a pipeline needs as many micro-batches as stages.
MESHES = {"tp2_ep2_sp2": {"tp": 2, "ep": 2, "sp": 2}, "pp2_tp2_dp2": {"pp": 2, "tp": 2, "dp": 2}}
#: Families that run on eight devices in the fast tests.
FAST = {("qwen3_moe", "tp2_ep2_sp2"), ("mixtral", "pp2_tp2_dp2")}


@pytest.fixture(scope="module", autouse=True)
def exact_products():
    # Layers broadcast vectors over tokens.
    with jax.default_matmul_precision("highest"), jax.numpy_rank_promotion("allow"):
        yield


def live_of(arrays):
    return (
        arrays["attention_mask"].astype(bool) if "attention_mask" in arrays else np.ones(arrays["labels"].shape, bool)
    )


def load(family, arrays, sizes):
    batch, length = arrays["labels"].shape
    unit = sizes.get("dp", 1) * sizes.get("ep", 1) * sizes.get("pp", 1)
    rows = -(-batch // unit) * unit
    state = goldens.load(family, sizes, (rows, length))
    fields = goldens.batch_fields(arrays, rows)
    return state, fields, jaxmoe.Batch.from_numpy(fields, state.mesh)


def check_logits(state, batch, arrays):
    logits = np.asarray(jaxmoe.forward(state, batch))[: len(arrays["logits"])]
    goldens.close(logits, arrays["logits"], "logits", live_of(arrays))


def check_inside(state, fields, arrays):
    found, live = goldens.look(state, fields), live_of(arrays)
    rows = len(arrays["labels"])
    for name in ("hidden", "final_hidden", "attn_out", "mlp_out", "router_logits"):
        if name in arrays and arrays[name].size:
            got = found[name][:rows] if name == "final_hidden" else found[name][:, :rows]
            goldens.close(got, arrays[name], name, live)
    if "index_scores" in arrays:
        got = {name: found[name][:, :rows] for name in ("index_scores", "index_selected")}
        goldens.close(got["index_scores"], arrays["index_scores"], "index_scores", live)
        np.testing.assert_array_equal(got["index_selected"][:, live], arrays["index_selected"][:, live])
    if "topk_idx" in arrays and arrays["topk_idx"].size:
        np.testing.assert_array_equal(found["topk_idx"][:, :rows][:, live], arrays["topk_idx"][:, live])
        weights = [value[:, live] for value in (found["topk_weight"][:, :rows], arrays["topk_weight"])]
        np.testing.assert_allclose(*weights, rtol=0, atol=2e-5)


def check_gradients(gradients, arrays):
    names = [str(name) for name in arrays["gradstat_names"]]
    assert set(names) <= set(gradients)
    for name, norm, product in zip(names, arrays["gradstat_l2"], arrays["gradstat_cosdot"], strict=True):
        flat = gradients[name].astype(np.float64).reshape(-1)
        np.testing.assert_allclose(np.linalg.norm(flat), norm, rtol=3e-4, atol=1e-6, err_msg=name)
        assert abs(flat @ np.cos(np.arange(flat.size)) - product) <= 3e-4 * norm + 1e-5, name
    for key in arrays:
        if key.startswith("grad:"):
            goldens.close(gradients[key.removeprefix("grad:")], arrays[key], key)


def check_loss(state, batch, arrays):
    """Loss and gradients, and the loss after one step of plain SGD where the goldens have it."""
    out = jaxmoe.loss_and_grads(state, batch)
    assert abs(float(out.total) - arrays["loss"]) <= 2e-5
    check_gradients(jaxmoe.to_hf_tree(out.grads, state.config), arrays)
    if "loss_after_sgd" in arrays:
        params = jax.tree.map(lambda p, g: p - goldens.RATE * g, state.params, out.grads)
        after = jaxmoe.loss_and_grads(replace(state, params=params), batch)
        assert abs(float(after.total) - arrays["loss_after_sgd"]) <= 1e-4
    return out


@pytest.mark.parametrize(("family", "case"), goldens.ALL)
def test_one_device(family, case):
    arrays = goldens.golden(family, case)
    state, fields, batch = load(family, arrays, {})
    check_inside(state, fields, arrays)
    check_logits(state, batch, arrays)
    out = check_loss(state, batch, arrays)
    assert float(batch.loss_mask.sum()) == arrays["n_target_tokens"]
    if state.config.model.moe is not None and "topk_idx" in arrays:
        chosen = arrays["topk_idx"][:, live_of(arrays)]
        experts = state.config.model.moe.num_experts
        want = np.stack([np.bincount(layer.reshape(-1), minlength=experts) for layer in chosen])
        np.testing.assert_array_equal(np.asarray(out.expert_counts)[arrays["moe_layers"]], want)


@pytest.mark.parametrize("family", [f for f in goldens.CASES if "aux_loss" in goldens.golden(f, "base")])
def test_balance_loss_as_the_library_pools_it(family):
    arrays = goldens.golden(family, "base")
    state, fields, _ = load(family, arrays, {})
    value, gradients = goldens.pooled_balance(state, fields)
    assert abs(value - arrays["aux_loss"]) <= 2e-5
    for key in arrays:
        if key.startswith("gradaux:"):
            goldens.close(gradients[key.removeprefix("gradaux:")], arrays[key], key)


def test_our_balance_loss_is_the_library_s_per_layer_over_k():
    arrays = goldens.golden("qwen3_moe", "base")
    batch, length = arrays["labels"].shape
    state = goldens.load("qwen3_moe", {}, (batch, length), "model.moe.router.aux_loss_coeff=0.01")
    fields = goldens.batch_fields(arrays)
    out = jaxmoe.loss_and_grads(state, jaxmoe.Batch.from_numpy(fields, state.mesh))
    per_layer = np.asarray(out.per_layer["aux_loss"])[arrays["moe_layers"]]
    np.testing.assert_allclose(per_layer, arrays["aux_loss_per_layer"] / 2, rtol=0, atol=2e-5)


@pytest.mark.parametrize(("kind", "stage"), [("dense", "warmup"), ("sparse", "sparse")])
def test_what_an_indexer_learns(kind, stage):
    """The golden vectors' own derivation from the report of DeepSeek-V3.2; the library has no such loss."""
    arrays, derived = goldens.golden("deepseek_v32", "base"), goldens.golden("deepseek_v32", "dsa_derived")
    own = (f"model.attention.dsa.stage={stage}", f"model.attention.dsa.indexer_loss={kind}")
    state = goldens.load("deepseek_v32", {}, arrays["labels"].shape, *own, "model.attention.dsa.indexer_loss_coeff=1")
    out = jaxmoe.loss_and_grads(state, jaxmoe.Batch.from_numpy(goldens.batch_fields(arrays), state.mesh))
    goldens.close(out.per_layer["indexer_loss"], derived[f"{kind}.kl"].mean((1, 2)), "KL")
    goldens.close(out.terms["indexer_loss"], derived[f"{kind}.loss"], "KL")
    gradients = jaxmoe.to_hf_tree(out.grads, state.config)
    names = [key for key in derived if key.startswith(f"{kind}.grad:")]
    assert len(names) == 15
    for key in names:
        goldens.close(gradients[key.partition(":")[2]], derived[key], "grad")


ON_EIGHT = [
    pytest.param(family, case, mesh, marks=() if (family, mesh) in FAST and case == "base" else pytest.mark.slow)
    for family, case in goldens.ALL
    for mesh in MESHES
]


@pytest.mark.parametrize(("family", "case", "mesh"), ON_EIGHT)
def test_eight_devices(family, case, mesh):
    arrays = goldens.golden(family, case)
    sizes = goldens.fitting(family, MESHES[mesh])
    state, fields, batch = load(family, arrays, sizes)
    check_logits(state, batch, arrays)
    check_loss(state, batch, arrays)
    if "pp" not in sizes:
        check_inside(state, fields, arrays)
