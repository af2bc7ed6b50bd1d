"""The small scorer that chooses the keys of sparse attention."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxmoe.kernels.sparse_attention import Indexer
from jaxmoe.model.norm import LayerNorm, at_least_float32
from jaxmoe.model.params import Init
from jaxmoe.model.rope import rotate
from jaxmoe.model.tokens import Tokens
from jaxmoe.spmd.axes import POSITION_AXES, TP
from jaxmoe.spmd.collectives import gather, own_piece


def hadamard(width: int) -> np.ndarray:
    """The orthogonal Hadamard matrix of a power of two (Sylvester's)."""
    matrix = np.ones((1, 1))
    while len(matrix) < width:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / math.sqrt(width)


class KeyIndexer(nnx.Module):
    """Queries q [B, S, J, I], weights w [B, S, J] and one key k [B, T, I] per token, for `index_scores`.

    Its inputs are detached: what it learns changes no other weight. The first channels of q and k are rotated as those
    of the attention.

    Layout: works on this rank's own positions; weights are replicated; keys are gathered over sp and tp.
    Source: DeepSeek-V3.2-Exp technical report, 2025, equation 1.
    """

    def __init__(self, init: Init):
        attention, width = init.model.attention, init.model.d_model
        mla, dsa = attention.mla, attention.dsa
        assert mla is not None
        assert dsa is not None
        heads, head = dsa.index_num_heads, dsa.index_head_dim
        self.q_CJI = init.normal((mla.q_lora_rank or width, heads, head), P())
        self.k_DI = init.normal((width, head), P())
        self.k_norm = LayerNorm(head, init, dsa.key_norm_eps)
        self.weight_DJ = init.normal((width, heads), P())
        self.dsa = dsa

    def _turned(self, x_BSJI: jax.Array, tokens: Tokens) -> jax.Array:
        cos, sin = (own_piece(table, TP, dim=1) for table in (tokens.cos_BQR, tokens.sin_BQR))
        turned = rotate(x_BSJI, cos, sin, interleaved=self.dsa.rope_interleaved)
        if self.dsa.hadamard:
            turned = turned @ jnp.asarray(hadamard(turned.shape[-1]), turned.dtype)
        return turned

    def __call__(self, x_BSD: jax.Array, source_BSC: jax.Array, tokens: Tokens) -> Indexer:
        """`source_BSC`: what the attention's queries are made from."""
        x, source = jax.lax.stop_gradient((x_BSD, source_BSC))
        q = jnp.einsum("bsc,cji->bsji", source, self.q_CJI[...].astype(source.dtype))
        k = self.k_norm(x @ self.k_DI[...].astype(x.dtype))
        wide = at_least_float32(x)
        scale = 1 / math.sqrt(self.dsa.index_num_heads * self.dsa.index_head_dim)
        return Indexer(
            q_BSJI=self._turned(q, tokens),
            w_BSJ=wide @ self.weight_DJ[...].astype(wide.dtype) * scale,
            k_BTI=gather(self._turned(k[:, :, None], tokens)[:, :, 0], POSITION_AXES, dim=1),
            relu=self.dsa.relu,
        )
