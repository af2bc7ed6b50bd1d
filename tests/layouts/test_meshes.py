"""Meshes with two and three wide axes: the numbers of the naive implementation on one device."""

import math
from typing import Any

import jax
import numpy as np
import pytest

import jaxmoe
from tests.reference import cases, naive

#: name: (settings, micro-batches)
MESHES: dict[str, dict[str, Any]] = {
    "ep_tp_whole_experts": {"ep": 2, "tp": 2, "dp": 2},
    "ep_tp_sliced_experts": {"ep": 2, "tp": 2, "dp": 2, "experts_over": "ep", "zero": 0},
    "tp_beyond_kv_heads_dp_fsdp": {"tp": 4, "dp": 2, "zero": 3},
    "sp_tp_zigzag": {"sp": 4, "tp": 2, "sp_placement": "zigzag"},
    "sp_tp_dp_ulysses": {"sp": 2, "tp": 2, "dp": 2, "sp_attention": "ulysses", "zero": 3},
    "ep_sp_zigzag": {"ep": 4, "sp": 2, "sp_placement": "zigzag", "remat": "none", "unroll_layers": 2},
    "pp_tp_dp": {"pp": 2, "tp": 2, "dp": 2, "microbatches": 4},
    "pp_padded_sp": {"pp": 4, "sp": 2, "layers": 6, "microbatches": 4, "zero": 0},
    "pp_circular_ep_sp_fsdp": {
        "pp": 2,
        "ep": 2,
        "sp": 2,
        "layers": 6,
        "microbatches": 4,
        "pipeline_schedule": "circular",
        "pipeline_chunks": 2,
        "zero": 3,
    },
}


@pytest.fixture(scope="module", autouse=True)
def float64():
    with cases.float64():
        yield


def config_of(name: str, **more: Any):
    settings: dict[str, Any] = {"microbatches": 2, "dp": 1} | MESHES[name] | more
    return cases.make_config(router=cases.SIGMOID_BIAS, moe={"shared_expert_gate": True}, **settings)


def devices_of(config) -> int:
    return math.prod(getattr(config.parallel, axis) for axis in ("pp", "dp", "ep", "sp", "tp"))


@pytest.mark.parametrize("name", MESHES)
def test_objective_and_gradients(name):
    config = config_of(name)
    state = cases.make_state(config, devices_of(config))
    assert sum(size > 1 for size in state.mesh.shape.values()) > 1
    batch, replicas = cases.ragged_batch(), config.parallel.dp * config.parallel.ep
    got = cases.run(jaxmoe.loss_and_grads, state, batch)
    arrays = cases.natural_arrays(config)
    want, gradient = naive.value_and_grad(*arrays, config, batch, replicas, config.batch.num_microbatches)
    cases.assert_close(got.total, want.total, what="J")
    cases.assert_close(got.terms, want.terms, what="terms")
    cases.assert_close(got.per_layer, want.per_layer, what="per layer")
    np.testing.assert_array_equal(got.expert_counts, want.counts_LE)
    cases.assert_close(cases.to_natural(got.grads, state), gradient, what="gradient of")


def test_two_steps_equal_one_device():
    config = config_of("pp_circular_ep_sp_fsdp", optimizer={"learning_rate": 0.01, "clip_norm": 0.1})
    alone = cases.make_config(
        router=cases.SIGMOID_BIAS,
        moe={"shared_expert_gate": True},
        layers=config.model.num_layers,
        microbatches=config.batch.num_microbatches,
        objective={"replicas": config.parallel.dp * config.parallel.ep},
        optimizer={"learning_rate": 0.01, "clip_norm": 0.1},
    )
    ends = []
    for own in (config, alone):
        state = cases.make_state(own, devices_of(own))
        for seed in (0, 1):
            state, metrics = cases.run(jaxmoe.train_step, state, cases.ragged_batch(seed=seed))
        trees = (state.params, state.router_bias)
        ends.append((*(cases.to_natural(tree, state) for tree in trees), metrics.scalars(), metrics.per_layer()))
    (params, bias, scalars, layers), (want_params, want_bias, want_scalars, want_layers) = ends
    cases.assert_close(params, want_params, what="parameter")
    jax.tree.map(np.testing.assert_array_equal, bias, want_bias)
    cases.assert_close(scalars, want_scalars, what="scalar")
    cases.assert_close(layers, want_layers, what="per layer")
