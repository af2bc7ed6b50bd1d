"""Whole tiny models in float64, loaded as Hugging Face folders, against an oracle in PyTorch: all of the objective.

The oracle computes in float64 without JAX; differences are rounding, 1e-10 of the largest number of each array.
"""

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxmoe
from tests.golden import oracle_io
from tests.reference.cases import float64

FOLDER = Path(__file__).parent.parent / "golden" / "oracle"
MODELS = ("qwen3_moe", "deepseek_v3", "deepseek_v32")
TERMS = ("seq_aux_loss", "aux_loss", "global_aux_loss", "z_loss")
REPLICAS = 2
MODES = {
    "true": ["objective.calculate_per_token_loss=true"],
    "false": ["objective.calculate_per_token_loss=false"],
    "false_balance_false": ["objective.calculate_per_token_loss=false", "objective.balance_dp_token=false"],
}
STEPS = [(mode, microbatches) for mode in MODES for microbatches in (1, 2, 4)]
#: With as many replicas as the oracle has.
MESHES = [{"dp": 2, "sp": 2, "tp": 2}, {"pp": 2, "ep": 2, "tp": 2}]


@pytest.fixture(scope="module", autouse=True)
def wide():
    with float64():
        yield


@lru_cache
def oracle(name):
    """(meta, batch, expected) of a model."""
    arrays = []
    for file in ("batch.npz", "expected.npz"):
        with np.load(FOLDER / name / file) as opened:
            arrays.append({key: opened[key] for key in opened.files})
    return json.loads((FOLDER / name / "meta.json").read_text()), *arrays


def terms_of(name):
    return (*TERMS, "indexer_loss") if oracle(name)[0].get("indexer_layers") else TERMS


def indexer_overrides(meta):
    if not meta.get("indexer_layers"):
        return []
    coefficient = f"model.attention.dsa.indexer_loss_coeff={meta['coef']['indexer_loss']}"
    return [coefficient, f"model.attention.dsa.indexer_loss={meta['indexer_loss_variant']}"]


def load(name, mode, microbatches, sizes, more=()):
    meta, batch, _ = oracle(name)
    coefficients = {f"{term}_coeff": meta["coef"][term] for term in TERMS}
    sizes = {axis: sizes.get(axis, 1) for axis in ("pp", "dp", "ep", "sp", "tp")}
    overrides = [
        "model.param_dtype=float64",
        "model.compute_dtype=float64",
        f"batch={{global_batch_size: {meta['G']}, seq_len: {meta['S']}, num_microbatches: {microbatches}}}",
        f"objective.replicas={REPLICAS}",
        "optimizer.kind=sgd",
        *MODES[mode],
        *(f"model.moe.router.{key}={value}" for key, value in coefficients.items()),
        *(f"parallel.{axis}={size}" for axis, size in sizes.items()),
        *indexer_overrides(meta),
        *more,
    ]
    config = jaxmoe.load_hf_config(FOLDER / name, overrides)
    mesh = jaxmoe.make_mesh(config, jax.devices()[: int(np.prod(list(sizes.values())))])
    state = jaxmoe.load_hf(FOLDER / name, mesh, overrides)
    return state, jaxmoe.Batch.from_numpy(batch, mesh)


def close(got, want, name):
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-10 * max(np.abs(want).max(), 1e-3), err_msg=name)


def check(name, mode, microbatches, sizes):
    meta, _, expected = oracle(name)
    state, batch = load(name, mode, microbatches, sizes)
    out = jaxmoe.loss_and_grads(state, batch)
    step = f"step/{mode}_M{microbatches}/"
    close(out.total, expected[step + "J"], "J")
    close(out.terms["cross_entropy"], expected[step + "ce"], "ce")
    gradients = jaxmoe.to_hf_tree(out.grads, state.config)
    names = [str(item) for item in expected["param_names"]]
    assert sorted(gradients) == sorted(names)
    # One micro-batch: both normalisations are the same, and stored once.
    tag = "true_M1" if (mode, microbatches) == ("false", 1) else f"{mode}_M{microbatches}"
    for row, item in zip(expected[f"gradstat/J/{tag}"], names, strict=True):
        flat = gradients[item].reshape(-1)
        found = [flat.sum(), np.linalg.norm(flat), flat @ np.cos(np.arange(flat.size))]
        # Sums of many numbers: compared by their size, not their own.
        np.testing.assert_allclose(found, row, rtol=0, atol=1e-9 * max(np.abs(flat).sum(), 1e-3), err_msg=item)
    if mode == "false_balance_false":
        return
    for term in terms_of(name):
        close(out.terms[term], expected[f"{step}term/{term}"], term)
        close(out.per_layer[term], expected[f"{step}per_layer/{term}"], term)
    for item, want in oracle_io.unflatten(meta, expected, expected[f"grad/{tag}"]).items():
        close(gradients[item], want, item)
    params = jax.tree.map(lambda p, g: p - 0.1 * g, state.params, out.grads)
    after = jaxmoe.loss_and_grads(replace(state, params=params), batch)
    close(after.terms["cross_entropy"], expected[step + "ce_after_sgd_bias_old"], "ce after SGD")


@pytest.mark.parametrize(("mode", "microbatches"), STEPS)
@pytest.mark.parametrize("name", MODELS)
def test_objective_and_gradients(name, mode, microbatches):
    check(name, mode, microbatches, {})


@pytest.mark.slow
@pytest.mark.parametrize("sizes", MESHES, ids=lambda sizes: "_".join(f"{axis}{size}" for axis, size in sizes.items()))
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_objective_and_gradients_on_eight_devices(name, mode, sizes):
    check(name, mode, 4, sizes)


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_counts(name):
    meta, fields, expected = oracle(name)
    state, batch = load(name, "true", 1, {})
    live = fields["segment_ids"][0] != 0
    close(np.asarray(jaxmoe.forward(state, batch))[0][live], expected["fwd/logits_row0"][live], "logits")
    sums = jaxmoe.eval_step(state, batch)
    close(sums.loss_sum, (expected["fwd/ce_tokens"] * fields["loss_mask"]).sum(), "sum of CE")
    counts = np.asarray(jaxmoe.loss_and_grads(state, batch).expert_counts)
    for layer in meta["moe_layers"]:
        np.testing.assert_array_equal(counts[layer], expected[f"bias/counts_layer{layer}"])


@pytest.mark.parametrize(("mode", "microbatches"), [("true", 1), ("false", 4)])
def test_indexer_loss_over_the_chosen_keys(mode, microbatches):
    meta, _, expected = oracle("deepseek_v32")
    only = ["model.attention.dsa.indexer_loss=sparse", "model.attention.dsa.indexer_loss_coeff=1.0"]
    state, batch = load("deepseek_v32", mode, microbatches, {}, only)
    out = jaxmoe.loss_and_grads(state, batch)
    close(out.per_layer["indexer_loss"], expected[f"step/{mode}_M{microbatches}/per_layer/indexer_loss_sparse"], "KL")
    gradients = jaxmoe.to_hf_tree(out.grads, state.config)
    flat = expected[f"grad_indexer_sparse/{mode}_M{microbatches}"]
    for item, want in oracle_io.unflatten(meta, expected, flat, ".indexer.").items():
        close(gradients[item], want, item)
