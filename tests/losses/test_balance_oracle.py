"""Balance losses and z-loss against float64 oracle values and gradients, on meshes that split rows and positions."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxmoe.config.schema import Objective, Router
from jaxmoe.losses.balance import row_balance, set_balance
from jaxmoe.losses.objective import AUX, GLOBAL_AUX, SEQ_AUX, Z, count_step, term_weights
from jaxmoe.model.router import RouterStats, route, router_stats
from jaxmoe.spmd.axes import AXES, REPLICA_AXES
from jaxmoe.spmd.collectives import sum_partial
from jaxmoe.spmd.program import build_mesh, manual
from tests.golden.oracle_io import load_function
from tests.reference import cases
from tests.reference.naive import FAST_COMPILE

ORACLE = Path(__file__).parents[1] / "golden" / "oracle"
NAMES = sorted(path.stem for path in ORACLE.glob("balance_s*.npz"))
#: term, per token?, micro-batches, replicas; the oracle's key
MODES = {
    **{f"aux/true_M{m}_R{r}": (AUX, True, m, r) for m in (1, 2, 4) for r in (1, 2)},
    **{f"aux/false_M{m}_R{r}": (AUX, False, m, r) for m in (2, 4) for r in (1, 2)},
    **{f"seq/false_M{m}": (SEQ_AUX, False, m, 2) for m in (2, 4)},
    **{f"z/false_M{m}": (Z, False, m, 2) for m in (2, 4)},
    "seq/true": (SEQ_AUX, True, 2, 2),
    "z/true": (Z, True, 4, 2),
    "global": (GLOBAL_AUX, True, 4, 2),
}


@pytest.fixture(scope="module", autouse=True)
def float64():
    with cases.float64():
        yield


def stats_of(logits_BSE: jax.Array, valid_BS: jax.Array, router: Router, k: int) -> RouterStats:
    shape = logits_BSE.shape
    expert_TK, weight_TK = route(logits_BSE.reshape(-1, shape[-1]), None, router, k)
    experts, weights = (value.reshape(*shape[:2], k) for value in (expert_TK, weight_TK))
    return router_stats(logits_BSE, experts, weights, valid_BS, router.score_function)


def own_part(logits_LMBSE: jax.Array, valid_MBS: jax.Array, term: str, objective: Objective, settings: tuple):
    """This rank's part of one term per layer, weighted as in J."""
    router, k = settings
    counts = count_step(0.0 * valid_MBS, valid_MBS, objective, jnp.float64)
    weights = term_weights(counts, objective)
    parts = []
    for logits_MBSE in logits_LMBSE:
        stats = [stats_of(*both, router, k) for both in zip(logits_MBSE, valid_MBS, strict=True)]
        if term == GLOBAL_AUX:
            count, score = (
                jnp.stack([getattr(own, name) for own in stats]).sum(axis=(0, 1))[None]
                for name in ("balance_count_BE", "score_sum_BE")
            )
            parts.append(set_balance(count, score, counts.valid_M.sum(), k, AXES)[0])
            continue
        values = []
        for own, valid_BS in zip(stats, valid_MBS, strict=True):
            valid_B = valid_BS.sum(axis=1)
            count, score = own.balance_count_BE[None], own.score_sum_BE[None]
            if term == SEQ_AUX:
                values.append(row_balance(count, score, valid_B, k, REPLICA_AXES)[0])
            elif term == AUX:
                tokens = sum_partial(valid_B.sum(), REPLICA_AXES)
                values.append(set_balance(count.sum(1), score.sum(1), tokens, k, REPLICA_AXES)[0])
            else:
                values.append(own.z_sum)
        parts.append(sum(weight * value for weight, value in zip(weights[term], values, strict=True)))
    return jnp.stack(parts)


