"""Vocabulary-parallel cross-entropy against the plain formula, for every split of the vocabulary."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxmoe.losses import cross_entropy as module
from jaxmoe.losses.cross_entropy import cross_entropy_sum, cross_entropy_terms
from jaxmoe.spmd.collectives import gather, sum_partial, to_varying
from jaxmoe.spmd.program import build_mesh, manual

TOKENS, WIDTH, PADDED, VOCAB = 112, 6, 32, 29


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(module, "MIN_CHUNK_TOKENS", 5)


def arrays(dtype=jnp.float64) -> tuple[jax.Array, ...]:
    random = np.random.default_rng(0)
    weight = random.random(TOKENS) * (random.random(TOKENS) < 0.8)
    return (
        jnp.asarray(random.normal(size=(TOKENS, WIDTH)), dtype),
        jnp.asarray(random.normal(size=(WIDTH, PADDED)), dtype),
        jnp.asarray(random.integers(0, VOCAB, TOKENS), jnp.int32),
        jnp.asarray(weight, jnp.promote_types(dtype, jnp.float32)),
    )


def reference_terms(x_TD, head_DV, target_T):
    logit_TV = jnp.dot(x_TD, head_DV, preferred_element_type=jnp.promote_types(x_TD.dtype, jnp.float32))[:, :VOCAB]
    picked_T = jnp.take_along_axis(logit_TV, target_T[:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(logit_TV, axis=1) - picked_T, jnp.argmax(logit_TV, axis=1) == target_T


def reference(x_TD, head_DV, target_T, weight_T):
    return jnp.sum(weight_T * reference_terms(x_TD, head_DV, target_T)[0])


def make_mesh(dp: int, tp: int):
    devices = jax.devices()[: dp * tp]
    return build_mesh({"pp": 1, "dp": dp, "ep": 1, "sp": 1, "tp": tp}, devices)


def sharded_loss_and_grads(mesh, num_chunks: int):
    """Tokens over (dp, tp), gathered over tp; head over tp. Global loss and gradients."""

    def step(x_TD, head_DV, target_T, weight_T):
        def loss(x_TD, head_DV):
            x_TD = gather(to_varying(x_TD, "tp"), "tp", 0)
            return 0.5 * cross_entropy_sum(x_TD, head_DV, target_T, weight_T, num_chunks=num_chunks, vocab_size=VOCAB)

        value, (dx, dhead) = jax.value_and_grad(loss, (0, 1))(x_TD, to_varying(head_DV, "dp"))
        return sum_partial(value, "dp"), dx, sum_partial(dhead, "dp")

    tokens, head = P(("dp", "tp")), P(None, "tp")
    specs = {"in_specs": (tokens, head, P("dp"), P("dp")), "out_specs": (P(), tokens, head)}
    return jax.jit(manual(step, mesh, **specs))


def assert_same(got, want, tolerance: float) -> None:
    for ours, theirs in zip(got, want, strict=True):
        assert ours.shape == theirs.shape
        wide = np.asarray(theirs, np.float64)
        bound = tolerance * max(1.0, np.abs(wide).max())
        np.testing.assert_allclose(np.asarray(ours, np.float64), wide, rtol=0, atol=bound)


@pytest.mark.parametrize("num_chunks", [1, 3, 8])
@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (1, 2), (4, 2), (1, 8)])
def test_value_and_gradients_equal_the_formula_on_every_mesh(dp, tp, num_chunks, x64):
    x_TD, head_DV, target_T, weight_T = arrays()
    got = sharded_loss_and_grads(make_mesh(dp, tp), num_chunks)(x_TD, head_DV, target_T, weight_T)
    value, grads = jax.value_and_grad(reference, (0, 1))(x_TD, head_DV, target_T, weight_T)
    assert_same(got, (0.5 * value, 0.5 * grads[0], 0.5 * grads[1]), 1e-12)
    assert (np.asarray(got[2])[:, VOCAB:] == 0).all()


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-5), (jnp.bfloat16, 3e-2)])
def test_narrow_types_come_close_and_the_sum_is_fp32(dtype, tolerance):
    # bf16: the gradient of the logits is rounded once (2^-9) before two products, the results once more.
    x_TD, head_DV, target_T, weight_T = arrays(dtype)
    got = sharded_loss_and_grads(make_mesh(1, 2), 3)(x_TD, head_DV, target_T, weight_T)
    assert [g.dtype for g in got] == [jnp.float32, dtype, dtype]
    wide = (x_TD.astype(jnp.float32), head_DV.astype(jnp.float32))
    value, grads = jax.value_and_grad(reference, (0, 1))(*wide, target_T, weight_T)
    assert_same(got, (0.5 * value, 0.5 * grads[0], 0.5 * grads[1]), tolerance)


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_terms_give_the_loss_and_the_hit_of_every_token(tp, x64):
    x_TD, head_DV, target_T, _ = arrays()
    head_DV = head_DV.at[:, 20].set(head_DV[:, 3])  # a tie across ranks: the lowest index wins
    mapped = manual(
        lambda x, head, target: cross_entropy_terms(x, head, target, vocab_size=VOCAB),
        make_mesh(1, tp),
        in_specs=(P(), P(None, "tp"), P()),
        out_specs=(P(), P()),
    )
    loss_T, hit_T = jax.jit(mapped)(x_TD, head_DV, target_T)
    want_loss_T, want_hit_T = reference_terms(x_TD, head_DV, target_T)
    assert_same([loss_T], [want_loss_T], 1e-12)
    np.testing.assert_array_equal(hit_T, want_hit_T)
    assert 0 < np.sum(hit_T) < TOKENS


def test_targets_and_weights_that_were_gathered_over_tp_are_accepted(x64):
    inputs = arrays()

    def step(x, head, target, weight):
        whole = [gather(a, "tp", 0) for a in (x, target, weight)]
        return cross_entropy_sum(whole[0], head, whole[1], whole[2], vocab_size=VOCAB)

    mapped = manual(step, make_mesh(1, 2), in_specs=(P("tp"), P(None, "tp"), P("tp"), P("tp")), out_specs=P())
    assert_same([jax.jit(mapped)(*inputs)], [reference(*inputs)], 1e-12)


def test_rematerialised_in_a_scan(x64):
    x_TD, head_DV, target_T, weight_T = arrays()

    def loss(x, head):
        body = jax.checkpoint(
            lambda total, x: (total + cross_entropy_sum(x, head, target_T, weight_T, vocab_size=VOCAB), None)
        )
        return jax.lax.scan(body, jnp.float64(0), jnp.stack([x, 2 * x]))[0]

    mapped = manual(
        jax.value_and_grad(loss, (0, 1)),
        make_mesh(1, 2),
        in_specs=(P(), P(None, "tp")),
        out_specs=(P(), (P(), P(None, "tp"))),
    )
    got = jax.jit(mapped)(x_TD, head_DV)
    want = jax.value_and_grad(
        lambda x, h: reference(x, h, target_T, weight_T) + reference(2 * x, h, target_T, weight_T), (0, 1)
    )(x_TD, head_DV)
    assert_same(jax.tree.leaves(got), jax.tree.leaves(want), 1e-12)


@pytest.mark.parametrize("what", ["loss", "gradients", "terms"])
def test_logits_of_one_chunk_only_exist_at_a_time(what):
    tokens, width, words, chunks = 2048, 16, 4096, 8
    x_TD, head_DV, weight_T = (
        jax.ShapeDtypeStruct(s, jnp.float32) for s in ((tokens, width), (width, words), (tokens,))
    )
    target_T = jax.ShapeDtypeStruct((tokens,), jnp.int32)

    def loss(x, head, target, weight):
        return cross_entropy_sum(x, head, target, weight, num_chunks=chunks)

    step = {
        "loss": loss,
        "gradients": jax.value_and_grad(loss, (0, 1)),
        "terms": lambda x, head, target, _: cross_entropy_terms(x, head, target, num_chunks=chunks),
    }[what]
    program = jax.jit(manual(step, make_mesh(1, 1), in_specs=P(), out_specs=P()))
    temporary = program.lower(x_TD, head_DV, target_T, weight_T).compile().memory_analysis().temp_size_in_bytes
    chunk = tokens // chunks * words * 4
    assert temporary < 4 * chunk, f"{temporary / chunk:.1f} chunks of {chunks}"
