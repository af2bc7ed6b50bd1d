"""Causal attention inside the documents of packed rows, with grouped queries; memory linear in the row.

    o_i = sum_j p_ij v_j,   p_ij = exp(scale q_i k_j - l_i) over the keys j that i sees
    l_i = log(sum_j exp(scale q_i k_j) + exp(sink))

i sees j if segment_i == segment_j != 0, position_j <= position_i and, with a window,
position_i - position_j < window. A query that sees nothing gives exactly 0.

Letters beside the glossary: T key positions, U value width where it differs from H, G = N / K query heads per
key head, C queries of a chunk.

Layout: everything local; heads may be split over tp and rows over dp and ep by the caller, and keys gathered
over sp in any order: positions and segments are data. Nothing is reduced over a mesh axis.

How: queries go in chunks; a custom VJP keeps o and the log-sum l per query and makes p again from them, so
scores exist for one chunk only. With `in_order` chunk c meets only the keys that its index allows: static
causal triangles, about half of the products, fewer with a window. At most `MAX_BLOCKS` chunks are unrolled
(XLA:CPU runs element-wise work in a loop body on one thread); longer rows loop inside each block.

The same code runs on GPU, not measured by us. `jax.nn.dot_product_attention(implementation="cudnn")` cannot
express this exactly: segments only as a dense [B, N, S, T] bias or as sequence lengths, and a row that sees
nothing is not 0 there.

Source: Dao et al. 2022, arXiv:2205.14135 (the backward pass from l); sinks: gpt-oss model card, 2025-08.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxmoe.kernels.one_by_one import not_before
from jaxmoe.spmd.collectives import vary_like

#: Blocks of queries that are unrolled; each one more costs compile time.
MAX_BLOCKS = 8

#: Queries of a block, if the row is short enough for `MAX_BLOCKS` of them (64 against 128 at S=512: 1.2 times faster).
BLOCK_QUERIES = 64

#: Queries whose scores exist at once in a longer row.
LOOP_QUERIES = 512


class _Marks(NamedTuple):
    """Who sees whom: segment and position of queries [B, S] and keys [B, T]."""

    q_segment_BS: jax.Array
    q_position_BS: jax.Array
    k_segment_BT: jax.Array
    k_position_BT: jax.Array


class _Options(NamedTuple):
    """Static choices, hashable."""

    scale: float
    window: int | None
    in_order: bool


def _wide_dtype(dtype: jnp.dtype) -> jnp.dtype:
    return jnp.promote_types(dtype, jnp.float32)


def _visible(marks: _Marks, window: int | None) -> jax.Array:
    """[B, 1, T, 1, C], True where query c sees key t."""
    q_segment, k_segment = marks.q_segment_BS[:, None, :], marks.k_segment_BT[:, :, None]
    ahead = marks.q_position_BS[:, None, :] - marks.k_position_BT[:, :, None]
    seen = (q_segment == k_segment) & (q_segment != 0) & (ahead >= 0)
    seen = seen if window is None else seen & (ahead < window)
    return seen[:, None, :, None, :]


def _merge(value_BKGCH: jax.Array) -> jax.Array:
    """The queries of a group's heads as one dim X = G * C: one larger product per key head."""
    return value_BKGCH.reshape(*value_BKGCH.shape[:2], -1, value_BKGCH.shape[-1])


def _per_key(rows_BKGCH: jax.Array, k_BKTH: jax.Array) -> jax.Array:
    """Products [B, K, T, G, C] of every query row with every key row, in at least fp32.

    Keys before queries: the products that sum over keys or queries then run at 0.4 to 0.6 of XLA:CPU's ceiling,
    the other way round slower, and reductions over keys vectorise.
    """
    wide = _wide_dtype(rows_BKGCH.dtype)
    s_BKTX = jnp.einsum("bkth,bkxh->bktx", k_BKTH, _merge(rows_BKGCH), preferred_element_type=wide)
    return s_BKTX.reshape(*s_BKTX.shape[:3], *rows_BKGCH.shape[2:4])


def _sum_over_keys(p_BKTGC: jax.Array, v_BKTU: jax.Array) -> jax.Array:
    """sum_t p v as [B, K, G, C, U], in at least fp32."""
    p_BKTX = p_BKTGC.reshape(*p_BKTGC.shape[:3], -1)
    # On two cores with a ceiling of 304 GFLOP/s: 194 with v turned before and o turned afterwards, 128 without.
    v_BKUT = jnp.swapaxes(v_BKTU, 2, 3)
    o_BKUX = jnp.einsum("bkut,bktx->bkux", v_BKUT, p_BKTX, preferred_element_type=_wide_dtype(v_BKTU.dtype))
    o_BKUGC = o_BKUX.reshape(*o_BKUX.shape[:3], *p_BKTGC.shape[3:])
    return jnp.moveaxis(o_BKUGC, 2, 4)


