"""Attention of every query to a few chosen keys, the choice of these keys, and the loss that teaches the chooser.

    score_ij = sum_h w_ih relu(q_ih . k_j)          the indexer: small queries with many heads, one key per token
    chosen_i = the P best-scored keys that i sees    ties to the lowest key; -1 fills up where i sees fewer
    o_i      = sum_{j chosen} softmax_j(scale q_i . k_j) v_j
    KL_i     = sum_j p_ij (log p_ij - log softmax_j(score_ij)),   p_i: attention summed over heads, normalised

Letters: S queries here, T keys of a row, N query heads, K key heads, X channels that a key and its value share,
P chosen keys, J index heads, I index head width.

Layout: everything local; keys of a whole row stand in the row's own order, so that ties go to the lowest position.
In the loss heads are split over tp, and queries too: see `indexer_loss`.

How: queries go in chunks of `CHUNK_QUERIES`; a chunk's scores over T, or its gathered keys [P, X], are all that exists
at once, forward and backward (each chunk is recomputed), so memory grows with T, never with S * T.

Source: DeepSeek-V3.2-Exp technical report, 2025, section 2.1 and equations 1-4.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxmoe.spmd.axes import TP
from jaxmoe.spmd.collectives import own_piece, scatter_sum, vary_like

#: Queries whose scores exist at once.
CHUNK_QUERIES = 64

#: Smallest target probability whose logarithm is taken, and smallest sum that a target is divided by.
TARGET_FLOOR = 1e-10


class Marks(NamedTuple):
    """Who sees whom: segment and position of queries [B, S] and keys [B, T]. Segment 0 is padding."""

    q_segment_BS: jax.Array
    q_position_BS: jax.Array
    k_segment_BT: jax.Array
    k_position_BT: jax.Array


class Indexer(NamedTuple):
    """What the scores are made from."""

    q_BSJI: jax.Array
    w_BSJ: jax.Array
    k_BTI: jax.Array
    relu: bool


class MainAttention(NamedTuple):
    """The attention that an indexer learns from."""

    q_BQNX: jax.Array
    k_BTKX: jax.Array
    scale: float


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def visible(marks: Marks) -> jax.Array:
    """[B, S, T], True where a query sees a key: of its own document, not after itself."""
    same = marks.q_segment_BS[:, :, None] == marks.k_segment_BT[:, None, :]
    before = marks.q_position_BS[:, :, None] >= marks.k_position_BT[:, None, :]
    return same & before & (marks.q_segment_BS != 0)[:, :, None]


def index_scores(q_BSJI: jax.Array, w_BSJ: jax.Array, k_BTI: jax.Array, *, relu: bool) -> jax.Array:
    """Scores [B, S, T] in at least fp32."""
    products = jnp.einsum("bsji,bti->bsjt", _wide(q_BSJI), _wide(k_BTI))
    products = jax.nn.relu(products) if relu else products
    return jnp.einsum("bsj,bsjt->bst", _wide(w_BSJ), products)


def choose_keys(score_BST: jax.Array, seen_BST: jax.Array, topk: int) -> jax.Array:
    """The best `topk` seen keys of each query, int32 [B, S, P], best first; -1 in slots that are not used."""
    # Minus infinity loses against every finite score; top_k takes the lower index of equals.
    score, index = lax.top_k(jnp.where(seen_BST, score_BST, -jnp.inf), min(topk, score_BST.shape[-1]))
    return jnp.where(score > -jnp.inf, index, -1).astype(jnp.int32)


def chosen_keys(indexer: Indexer, marks: Marks, topk: int, *, chunk: int = CHUNK_QUERIES) -> Int[Array, "B S P"]:
    """The keys that each query attends to; see `choose_keys`. Has no gradient."""
    q, w, k = (lax.stop_gradient(a) for a in (indexer.q_BSJI, indexer.w_BSJ, indexer.k_BTI))

    def choose(q_BCJI: jax.Array, w_BCJ: jax.Array, segment: jax.Array, position: jax.Array) -> jax.Array:
        seen = visible(marks._replace(q_segment_BS=segment, q_position_BS=position))
        return choose_keys(index_scores(q_BCJI, w_BCJ, k, relu=indexer.relu), seen, topk)

    return _by_chunks(choose, (q, w, marks.q_segment_BS, marks.q_position_BS), q.shape[1], chunk)


def _take(value_BTX: jax.Array, index_BSP: jax.Array) -> jax.Array:
    """[B, S, P, ...]: what stands at the chosen keys, at key 0 where a slot is not used."""
    return jax.vmap(lambda value, index: value[index])(value_BTX, jnp.maximum(index_BSP, 0))


def _softmax(score: jax.Array, seen: jax.Array) -> jax.Array:
    """Over the last dim, over what is seen only; 0 in a row that sees nothing, with finite gradients."""
    top = lax.stop_gradient(jnp.max(jnp.where(seen, score, jnp.finfo(score.dtype).min), axis=-1, keepdims=True))
    e = jnp.where(seen, jnp.exp(jnp.where(seen, score - top, 0)), 0)
    total = jnp.sum(e, axis=-1, keepdims=True)
    return e / jnp.where(total > 0, total, 1)


def _log_softmax(score: jax.Array, seen: jax.Array) -> jax.Array:
    """The same in logarithms; 0 where nothing is seen."""
    top = lax.stop_gradient(jnp.max(jnp.where(seen, score, jnp.finfo(score.dtype).min), axis=-1, keepdims=True))
    shifted = jnp.where(seen, score - top, 0)
    total = jnp.sum(jnp.where(seen, jnp.exp(shifted), 0), axis=-1, keepdims=True)
    return jnp.where(seen, shifted - jnp.log(jnp.where(total > 0, total, 1)), 0)


def _by_chunks(function: Callable[..., Any], inputs: Any, num_queries: int, chunk: int) -> Any:
    """`function` of `chunk` queries at a time; dim 1 of every input and output is that of the queries.

    Padded queries at the end are zeros: segment 0, they see nothing.
    """
    size = min(chunk, num_queries)
    count = -(-num_queries // size)

    def split(value: jax.Array) -> jax.Array:
        padding = [(0, 0)] * value.ndim
        padding[1] = (0, count * size - num_queries)
        pieces = jnp.pad(value, padding).reshape(value.shape[0], count, size, *value.shape[2:])
        return jnp.moveaxis(pieces, 1, 0)

    def join(value: jax.Array) -> jax.Array:
        whole = jnp.moveaxis(value, 0, 1).reshape(value.shape[1], count * size, *value.shape[3:])
        return whole[:, :num_queries]

    run = jax.checkpoint(lambda piece: function(*piece))
    return jax.tree.map(join, lax.map(run, jax.tree.map(split, inputs)))


def sparse_attention(
    q_BSNH: Float[Array, "B S N H"],
    kv_BTKX: Float[Array, "B T K X"],
    index_BSP: Int[Array, "B S P"],
    *,
    scale: float,
    value_start: int,
    chunk: int = CHUNK_QUERIES,
) -> Float[Array, "B S N U"]:
    """Attention of every query to its chosen keys.

    The first H channels of `kv` are the key, those from `value_start` on the value; they may overlap, as a latent that
    is both. Slots of -1 count for nothing, forward and backward; a query without any gets 0. Softmax in at least fp32.
    """
    dtype, heads = q_BSNH.dtype, kv_BTKX.shape[2]
    # The gradient of a key is a sum over many chunks: in at least fp32.
    q, kv, index = (vary_like(a, q_BSNH, kv_BTKX, index_BSP) for a in (q_BSNH, _wide(kv_BTKX), index_BSP))
    width = q.shape[-1]

    def attend(q_BCNH: jax.Array, index_BCP: jax.Array) -> jax.Array:
        rows, size, num_heads, _ = q_BCNH.shape
        chosen_BCPKX = _take(kv, index_BCP).astype(dtype)
        q_BCKGH = q_BCNH.reshape(rows, size, heads, num_heads // heads, width)
        wide = kv.dtype
        score = jnp.einsum("bckgh,bcpkh->bckgp", q_BCKGH, chosen_BCPKX[..., :width], preferred_element_type=wide)
        p = _softmax(score * scale, (index_BCP >= 0)[:, :, None, None, :]).astype(dtype)
        o = jnp.einsum("bckgp,bcpku->bckgu", p, chosen_BCPKX[..., value_start:], preferred_element_type=wide)
        return o.astype(dtype).reshape(rows, size, num_heads, -1)

    # Padded queries are zeros: plus one, so that these choose nothing.
    return _by_chunks(lambda q, place: attend(q, place - 1), (q, index + 1), q.shape[1], chunk)


def indexer_loss(
    indexer: Indexer,
    main: MainAttention,
    marks: Marks,
    index_BQP: Int[Array, "B Q P"] | None,
    *,
    chunk: int = CHUNK_QUERIES,
) -> Float[Array, "B S"]:
    """KL(attention || indexer) of every query, in at least fp32; 0 for padding. No gradient reaches the attention.

    Layout: the indexer has this tp rank's queries S; the attention has this rank's heads, and the queries Q = R * S of
    all R tp ranks, rank by rank, as `marks` and `index_BQP`. Attention is summed over the heads of all tp ranks: each
    gets the rows of its own queries. `index_BQP`: compare over the chosen keys; None: over all keys that are seen.
    """
    num_queries = indexer.q_BSJI.shape[1]
    k_BTKX = lax.stop_gradient(main.k_BTKX)

    def by_query(value_BQ: jax.Array) -> jax.Array:
        """[B, R * S, ...] as [B, S, R, ...]."""
        return jnp.moveaxis(value_BQ.reshape(value_BQ.shape[0], -1, num_queries, *value_BQ.shape[2:]), 1, 2)

    def by_rank(value_BCR: jax.Array) -> jax.Array:
        """[B, C, R, ...] as [B, R * C, ...]."""
        moved = jnp.moveaxis(value_BCR, 2, 1)
        return moved.reshape(moved.shape[0], -1, *moved.shape[3:])

    def divergence(
        q_BCJI: jax.Array, w_BCJ: jax.Array, q_BCRNX: jax.Array, segment: jax.Array, position: jax.Array, place: Any
    ) -> jax.Array:
        rows_marks = marks._replace(q_segment_BS=by_rank(segment), q_position_BS=by_rank(position))
        seen = visible(rows_marks) if place is None else by_rank(place) > 0
        chosen = None if place is None else by_rank(place) - 1
        target_BCT = _target(by_rank(q_BCRNX), k_BTKX, main.scale, seen, chosen)
        score = index_scores(q_BCJI, w_BCJ, indexer.k_BTI, relu=indexer.relu)
        own_seen = _own_rows(seen)
        if chosen is not None:
            score = jnp.take_along_axis(score, jnp.maximum(_own_rows(chosen), 0), axis=-1)
        log_target = jnp.log(jnp.maximum(target_BCT, TARGET_FLOOR))
        return jnp.sum(target_BCT * (log_target - _log_softmax(score, own_seen)), axis=-1)

    place = None if index_BQP is None else by_query(index_BQP + 1)
    q_BSRNX = by_query(lax.stop_gradient(main.q_BQNX))
    inputs = (
        indexer.q_BSJI,
        indexer.w_BSJ,
        q_BSRNX,
        by_query(marks.q_segment_BS),
        by_query(marks.q_position_BS),
        place,
    )
    return _by_chunks(divergence, inputs, num_queries, chunk)


def _own_rows(value_BQ: jax.Array) -> jax.Array:
    """This tp rank's rows of [B, R * C, ...]: [B, C, ...]."""
    return own_piece(value_BQ, TP, dim=1)


def _target(
    q_BQNX: jax.Array, k_BTKX: jax.Array, scale: float, seen_BQT: jax.Array, chosen_BQP: jax.Array | None
) -> jax.Array:
    """Attention of this tp rank's own queries, summed over all heads and normalised, [B, C, T] (or P chosen keys)."""
    rows, num_queries, num_heads, width = q_BQNX.shape
    heads, wide = k_BTKX.shape[2], jnp.promote_types(q_BQNX.dtype, jnp.float32)
    q_BQKGX = q_BQNX.reshape(rows, num_queries, heads, num_heads // heads, width)
    if chosen_BQP is None:
        score = jnp.einsum("bqkgx,btkx->bqkgt", q_BQKGX, k_BTKX, preferred_element_type=wide)
    else:
        k_BQPKX = _take(k_BTKX, chosen_BQP)
        score = jnp.einsum("bqkgx,bqpkx->bqkgp", q_BQKGX, k_BQPKX, preferred_element_type=wide)
    p = _softmax(score * scale, seen_BQT[:, :, None, None, :]).sum(axis=(2, 3))
    summed = scatter_sum(p, TP, dim=1)
    return summed / jnp.maximum(summed.sum(axis=-1, keepdims=True), TARGET_FLOOR)
