"""Sparse attention of layers without an indexer of their own: the keys that a layer before them chose."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxmoe.config.layer_plan import layer_plan
from jaxmoe.model.mla import LatentAttention
from jaxmoe.model.params import Init
from jaxmoe.model.tokens import make_tokens
from jaxmoe.spmd.axes import AXES
from jaxmoe.spmd.program import build_mesh, manual
from jaxmoe.step.train import probe_step
from tests.reference import cases

MLA = {"q_lora_rank": 8, "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
DSA = {"index_num_heads": 3, "index_head_dim": 8, "index_topk": 4, "indexer_loss": "sparse", "indexer_loss_coeff": 0.7}


@pytest.fixture(scope="module", autouse=True)
def float64():
    with cases.float64():
        yield


def config_of(pattern: Any, **more: Any):
    attention = {"num_kv_heads": 4, "head_dim": 10, "qk_norm": False, "mla": MLA}
    attention["dsa"] = DSA | {"indexer_pattern": pattern}
    return cases.make_config(attention=attention, router=cases.SIGMOID_BIAS, **more)


@pytest.mark.parametrize(
    ("pattern", "owners", "lead", "period"),
    [
        (1, [1, 1, 1, 1, 1, 1, 1], 1, 1),
        (3, [1, 1, 0, 0, 1, 0, 0], 1, 3),
        ([1, 0, 0, 1, 0, 1, 0], [1, 0, 0, 1, 0, 1, 0], 3, 2),
    ],
)
def test_no_chosen_key_leaves_the_lead_or_a_period(pattern, owners, lead, period):
    plan = layer_plan(config_of(pattern, layers=7, model={"mtp": {"num_depths": 1}}).model)
    assert [kind.owns_indexer for kind in plan.kinds] == [*map(bool, owners), True]
    assert [kind.is_moe for kind in plan.kinds] == [False] + [True] * 7
    assert (len(plan.lead), len(plan.period)) == (lead, period)
    assert plan.period[0].owns_indexer


def test_a_layer_attends_to_the_keys_it_is_given():
    model = config_of(2).model
    random = np.random.default_rng(0)
    x_BSD = jnp.asarray(random.normal(size=(2, 16, model.d_model)))
    batch = {name: value[:2] for name, value in cases.ragged_batch().items()}

    def body(x_BSD, positions, segments):
        init = Init(jax.random.key(0), model, dict.fromkeys(AXES, 1))
        owner, other = (LatentAttention(init.split(), reorders_keys=False, owns_indexer=own) for own in (True, False))
        tokens = make_tokens(positions, positions, segments, model.attention.rope, 4, x_BSD.dtype)
        _, _, index = owner(x_BSD, None, tokens)
        got, loss, same = other(x_BSD, index, tokens)
        assert loss is None
        assert not hasattr(other, "indexer")
        (q_nope, q_rope), (latent, rope) = (
            other._queries(other.query_source(x_BSD), tokens),
            other._latents(x_BSD, tokens),
        )
        up_k, up_v = other._up_weights(latent.dtype)
        score = jnp.einsum("bqnh,btc,cnh->bnqt", q_nope, latent, up_k) + jnp.einsum("bqnr,btr->bnqt", q_rope, rope)
        e = jnp.where((index[..., None] == jnp.arange(16)).any(axis=2)[:, None], jnp.exp(score * other.scale), 0)
        p = e / jnp.maximum(e.sum(axis=-1, keepdims=True), 1e-300)
        want = jnp.einsum("bnqt,btc,cnu,nud->bqd", p, latent, up_v, other.o_NHD[...])
        return got, want, index, same

    mesh = build_mesh(dict.fromkeys(AXES, 1), jax.devices()[:1])
    fields = [jnp.asarray(batch[name]) for name in ("positions", "segment_ids")]
    got, want, index, same = jax.jit(manual(body, mesh, P(), P()))(x_BSD, *fields)
    np.testing.assert_array_equal(index, same)
    assert (np.asarray(index) == -1).any()
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-13)
    assert np.asarray(want).any()


@pytest.mark.slow
def test_a_step_with_shared_keys_is_that_of_one_device():
    """Experts in the lead, three periods of two layers on two stages, tp and sp; the biases of all routers."""
    runs = []
    for layout in ({}, {"pp": 2, "sp": 2, "tp": 2}):
        config = config_of(
            [1, 0, 1, 0, 1, 0, 1, 0], layers=8, microbatches=2, objective={"replicas": 1},
            model={"mtp": {"num_depths": 1}}, **layout,
        )  # fmt: skip
        state = cases.make_state(config, 8 if layout else 1)
        new, metrics, gradient = cases.run(probe_step, state, cases.ragged_batch())
        trees = (gradient, new.params, new.router_bias)
        runs.append((*(cases.to_natural(tree, state) for tree in trees), metrics.scalars(), metrics.per_layer()))
        assert "lead" in state.router_bias
    for got, want, what in zip(runs[1], runs[0], ("gradient", "parameter", "bias", "scalar", "layer"), strict=True):
        cases.assert_close(got, want, what=what)
    _, _, bias, scalars, layers = runs[0]
    losses = layers["indexer_loss"]
    assert [bool(loss) for loss in losses] == [True, False] * 4 + [True]
    assert scalars["indexer_loss"] == pytest.approx(losses.sum() / 5, rel=1e-12)
    counts = np.asarray(metrics.expert_counts)
    _, old = cases.natural_arrays(config)
    step = np.sign(counts[1].mean() - counts[1]) * 0.01
    moved = bias["lead"][1]["moe"]["router"]["bias_E"] - old["lead"][1]["moe"]["router"]["bias_E"]
    np.testing.assert_allclose(moved, step, rtol=0, atol=1e-7)
