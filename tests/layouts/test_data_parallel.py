"""dp in {1, 2, 4, 8} x M in {1, 2, 4}: the same numbers, those of the naive implementation on one device."""

from functools import lru_cache

import jax
import numpy as np
import optax
import pytest

import jaxmoe
from tests.reference import cases, naive

ROWS = 32
GRID = [(dp, microbatches) for dp in (1, 2, 4, 8) for microbatches in (1, 2, 4)]
OPTIMIZER = {"learning_rate": 0.01, "clip_norm": 0.5, "weight_decay": 0.1, "schedule": {"kind": "constant"}}
#: Neither term that needs more than one micro-batch or depends on the split: J is a sum over micro-batches.
SPLIT_FREE = cases.SIGMOID_BIAS | {"aux_loss_coeff": 0.0, "global_aux_loss_coeff": 0.0}
STEPS = 3


@pytest.fixture(scope="module", autouse=True)
def float64():
    with cases.float64():
        yield


def config_of(dp: int, microbatches: int, router: dict, **objective):
    return cases.make_config(
        rows=ROWS, microbatches=microbatches, router=router, objective=objective, optimizer=OPTIMIZER, dp=dp
    )


@lru_cache
def batch_of(seed: int):
    return cases.ragged_batch(ROWS, seed)


def check_against_naive(config, dp: int, microbatches: int):
    state = cases.make_state(config, dp)
    got = cases.run(jaxmoe.loss_and_grads, state, batch_of(0))
    want, gradient = naive.value_and_grad(
        *cases.natural_arrays(config), config, batch_of(0), replicas=dp, num_microbatches=microbatches
    )
    cases.assert_close(got.total, want.total, what="J")
    cases.assert_close(got.terms, want.terms, what="terms")
    cases.assert_close(got.per_layer, want.per_layer, what="per layer")
    np.testing.assert_array_equal(got.expert_counts, want.counts_LE)
    cases.assert_close(cases.to_natural(got.grads, state), gradient, what="gradient of")
    return got


def test_shards_and_microbatches_are_empty_and_without_targets():
    valid, targets = batch_of(0)["segment_ids"] != 0, batch_of(0)["loss_mask"]
    assert 0 in valid.reshape(8, -1).sum(1)  # a shard of dp = 8 with M = 1
    assert 0 in valid.reshape(4, -1).sum(1)  # a micro-batch of M = 4
    assert any(
        v > 0 and t == 0 for v, t in zip(valid.reshape(4, -1).sum(1), targets.reshape(4, -1).sum(1), strict=True)
    )


@pytest.mark.parametrize(("dp", "microbatches"), GRID)
def test_loss_terms_and_gradients(dp, microbatches):
    config = config_of(dp, microbatches, cases.SIGMOID_BIAS)
    got = check_against_naive(config, dp, microbatches)
    # The naive numbers come from the same split; all but `aux_loss` must not depend on it.
    whole, _ = naive.value_and_grad(*cases.natural_arrays(config), config, batch_of(0), 1, 1)
    for name in ("cross_entropy", "seq_aux_loss", "global_aux_loss", "z_loss"):
        cases.assert_close(got.terms[name], whole.terms[name], what=name)


@pytest.mark.parametrize("balance_dp_token", [True, False])
@pytest.mark.parametrize(("dp", "microbatches"), [(2, 4), (4, 2)])
def test_mean_of_microbatch_means(dp, microbatches, balance_dp_token):
    settings = {"calculate_per_token_loss": False, "balance_dp_token": balance_dp_token}
    check_against_naive(config_of(dp, microbatches, cases.SIGMOID_BIAS, **settings), dp, microbatches)


@lru_cache
def trained_naively():
    """Parameters, biases, losses and gradient norms of the steps, by optax on whole arrays."""
    config = config_of(1, 1, SPLIT_FREE)
    params, bias = cases.natural_arrays(config)
    decays = jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key not in ("scale_D",), params)
    settings = config.optimizer
    adam = optax.adamw(
        settings.learning_rate, b1=settings.beta1, b2=settings.beta2, eps=settings.eps, weight_decay=0.1, mask=decays
    )
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), adam)
    opt_state, losses, norms = optimizer.init(params), [], []
    for step in range(STEPS):
        outcome, gradient = naive.value_and_grad(params, bias, config, batch_of(step), 1, 1)
        losses.append(float(outcome.total))
        norms.append(float(optax.tree.norm(gradient)))
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        params = optax.apply_updates(params, updates)
        bias = naive.moved_bias(bias, config, np.asarray(outcome.counts_LE))
    return params, bias, losses, norms


@pytest.mark.parametrize(("dp", "microbatches"), GRID)
def test_parameters_and_router_bias_after_three_steps(dp, microbatches):
    params, bias, losses, norms = trained_naively()
    state = cases.make_state(config_of(dp, microbatches, SPLIT_FREE), dp)
    assert max(norms) > 0.5, "a gradient that is not clipped shows less"
    for step in range(STEPS):
        state, metrics = cases.run(jaxmoe.train_step, state, batch_of(step))
        scalars = metrics.scalars()
        assert scalars["skipped"] == 0
        cases.assert_close(scalars["total_loss"], losses[step], what="J")
        cases.assert_close(scalars["grad_norm"], norms[step], what="gradient norm")
    cases.assert_close(cases.to_natural(state.params, state), params, what="parameter")
    got = cases.to_natural(state.router_bias, state)
    for (_, g), (_, w) in zip(*(jax.tree_util.tree_leaves_with_path(tree) for tree in (got, bias)), strict=True):
        assert g.dtype == np.float32
        np.testing.assert_array_equal(g, w)
