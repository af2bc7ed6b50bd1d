"""Latent attention over packed documents: heads split over tp, one latent per token gathered over sp."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxmoe.config.schema import Attention as AttentionConfig
from jaxmoe.kernels.attention import attention
from jaxmoe.kernels.linear import linear
from jaxmoe.kernels.sparse_attention import (
    Indexer,
    MainAttention,
    Marks,
    chosen_keys,
    indexer_loss,
    sparse_attention,
)
from jaxmoe.model.indexer import KeyIndexer
from jaxmoe.model.norm import RmsNorm
from jaxmoe.model.params import Init
from jaxmoe.model.rope import rotate, yarn_mscale
from jaxmoe.model.tokens import Tokens
from jaxmoe.spmd.axes import POSITION_AXES, SP, TP
from jaxmoe.spmd.collectives import axis_size, gather, own_piece, scatter_sum


def softmax_scale(config: AttentionConfig) -> float:
    """1 / sqrt(query width), times the square of YaRN's factor for the attention logits."""
    scaling = config.rope.scaling
    scale = 1 / math.sqrt(config.head_dim)
    if scaling is None or scaling.type != "yarn" or not scaling.mscale_all_dim:
        return scale
    return scale * yarn_mscale(scaling.factor, scaling.mscale_all_dim) ** 2


