"""Rotary position embedding, with the usual ways to stretch it.

Source: Su et al. 2021, arXiv:2104.09864; YaRN: Peng et al. 2023, arXiv:2309.00071; llama3: the Llama 3.1 model card.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmoe.config.schema import Rope, RopeScaling

#: Most pieces of a table that are made one after the other.
_TABLE_PIECES = 8


def _llama3(inverse: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    wavelength = 2 * math.pi / inverse
    turns = scaling.original_seq_len / wavelength
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return (1 - smooth) * inverse / scaling.factor + smooth * inverse


def _yarn(inverse: np.ndarray, scaling: RopeScaling, theta: float, width: int) -> np.ndarray:
    def dim_of(turns: float) -> float:
        return width * math.log(scaling.original_seq_len / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dim_of(scaling.beta_fast), dim_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(width // 2) - low) / (high - low), 0.0, 1.0)
    return inverse / scaling.factor * ramp + inverse * (1 - ramp)


def inverse_frequencies(rope: Rope, width: int) -> np.ndarray:
    """Radians per position of each rotated pair, [width / 2], float64."""
    inverse = rope.theta ** -(np.arange(0, width, 2, dtype=np.float64) / width)
    scaling = rope.scaling
    if scaling is None:
        return inverse
    if scaling.type == "linear":
        return inverse / scaling.factor
    if scaling.type == "llama3":
        return _llama3(inverse, scaling)
    return _yarn(inverse, scaling, rope.theta, width)


def yarn_mscale(factor: float, mscale: float) -> float:
    """0.1 * mscale * ln(factor) + 1, for factor above 1."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def attention_factor(rope: Rope) -> float:
    """The factor on cos and sin: 1 but for YaRN."""
    scaling = rope.scaling
    if scaling is None or scaling.type != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale_all_dim:
        return yarn_mscale(scaling.factor, scaling.mscale) / yarn_mscale(scaling.factor, scaling.mscale_all_dim)
    return yarn_mscale(scaling.factor, 1.0)


def rope_tables(rope: Rope, width: int, position_BS: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """cos and sin [B, S, width / 2], in at least float32. `position_BS` counts from 0 in every document."""
    wide = jnp.promote_types(dtype, jnp.float32)
    inverse_R, factor = jnp.asarray(inverse_frequencies(rope, width), wide), attention_factor(rope)

    def of_piece(position: jax.Array) -> tuple[jax.Array, jax.Array]:
        angle = position.astype(wide)[..., None] * inverse_R
        return jnp.cos(angle) * factor, jnp.sin(angle) * factor

    # A loop, for XLA:CPU does not fuse across its border. It would otherwise make cos and sin again for every head
    # and layer, forward and backward: 3.3 ms instead of 0.2 for 4096 tokens of 8 heads of 64.
    pieces = math.gcd(position_BS.size, _TABLE_PIECES)
    cos, sin = lax.map(of_piece, position_BS.reshape(pieces, -1))
    return cos.reshape(*position_BS.shape, -1), sin.reshape(*position_BS.shape, -1)


def rotate(x_BSNH: jax.Array, cos_BSR: jax.Array, sin_BSR: jax.Array, *, interleaved: bool = False) -> jax.Array:
    """Rotate the first 2R channels of every head; channel i is paired with i + R (half-split). The rest passes.

    `interleaved` pairs channel 2i with 2i + 1. They come out half-split: products of queries and keys do not see it.
    """
    width = 2 * cos_BSR.shape[-1]
    x = x_BSNH[..., :width].astype(cos_BSR.dtype)
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else jnp.split(x, 2, axis=-1)
    cos, sin = cos_BSR[:, :, None], sin_BSR[:, :, None]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_BSNH.dtype)
    return jnp.concatenate([turned, x_BSNH[..., width:]], axis=-1) if width < x_BSNH.shape[-1] else turned
