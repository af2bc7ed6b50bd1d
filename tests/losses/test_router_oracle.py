"""Routing and the bias update against float64 oracle values: choices, weights, counts, gradients."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxmoe.config.schema import Router
from jaxmoe.losses.balance import set_balance
from jaxmoe.model.router import count_experts, route, router_stats
from jaxmoe.spmd.axes import AXES
from jaxmoe.spmd.program import build_mesh, manual
from jaxmoe.step.router_bias import updated_bias
from tests.golden.oracle_io import load_function
from tests.reference import cases
from tests.reference.naive import FAST_COMPILE

ORACLE = Path(__file__).parents[1] / "golden" / "oracle"
ROUTERS = sorted(path.stem for path in ORACLE.glob("router_s*.npz"))
_, _, BIAS_UPDATE = load_function(ORACLE / "router_bias_update.npz")
BIAS_CASES = sorted({key.split("/")[1] for key in BIAS_UPDATE})


@pytest.fixture(scope="module", autouse=True)
def float64():
    with cases.float64():
        yield


def router_of(cfg: dict) -> Router:
    """The oracle's settings in the config's words."""
    softmax, pre = cfg["fn"] == "softmax", cfg.get("pre", False)
    return Router(
        score_function=cfg["fn"],
        softmax_before_topk=pre or not softmax,
        renormalize=cfg.get("norm", not softmax and cfg["k"] > 1),
        scaling_factor=cfg.get("scale", 1.0),
        num_groups=cfg.get("n_group", 1),
        topk_groups=cfg.get("topk_group", 1),
        group_score_experts=cfg.get("group_top", 2),
        selection_bias=cfg.get("use_bias", False),
    )


def test_all_router_cases_are_here():
    assert len(ROUTERS) == 9


@pytest.mark.parametrize("name", ROUTERS)
def test_choice_weights_counts_and_gradient(name):
    cfg, _, case = load_function(ORACLE / f"{name}.npz")
    num_experts, k, valid = cfg["E"], cfg["k"], case["in/valid"] != 0
    router = router_of(cfg)
    bias = jnp.asarray(case["in/bias"]) if router.selection_bias else None
    cotangent = jnp.asarray(case["in/cotangent_probs"]).reshape(-1, num_experts)

    def scalar(logits):
        expert_TK, weight_TK = route(logits.reshape(-1, num_experts), bias, router, k)
        kept = jnp.where(valid.reshape(-1)[:, None], weight_TK, 0)
        return jnp.sum(kept * jnp.take_along_axis(cotangent, expert_TK, axis=1)), (expert_TK, weight_TK)

    (value, (expert_TK, weight_TK)), gradient = jax.value_and_grad(scalar, has_aux=True)(jnp.asarray(case["in/logits"]))
    shape = (*valid.shape, k)
    expert, weight = np.asarray(expert_TK).reshape(shape), np.asarray(weight_TK).reshape(shape)
    np.testing.assert_array_equal(expert[valid], case["out/idx"][valid])
    np.testing.assert_allclose(weight[valid], case["out/weights"][valid], rtol=1e-9)
    np.testing.assert_allclose(value, case["out/scalar"], rtol=1e-9)
    np.testing.assert_allclose(gradient, case["grad/logits"], rtol=0, atol=1e-9)
    counts = count_experts(jnp.asarray(expert), jnp.asarray(valid), num_experts).sum(axis=0)
    np.testing.assert_array_equal(counts, case["out/counts"])
    everything = count_experts(jnp.asarray(expert), jnp.ones_like(valid), num_experts).sum(axis=0)
    np.testing.assert_array_equal(everything, case["out/counts_with_padding"])


def test_worked_example():
    cfg, _, case = load_function(ORACLE / "router_worked_example.npz")
    logits, k = jnp.asarray(case["in/logits"]), cfg["k"]
    routers = {
        "post": Router(softmax_before_topk=False),
        "pre": Router(renormalize=False),
        "sigmoid": Router(score_function="sigmoid"),
        "sqrtsoftplus": Router(score_function="sqrtsoftplus"),
    }
    for name, router in routers.items():
        expert, weight = route(logits, None, router, k)
        np.testing.assert_array_equal(expert, case[f"out/{name}/idx"])
        np.testing.assert_allclose(weight, case[f"out/{name}/weights"], rtol=1e-9)
        if name == "post":
            counts = count_experts(expert[None], jnp.ones((1, 4), bool), 4)[0]
            np.testing.assert_array_equal(counts, case["out/counts"])
    mesh = build_mesh(dict.fromkeys(AXES, 1), jax.devices()[:1])

    def body(logits_TE):
        out = {}
        for function in ("softmax", "sigmoid", "sqrtsoftplus"):
            expert, weight = route(logits_TE, None, Router(score_function=function), k)
            stats = router_stats(logits_TE[None], expert[None], weight[None], jnp.ones((1, 4), bool), function)
            count, score = stats.balance_count_BE, stats.score_sum_BE
            out[function] = set_balance(count, score, jnp.int32(4), k, AXES)[0], stats.z_sum / 4
        return out

    program = jax.jit(manual(body, mesh, P(), P()), compiler_options=FAST_COMPILE)
    for function, (aux, z) in program(logits).items():
        np.testing.assert_allclose(aux, case[f"out/aux/{function}"], rtol=1e-9)
        np.testing.assert_allclose(z, case["out/z"], rtol=1e-9)


def update(layout, tree, count_E):
    mesh = build_mesh(dict.fromkeys(AXES, 1), jax.devices()[:1])
    function = manual(lambda tree, count: updated_bias(layout, tree, count), mesh, (P(), P()), P())
    return jax.jit(function, compiler_options=FAST_COMPILE)(tree, jnp.asarray(count_E[None], jnp.int32))


@pytest.mark.parametrize("name", [name for name in BIAS_CASES if name != "skipped_step"])
def test_bias_update(name):
    case = {key.rsplit("/", 1)[1]: value for key, value in BIAS_UPDATE.items() if f"/{name}/" in key}
    old, pooled = BIAS_UPDATE[f"in/{name}/bias_float32"], case["pooled"]
    np.testing.assert_array_equal(case["counts"].sum(axis=(0, 1)), pooled)
    router = cases.SIGMOID_BIAS | {"bias_update_rate": float(case["rate"])}
    moe = {"num_experts": len(old), "num_dense_layers": 0}
    layout = cases.natural_layout(cases.make_config(layers=1, moe=moe, router=router))
    tree = {"trunk": {0: {"moe": {"router": {"bias_E": jnp.asarray(old, jnp.float32)[None]}}}}}
    new = update(layout, tree, pooled)
    got = np.asarray(new["trunk"][0]["moe"]["router"]["bias_E"][0])
    assert got.dtype == np.float32
    np.testing.assert_array_equal(np.sign(got - old), case["sign"] * (case["rate"] > 0))
    np.testing.assert_array_equal(got, BIAS_UPDATE[f"out/{name}/bias_float32"])


def test_bias_update_of_counts_beyond_int32():
    """E * C_i does not fit into 32 bits; the sign is still right."""
    layout = cases.natural_layout(
        cases.make_config(layers=1, moe={"num_dense_layers": 0}, router=cases.SIGMOID_BIAS | {"bias_update_rate": 1.0})
    )
    count = np.full(8, 2**28 - 1)
    count[3] += 3
    count[5] -= 2
    tree = {"trunk": {0: {"moe": {"router": {"bias_E": jnp.zeros((1, 8), jnp.float32)}}}}}
    new = update(layout, tree, count)
    exact = [np.sign(sum(map(int, count)) - 8 * int(c)) for c in count]
    np.testing.assert_array_equal(new["trunk"][0]["moe"]["router"]["bias_E"][0], exact)
