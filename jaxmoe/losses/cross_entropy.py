"""Cross-entropy over a vocabulary that is split over tp, in chunks of tokens; no array of T x V ever exists.

    CE_t = log(sum_v exp(x_t head_v)) - x_t head_target,   in at least fp32

Layout: x_TD holds the same tokens on every tp rank (gathered by the caller, typed varying over tp or not);
`head_DV` is this rank's contiguous slice of the vocabulary, rank r from column r * V on, the end possibly padding
(`vocab_size` gives the true size). Results are equal over tp and vary over the other axes of the inputs. Per
chunk one maximum and two sums cross tp.

The gradients of x and head are made in the forward pass, chunk by chunk, while the logits exist: nothing is
computed twice and only x- and head-sized arrays are kept. Chunks wait for each other, so one chunk's logits exist
at a time: 42 MB of temporaries at T=4096, V=8192, D=512 on CPU, against 134 MB in one chunk and 143 MB if chunks
need not wait. The gradient of x is this rank's part over its slice of the vocabulary: whoever gathered x over tp
sums it there (`gather`'s transpose does).

Source: Shoeybi et al. 2019, arXiv:1909.08053 (vocabulary-parallel loss); Hsu et al. 2024, arXiv:2410.10989
(gradient in the forward pass).
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.kernels.linear import sum_outer
from jaxmoe.kernels.one_by_one import not_before
from jaxmoe.spmd.axes import TP
from jaxmoe.spmd.collectives import max_over, min_over, rank, sum_partial, to_varying, vary_like, varying_axes

#: A chunk is not made smaller than this: below, the product with the head is no longer efficient.
MIN_CHUNK_TOKENS = 256


class _Logits(NamedTuple):
    """One chunk: local logits, and per token the pieces of its cross-entropy (equal over tp)."""

    logit_CV: jax.Array
    column_CV: jax.Array  # global vocabulary index of every local column
    top_C: jax.Array
    log_sum_C: jax.Array  # log of the sum of exp(logit - top)
    target_logit_C: jax.Array


def _equal_over_tp(value: jax.Array) -> jax.Array:
    """The value typed equal over tp; the caller promises that it is, in value."""
    return max_over(value, TP) if TP in varying_axes(value) else value


def _chunk_logits(x_CD: jax.Array, head_DV: jax.Array, target_C: jax.Array, vocab_size: int | None) -> _Logits:
    wide = jnp.promote_types(x_CD.dtype, jnp.float32)
    logit_CV = jnp.dot(x_CD, head_DV, preferred_element_type=wide)
    width = head_DV.shape[1]
    column_V = rank(TP) * width + jnp.arange(width, dtype=jnp.int32)
    if vocab_size is not None:
        logit_CV = jnp.where(column_V < vocab_size, logit_CV, jnp.finfo(wide).min)
    top_C = max_over(jnp.max(logit_CV, axis=1), TP)
    sum_C = sum_partial(jnp.sum(jnp.exp(logit_CV - top_C[:, None]), axis=1), TP)
    local_C = target_C - column_V[0]
    here_C = (local_C >= 0) & (local_C < width)
    picked_C = jnp.take_along_axis(logit_CV, jnp.clip(local_C, 0, width - 1)[:, None], axis=1)[:, 0]
    target_logit_C = sum_partial(jnp.where(here_C, picked_C, 0), TP)
    return _Logits(logit_CV, column_V[None, :], top_C, jnp.log(sum_C), target_logit_C)


def _chunk_slices(num_tokens: int, num_chunks: int) -> list[slice]:
    count = max(1, min(num_chunks, num_tokens // MIN_CHUNK_TOKENS))
    size = -(-num_tokens // count)
    return [slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]


class _Options(NamedTuple):
    """Static choices, hashable."""

    num_chunks: int
    vocab_size: int | None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss_sum(
    options: _Options, x_TD: jax.Array, head_DV: jax.Array, target_T: jax.Array, weight_T: jax.Array
) -> jax.Array:
    loss = jnp.zeros((), weight_T.dtype)
    for tokens in _chunk_slices(x_TD.shape[0], options.num_chunks):
        part = _chunk_logits(not_before(x_TD[tokens], loss), head_DV, target_T[tokens], options.vocab_size)
        loss += jnp.sum(weight_T[tokens] * (part.top_C + part.log_sum_C - part.target_logit_C))
    return loss


def _loss_sum_forward(
    options: _Options, x_TD: jax.Array, head_DV: jax.Array, target_T: jax.Array, weight_T: jax.Array
) -> tuple[jax.Array, tuple]:
    wide = jnp.promote_types(x_TD.dtype, jnp.float32)
    loss, dx_parts, dhead_DV = jnp.zeros((), weight_T.dtype), [], jnp.zeros(head_DV.shape, wide)
    for tokens in _chunk_slices(x_TD.shape[0], options.num_chunks):
        weight_C, target_C = weight_T[tokens], target_T[tokens]
        x_CD = not_before(x_TD[tokens], *dx_parts[-1:], dhead_DV)
        part = _chunk_logits(x_CD, head_DV, target_C, options.vocab_size)
        loss += jnp.sum(weight_C * (part.top_C + part.log_sum_C - part.target_logit_C))
        probability_CV = jnp.exp(part.logit_CV - (part.top_C + part.log_sum_C)[:, None])
        is_target_CV = part.column_CV == target_C[:, None]
        dlogit_CV = (weight_C[:, None] * (probability_CV - is_target_CV)).astype(x_CD.dtype)
        dx_parts.append(jnp.dot(dlogit_CV, head_DV.T, preferred_element_type=wide))
        dhead_DV += sum_outer(x_CD, dlogit_CV, wide)
    return loss, (jnp.concatenate(dx_parts), dhead_DV, weight_T, x_TD, head_DV)


def _loss_sum_backward(options: _Options, saved: tuple, dloss: jax.Array) -> tuple:
    dx_TD, dhead_DV, weight_T, x_TD, head_DV = saved
    dloss = vary_like(dloss, dx_TD)
    dx_TD = (dx_TD * dloss).astype(x_TD.dtype)
    return dx_TD, (dhead_DV * dloss).astype(head_DV.dtype), None, jnp.zeros_like(weight_T)


_loss_sum.defvjp(_loss_sum_forward, _loss_sum_backward)


def _aligned(
    x_TD: jax.Array, head_DV: jax.Array, target_T: jax.Array, weight_T: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The inputs with one set of varying axes; tokens' own data without tp, the products' with it."""
    target_T, weight_T = _equal_over_tp(target_T.astype(jnp.int32)), _equal_over_tp(weight_T)
    union = varying_axes(x_TD) | varying_axes(head_DV) | varying_axes(target_T) | varying_axes(weight_T)
    x_TD, head_DV = (to_varying(a, union | {TP}) for a in (x_TD, head_DV))
    target_T, weight_T = (to_varying(a, union - {TP}) for a in (target_T, weight_T))
    return x_TD, head_DV, target_T, weight_T


