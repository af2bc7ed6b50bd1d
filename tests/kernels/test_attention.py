"""Attention against the formula on packed rows: values, gradients, and that documents do not touch each other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.kernels import attention as module
from jaxmoe.kernels.attention import attention, attention_reference

ROWS, LENGTH, HEADS, KEY_HEADS, WIDTH, VALUE_WIDTH = 2, 41, 4, 2, 6, 5


def packed(length: int = LENGTH) -> tuple[np.ndarray, np.ndarray]:
    """Segments and positions: padding first, in the middle and last, documents of one token and of many."""
    segment = np.zeros((ROWS, length), np.int32)
    position = np.zeros_like(segment)
    spans = [[(3, 10), (10, 11), (14, length - 2)], [(0, length // 2), (length // 2, length)]]
    for row, documents in enumerate(spans):
        for name, (start, end) in enumerate(documents, start=1):
            segment[row, start:end] = name
            position[row, start:end] = np.arange(end - start)
    return segment, position


def arrays(length: int = LENGTH, dtype=jnp.float64) -> tuple[jax.Array, ...]:
    random = np.random.default_rng(0)
    shapes = (
        (ROWS, length, HEADS, WIDTH),
        (ROWS, length, KEY_HEADS, WIDTH),
        (ROWS, length, KEY_HEADS, VALUE_WIDTH),
        (HEADS,),
    )
    return tuple(jnp.asarray(random.normal(size=shape), dtype) for shape in shapes)


def value_and_grads(function, inputs, segment, position, *, order=None, with_sinks=False, **options):
    """`order` permutes the keys. Gradients are those of the arrays in their first order."""

    def loss(q, k, v, sinks):
        take = slice(None) if order is None else order
        o = function(
            q,
            k[:, take],
            v[:, take],
            q_segment_BS=jnp.asarray(segment),
            q_position_BS=jnp.asarray(position),
            k_segment_BT=jnp.asarray(segment[:, take]),
            k_position_BT=jnp.asarray(position[:, take]),
            scale=0.4,
            sinks_N=sinks if with_sinks else None,
            **options,
        )
        return jnp.sum(jnp.sin(o.astype(jnp.promote_types(o.dtype, jnp.float32)))), o

    (_, o), grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True))(*inputs)
    return o, *grads


def assert_same(got, want, tolerance: float) -> None:
    for ours, theirs in zip(got, want, strict=True):
        assert ours.shape == theirs.shape
        wide = np.asarray(theirs, np.float64)
        bound = tolerance * max(1.0, np.abs(wide).max())
        np.testing.assert_allclose(np.asarray(ours, np.float64), wide, rtol=0, atol=bound)


@pytest.fixture(params=["one_block", "blocks", "loops_in_blocks"])
def chunking(request, monkeypatch):
    """Small limits, so that short rows take the ways of long ones."""
    block, most, loop = {"one_block": (128, 8, 512), "blocks": (7, 8, 512), "loops_in_blocks": (7, 2, 8)}[request.param]
    monkeypatch.setattr(module, "BLOCK_QUERIES", block)
    monkeypatch.setattr(module, "MAX_BLOCKS", most)
    monkeypatch.setattr(module, "LOOP_QUERIES", loop)


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize(("window", "with_sinks"), [(None, False), (6, True)])
def test_values_and_gradients_equal_the_formula(chunking, in_order, window, with_sinks, x64):
    options = {"window": window, "with_sinks": with_sinks, "in_order": in_order}
    got = value_and_grads(attention, arrays(), *packed(), **options)
    assert_same(got, value_and_grads(attention_reference, arrays(), *packed(), **options), 1e-12)


@pytest.mark.parametrize("in_order", [True, False])
def test_a_window_of_one_sees_only_the_query_itself(in_order, x64):
    segment, position = packed()
    q, k, v, sinks = arrays()
    o, *_ = value_and_grads(attention, (q, k, v, sinks), segment, position, in_order=in_order, window=1)
    own = np.where((segment != 0)[:, :, None, None], np.repeat(np.asarray(v), HEADS // KEY_HEADS, axis=2), 0)
    assert_same([o], [own], 1e-12)


def test_the_order_of_the_keys_does_not_matter(chunking, x64):
    order = np.random.default_rng(3).permutation(LENGTH)
    got = value_and_grads(attention, arrays(), *packed(), order=order)
    assert_same(got, value_and_grads(attention, arrays(), *packed(), in_order=True), 1e-12)


@pytest.mark.parametrize("with_sinks", [True, False])
def test_a_query_that_sees_nothing_gives_zero_and_gets_no_gradient(with_sinks):
    segment, position = packed()
    o, dq, dk, dv, _ = value_and_grads(
        attention, arrays(dtype=jnp.float32), segment, position, in_order=True, with_sinks=with_sinks
    )
    for value in (o, dq, dk, dv):
        assert np.isfinite(value).all()
        assert (np.asarray(value)[segment == 0] == 0).all()


def test_a_changed_document_leaves_the_next_one_bit_equal(chunking):
    q, k, v, sinks = arrays(dtype=jnp.float32)
    segment, position = packed()
    second = np.arange(LENGTH) >= LENGTH // 2
    changed = tuple(jnp.where(second[None, :, None, None], a, 7 * a + 50) for a in (q, k, v))
    for in_order in (True, False):
        first = value_and_grads(attention, (q, k, v, sinks), segment, position, in_order=in_order)
        other = value_and_grads(attention, (*changed, sinks), segment, position, in_order=in_order)
        for a, b in zip(first[:4], other[:4], strict=True):
            np.testing.assert_array_equal(np.asarray(a)[1, second], np.asarray(b)[1, second])


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-5), (jnp.bfloat16, 5e-2)])
def test_narrow_types_keep_their_dtype_and_come_close(dtype, tolerance):
    # bf16: 2^-8 per rounding of p, ds and the results, relative to the largest element.
    got = value_and_grads(attention, arrays(dtype=dtype), *packed(), in_order=True, with_sinks=True)
    assert all(g.dtype == dtype for g in got)
    want = value_and_grads(attention_reference, arrays(dtype=jnp.float32), *packed(), with_sinks=True)
    assert_same(got, want, tolerance)


def test_rematerialised_in_a_scan(chunking, x64):
    _, k, v, _ = arrays()
    q = jnp.asarray(np.random.default_rng(4).normal(size=(ROWS, LENGTH, HEADS, VALUE_WIDTH)))
    k = k[..., :VALUE_WIDTH]
    segment, position = (jnp.asarray(a) for a in packed())
    marks = {
        "q_segment_BS": segment,
        "q_position_BS": position,
        "k_segment_BT": segment,
        "k_position_BT": position,
    }

    def loss(function, q, k, v):
        layer = jax.checkpoint(lambda x, _: (x + function(x, k, v, scale=0.4, in_order=True, **marks), None))
        return jnp.sum(jax.lax.scan(layer, q, None, length=3)[0] ** 2)

    got = jax.jit(jax.grad(lambda *a: loss(attention, *a), (0, 1, 2)))(q, k, v)
    assert_same(got, jax.grad(lambda *a: loss(attention_reference, *a), (0, 1, 2))(q, k, v), 1e-12)


@pytest.mark.parametrize("window", [None, 512])
@pytest.mark.parametrize("with_gradients", [False, True])
def test_scores_of_one_block_only_exist_at_a_time(with_gradients, window):
    length, heads, width = 2048, 4, 8
    q = jax.ShapeDtypeStruct((1, length, heads, width), jnp.float32)
    k = jax.ShapeDtypeStruct((1, length, 2, width), jnp.float32)
    marks = jnp.ones((1, length), jnp.int32), jnp.arange(length, dtype=jnp.int32)[None]
    names = ("q_segment_BS", "q_position_BS", "k_segment_BT", "k_position_BT")

    def total(q, k, v):
        options = {"scale": 0.3, "window": window, "in_order": True}
        return jnp.sum(attention(q, k, v, **dict(zip(names, marks * 2, strict=True)), **options) ** 2)

    program = jax.jit(jax.grad(total, (0, 1, 2)) if with_gradients else total).lower(q, k, k).compile()
    queries = length // module.MAX_BLOCKS
    block = heads * queries * min(length, (window or length) + queries) * 4
    temporary = program.memory_analysis().temp_size_in_bytes
    assert temporary < 4 * block, f"{temporary / block:.1f} blocks of {module.MAX_BLOCKS}"
