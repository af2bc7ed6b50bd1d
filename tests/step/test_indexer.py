"""The indexers of sparse attention within a whole step: who learns from what, at what scale, and at what memory."""

from typing import Any

import jax
import numpy as np
import pytest

import jaxmoe
from jaxmoe.config.schema import Config
from tests.reference import cases

MLA = {"q_lora_rank": 8, "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
DSA = {"index_num_heads": 3, "index_head_dim": 8, "index_topk": 4, "indexer_loss": "sparse", "indexer_loss_coeff": 0.7}
NO_LOSSES = dict.fromkeys(cases.ALL_TERMS, 0.0)
MTP = {"num_depths": 1, "loss_coeff": 0.5}


@pytest.fixture(scope="module", autouse=True)
def float64():
    with cases.float64():
        yield


def config_of(dsa: dict[str, Any], **more: Any) -> Config:
    attention = {"num_kv_heads": 4, "head_dim": 10, "qk_norm": False, "mla": MLA, "dsa": DSA | dsa}
    settings: dict[str, Any] = {"router": NO_LOSSES, "model": {"mtp": MTP}, "layers": 2} | more
    return cases.make_config(attention=attention, **settings)


def by_owner(tree: Any, state: Any) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Leaves of the indexers, and of all else, by name."""
    leaves = jax.tree_util.tree_leaves_with_path(cases.to_natural(tree, state))
    named = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
    indexers = {name: leaf for name, leaf in named.items() if "'indexer'" in name}
    return indexers, {name: leaf for name, leaf in named.items() if name not in indexers}


def norm(leaves: dict[str, np.ndarray]) -> float:
    return float(np.sqrt(sum(np.square(leaf).sum() for leaf in leaves.values())))


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_the_divergence_teaches_the_indexers_alone_and_nothing_else_teaches_them(kind):
    state, batch = cases.make_state(config_of({"indexer_loss": kind}), 1), cases.ragged_batch()
    out = cases.run(jaxmoe.loss_and_grads, state, batch)
    # Without a target J is the indexers' loss alone: every other gradient must be zero.
    untrained = cases.run(jaxmoe.loss_and_grads, state, batch | {"loss_mask": np.zeros_like(batch["loss_mask"])})
    assert untrained.terms["cross_entropy"] == untrained.terms["mtp"] == 0
    assert untrained.terms["indexer_loss"] == out.terms["indexer_loss"] > 0
    assert (np.asarray(out.per_layer["indexer_loss"]) > 0).all(), "of lead, trunk and MTP layers"
    (indexers, rest), (of_all, rest_of_all) = (by_owner(run.grads, state) for run in (untrained, out))
    assert len(indexers) == 3 * 5
    for name, leaf in indexers.items():
        assert leaf.any(), name
        np.testing.assert_array_equal(leaf, of_all[name], err_msg=name)
    for name, leaf in rest.items():
        assert not leaf.any(), name
    # Routed experts may be met by no token; everything that every token meets has a gradient.
    assert all(leaf.any() for leaf in rest_of_all.values())


def test_without_its_loss_an_indexer_has_no_gradient():
    state = cases.make_state(config_of({"indexer_loss_coeff": 0.0}, router={}), 1)
    out = cases.run(jaxmoe.loss_and_grads, state, cases.ragged_batch())
    indexers, rest = by_owner(out.grads, state)
    assert not any(leaf.any() for leaf in indexers.values())
    assert all(leaf.any() for leaf in rest.values())


def _of_equal_rows() -> dict[str, np.ndarray]:
    ragged = cases.ragged_batch()
    fullest = int((ragged["loss_mask"] > 0).sum(axis=1).argmax())
    return {name: np.repeat(value[fullest : fullest + 1], len(value), axis=0) for name, value in ragged.items()}


@pytest.mark.slow
@pytest.mark.parametrize("per_token", [True, False])
def test_the_scale_of_its_gradient_does_not_depend_on_the_number_of_microbatches(per_token):
    """Per token on any batch; as a mean of means where every micro-batch has the same tokens."""
    batch = cases.ragged_batch() if per_token else _of_equal_rows()
    norms, losses = [], []
    for microbatches in (1, 2, 4, 8):
        config = config_of({}, microbatches=microbatches, objective={"calculate_per_token_loss": per_token})
        state = cases.make_state(config, 1)
        out = cases.run(jaxmoe.loss_and_grads, state, batch)
        norms.append(norm(by_owner(out.grads, state)[0]))
        losses.append(float(out.terms["indexer_loss"]))
    assert norms[0] > 0
    np.testing.assert_allclose(norms, norms[0], rtol=1e-12)
    np.testing.assert_allclose(losses, losses[0], rtol=1e-12)


def test_warm_up_trains_the_indexers_alone():
    dsa = {"stage": "warmup", "indexer_loss": "dense", "indexer_loss_coeff": 1.0}
    optimizer = {"learning_rate": 0.01, "weight_decay": 0.5, "schedule": {"kind": "constant"}}
    state = cases.make_state(config_of(dsa, router=cases.SIGMOID_BIAS, optimizer=optimizer), 1)
    before = [by_owner(tree, state) for tree in (state.params, state.router_bias)]
    new, metrics = cases.run(jaxmoe.train_step, state, cases.ragged_batch())
    after = [by_owner(tree, new) for tree in (new.params, new.router_bias)]
    assert not metrics.scalars()["skipped"]
    for (indexers, rest), (new_indexers, new_rest) in zip(before, after, strict=True):
        for name, leaf in rest.items():
            np.testing.assert_array_equal(leaf, new_rest[name], err_msg=name)
        assert all((leaf != new_indexers[name]).any() for name, leaf in indexers.items())
    assert before[0][0]
    assert before[1][1]


@pytest.mark.slow
def test_a_step_of_long_rows_holds_no_array_of_queries_by_keys():
    """Forward and backward of a whole step, rows of 5 times the chosen keys and 5 chunks of queries."""
    length, topk = 320, 64
    config = config_of({"index_topk": topk}, rows=1, layers=2, router=cases.SIGMOID_BIAS)
    config = config.model_copy(update={"batch": config.batch.model_copy(update={"seq_len": length})})
    text = cases.compiled_step(config)
    chunk = [f"64,{length}" in line or f"{length},64" in line for line in text.splitlines()]
    assert any(chunk), "the scores of a chunk"
    squares = [line for line in text.splitlines() if f"{length},{length}" in line]
    assert not squares, squares[:3]
