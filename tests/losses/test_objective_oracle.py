"""The cross-entropy's two normalisations against float64 oracle values and gradients; a step without targets."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe.config.schema import Objective
from jaxmoe.losses.cross_entropy import cross_entropy_sum, cross_entropy_terms
from jaxmoe.losses.objective import CROSS_ENTROPY, count_step, term_weights
from jaxmoe.spmd.axes import AXES
from jaxmoe.spmd.collectives import sum_partial, to_varying
from jaxmoe.spmd.program import build_mesh, manual
from tests.golden.oracle_io import load_function
from tests.reference import cases
from tests.reference.naive import FAST_COMPILE

ORACLE = Path(__file__).parents[1] / "golden" / "oracle"
_, _, CE = load_function(ORACLE / "ce_objective.npz")
_, _, EXAMPLE = load_function(ORACLE / "ce_example_10_5_4_1.npz")
GRID = [(m, r) for m in (1, 2, 4) for r in (1, 2, 4)]


@pytest.fixture(scope="module", autouse=True)
def float64():
    with cases.float64():
        yield


def on_mesh(case: dict, objective: Objective, microbatches: int, dp: int, sp: int = 1):
    """J and its gradient by the logits; the logits are the hidden states of an identity head."""
    vocab = case["in/logits"].shape[-1]
    rows, seq = case["in/targets"].shape

    def body(logits, targets, mask, valid):
        weights = term_weights(count_step(mask, valid, objective, jnp.float64), objective)[CROSS_ENTROPY][:, 0]
        head = to_varying(jnp.eye(vocab), AXES)

        def part(logits):
            sums = [
                cross_entropy_sum(logits[m].reshape(-1, vocab), head, targets[m].reshape(-1), mask[m].reshape(-1))
                for m in range(microbatches)
            ]
            return sum(weight * value for weight, value in zip(weights, sums, strict=True))

        value, gradient = jax.value_and_grad(part)(logits)
        return sum_partial(value, AXES), gradient

    sizes = dict.fromkeys(AXES, 1) | {"dp": dp, "sp": sp}
    mesh = build_mesh(sizes, jax.devices()[: dp * sp])
    tokens, logits = P(None, "dp", "sp"), P(None, "dp", "sp", None)
    program = jax.jit(
        manual(body, mesh, (logits, tokens, tokens, tokens), (P(), logits)), compiler_options=FAST_COMPILE
    )
    arrays = (case["in/logits"], case["in/targets"].astype(np.int32), case["in/loss_mask"], case["in/segment_ids"] != 0)
    value, gradient = program(*(a.reshape(microbatches, rows // microbatches, *a.shape[1:]) for a in arrays))
    return value, np.asarray(gradient).reshape(rows, seq, vocab)


def check(got, case: dict, value_key: str, gradient_key: str) -> None:
    np.testing.assert_allclose(got[0], case[f"out/{value_key}"], rtol=1e-9)
    want = case[f"grad/{gradient_key}"]
    np.testing.assert_allclose(got[1], want, rtol=0, atol=1e-9 * np.abs(want).max())


@pytest.mark.parametrize(("microbatches", "dp"), GRID)
def test_one_denominator(microbatches, dp):
    sp = 2 if dp < 4 else 1
    check(on_mesh(CE, Objective(), microbatches, dp, sp), CE, "J_true", "J_true")


@pytest.mark.parametrize(("microbatches", "dp"), GRID)
def test_mean_of_microbatch_means(microbatches, dp):
    got = on_mesh(CE, Objective(calculate_per_token_loss=False), microbatches, dp, 2 if dp < 4 else 1)
    name = f"J_false_balance_true_M{microbatches}"
    check(got, CE, name, "J_true" if microbatches == 1 else name)


@pytest.mark.parametrize(("microbatches", "dp"), GRID)
def test_mean_of_replica_means(microbatches, dp):
    objective = Objective(calculate_per_token_loss=False, balance_dp_token=False)
    got = on_mesh(CE, objective, microbatches, dp, 2 if dp < 4 else 1)
    name = f"J_false_balance_false_M{microbatches}_R{dp}"
    pooled = "J_true" if microbatches == 1 else f"J_false_balance_true_M{microbatches}"
    check(got, CE, name, pooled if dp == 1 else name)


@pytest.mark.parametrize("sp", [1, 2])
def test_example_of_two_replicas(sp):
    means = Objective(calculate_per_token_loss=False)
    check(on_mesh(EXAMPLE, Objective(), 1, 2, sp), EXAMPLE, "J_true", "J_true")
    check(on_mesh(EXAMPLE, means, 1, 2, sp), EXAMPLE, "J_false_balance_true", "J_false_balance_true")
    by_replica = Objective(calculate_per_token_loss=False, balance_dp_token=False)
    name = "J_false_balance_false_R2"
    check(on_mesh(EXAMPLE, by_replica, 1, 2, sp), EXAMPLE, name, name)
    assert float(EXAMPLE["out/J_true"]) == pytest.approx(7 / 3, abs=1e-6)


def test_cross_entropy_of_each_token():
    mesh = build_mesh(dict.fromkeys(AXES, 1), jax.devices()[:1])
    logits = CE["in/logits"]
    head = np.eye(logits.shape[-1])
    program = manual(lambda *arrays: cross_entropy_terms(*arrays)[0], mesh, (P(), P(), P()), P())
    got = program(logits.reshape(-1, len(head)), head, CE["in/targets"].reshape(-1).astype(np.int32))
    valid = CE["in/segment_ids"].reshape(-1) != 0
    np.testing.assert_allclose(np.asarray(got)[valid], CE["out/ce_tokens"].reshape(-1)[valid], rtol=1e-9)


def test_no_target_gives_zero_and_no_gradient():
    _, _, case = load_function(ORACLE / "ce_skipped_step.npz")
    assert case["out/V"] == 0
    for objective in (Objective(), Objective(calculate_per_token_loss=False), Objective(balance_dp_token=False)):
        value, gradient = on_mesh(case, objective, 1, 2)
        assert float(value) == 0
        np.testing.assert_array_equal(gradient, case["grad/logits"])


def test_a_step_without_targets_changes_nothing():
    _, _, case = load_function(ORACLE / "ce_skipped_step.npz")
    config = cases.make_config(router=cases.SIGMOID_BIAS, rows=4)
    batch = cases.ragged_batch(4)
    batch["loss_mask"][:] = 0
    state = cases.make_state(config, 1)
    before = jax.tree.map(np.asarray, (state.params, state.router_bias, state.opt_state))
    after, metrics = cases.run(jaxmoe.train_step, state, batch)
    jax.tree.map(np.testing.assert_array_equal, (after.params, after.router_bias, after.opt_state), before)
    scalars = metrics.scalars()
    assert bool(case["out/skipped"])
    assert scalars["skipped"] == scalars["skipped_in_a_row"] == 1
    assert scalars["target_tokens"] == 0
    assert scalars["valid_tokens"] == (batch["segment_ids"] != 0).sum()
    assert not {"loss", "total_loss"} & set(scalars)
    assert all(np.isfinite(value) for value in scalars.values())
    assert int(after.step) == 1
