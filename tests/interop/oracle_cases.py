"""Whole tiny models of the float64 oracle (PyTorch, no JAX): their numbers, and their folders as states."""

import json
from functools import lru_cache
from pathlib import Path
from unittest.mock import patch

import jax
import numpy as np

import jaxmoe
from jaxmoe.losses.objective import CROSS_ENTROPY
from jaxmoe.step.batch import Batch
from jaxmoe.step.state import TrainState
from jaxmoe.step.train import loss_and_grads
from tests.golden import oracle_io

FOLDER = Path(__file__).parent.parent / "golden" / "oracle"
MODELS = ("qwen3_moe", "deepseek_v3", "deepseek_v32")
TERMS = ("seq_aux_loss", "aux_loss", "global_aux_loss", "z_loss")
MODES = {
    "true": ["objective.calculate_per_token_loss=true"],
    "false": ["objective.calculate_per_token_loss=false"],
    "false_balance_false": ["objective.calculate_per_token_loss=false", "objective.balance_dp_token=false"],
}
STEPS = [(mode, microbatches) for mode in MODES for microbatches in (1, 2, 4)]
#: Plain descent, as the oracle steps.
SGD = ["optimizer={kind: sgd, learning_rate: 0.1, clip_norm: null, weight_decay: 0, schedule: {kind: constant}}"]


@lru_cache
def oracle(name: str) -> tuple[dict, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(meta, batch, expected) of a model."""
    arrays = []
    for file in ("batch.npz", "expected.npz"):
        with np.load(FOLDER / name / file) as opened:
            arrays.append({key: opened[key] for key in opened.files})
    return json.loads((FOLDER / name / "meta.json").read_text()), *arrays


def terms_of(name: str) -> tuple[str, ...]:
    """The terms of the objective beside the cross-entropy that a model has."""
    return (*TERMS, "indexer_loss") if oracle(name)[0].get("indexer_layers") else TERMS


def tag_of(mode: str, microbatches: int) -> str:
    """Of gradients; with one micro-batch both normalisations are the same, and stored once."""
    return "true_M1" if (mode, microbatches) == ("false", 1) else f"{mode}_M{microbatches}"


def _own_overrides(meta: dict) -> list[str]:
    found = []
    if meta.get("indexer_layers"):
        found.append(f"model.attention.dsa.indexer_loss_coeff={meta['coef']['indexer_loss']}")
        found.append(f"model.attention.dsa.indexer_loss={meta['indexer_loss_variant']}")
    if meta["has_router_bias"]:
        found.append(f"model.moe.router.bias_update_rate={meta['coef']['bias_rate']}")
    return found


def load(
    name: str, mode: str, microbatches: int, sizes: dict[str, int], more: tuple[str, ...] = ()
) -> tuple[TrainState, Batch]:
    """A model's folder and its batch on a mesh of these sizes (1 where not given), with the oracle's coefficients."""
    meta, batch, _ = oracle(name)
    coefficients = {f"{term}_coeff": meta["coef"][term] for term in TERMS}
    sizes = {axis: sizes.get(axis, 1) for axis in ("pp", "dp", "ep", "sp", "tp")}
    overrides = [
        "model.param_dtype=float64",
        "model.compute_dtype=float64",
        f"batch={{global_batch_size: {meta['G']}, seq_len: {meta['S']}, num_microbatches: {microbatches}}}",
        f"objective.replicas={meta['R']}",
        *SGD,
        *MODES[mode],
        *(f"model.moe.router.{key}={value}" for key, value in coefficients.items()),
        *(f"parallel.{axis}={size}" for axis, size in sizes.items()),
        *_own_overrides(meta),
        *more,
    ]
    config = jaxmoe.load_hf_config(FOLDER / name, overrides)
    mesh = jaxmoe.make_mesh(config, jax.devices()[: int(np.prod(list(sizes.values())))])
    state = jaxmoe.load_hf(FOLDER / name, mesh, overrides)
    return state, jaxmoe.Batch.from_numpy(batch, mesh)


def close(got, want, name: str) -> None:
    """Rounding: 1e-10 of the largest number of each array."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-10 * max(np.abs(want).max(), 1e-3), err_msg=name)


def close_stats(name: str, tree: dict[str, np.ndarray], rows: np.ndarray) -> None:
    """Tensors by name against the oracle's three numbers of each: sum, norm, product with cosines."""
    names = [str(item) for item in oracle(name)[2]["param_names"]]
    assert sorted(tree) == sorted(names)
    for item, row in zip(names, rows, strict=True):
        # Sums of many numbers: compared by their size, not their own.
        size = max(np.abs(tree[item]).sum(), 1e-3)
        np.testing.assert_allclose(oracle_io.stat(tree[item]), row, rtol=0, atol=1e-9 * size, err_msg=item)


def term_gradients(state: TrainState, batch: Batch) -> dict[str, dict[str, np.ndarray]]:
    """The gradient of each term alone, by the names of the checkpoint: {term: {tensor: array}}.

    J is linear in the coefficients. One program serves all: it takes them as arguments, where a step has constants.
    """
    names = terms_of(state.config.model.from_hf.rpartition("/")[2])

    @jax.jit
    def gradients(values: dict[str, jax.Array]):
        with patch("jaxmoe.step.parts.term_coefficients", lambda _: values):
            return loss_and_grads.__wrapped__(state, batch).grads

    def one(chosen: str) -> dict[str, np.ndarray]:
        coefficients = {name: np.float64(name == chosen) for name in names}
        return jaxmoe.to_hf_tree(gradients(coefficients), state.config)

    main = one(CROSS_ENTROPY)
    alone = {name: {key: value - main[key] for key, value in one(name).items()} for name in names}
    return alone | {"ce": main}