def cross_entropy_sum(
    x_TD: Float[Array, "T D"],
    head_DV: Float[Array, "D V"],
    target_T: Int[Array, "T"],
    weight_T: Float[Array, "T"],
    *,
    num_chunks: int = 8,
    vocab_size: int | None = None,
) -> Float[Array, ""]:
    """Sum over the tokens of weight * cross-entropy, in at least fp32. Runs inside shard_map (axis tp).

    Layout: see the module. The sum is over local tokens only, equal over tp. `weight_T` is a constant: its
    gradient is 0. `vocab_size` is the global number of true columns; the rest of the padded head is ignored and
    gets gradient 0. `num_chunks` is an upper limit.
    """
    x_TD, head_DV, target_T, weight_T = _aligned(x_TD, head_DV, target_T, lax.stop_gradient(weight_T))
    weight_T = weight_T.astype(jnp.promote_types(x_TD.dtype, jnp.float32))
    return _loss_sum(_Options(num_chunks, vocab_size), x_TD, head_DV, target_T, weight_T)


def cross_entropy_terms(
    x_TD: Float[Array, "T D"],
    head_DV: Float[Array, "D V"],
    target_T: Int[Array, "T"],
    *,
    num_chunks: int = 8,
    vocab_size: int | None = None,
) -> tuple[Float[Array, "T"], Bool[Array, "T"]]:
    """Per token its cross-entropy and whether the target is the most likely word. No gradient. Inside shard_map.

    Layout: as `cross_entropy_sum`; both results are equal over tp. Ties go to the lowest vocabulary index.
    """
    x_TD, head_DV, target_T, _ = lax.stop_gradient(_aligned(x_TD, head_DV, target_T, target_T))
    losses, hits = [], []
    for tokens in _chunk_slices(x_TD.shape[0], num_chunks):
        target_C = target_T[tokens]
        x_CD = not_before(x_TD[tokens], *losses[-1:])
        part = _chunk_logits(x_CD, head_DV, target_C, vocab_size)
        losses.append(part.top_C + part.log_sum_C - part.target_logit_C)
        is_top_CV = part.logit_CV == part.top_C[:, None]
        best_C = min_over(jnp.min(jnp.where(is_top_CV, part.column_CV, jnp.iinfo(jnp.int32).max), axis=1), TP)
        hits.append(best_C == target_C)
    return jnp.concatenate(losses), jnp.concatenate(hits)
