"""What a real step reports where the answer is known: balanced routing, lost choices, two models in turn."""

from typing import Any

import jax
import numpy as np
import pytest

import jaxmoe
from jaxmoe.model.router import router_stats
from tests.layouts.mutations import Mutation, applied
from tests.reference import cases

BALANCE = ("load_balancing_loss", "seq_load_balancing_loss", "global_load_balancing_loss")
EXPERTS = 8


@pytest.fixture(scope="module", autouse=True)
def float64():
    with cases.float64():
        yield


def balanced_batch() -> dict[str, np.ndarray]:
    """Rows of eight documents of two tokens: ids 0 to 7 once as a first and once as a second token."""
    random, rows = np.random.default_rng(0), 8
    pairs = np.stack([random.permuted(np.tile(np.arange(EXPERTS), (rows, 1)), axis=1) for _ in range(2)], axis=2)
    shape = (rows, 2 * EXPERTS)
    first = np.tile([1, 0], (rows, EXPERTS)).astype(np.float32)
    return {
        "inputs": pairs.reshape(shape).astype(np.int32),
        "targets": np.roll(pairs.reshape(shape), -1, axis=1).astype(np.int32),
        "loss_mask": first,
        "positions": (1 - first).astype(np.int32),
        "segment_ids": np.tile(np.repeat(np.arange(1, EXPERTS + 1), 2), (rows, 1)).astype(np.int32),
    }


def routing_by_id(config: Any, gate: float) -> tuple[Any, Any]:
    """Weights with which token v chooses experts v and v + 1, in every layer; with `gate` 0, all experts alike."""
    params, bias = cases.natural_arrays(config)
    width = config.model.d_model
    preferred = gate * (np.eye(width, EXPERTS) + np.eye(width, EXPERTS, -1) + np.eye(width, EXPERTS, EXPERTS - 1))
    preferred[EXPERTS:] = 0
    if gate:
        assert (np.roll(preferred[:EXPERTS], -1, axis=0) == np.roll(preferred[:EXPERTS], 1, axis=1)).all()

    def value(path: tuple, leaf: np.ndarray) -> np.ndarray:
        name = path[-1].key
        if name == "table_VD":
            return np.eye(*leaf.shape)
        if name == "gate_DE":
            return np.broadcast_to(preferred, leaf.shape).copy()
        if name == "join_2DF":
            return np.stack([np.eye(width), np.zeros((width, width))])
        # The stream stays what the embedding made it.
        zeroed = ("o_NHD", "down_FD", "down_EFD")
        return np.zeros_like(leaf) if name in zeroed else np.ones_like(leaf) if "scale" in name else leaf

    return jax.tree_util.tree_map_with_path(value, params), jax.tree.map(np.zeros_like, bias)


#: Settings of the config, devices, layers with experts.
BALANCED: dict[str, tuple[dict[str, Any], int, list[int]]] = {
    "softmax_every_layer": ({"layers": 2, "moe": {"num_dense_layers": 0}, "router": {}}, 1, [0, 1]),
    "sigmoid_some_layers_mtp_on_a_mesh": (
        {
            "layers": 4,
            "moe": {"layer_pattern": [1, 0, 1]},
            "router": cases.SIGMOID_BIAS,
            "model": {"mtp": {"num_depths": 1}},
            "objective": {"calculate_per_token_loss": False},
            "microbatches": 2,
            "dp": 2,
            "sp": 2,
            "tp": 2,
        },
        8,
        [1, 3, 4],
    ),
}


@pytest.mark.parametrize("case", BALANCED)
def test_balanced_routing_reports_one(case):
    settings, devices, owning = BALANCED[case]
    config, batch = cases.make_config(**settings), balanced_batch()

    def step(gate: float):
        state = cases.make_state(config, devices, routing_by_id(config, gate))
        return cases.run(jaxmoe.train_step, state, batch)[1]

    metrics = step(gate=2.0)
    scalars, layers = metrics.scalars(), metrics.per_layer()
    ones = np.isin(np.arange(len(layers["z_loss"])), owning).astype(float)
    counts = np.asarray(metrics.expert_counts)
    assert (counts[owning] == counts[owning][:, :1]).all()
    assert counts[owning].min(axis=1).tolist() == [32 if owner < config.model.num_layers else 16 for owner in owning]
    for name in (*BALANCE, "load_max_over_mean"):
        assert scalars[name] == pytest.approx(1.0, abs=1e-14), name
        np.testing.assert_allclose(layers[name], ones, rtol=0, atol=1e-14, err_msg=name)
    assert [scalars[name] for name in ("load_variation", "dead_experts", "dropped_share")] == [0, 0, 0]
    # Scores that are all alike, whatever is chosen: numbers without rounding, so exactly one.
    alike = step(gate=0.0)
    scalars, layers = alike.scalars(), alike.per_layer()
    assert scalars["load_max_over_mean"] > 1
    for name in BALANCE:
        assert scalars[name] == 1.0
        np.testing.assert_array_equal(layers[name], ones, err_msg=name)
    assert scalars["router_entropy"] == pytest.approx(np.log(EXPERTS), rel=1e-14)
    assert scalars["top1_weight"] == 0.5


