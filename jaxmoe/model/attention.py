"""Grouped-query attention over packed documents, heads split over tp and positions over sp."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxmoe.config.schema import Attention as AttentionConfig
from jaxmoe.kernels.attention import attention
from jaxmoe.kernels.linear import linear
from jaxmoe.model.norm import ProjectionNorm, RmsNorm
from jaxmoe.model.params import Init
from jaxmoe.model.rope import rotate
from jaxmoe.model.tokens import Tokens
from jaxmoe.spmd.axes import SP, TP
from jaxmoe.spmd.collectives import axis_size, exchange, gather, own_piece, rank, scatter_sum


def rope_dim(config: AttentionConfig) -> int:
    """Channels of a head that are rotated."""
    if config.mla is not None:
        return config.mla.qk_rope_head_dim
    return round(config.head_dim * config.rope.fraction)


def _project(x_BSD: jax.Array, weight_DNH: jax.Array) -> jax.Array:
    dim, heads, width = weight_DNH.shape
    flat = linear(x_BSD, weight_DNH.reshape(dim, heads * width).astype(x_BSD.dtype))
    return flat.reshape(*x_BSD.shape[:-1], heads, width)


class Attention(nnx.Module):
    """Causal attention within each document.

    Layout: x_BSD holds this (sp, tp) rank's positions, in and out. Heads are split over tp. With fewer key/value heads
    than tp ranks, each rank projects the one it needs from a replicated weight; the weight's gradient is then the sum
    over tp, as for every replicated weight.
    Source: Ainslie et al. 2023, arXiv:2305.13245; Ulysses: Jacobs et al. 2023, arXiv:2309.14509.
    """

    def __init__(self, init: Init, *, ulysses: bool, window: int | None):
        config, width = init.model.attention, init.model.d_model
        heads, kv_heads, head = config.num_heads, config.num_kv_heads, config.head_dim
        kv_axis = TP if kv_heads % init.sizes[TP] == 0 else None
        self.q_DNH = init.normal((width, heads, head), P(None, TP, None))
        self.k_DKH = init.normal((width, kv_heads, head), P(None, kv_axis, None))
        self.v_DKH = init.normal((width, kv_heads, head), P(None, kv_axis, None))
        self.o_NHD = init.normal((heads, head, width), P(TP, None, None), to_residual=True)
        if config.qkv_bias:
            self.q_bias_NH = init.zeros((heads, head), P(TP, None))
            self.k_bias_KH = init.zeros((kv_heads, head), P(kv_axis, None))
            self.v_bias_KH = init.zeros((kv_heads, head), P(kv_axis, None))
        if config.output_bias:
            self.o_bias_D = init.zeros((width,))
        if config.qk_norm and config.qk_norm_over == "projection":
            self.q_norm = ProjectionNorm(heads, head, TP, init)
            self.k_norm = ProjectionNorm(kv_heads, head, kv_axis, init)
        elif config.qk_norm:
            self.q_norm = RmsNorm(head, init)
            self.k_norm = RmsNorm(head, init)
        if config.sinks:
            self.sinks_N = init.zeros((heads,), P(TP))
        self.config = config
        self.ulysses = ulysses
        self.window = window

    def _own_kv(self, weight: jax.Array, dim: int) -> jax.Array:
        """The key/value heads this rank's queries use: all it holds, or one of a replicated weight."""
        num_kv, ranks = self.config.num_kv_heads, axis_size(TP)
        if num_kv % ranks == 0:
            return weight
        return jax.lax.dynamic_slice_in_dim(weight, rank(TP) * num_kv // ranks, 1, dim)

    def _qkv(self, x_BQD: jax.Array, tokens: Tokens) -> tuple[jax.Array, jax.Array, jax.Array]:
        q = _project(x_BQD, self.q_DNH[...])
        k = _project(x_BQD, self._own_kv(self.k_DKH[...], 1))
        v = _project(x_BQD, self._own_kv(self.v_DKH[...], 1))
        if self.config.qkv_bias:
            q = q + self.q_bias_NH[...].astype(q.dtype)
            k = k + self._own_kv(self.k_bias_KH[...], 0).astype(q.dtype)
            v = v + self._own_kv(self.v_bias_KH[...], 0).astype(q.dtype)
        if self.config.qk_norm and isinstance(self.k_norm, ProjectionNorm):
            q, k = self.q_norm(q), self.k_norm(k, own=lambda scale: self._own_kv(scale, 0))
        elif self.config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.config.clip_qkv is not None:
            q, k, v = (jnp.clip(x, -self.config.clip_qkv, self.config.clip_qkv) for x in (q, k, v))
        q, k = (rotate(x, tokens.cos_BQR, tokens.sin_BQR, interleaved=self.config.rope.interleaved) for x in (q, k))
        return q, k, v

    def _attend(self, q: jax.Array, k: jax.Array, v: jax.Array, tokens: Tokens) -> jax.Array:
        if self.ulysses:
            return self._attend_ulysses(q, k, v, tokens)
        return attention(
            q,
            gather(k, SP, dim=1),
            gather(v, SP, dim=1),
            q_segment_BS=tokens.segment_BQ,
            q_position_BS=tokens.position_BQ,
            k_segment_BT=tokens.segment_BT,
            k_position_BT=tokens.position_BT,
            scale=self.config.scale or 1 / math.sqrt(self.config.head_dim),
            window=self.window,
            in_order=axis_size(SP) == 1,
            sinks_N=self.sinks_N[...] if self.config.sinks else None,
        )

    def _attend_ulysses(self, q: jax.Array, k: jax.Array, v: jax.Array, tokens: Tokens) -> jax.Array:
        """All positions of a part of the heads instead of all heads of a part of the positions."""
        ranks = axis_size(SP)
        copies = ranks // math.gcd(k.shape[2], ranks)
        k, v = (jnp.repeat(x, copies, axis=2) for x in (k, v))
        q, k, v = (exchange(x, SP, split_dim=2, join_dim=1) for x in (q, k, v))
        o = attention(
            q,
            k,
            v,
            q_segment_BS=tokens.segment_BT,
            q_position_BS=tokens.position_BT,
            k_segment_BT=tokens.segment_BT,
            k_position_BT=tokens.position_BT,
            scale=self.config.scale or 1 / math.sqrt(self.config.head_dim),
            window=self.window,
            in_order=True,
            sinks_N=own_piece(self.sinks_N[...], SP, dim=0) if self.config.sinks else None,
        )
        return exchange(o, SP, split_dim=1, join_dim=2)

    def __call__(self, x_BSD: jax.Array, tokens: Tokens) -> jax.Array:
        q, k, v = self._qkv(gather(x_BSD, TP, dim=1), tokens)
        o_BQNH = self._attend(q, k, v, tokens)
        weight_NHD = self.o_NHD[...].astype(x_BSD.dtype)
        partial = linear(o_BQNH.reshape(*o_BQNH.shape[:2], -1), weight_NHD.reshape(-1, weight_NHD.shape[-1]))
        y_BSD = scatter_sum(partial, TP, dim=1)
        return y_BSD + self.o_bias_D[...].astype(y_BSD.dtype) if self.config.output_bias else y_BSD
