"""What a step does to the state: clipping, decay, biases, noise, skipped steps; what no layout and no remat changes."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmoe
from tests.reference import cases, naive

OPTIMIZER = {"learning_rate": 0.01, "clip_norm": 0.1, "weight_decay": 0.5, "schedule": {"kind": "constant"}}
BIASES = {"qkv_bias": True, "output_bias": True}
NOT_DECAYED = ("scale_D", "q_bias_NH", "k_bias_KH", "v_bias_KH", "o_bias_D")
SPLIT: dict[str, Any] = {"dp": 2, "tp": 2, "microbatches": 2}


@pytest.fixture(scope="module", autouse=True)
def float64():
    with cases.float64():
        yield


def split_config():
    return cases.make_config(router=cases.SIGMOID_BIAS, attention=BIASES, optimizer=OPTIMIZER, **SPLIT)


def test_initial_numbers_do_not_depend_on_the_mesh():
    made = []
    meshes: tuple[dict[str, Any], ...] = ({}, {"pp": 2, "tp": 2, "dp": 2, "microbatches": 2})
    for mesh in meshes:
        config = cases.make_config(router=cases.SIGMOID_BIAS, layers=4, **mesh)
        state = jaxmoe.init_state(config, jaxmoe.make_mesh(config, jax.devices()[: 8 if mesh else 1]))
        made.append((cases.to_natural(state.params, state), cases.to_natural(state.router_bias, state)))
    jax.tree.map(np.testing.assert_array_equal, *made)
    layers = made[0][0]["trunk"][0]["moe"]["router"]["gate_DE"]
    assert len(np.unique(layers)) == layers.size


def group_of(name: str) -> str:
    """Written down once more, by name of the weight: the order of these lines is the rule."""
    return next(
        group
        for part, group in (
            ("scale", "norms"),
            ("table", "embedding"),
            ("weight_DV", "embedding"),
            (".gate_DE", "router"),
            (".experts.", "experts"),
            (".attention.", "attention"),
            ("", "dense"),
        )
        if part in name
    )


def test_one_update_is_that_of_optax_on_whole_arrays():
    state = cases.make_state(split_config(), 4)
    batch = cases.ragged_batch()
    outcome = cases.run(jaxmoe.loss_and_grads, state, batch)
    params, gradient = (cases.to_natural(tree, state) for tree in (state.params, outcome.grads))
    decays = jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key not in NOT_DECAYED, params)
    assert {False, True} == set(jax.tree.leaves(decays))
    adam = optax.adamw(0.01, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.5, mask=decays)
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), adam)
    updates, _ = optimizer.update(gradient, optimizer.init(params), params)
    bias = naive.moved_bias(cases.to_natural(state.router_bias, state), state.config, np.asarray(outcome.expert_counts))
    placed = [leaf.sharding for leaf in jax.tree.leaves(state)]
    new, metrics = cases.run(jaxmoe.train_step, state, batch)
    assert [leaf.sharding for leaf in jax.tree.leaves(new)] == placed, "the next step would be traced again"
    cases.assert_close(cases.to_natural(new.params, new), optax.apply_updates(params, updates), 1e-12, "parameter")
    jax.tree.map(np.testing.assert_array_equal, cases.to_natural(new.router_bias, new), bias)
    scalars = metrics.scalars()
    norm = float(optax.tree.norm(gradient))
    assert norm > 0.1, "a norm below the limit would not be clipped"
    assert scalars["grad_norm"] == pytest.approx(norm, rel=1e-12)
    by_group: dict[str, list] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        by_group.setdefault(group_of(".".join(str(step.key) for step in path)), []).append(leaf)
    for group, leaves in by_group.items():
        assert scalars[f"grad_norm/{group}"] == pytest.approx(float(optax.tree.norm(leaves)), rel=1e-12), group
    assert sum(name.startswith("grad_norm/") for name in scalars) == len(by_group) == 6
    assert scalars["learning_rate"] == pytest.approx(0.01)
    assert (scalars["skipped"], int(new.step)) == (0, 1)


def test_a_gradient_that_is_not_finite_skips_the_step():
    state, batch = cases.make_state(split_config(), 4), cases.ragged_batch()
    table = state.params["embedding"]["table_VD"]
    broken = {**state.params, "embedding": {"table_VD": table.at[3, 5].set(jnp.inf)}}
    broken["embedding"] = {"table_VD": jax.device_put(broken["embedding"]["table_VD"], table.sharding)}
    state = replace(state, params=broken)
    for count in (1, 2):
        before = jax.tree.map(np.array, (state.params, state.router_bias, state.opt_state))
        state, metrics = cases.run(jaxmoe.train_step, state, batch)
        jax.tree.map(np.testing.assert_array_equal, (state.params, state.router_bias, state.opt_state), before)
        scalars = metrics.scalars()
        assert (scalars["skipped"], scalars["skipped_in_a_row"], int(state.step)) == (1, count, count)
        assert not {"loss", "total_loss"} & set(scalars)
    healthy = cases.make_state(split_config(), 4)
    state = replace(state, params=healthy.params)
    state, metrics = cases.run(jaxmoe.train_step, state, batch)
    assert (metrics.scalars()["skipped"], metrics.scalars()["skipped_in_a_row"]) == (0, 0)
    # The two skipped steps left no trace: the same as the first step of a fresh state.
    fresh, _ = cases.run(jaxmoe.train_step, cases.make_state(split_config(), 4), batch)
    jax.tree.map(np.testing.assert_array_equal, (state.params, state.router_bias), (fresh.params, fresh.router_bias))


def test_evaluation_sums_are_of_all_targets_and_change_nothing():
    state, batch = cases.make_state(split_config(), 4), cases.ragged_batch()
    before = jax.tree.map(np.array, (state.params, state.router_bias, state.opt_state))
    sums = cases.run(jaxmoe.eval_step, state, batch)
    jax.tree.map(np.testing.assert_array_equal, (state.params, state.router_bias, state.opt_state), before)
    params, bias, _ = before
    rows = naive.compiled_rows(params, bias, batch, config=state.config)
    cases.assert_close(sums.loss_sum, (batch["loss_mask"] * np.asarray(rows.ce_S)).sum())
    assert float(sums.weight_sum) == batch["loss_mask"].sum()


@pytest.mark.parametrize("remat", ["none", "dots"])
def test_what_is_recomputed_changes_nothing(remat):
    """Nor is anything counted twice."""
    batch, outcomes = cases.ragged_batch(), []
    for policy in ("layer", remat):
        config = cases.make_config(router=cases.SIGMOID_BIAS, microbatches=2, remat=policy)
        outcomes.append(cases.run(jaxmoe.loss_and_grads, cases.make_state(config, 1), batch))
    want, got = outcomes
    np.testing.assert_array_equal(got.expert_counts, want.expert_counts)
    assert want.expert_counts.sum() == 2 * 2 * (batch["segment_ids"] != 0).sum()  # layers, experts a token
    cases.assert_close(got, want, 1e-12)


def test_noise_belongs_to_the_token_not_to_the_layout():
    noise = cases.SIGMOID_BIAS | {"force_balance": True, "input_jitter": 0.3, "aux_loss_coeff": 0.0}
    batch, outcomes = cases.ragged_batch(), []
    meshes: tuple[dict[str, Any], ...] = (
        {"microbatches": 1},
        {"dp": 2, "sp": 2, "tp": 2, "sp_placement": "zigzag", "microbatches": 4},
    )
    for mesh in meshes:
        config = cases.make_config(router=noise, **mesh)
        state = cases.make_state(config, 8 if "sp" in mesh else 1)
        outcomes.append(cases.run(jaxmoe.loss_and_grads, state, batch))
        if "sp" not in mesh:
            later = cases.run(jaxmoe.loss_and_grads, replace(state, step=state.step + 1), batch)
    want, got = outcomes
    np.testing.assert_array_equal(got.expert_counts, want.expert_counts)
    cases.assert_close(got, want)
    # There is noise, another one in each layer and step.
    counts = np.asarray(want.expert_counts)
    assert (counts[1] != counts[2]).any()
    assert (counts != np.asarray(later.expert_counts)).any()


def test_evaluation_has_no_noise():
    noise = cases.SIGMOID_BIAS | {"force_balance": True, "input_jitter": 0.3}
    sums = [
        cases.run(jaxmoe.eval_step, cases.make_state(cases.make_config(router=router), 1), cases.ragged_batch())
        for router in (noise, cases.SIGMOID_BIAS)
    ]
    jax.tree.map(np.testing.assert_array_equal, *sums)
