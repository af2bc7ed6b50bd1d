"""The tracker against float64 oracle values: partial values as ranks record them, on real meshes."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxmoe.metrics import MEGATRON_RULES, SUM_OF_PARTS, MetricRule, MoEMetricsTracker
from jaxmoe.spmd.axes import AXES
from jaxmoe.spmd.program import build_mesh, manual
from tests.golden.oracle_io import load_function

ORACLE = Path(__file__).parents[1] / "golden" / "oracle"
REDUCTION_CFG, _, REDUCTION = load_function(ORACLE / "metrics_reduction.npz")
ROUTER_CFG, _, ROUTER = load_function(ORACLE / "metrics_from_router.npz")
# float64, some hundred terms of order one
assert_close = partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-13)

# Every wide axis of the oracle's 3 x 2 x 2 x 2 x 2 ranks occurs, in pairs and triples that 8 devices hold.
SMALL_MESHES = [(1, 1, 1, 1, 1), (3, 2, 1, 1, 1), (3, 1, 1, 1, 2), (1, 2, 2, 2, 1), (1, 2, 1, 2, 2), (1, 1, 2, 2, 2)]


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def make_mesh(shape):
    return build_mesh(dict(zip(AXES, shape, strict=True)), jax.devices()[: np.prod(shape)])


def report_on_mesh(mesh, rule, num_owning, values, scale):
    """`values [M, pp, dp, ep, sp, tp, slot]`, one vector per rank and micro-batch -> (per layer, scalar)."""
    slots = values.shape[-1]

    def body(values):
        tracker = MoEMetricsTracker.create({"x": rule}, slots, num_owning).varying()

        def micro_batch(tracker, row):
            for layer in range(slots):
                tracker = tracker.record("x", row[layer], layer + 1)
            return tracker, None

        tracker, _ = jax.lax.scan(micro_batch, tracker, values.reshape(values.shape[0], slots))
        return tracker.sync()

    run = jax.jit(manual(body, mesh, P(None, *AXES), P()))
    tracker = run(values)
    assert tracker.values["x"].dtype == np.float64
    return tracker.per_layer(scale)["x"], tracker.scalars(scale)["x"]


def check_reduction(case, mesh_shape):
    spec = REDUCTION_CFG["rules"][case]
    rule = MetricRule(spec["sum_over"], spec["mean_over"], needs_dp_avg=False)
    values = REDUCTION["in/values"]
    for dim, (axis, size) in enumerate(zip(AXES, mesh_shape, strict=True), start=1):
        if size == 1:  # ranks that this mesh does not have: the oracle's formula in numpy
            fold = np.mean if axis in spec["mean_over"] else np.sum
            values = fold(values, axis=dim, keepdims=True)
    per_layer, scalar = report_on_mesh(make_mesh(mesh_shape), rule, REDUCTION_CFG["num_owning"], values, spec["scale"])
    assert_close(per_layer, REDUCTION[f"out/{case}/per_layer"])
    assert_close(scalar, REDUCTION[f"out/{case}/scalar"])


@pytest.mark.parametrize("mesh_shape", SMALL_MESHES)
@pytest.mark.parametrize("case", REDUCTION_CFG["rules"])
def test_reduction_cases_hold_on_meshes_of_up_to_eight_ranks(case, mesh_shape):
    check_reduction(case, mesh_shape)


def test_reduction_cases_hold_on_the_oracles_own_mesh_of_48_ranks():
    """All five axes wide at once needs 48 devices, so a process of its own."""
    flags = "--xla_force_host_platform_device_count=48"
    program = (
        "import jax; jax.config.update('jax_enable_x64', True);"
        "from tests.metrics import test_tracker_oracle as t;"
        "[t.check_reduction(case, (3, 2, 2, 2, 2)) for case in t.REDUCTION_CFG['rules']]; print('48 ranks agree')"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        cwd=ORACLE.parents[2],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "48 ranks agree" in run.stdout


def test_needs_dp_avg_is_the_mean_over_dp_and_ep():
    spec = REDUCTION_CFG["rules"]["sum_tp_sp_mean_dp"]
    values = REDUCTION["in/values"].sum(axis=(1, 4, 5), keepdims=True)
    per_layer, _ = report_on_mesh(
        make_mesh((1, 2, 2, 1, 1)), MetricRule(("sp", "tp")), REDUCTION_CFG["num_owning"], values, spec["scale"]
    )
    assert_close(per_layer, REDUCTION["out/sum_tp_sp_mean_dp/per_layer"])


# in/partial/... has dims [M, dp, sp, tp, slot]: a mesh of 2 x 2 x 2 ranks, pp and ep of size one.
ROUTER_MESH = (1, 2, 1, 2, 2)


def router_partials(name):
    return ROUTER[f"in/partial/{name}"][:, None, :, None]


def check_router(name, values, rule, scale, case):
    per_layer, scalar = report_on_mesh(make_mesh(ROUTER_MESH), rule, int(ROUTER["in/owns"].sum()), values, scale)
    assert_close(per_layer, ROUTER[f"out/{case}/per_layer"])
    assert_close(scalar, ROUTER[f"out/{case}/scalar"])


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("load_balancing_loss", "aux_false"),
        ("seq_load_balancing_loss", "seq_false"),
        ("global_load_balancing_loss", "global"),
    ],
)
def test_unweighted_balance_losses_of_real_logits_reduce_by_megatrons_rules(name, case):
    num_microbatches = ROUTER["in/N_micro"].size
    scale = 1.0 if case == "global" else 1.0 / num_microbatches
    check_router(name, router_partials(name), MEGATRON_RULES[name], scale, case)


def test_values_that_carry_their_weight_add_to_the_per_token_balance_loss():
    """Weight of micro-batch m: N_m / N; of a replica: one over their number."""
    weights = ROUTER["in/N_micro"] / ROUTER["in/N_micro"].sum() / 2
    values = router_partials("load_balancing_loss") * weights[:, None, None, None, None, None, None]
    check_router("load_balancing_loss", values, SUM_OF_PARTS, 1.0, "aux_true")


@pytest.mark.parametrize("case", ["z_true", "z_false"])
def test_z_loss_with_its_denominator_counted_first_is_a_sum_of_parts(case):
    numerator, counted = ROUTER["in/partial/z_num"], ROUTER["in/partial/z_den"]
    if case == "z_true":  # valid tokens of the step
        denominator = counted.sum(axis=(0, 1, 2, 3))
    else:  # valid tokens of each micro-batch, times the number of micro-batches
        denominator = counted.sum(axis=(1, 2, 3), keepdims=True) * counted.shape[0]
    parts = np.divide(numerator, denominator, out=np.zeros_like(numerator), where=numerator != 0)
    check_router("z_loss", parts[:, None, :, None], SUM_OF_PARTS, 1.0, case)


def test_megatrons_z_loss_is_a_mean_of_the_ranks_means():
    check_router("z_loss", router_partials("z_local_mean"), MEGATRON_RULES["z_loss"], 0.5, "z_mean_of_means")