class LatentAttention(nnx.Module):
    """Causal attention within each document; keys and values of all heads are made from one latent.

        q = up(norm(x W_qa)), or x W_q      latent c = norm(x W_kva)[:C], rotated key r = x W_kva[C:]
        k_n = [c W_k,n | r],  v_n = c W_v,n

    Layout: x_BSD holds this (sp, tp) rank's positions, in and out. Heads are split over tp. The down-projections are
    replicated and work on a rank's own positions, so only latents and the rotated key are gathered. `reorders_keys`:
    rows are not split over sp in their own order. `owns_indexer`: chooses the keys that it attends to; without one it
    attends to those that it is given, where the config has any.
    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.
    """

    def __init__(self, init: Init, *, reorders_keys: bool, owns_indexer: bool):
        config, width = init.model.attention, init.model.d_model
        mla = config.mla
        assert mla is not None
        heads, nope, rope = config.num_heads, mla.qk_nope_head_dim, mla.qk_rope_head_dim
        if mla.q_lora_rank is None:
            self.q_DNH = init.normal((width, heads, nope + rope), P(None, TP, None))
        else:
            self.q_down_DC = init.normal((width, mla.q_lora_rank), P())
            self.q_norm = RmsNorm(mla.q_lora_rank, init, mla.latent_norm_eps)
            self.q_up_CNH = init.normal((mla.q_lora_rank, heads, nope + rope), P(None, TP, None))
        self.kv_down_DC = init.normal((width, mla.kv_lora_rank + rope), P())
        self.kv_norm = RmsNorm(mla.kv_lora_rank, init, mla.latent_norm_eps)
        self.kv_up_CNH = init.normal((mla.kv_lora_rank, heads, nope + mla.v_head_dim), P(None, TP, None))
        self.o_NHD = init.normal((heads, mla.v_head_dim, width), P(TP, None, None), to_residual=True)
        if owns_indexer:
            self.indexer = KeyIndexer(init.split())
        self.mla = mla
        self.dsa = config.dsa
        self.owns_indexer = owns_indexer
        self.reorders_keys = reorders_keys
        self.scale = softmax_scale(config)

    def _queries(self, source_BSC: jax.Array, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
        """Queries [B, Q, N, H] of this rank's heads, without position and rotated, of all positions of this sp rank.

        `source_BSC`: the queries' own latent, or the hidden state where there is none.
        """
        source = gather(source_BSC, TP, dim=1)
        up = self.q_DNH if self.mla.q_lora_rank is None else self.q_up_CNH
        q = jnp.einsum("bqc,cnh->bqnh", source, up[...].astype(source.dtype))
        nope, rope = jnp.split(q, [self.mla.qk_nope_head_dim], axis=-1)
        return nope, rotate(rope, tokens.cos_BQR, tokens.sin_BQR, interleaved=self.mla.rope_interleaved)

    def query_source(self, x_BSD: jax.Array) -> jax.Array:
        """What queries are made from: their normalised latent, or the hidden state. [B, S, C]."""
        if self.mla.q_lora_rank is None:
            return x_BSD
        return self.q_norm(linear(x_BSD, self.q_down_DC[...].astype(x_BSD.dtype)))

    def _latents(self, x_BSD: jax.Array, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
        """Latents [B, T, C] and rotated keys [B, T, R] of the whole row, from this rank's positions."""
        down = linear(x_BSD, self.kv_down_DC[...].astype(x_BSD.dtype))
        latent, rope = jnp.split(down, [self.mla.kv_lora_rank], axis=-1)
        cos, sin = (own_piece(table, TP, dim=1) for table in (tokens.cos_BQR, tokens.sin_BQR))
        rope = rotate(rope[:, :, None], cos, sin, interleaved=self.mla.rope_interleaved)[:, :, 0]
        both = gather(jnp.concatenate([self.kv_norm(latent), rope], axis=-1), POSITION_AXES, dim=1)
        latent, rope = jnp.split(both, [self.mla.kv_lora_rank], axis=-1)
        return latent, rope

    def _up_weights(self, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
        """The up-projections of keys [C, N, H] and values [C, N, U]."""
        up_k, up_v = jnp.split(self.kv_up_CNH[...].astype(dtype), [self.mla.qk_nope_head_dim], axis=-1)
        return up_k, up_v

    def _dense(
        self, q: tuple[jax.Array, jax.Array], latent_BTC: jax.Array, rope_BTR: jax.Array, tokens: Tokens
    ) -> jax.Array:
        """Attention to every visible key, keys and values of each head made in full; [B, Q, N, U]."""
        up_k, up_v = self._up_weights(latent_BTC.dtype)
        k_nope = jnp.einsum("btc,cnh->btnh", latent_BTC, up_k)
        shared = jnp.broadcast_to(rope_BTR[:, :, None], (*k_nope.shape[:3], rope_BTR.shape[-1]))
        return attention(
            jnp.concatenate(q, axis=-1),
            jnp.concatenate([k_nope, shared], axis=-1),
            jnp.einsum("btc,cnh->btnh", latent_BTC, up_v),
            q_segment_BS=tokens.segment_BQ,
            q_position_BS=tokens.position_BQ,
            k_segment_BT=tokens.segment_BT,
            k_position_BT=tokens.position_BT,
            scale=self.scale,
            in_order=axis_size(SP) == 1,
        )

    def _output(self, o_BQNH: jax.Array) -> jax.Array:
        weight_NHD = self.o_NHD[...].astype(o_BQNH.dtype)
        partial = linear(o_BQNH.reshape(*o_BQNH.shape[:2], -1), weight_NHD.reshape(-1, weight_NHD.shape[-1]))
        return scatter_sum(partial, TP, dim=1)

    def _chosen(
        self,
        q: tuple[jax.Array, jax.Array],
        latent_BTC: jax.Array,
        rope_BTR: jax.Array,
        tokens: Tokens,
        found: Indexer | None,
        index_BQP: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
        """Attention to the chosen keys, [B, Q, N, U]; this rank's part of the indexer's loss summed over tokens; the
        keys, places of a row in its own order.

        `found`: what chooses, and learns; None takes the keys of the layer before. Heads attend in the space of the
        latent, which is key and value in one: [B, T, 1, R + C].
        """
        dsa, up_weights = self.dsa, self._up_weights(latent_BTC.dtype)
        assert dsa is not None
        order = jnp.argsort(tokens.id_BT[0]) if self.reorders_keys else None

        def in_order(value_BT: jax.Array) -> jax.Array:
            """Ties go to the lowest position of the row, however positions lie on sp."""
            return value_BT if order is None else jnp.take(value_BT, order, axis=1)

        q_nope, q_rope = q
        q_BQNX = jnp.concatenate([q_rope, jnp.einsum("bqnh,cnh->bqnc", q_nope, up_weights[0])], axis=-1)
        kv_BTKX = in_order(jnp.concatenate([rope_BTR, latent_BTC], axis=-1))[:, :, None]
        marks = Marks(tokens.segment_BQ, tokens.position_BQ, in_order(tokens.segment_BT), in_order(tokens.position_BT))
        if found is not None:
            found = found._replace(k_BTI=in_order(found.k_BTI))
        if dsa.stage == "sparse":
            index_BQP = self._keys(found, marks) if found is not None else index_BQP
            assert index_BQP is not None, "the first layer has an indexer"
            o_BQNC = sparse_attention(q_BQNX, kv_BTKX, index_BQP, scale=self.scale, value_start=rope_BTR.shape[-1])
            o_BQNH = jnp.einsum("bqnc,cnh->bqnh", o_BQNC, up_weights[1])
        else:
            o_BQNH = self._dense(q, latent_BTC, rope_BTR, tokens)
        if found is None or dsa.indexer_loss_coeff == 0:
            return o_BQNH, None, index_BQP
        main = MainAttention(q_BQNX, kv_BTKX, self.scale)
        compared = index_BQP if dsa.indexer_loss == "sparse" else None
        return o_BQNH, indexer_loss(found, main, marks, compared).sum(), index_BQP

    def _keys(self, found: Indexer, marks: Marks) -> jax.Array:
        """The keys that the queries of this sp rank attend to, each tp rank choosing those of its own, [B, Q, P]."""
        assert self.dsa is not None
        own_segment, own_position = (own_piece(x, TP, dim=1) for x in (marks.q_segment_BS, marks.q_position_BS))
        return gather(chosen_keys(found, Marks(own_segment, own_position, *marks[2:]), self.dsa.index_topk), TP, dim=1)

    def __call__(
        self, x_BSD: jax.Array, index_BQP: jax.Array | None, tokens: Tokens
    ) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
        """The output; this rank's part of the indexer's loss summed over tokens, where there is one; the chosen keys.

        `index_BQP`: the keys of the layer before.
        """
        source = self.query_source(x_BSD)
        q, (latent, rope) = self._queries(source, tokens), self._latents(x_BSD, tokens)
        if self.dsa is None:
            return self._output(self._dense(q, latent, rope, tokens)), None, None
        found = self.indexer(x_BSD, source, tokens) if self.owns_indexer else None
        o_BQNH, loss, index_BQP = self._chosen(q, latent, rope, tokens, found, index_BQP)
        return self._output(o_BQNH), loss, index_BQP
