"""Every number that a step reports is that of one device: layouts, micro-batches, remat; odd places of MoE layers."""

import math
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

import jaxmoe
from jaxmoe.runtime.proof.layouts import DEFAULT_FOR_8, MICROBATCHES, chosen_layouts
from jaxmoe.spmd.axes import AXES
from tests.reference import cases

#: No term depends on the number of micro-batches.
ROUTER = cases.SIGMOID_BIAS | {"aux_loss_coeff": 0.0, "bias_update_rate": 0.03}
OPTIMIZER = {"learning_rate": 0.01, "clip_norm": 0.5, "schedule": {"kind": "constant"}}
ROUTERS: dict[str, dict] = {"plain": ROUTER, "aux": ROUTER | {"aux_loss_coeff": 0.04}}
#: Which layers after the leading dense one have experts; the layer of MTP is like the last.
PATTERNS: dict[str, dict[str, Any]] = {
    "dense_last_layer_and_mtp": {"pattern": [1, 1, 0, 1, 1, 0], "mtp": {"num_depths": 1}},
    "one_stage_without_layers_and_moe_mtp": {"pattern": [1, 0, 1], "mtp": {"num_depths": 2}},
    "without_mtp": {"pattern": [1, 0]},
}
STEPS = 2
#: Of every model with experts; the balance losses are those of its objective.
EVERY_RUN = {
    "loss",
    "total_loss",
    "grad_norm",
    "learning_rate",
    "target_tokens",
    "valid_tokens",
    "skipped",
    "skipped_in_a_row",
    "load_max_over_mean",
    "load_variation",
    "dead_experts",
    "dropped_share",
    "router_entropy",
    "top1_weight",
}


@pytest.fixture(scope="module", autouse=True)
def float64():
    with cases.float64():
        yield


def config_of(case: str, rows: int = 32, router: dict = ROUTER, **settings: Any):
    pattern, mtp = PATTERNS[case]["pattern"], PATTERNS[case].get("mtp")
    return cases.make_config(
        rows=rows,
        layers=1 + len(pattern),
        attention={"num_heads": 8, "num_kv_heads": 2},
        moe={"layer_pattern": pattern, "shared_expert_gate": True},
        router=router,
        model={"mtp": mtp} if mtp else {},
        optimizer=OPTIMIZER,
        **settings,
    )


def devices_of(config) -> int:
    return math.prod(getattr(config.parallel, axis) for axis in AXES)


def reported(config) -> list[dict[str, Any]]:
    """All that two steps report, on the host."""
    state, steps = cases.make_state(config, devices_of(config)), []
    for seed in range(STEPS):
        batch = cases.ragged_batch(config.batch.global_batch_size, seed)
        state, metrics = cases.run(jaxmoe.train_step, state, batch)
        counts = {"expert_counts": np.asarray(metrics.expert_counts), "served": np.asarray(metrics.served)}
        steps.append(metrics.scalars() | {"per_layer": metrics.per_layer(), "counts": counts})
    return steps


@lru_cache
def on_one_device(case: str, replicas: int | None, router: str = "plain", microbatches: int = 1):
    settings = ROUTERS[router]
    return reported(config_of(case, router=settings, objective={"replicas": replicas}, microbatches=microbatches))


def check(config, want: list[dict[str, Any]]) -> None:
    for number, (got, wanted) in enumerate(zip(reported(config), want, strict=True), start=1):
        cases.assert_close(got, wanted, what=f"step {number}, ")


def test_dense_last_layer_on_a_pipeline_with_a_stage_without_layers():
    """The trunk's period of three stands twice on four stages: two of them hold padding only."""
    config = config_of("dense_last_layer_and_mtp", pp=4, ep=2, microbatches=4, remat="none")
    assert config.parallel.remat != cases.make_config().parallel.remat
    want = on_one_device("dense_last_layer_and_mtp", None)
    check(config, want)
    names = set(want[0])
    groups = {f"grad_norm/{group}" for group in ("embedding", "attention", "router", "experts", "dense", "norms")}
    assert groups | EVERY_RUN | {"mtp_loss", "mtp_acceptance", "router_bias_range"} <= names
    layers = want[1]["per_layer"]
    assert np.flatnonzero(layers["router_bias_range"]).tolist() == [1, 2, 4, 5]
    assert np.flatnonzero(layers["mtp_loss"]).tolist() == [7]


@pytest.mark.slow
@pytest.mark.parametrize("case", PATTERNS)
@pytest.mark.parametrize("layout", DEFAULT_FOR_8)
def test_every_layout(layout, case):
    """With `aux_loss`, at the same replicas and micro-batches, on which it depends by definition.

    Each layout has another number of micro-batches for each case, where it can have all.
    """
    turn = DEFAULT_FOR_8.index(layout) + list(PATTERNS).index(case)
    (parallel,) = chosen_layouts(layout, 8)
    possible = [count for count in MICROBATCHES if count % int(parallel.get("pp", 1)) == 0]
    microbatches = possible[turn % len(possible)]
    config = config_of(case, router=ROUTERS["aux"], objective={"replicas": 8}, microbatches=microbatches, **parallel)
    assert devices_of(config) == 8
    check(config, on_one_device(case, 8, "aux", microbatches))