def _sum_over_queries(p_BKTGC: jax.Array, rows_BKGCH: jax.Array) -> jax.Array:
    """sum_gc p row as [B, K, T, H], in at least fp32."""
    p_BKTX = p_BKTGC.reshape(*p_BKTGC.shape[:3], -1)
    wide = _wide_dtype(rows_BKGCH.dtype)
    return jnp.einsum("bktx,bkxh->bkth", p_BKTX, _merge(rows_BKGCH), preferred_element_type=wide)


def _exp_where(seen: jax.Array, exponent: jax.Array) -> jax.Array:
    """exp(exponent) where seen, else exactly 0. The choice before the exp: XLA:CPU makes one pass of it, not two."""
    return jnp.exp(jnp.where(seen, exponent, -jnp.inf))


def _chunk_forward(
    q_BKGCH: jax.Array,
    k_BKTH: jax.Array,
    v_BKTU: jax.Array,
    marks: _Marks,
    sinks_KG: jax.Array | None,
    options: _Options,
) -> tuple[jax.Array, jax.Array]:
    """o [B, K, G, C, U] and l [B, K, G, C] of one chunk of queries."""
    seen = _visible(marks, options.window)
    s = _per_key(q_BKGCH, k_BKTH) * options.scale
    lowest = jnp.finfo(s.dtype).min
    top = jnp.max(jnp.where(seen, s, lowest), axis=2)
    if sinks_KG is not None:
        sinks = sinks_KG[None, :, :, None]
        top = jnp.maximum(top, sinks)
    p = _exp_where(seen, s - top[:, :, None])
    total = jnp.sum(p, axis=2)
    if sinks_KG is not None:
        total = total + jnp.exp(sinks - top)
    o = _sum_over_keys(p.astype(v_BKTU.dtype), v_BKTU)
    total = jnp.where(total > 0, total, 1)
    return (o / total[..., None]).astype(q_BKGCH.dtype), jnp.where(top > lowest, top, 0) + jnp.log(total)