def test_means_over_tokens_and_over_targets_are_of_what_is_valid_in_the_step():
    """Depth 1 of MTP sees the vector of the next token alone, so what it predicts is a row of the head."""
    settings, devices, owning = BALANCED["sigmoid_some_layers_mtp_on_a_mesh"]
    config, random = cases.make_config(**settings), np.random.default_rng(3)
    params, bias = routing_by_id(config, 2.0)
    row_of_id = params["head"]["weight_DV"][:EXPERTS]
    shape, lengths = (8, cases.SEQ), np.array([16, 3, 9, 0, 16, 1, 12, 7])
    valid = np.arange(cases.SEQ) < lengths[:, None]
    inputs = random.integers(0, EXPERTS, shape)
    best = row_of_id.argmax(axis=1)[inputs]
    targets = np.where(random.random(shape) < 0.5, best, random.integers(0, cases.VOCAB, shape))
    mask = random.choice([0.0, 0.5, 1.0], shape) * (np.arange(cases.SEQ) < lengths[:, None] - 1)
    batch = {
        "inputs": inputs.astype(np.int32),
        "targets": targets.astype(np.int32),
        "loss_mask": mask.astype(np.float32),
        "positions": np.where(valid, np.arange(cases.SEQ), 0).astype(np.int32),
        "segment_ids": valid.astype(np.int32),
    }
    state = cases.make_state(config, devices, (params, bias))
    metrics = cases.run(jaxmoe.train_step, state, batch)[1]
    scalars, layers = metrics.scalars(), metrics.per_layer()
    hits = (mask * (best == targets))[:, 1:].sum() / mask[:, 1:].sum()
    assert 0.3 < hits < 0.8
    assert scalars["mtp_acceptance"] == pytest.approx(hits, rel=1e-12)
    assert (scalars["valid_tokens"], scalars["target_tokens"]) == (valid.sum(), mask.sum())
    # Every token has the same two scores, sigmoid(8), among six of sigmoid(0).
    scores = 1 / (1 + np.exp(-np.array([8.0, 8, 0, 0, 0, 0, 0, 0])))
    scores /= scores.sum()
    ones = np.isin(np.arange(len(layers["z_loss"])), owning)
    np.testing.assert_allclose(layers["router_entropy"], -(scores * np.log(scores)).sum() * ones, rtol=1e-6)
    np.testing.assert_allclose(layers["top1_weight"], 0.5 * ones, rtol=1e-12)


@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
def test_entropy_and_largest_weight_are_those_of_numpy(function):
    random = np.random.default_rng(5)
    logits, weights, valid = random.normal(size=(3, 4, 8)), random.random((3, 4, 2)), random.random((3, 4)) < 0.6
    experts = random.permuted(np.tile(np.arange(8), (3, 4, 1)), axis=2)[..., :2]
    stats = router_stats(*(jax.numpy.asarray(a) for a in (logits, experts, weights, valid)), function)
    scores = np.exp(logits) if function == "softmax" else 1 / (1 + np.exp(-logits))
    scores /= scores.sum(axis=-1, keepdims=True)
    entropy = -(scores * np.log(scores)).sum(axis=-1)
    assert float(stats.entropy_sum) == pytest.approx(entropy[valid].sum(), rel=1e-12)
    assert float(stats.top1_sum) == pytest.approx(weights.max(axis=-1)[valid].sum(), rel=1e-12)


def test_choices_that_reach_no_expert_are_the_dropped_share():
    """The experts are made to miss the first of those held on each rank."""
    lossy = Mutation(
        "an expert lost",
        "model.moe:Experts.__call__",
        "(local >= 0) & (local",
        "(local > 0) & (local",
        "ep=2",
        "verify",
    )
    config = cases.make_config(router=cases.SIGMOID_BIAS, microbatches=2, ep=2, tp=2, experts_over="ep", remat="none")
    state, batch = cases.make_state(config, 4), cases.ragged_batch()
    with applied(lossy):
        metrics = jaxmoe.train_step(state, jaxmoe.Batch.from_numpy(batch, state.mesh))[1]
        counts, shares = np.asarray(metrics.expert_counts), metrics.per_layer()["dropped_share"]
    lost = counts[:, 0] + counts[:, EXPERTS // 2]
    assert (lost[1:] > 0).all()
    np.testing.assert_array_equal(shares, [0, *(lost[1:] / counts[1:].sum(axis=1))])
    assert metrics.scalars()["dropped_share"] == pytest.approx(shares[1:].mean(), rel=1e-15)
    # The range of the biases that the step routed with, not of those that it leaves.
    (bias_RE,) = jax.tree.leaves(cases.natural_arrays(config)[1])
    np.testing.assert_array_equal(metrics.per_layer()["router_bias_range"], [0, *np.ptp(bias_RE, axis=1)])


def test_models_trained_in_turn_report_what_each_reports_alone():
    """Of different depths, in one process."""
    batch = cases.ragged_batch()
    configs = [cases.make_config(router=cases.SIGMOID_BIAS, layers=layers) for layers in (2, 4)]

    def step(state: Any) -> tuple[Any, tuple]:
        state, metrics = cases.run(jaxmoe.train_step, state, batch)
        return state, (metrics.scalars(), metrics.per_layer())

    alone = []
    for config in configs:
        state, reports = cases.make_state(config, 1), []
        for _ in range(2):
            state, report = step(state)
            reports.append(report)
        alone.append(reports)
    states = [cases.make_state(config, 1) for config in configs]
    for turn in range(2):
        for which in (1, 0):
            states[which], report = step(states[which])
            np.testing.assert_equal(report, alone[which][turn])
    assert [len(reports[0][1]["z_loss"]) for reports in alone] == [2, 4]