def on_mesh(case: dict, cfg: dict, mode: tuple, sp: int):
    """Per-layer values and the gradient of their sum by the logits."""
    term, per_token, microbatches, replicas = mode
    logits, valid = case["in/logits"], case["in/valid"] != 0
    pad = (-logits.shape[2]) % sp  # more padding is no other batch
    logits = np.pad(logits, ((0, 0), (0, 0), (0, pad), (0, 0)), constant_values=0.5)
    valid = np.pad(valid, ((0, 0), (0, pad)))
    layers, rows, seq, experts = logits.shape
    logits = logits.reshape(layers, microbatches, rows // microbatches, seq, experts)
    valid = valid.reshape(microbatches, -1, seq)
    settings = (Router(score_function=cfg["fn"]), cfg["k"])
    objective = Objective(calculate_per_token_loss=per_token)

    def body(logits, valid):
        part = partial(own_part, valid_MBS=valid, term=term, objective=objective, settings=settings)
        value, pull = jax.vjp(part, logits)
        return sum_partial(value, AXES), pull(jnp.ones_like(value) + 0 * value)[0]

    sizes = dict.fromkeys(AXES, 1) | {"dp": replicas, "sp": sp}
    mesh = build_mesh(sizes, jax.devices()[: replicas * sp])
    logits_spec = P(None, None, "dp", "sp", None)
    program = jax.jit(
        manual(body, mesh, (logits_spec, P(None, "dp", "sp")), (P(), logits_spec)), compiler_options=FAST_COMPILE
    )
    values, gradient = program(logits, valid)
    return values, np.asarray(gradient).reshape(layers, rows, seq, experts)[:, :, : seq - pad]


def test_all_balance_cases_are_here():
    assert len(NAMES) == 6


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_value_and_gradient(name, mode):
    cfg, _, case = load_function(ORACLE / f"{name}.npz")
    sp = 3 if mode.endswith(("R2", "true", "global", "M4")) else 1
    values, gradient = on_mesh(case, cfg, MODES[mode], sp)
    np.testing.assert_allclose(values, case[f"out/{mode}"], rtol=1e-9)
    np.testing.assert_allclose(gradient, case[f"grad/{mode}"], rtol=0, atol=1e-9 * np.abs(case[f"grad/{mode}"]).max())


@pytest.mark.parametrize("name", NAMES)
def test_row_sums(name):
    cfg, _, case = load_function(ORACLE / f"{name}.npz")
    valid = jnp.asarray(case["in/valid"] != 0)
    for layer, logits in enumerate(case["in/logits"]):
        stats = stats_of(jnp.asarray(logits), valid, Router(score_function=cfg["fn"]), cfg["k"])
        np.testing.assert_array_equal(stats.balance_count_BE, case["out/counts_per_row"][layer])
        np.testing.assert_allclose(stats.score_sum_BE, case["out/score_sums_per_row"][layer], rtol=1e-9)
    np.testing.assert_array_equal(valid.sum(axis=1), case["out/valid_tokens_per_row"])


def test_local_balance_is_no_global_balance():
    cfg, _, case = load_function(ORACLE / "balance_example_global_vs_local.npz")
    case["in/logits"] = case["in/logits"][None]
    value, gradient = on_mesh(case, cfg, (GLOBAL_AUX, True, 2, 1), 1)
    np.testing.assert_allclose(value, case["out/global"], rtol=1e-9)
    np.testing.assert_allclose(gradient[0], case["grad/global"], rtol=0, atol=1e-9)
    value, _ = on_mesh(case, cfg, (AUX, False, 2, 1), 1)
    np.testing.assert_allclose(value, case["out/aux_false_M2"], rtol=1e-9)


@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
def test_balanced_routing_gives_one(function):
    cfg, _, case = load_function(ORACLE / "balance_example_uniform.npz")
    case["in/logits"] = case["in/logits"][None]
    for term in (AUX, SEQ_AUX, GLOBAL_AUX):
        value, _ = on_mesh(case, cfg | {"fn": function}, (term, True, 1, 1), 1)
        np.testing.assert_allclose(value, 1.0, rtol=1e-12)
        np.testing.assert_allclose(value, case[f"out/{function}"], rtol=1e-12)
