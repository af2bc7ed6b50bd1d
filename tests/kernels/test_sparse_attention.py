"""Choice of keys, sparse attention and the indexer's loss: float64 numbers made with another library, exact zeros,
ties, slots that are not used, and memory."""

from functools import lru_cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxmoe.kernels.attention import attention_reference
from jaxmoe.kernels.sparse_attention import (
    Indexer,
    MainAttention,
    Marks,
    choose_keys,
    chosen_keys,
    indexer_loss,
    sparse_attention,
    visible,
)
from jaxmoe.spmd.axes import AXES
from jaxmoe.spmd.program import build_mesh, manual
from tests.golden import oracle_io

FOLDER = Path(__file__).parents[1] / "golden" / "oracle"


@pytest.fixture(autouse=True)
def wide(x64):
    with jax.numpy_rank_promotion("allow"):
        yield


@lru_cache
def oracle():
    cfg, _, arrays = oracle_io.load_function(FOLDER / "dsa.npz")
    return cfg, arrays


def on_one_device(function, *inputs):
    mesh = build_mesh(dict.fromkeys(AXES, 1), jax.devices()[:1])
    return jax.jit(manual(function, mesh, P(), P()))(*inputs)


def marks_of(arrays) -> Marks:
    segment, position = jnp.asarray(arrays["in/segment_ids"]), jnp.asarray(arrays["in/positions"])
    return Marks(segment, position, segment, position)


def heads_last(value):
    return jnp.moveaxis(jnp.asarray(value), 1, 2)


def turned(x, arrays):
    """The oracle's rotation: half-split, the first channels."""
    angle = arrays["in/positions"][..., None] * arrays["in/rope_inv_freq"]
    cos, sin = np.cos(angle)[:, :, None], np.sin(angle)[:, :, None]
    half = angle.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def indexer_of(params, x, latent, cfg, arrays) -> Indexer:
    heads, width = cfg["H"], cfg["D"]
    q = (latent @ params["wq_b"].T).reshape(*latent.shape[:2], heads, width)
    k = x @ params["wk"].T
    k = (k - k.mean(-1, keepdims=True)) / jnp.sqrt(k.var(-1, keepdims=True) + cfg["layernorm_eps"])
    k = k * params["k_norm_w"] + params["k_norm_b"]
    w = x @ params["weights_proj"].T / np.sqrt(heads * width)
    return Indexer(turned(q, arrays), w, turned(k[:, :, None], arrays)[:, :, 0], cfg["relu"])


def loss_rows(params, main, kind: str, chunk: int, cfg, arrays):
    x, latent = (jax.lax.stop_gradient(jnp.asarray(arrays[f"in/{n}"])) for n in ("x", "q_latent_normalised"))
    found, marks = indexer_of(params, x, latent, cfg, arrays), marks_of(arrays)
    index = chosen_keys(found, marks, cfg["topk"], chunk=chunk)
    compared = index if kind == "sparse" else None
    rows = indexer_loss(found, MainAttention(*main, cfg["scale"]), marks, compared, chunk=chunk)
    return rows, index