def _chunk_backward(
    q_BKGCH: jax.Array,
    k_BKTH: jax.Array,
    v_BKTU: jax.Array,
    marks: _Marks,
    options: _Options,
    l_BKGC: jax.Array,
    do_BKGCU: jax.Array,
    delta_BKGC: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of one chunk's q, k and v; `delta` is the sum of o * do over U."""
    s = _per_key(q_BKGCH, k_BKTH) * options.scale
    p = _exp_where(_visible(marks, options.window), s - l_BKGC[:, :, None])
    ds = p * (_per_key(do_BKGCU, v_BKTU) - delta_BKGC[:, :, None]) * options.scale
    p, ds = p.astype(q_BKGCH.dtype), ds.astype(q_BKGCH.dtype)
    return _sum_over_keys(ds, k_BKTH), _sum_over_queries(ds, q_BKGCH), _sum_over_queries(p, do_BKGCU)


def _blocks(num_queries: int, num_keys: int, options: _Options) -> list[tuple[slice, slice]]:
    """Static (queries, keys) blocks that together hold every visible pair."""
    size = max(min(BLOCK_QUERIES, num_queries), -(-num_queries // MAX_BLOCKS))
    blocks = []
    for start in range(0, num_queries, size):
        end = min(start + size, num_queries)
        first = 0 if options.window is None else max(0, start - options.window + 1)
        blocks.append((slice(start, end), slice(first, end) if options.in_order else slice(0, num_keys)))
    return blocks


def _block_marks(marks: _Marks, queries: slice, keys: slice) -> _Marks:
    return _Marks(
        marks.q_segment_BS[:, queries],
        marks.q_position_BS[:, queries],
        marks.k_segment_BT[:, keys],
        marks.k_position_BT[:, keys],
    )


def _split(value: jax.Array, dim: int, count: int) -> jax.Array:
    """`dim` cut into `count` equal pieces, padded with zeros at the end; the pieces come first."""
    size = -(-value.shape[dim] // count)
    pad = [(0, 0)] * value.ndim
    pad[dim] = (0, size * count - value.shape[dim])
    shape = (*value.shape[:dim], count, size, *value.shape[dim + 1 :])
    return jnp.moveaxis(jnp.pad(value, pad).reshape(shape), dim, 0)


def _join(value: jax.Array, dim: int, length: int) -> jax.Array:
    """The inverse of `_split`."""
    value = jnp.moveaxis(value, 0, dim)
    shape = (*value.shape[:dim], -1, *value.shape[dim + 2 :])
    return lax.slice_in_dim(value.reshape(shape), 0, length, axis=dim)


def _loop_count(num_queries: int) -> int:
    return 1 if num_queries <= LOOP_QUERIES else -(-num_queries // LOOP_QUERIES)


def _split_marks(marks: _Marks, count: int) -> tuple[jax.Array, jax.Array]:
    # Padded queries have segment 0 and see nothing.
    return _split(marks.q_segment_BS, 1, count), _split(marks.q_position_BS, 1, count)


def _block_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, marks: _Marks, sinks_KG: jax.Array | None, options: _Options
) -> tuple[jax.Array, jax.Array]:
    count = _loop_count(q.shape[3])
    if count == 1:
        return _chunk_forward(q, k, v, marks, sinks_KG, options)

    def chunk(pieces: tuple) -> tuple[jax.Array, jax.Array]:
        q_piece, segment, position = pieces
        piece_marks = marks._replace(q_segment_BS=segment, q_position_BS=position)
        return _chunk_forward(q_piece, k, v, piece_marks, sinks_KG, options)

    o, l_sum = lax.map(chunk, (_split(q, 3, count), *_split_marks(marks, count)))
    return _join(o, 3, q.shape[3]), _join(l_sum, 3, q.shape[3])


def _block_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    marks: _Marks,
    options: _Options,
    l_sum: jax.Array,
    do: jax.Array,
    delta: jax.Array,
) -> tuple:
    count = _loop_count(q.shape[3])
    if count == 1:
        return _chunk_backward(q, k, v, marks, options, l_sum, do, delta)

    def chunk(sums: tuple, pieces: tuple) -> tuple[tuple, jax.Array]:
        q_piece, l_piece, do_piece, delta_piece, segment, position = pieces
        piece_marks = marks._replace(q_segment_BS=segment, q_position_BS=position)
        dq, dk, dv = _chunk_backward(q_piece, k, v, piece_marks, options, l_piece, do_piece, delta_piece)
        return (sums[0] + dk, sums[1] + dv), dq

    wide = _wide_dtype(q.dtype)
    zeros = tuple(vary_like(jnp.zeros(a.shape, wide), q) for a in (k, v))
    pieces = (*(_split(a, 3, count) for a in (q, l_sum, do, delta)), *_split_marks(marks, count))
    (dk, dv), dq = lax.scan(chunk, zeros, pieces)
    return _join(dq, 3, q.shape[3]), dk, dv


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    options: _Options,
    q_BKGSH: jax.Array,
    k_BKTH: jax.Array,
    v_BKTU: jax.Array,
    marks: _Marks,
    sinks_KG: jax.Array | None,
) -> jax.Array:
    return _attend_forward(options, q_BKGSH, k_BKTH, v_BKTU, marks, sinks_KG)[0]


def _attend_forward(
    options: _Options,
    q_BKGSH: jax.Array,
    k_BKTH: jax.Array,
    v_BKTU: jax.Array,
    marks: _Marks,
    sinks_KG: jax.Array | None,
) -> tuple:
    parts = []
    for queries, keys in _blocks(q_BKGSH.shape[3], k_BKTH.shape[2], options):
        q_block = not_before(q_BKGSH[:, :, :, queries], *(part[0] for part in parts[-1:]))
        block = q_block, k_BKTH[:, :, keys], v_BKTU[:, :, keys]
        parts.append(_block_forward(*block, _block_marks(marks, queries, keys), sinks_KG, options))
    # The names let a remat policy keep both and leave this pass out of the recomputation.
    o = checkpoint_name(jnp.concatenate([part[0] for part in parts], axis=3), "attention_out")
    l_sum = checkpoint_name(jnp.concatenate([part[1] for part in parts], axis=3), "attention_log_sum")
    return o, (q_BKGSH, k_BKTH, v_BKTU, marks, sinks_KG, o, l_sum)


def _attend_backward(options: _Options, saved: tuple, do_BKGSU: jax.Array) -> tuple:
    q, k, v, marks, sinks_KG, o, l_sum = saved
    wide = _wide_dtype(q.dtype)
    delta = jnp.sum(o.astype(wide) * do_BKGSU.astype(wide), axis=-1)
    dq_parts, part = [], ()
    dk, dv = (vary_like(jnp.zeros(a.shape, wide), q) for a in (k, v))
    for queries, keys in _blocks(q.shape[3], k.shape[2], options):
        q_block, do_block = (not_before(a[:, :, :, queries], *part) for a in (q, do_BKGSU))
        block = q_block, k[:, :, keys], v[:, :, keys]
        rest = l_sum[:, :, :, queries], do_block, delta[:, :, :, queries]
        part = _block_backward(*block, _block_marks(marks, queries, keys), options, *rest)
        dq_parts.append(part[0])
        dk, dv = dk.at[:, :, keys].add(part[1]), dv.at[:, :, keys].add(part[2])
    dq = jnp.concatenate(dq_parts, axis=3).astype(q.dtype)
    dsinks = None
    if sinks_KG is not None:
        # A sink is a key with value 0: its probability times (0 - delta).
        dsinks = -jnp.sum(jnp.exp(sinks_KG[None, :, :, None] - l_sum) * delta, axis=(0, 3))
    return dq, dk.astype(k.dtype), dv.astype(v.dtype), None, dsinks


_attend.defvjp(_attend_forward, _attend_backward)


def attention(  # noqa: PLR0913 - queries and keys come with segments and positions of their own
    q_BSNH: Float[Array, "B S N H"],
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K U"],
    *,
    q_segment_BS: Int[Array, "B S"],
    q_position_BS: Int[Array, "B S"],
    k_segment_BT: Int[Array, "B T"],
    k_position_BT: Int[Array, "B T"],
    scale: float,
    window: int | None = None,
    in_order: bool = False,
    sinks_N: Float[Array, "N"] | None = None,
) -> Float[Array, "B S N U"]:
    """Attention of every query to the keys it sees; see the module for the formula.

    `in_order` promises that S == T, that queries and keys are the same tokens in the row's own order, and that
    positions rise inside a document. Softmax in at least fp32; the result has q's dtype. Query head n reads
    key head n // (N / K).
    """
    assert not in_order or q_BSNH.shape[1] == k_BTKH.shape[1], "in_order needs queries and keys of the same tokens"
    num_rows, num_queries, num_heads, _ = q_BSNH.shape
    num_key_heads = k_BTKH.shape[2]
    group = num_heads // num_key_heads
    sinks = () if sinks_N is None else (sinks_N,)
    inputs = (q_BSNH, k_BTKH, v_BTKH, q_segment_BS, q_position_BS, k_segment_BT, k_position_BT, *sinks)
    q, k, v, q_segment, q_position, k_segment, k_position, *sinks = [vary_like(a, *inputs) for a in inputs]
    q_BKGSH = q.reshape(num_rows, num_queries, num_key_heads, group, -1).transpose(0, 2, 3, 1, 4)
    wide = _wide_dtype(q.dtype)
    sinks_KG = sinks[0].astype(wide).reshape(num_key_heads, group) if sinks else None
    marks = _Marks(q_segment, q_position, k_segment, k_position)
    options = _Options(float(scale), window, in_order)
    o_BKGSU: Any = _attend(options, q_BKGSH, k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3), marks, sinks_KG)
    return o_BKGSU.transpose(0, 3, 1, 2, 4).reshape(num_rows, num_queries, num_heads, -1)


def attention_reference(  # noqa: PLR0913 - the signature of `attention`
    q_BSNH: Float[Array, "B S N H"],
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K U"],
    *,
    q_segment_BS: Int[Array, "B S"],
    q_position_BS: Int[Array, "B S"],
    k_segment_BT: Int[Array, "B T"],
    k_position_BT: Int[Array, "B T"],
    scale: float,
    window: int | None = None,
    in_order: bool = False,
    sinks_N: Float[Array, "N"] | None = None,
) -> Float[Array, "B S N U"]:
    """The same by the formula, all scores at once: slow, for tests. Ignores `in_order`."""
    group = q_BSNH.shape[2] // k_BTKH.shape[2]
    k_BTNH, v_BTNU = (jnp.repeat(a, group, axis=2) for a in (k_BTKH, v_BTKH))
    ahead_BST = q_position_BS[:, :, None] - k_position_BT[:, None, :]
    same_BST = (q_segment_BS[:, :, None] == k_segment_BT[:, None, :]) & (q_segment_BS[:, :, None] != 0)
    seen_BST = same_BST & (ahead_BST >= 0) & (ahead_BST < (jnp.inf if window is None else window))
    s_BNST = scale * jnp.einsum("bsnh,btnh->bnst", q_BSNH, k_BTNH)
    e_BNST = jnp.where(seen_BST[:, None], jnp.exp(jnp.where(seen_BST[:, None], s_BNST, 0)), 0)
    total_BNS = e_BNST.sum(-1) + (0 if sinks_N is None else jnp.exp(sinks_N)[None, :, None])
    p_BNST = e_BNST / jnp.where(total_BNS > 0, total_BNS, 1)[..., None]
    return jnp.einsum("bnst,btnu->bsnu", p_BNST, v_BTNU).astype(q_BSNH.dtype)
