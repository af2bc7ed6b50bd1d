"""Normalisation over the last dim."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxmoe.model.params import Init
from jaxmoe.spmd.axes import TP
from jaxmoe.spmd.collectives import axis_size, sum_partial, vary_like


def at_least_float32(x: jax.Array) -> jax.Array:
    """bfloat16 as float32; float32 and float64 as they are."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _rms_norm(x: jax.Array, scale_D: jax.Array, eps: float) -> jax.Array:
    return _rms_norm_forward(x, scale_D, eps)[0]


def _rms_norm_forward(x: jax.Array, scale_D: jax.Array, eps: float) -> tuple[jax.Array, tuple]:
    wide = at_least_float32(x)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * inverse * scale_D.astype(wide.dtype)).astype(x.dtype), (x, scale_D, inverse)


def _rms_norm_backward(eps: float, saved: tuple, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Kept is one number per row beside x. Both sums are products: for sums over rows and over columns of one value
    XLA:CPU spread the scale over an array of x's size and kept it (8 layers: 0.5 GB and 4 % of the step).
    """
    del eps
    x, scale_D, inverse = saved
    width = x.shape[-1]
    x_TD, dy_TD, inverse_T1 = (at_least_float32(a).reshape(-1, a.shape[-1]) for a in (x, dy, inverse))
    scale = scale_D.astype(x_TD.dtype)
    product_TD = dy_TD * x_TD
    dot = partial(jnp.dot, precision=jax.lax.Precision.HIGHEST)
    mean_T1 = dot(product_TD, scale[:, None]) / width
    dx_TD = inverse_T1 * (dy_TD * scale - x_TD * (jnp.square(inverse_T1) * mean_T1))
    dscale_D = dot(inverse_T1.T, product_TD)[0]
    return dx_TD.reshape(x.shape).astype(x.dtype), dscale_D.astype(scale_D.dtype)


_rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


class RmsNorm(nnx.Module):
    """x / rms(x) * scale, computed in at least float32, returned in the dtype of x.

    Layout: any; the last dim is whole. The scale is equal on all ranks.
    Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """

    def __init__(self, width: int, init: Init, eps: float | None = None):
        self.scale_D = init.ones((width,))
        self.eps = init.model.norm_eps if eps is None else eps

    def __call__(self, x: jax.Array) -> jax.Array:
        scale_D = self.scale_D[...]
        return _rms_norm(vary_like(x, x, scale_D), vary_like(scale_D, x, scale_D), self.eps)


class ProjectionNorm(nnx.Module):
    """RmsNorm over all heads of a projection together.

    Layout: x holds this tp rank's heads, [..., N, H]; with fewer heads than ranks, some ranks hold the same one.
    """

    def __init__(self, heads: int, width: int, axis: str | None, init: Init):
        self.scale_NH = init.ones((heads, width), P(axis, None))
        self.heads = heads
        self.eps = init.model.norm_eps

    def __call__(self, x: jax.Array, own: Callable[[jax.Array], jax.Array] = lambda scale: scale) -> jax.Array:
        """`own` picks the scale of this rank's heads."""
        wide = at_least_float32(x)
        copies = x.shape[-2] * axis_size(TP) // self.heads
        total = sum_partial(jnp.sum(jnp.square(wide), axis=(-2, -1), keepdims=True), TP) / copies
        normed = wide * jax.lax.rsqrt(total / (self.heads * x.shape[-1]) + self.eps)
        return (normed * own(self.scale_NH[...]).astype(wide.dtype)).astype(x.dtype)


class LayerNorm(nnx.Module):
    """(x - mean) / deviation * scale + bias, computed in at least float32, returned in the dtype of x.

    Layout: as `RmsNorm`. Source: Ba et al. 2016, arXiv:1607.06450.
    """

    def __init__(self, width: int, init: Init, eps: float):
        self.scale_D = init.ones((width,))
        self.bias_D = init.zeros((width,))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = at_least_float32(x)
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        normed = centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + self.eps)
        return (normed * self.scale_D[...].astype(wide.dtype) + self.bias_D[...].astype(wide.dtype)).astype(x.dtype)