@pytest.mark.parametrize("chunk", [5, 64])
@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_choice_loss_and_its_gradient(kind, chunk):
    cfg, arrays = oracle()
    names = ("wq_b", "wk", "k_norm_w", "k_norm_b", "weights_proj")
    params = {name: jnp.asarray(arrays[f"in/{name}"]) for name in names}
    main = tuple(heads_last(arrays[f"in/main_{name}"]) for name in ("q", "k"))
    valid = arrays["in/segment_ids"] != 0
    modes = {"true": np.full(cfg["B"], 1 / valid.sum())}
    for microbatches in (2, 4):
        counts = valid.reshape(microbatches, -1).sum(1)
        modes[f"false_M{microbatches}"] = np.repeat(1 / counts / microbatches, cfg["B"] // microbatches)

    def run(params, main):
        rows, back, index = jax.vjp(
            lambda params, main: loss_rows(params, main, kind, chunk, cfg, arrays), params, main, has_aux=True
        )
        return rows, index, {mode: back(jnp.broadcast_to(w[:, None], rows.shape)) for mode, w in modes.items()}

    rows, index, gradients = on_one_device(run, params, main)
    np.testing.assert_array_equal(np.sort(index), np.sort(arrays["out/selected_idx"]))
    np.testing.assert_allclose(rows, np.where(valid, arrays[f"out/{kind}/kl_rows"], 0), rtol=0, atol=1e-13)
    for mode, weight in modes.items():
        loss = (np.asarray(rows) * weight[:, None]).sum()
        np.testing.assert_allclose(loss, arrays[f"out/{kind}/loss_{mode}"], rtol=1e-12)
        of_params, of_main = gradients[mode]
        for name in names:
            np.testing.assert_allclose(of_params[name], arrays[f"grad/{kind}_{mode}/{name}"], rtol=0, atol=1e-13)
        assert not any(np.asarray(g).any() for g in of_main), "the loss reaches the attention"


@pytest.mark.parametrize("chunk", [5, 64])
def test_attention_to_the_chosen_keys_and_its_gradient(chunk):
    cfg, arrays = oracle()
    q, k, v = (heads_last(arrays[f"in/main_{name}"]) for name in "qkv")
    index = jnp.asarray(arrays["out/selected_idx"])

    def run(q, k, v):
        def attend(q, k, v):
            kv = jnp.concatenate([k, v], axis=-1)
            return sparse_attention(q, kv, index, scale=cfg["scale"], value_start=k.shape[-1], chunk=chunk)

        o, back = jax.vjp(attend, q, k, v)
        return o, back(heads_last(arrays["in/cotangent_attention"]))

    o, gradients = on_one_device(run, q, k, v)
    valid = (arrays["in/segment_ids"] != 0)[:, :, None, None]
    np.testing.assert_allclose(o * valid, heads_last(arrays["out/attention"]) * valid, rtol=0, atol=1e-13)
    for name, gradient in zip("qkv", gradients, strict=True):
        want = heads_last(arrays[f"grad/attention/main_{name}"])
        np.testing.assert_allclose(gradient, want, rtol=0, atol=1e-13, err_msg=name)


def test_ties_go_to_the_lowest_key_and_unused_slots_are_minus_one():
    cfg, _, arrays = oracle_io.load_function(FOLDER / "dsa_select_ties.npz")
    segment = jnp.asarray(arrays["in/segment_ids"])
    position = jnp.broadcast_to(jnp.arange(segment.shape[1]), segment.shape)
    seen = visible(Marks(segment, position, segment, position))
    index = choose_keys(jnp.asarray(arrays["in/index_scores"]), seen, cfg["topk"])
    np.testing.assert_array_equal(np.sort(index), np.sort(arrays["out/selected_idx"]))
    assert arrays["out/tied_rows"].any()


def made(rows=2, seq=40, heads=4, width=6, value=4, seed=0):
    random = np.random.default_rng(seed)
    q = jnp.asarray(random.normal(size=(rows, seq, heads, width + value)))
    kv = jnp.asarray(random.normal(size=(rows, seq, 1, width + value)))
    return q, kv, jnp.asarray(random.normal(size=(rows, seq, heads, value)))


def test_a_latent_that_is_key_and_value_equals_a_dense_mask():
    """A mask as a document id: every query of its own document sees what it chose."""
    q, kv, cotangent = made()
    rows, seq = q.shape[:2]
    topk = 5
    position = jnp.broadcast_to(jnp.arange(seq), (rows, seq))
    segment = jnp.where(position < 7, 1, jnp.where(position < 9, 0, 2)).astype(jnp.int32)
    score = jnp.asarray(np.random.default_rng(1).normal(size=(rows, seq, seq)))
    index = choose_keys(score, visible(Marks(segment, position, segment, position)), topk)
    assert (np.asarray(index[:, 0]) == [0] + [-1] * (topk - 1)).all()
    assert (index == -1).all(-1).any()
    chosen = (index[..., None] == jnp.arange(seq)).any(axis=2)

    def dense(q, kv):
        s = jnp.einsum("bsnx,btx->bsnt", q, kv[:, :, 0]) * 0.3
        e = jnp.where(chosen[:, :, None], jnp.exp(s), 0)
        total = e.sum(-1, keepdims=True)
        return jnp.einsum("bsnt,btu->bsnu", e / jnp.where(total > 0, total, 1), kv[:, :, 0, 6:])

    sparse = partial(sparse_attention, index_BSP=index, scale=0.3, value_start=6, chunk=16)

    def run(q, kv):
        o, back = jax.vjp(sparse, q, kv)
        want, back_want = jax.vjp(dense, q, kv)
        return o, want, back(cotangent), back_want(cotangent)

    o, want, gradients, want_gradients = on_one_device(run, q, kv)
    np.testing.assert_allclose(o, want, rtol=0, atol=1e-12)
    for got, expected in zip(gradients, want_gradients, strict=True):
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)


def test_all_keys_chosen_is_plain_attention():
    q, kv, _ = made()
    rows, seq = q.shape[:2]
    position = jnp.broadcast_to(jnp.arange(seq), (rows, seq))
    segment = jnp.ones_like(position)
    index = choose_keys(jnp.zeros((rows, seq, seq)), visible(Marks(segment, position, segment, position)), seq)
    o = on_one_device(lambda q, kv: sparse_attention(q, kv, index, scale=0.3, value_start=6), q, kv)
    marks = {"q_segment_BS": segment, "q_position_BS": position, "k_segment_BT": segment, "k_position_BT": position}
    want = attention_reference(q, kv, kv[..., 6:], scale=0.3, **marks)
    np.testing.assert_allclose(o, want, rtol=0, atol=1e-12)


def test_no_array_of_queries_by_keys_exists():
    """Forward and backward of choice, attention and loss, at S = 8 * topk and chunks of S / 8."""
    seq, topk, chunk, heads, index_heads = 512, 64, 64, 2, 2

    def run(q, kv, found_q, found_w, found_k):
        position = jnp.broadcast_to(jnp.arange(seq), (1, seq))
        segment = jnp.ones_like(position)
        marks = Marks(segment, position, segment, position)

        def loss(q, kv, found_q, found_w, found_k):
            found = Indexer(found_q, found_w, found_k, relu=True)
            index = chosen_keys(found, marks, topk, chunk=chunk)
            o = sparse_attention(q, kv, index, scale=0.3, value_start=2, chunk=chunk)
            return o.sum() + indexer_loss(found, MainAttention(q, kv, 0.3), marks, None, chunk=chunk).sum()

        return jax.grad(loss, argnums=(0, 1, 2, 3, 4))(q, kv, found_q, found_w, found_k)

    shapes = [(1, seq, heads, 6), (1, seq, 1, 6), (1, seq, index_heads, 4), (1, seq, index_heads), (1, seq, 4)]
    mesh = build_mesh(dict.fromkeys(AXES, 1), jax.devices()[:1])
    inputs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    text = jax.jit(manual(run, mesh, P(), P())).lower(*inputs).compile().as_text()
    assert f"{chunk},{seq}" in text or f"{seq},{chunk}" in text, "the scores of a chunk"
    squares = [line for line in text.splitlines() if f"{seq},{seq}" in line]
    assert not squares, squares[:3]
