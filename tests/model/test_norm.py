"""RMSNorm's own gradient against automatic differentiation of the formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.model.norm import _rms_norm
from tests.reference import cases


def _formula(x: jax.Array, scale_D: jax.Array, eps: float) -> jax.Array:
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (wide / jnp.sqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + eps) * scale_D).astype(x.dtype)


@pytest.mark.parametrize(
    ("dtype", "scale_dtype", "tolerance"),
    [("float64", "float64", 1e-12), ("float32", "float32", 1e-5), ("bfloat16", "float32", 2e-2)],
)
@pytest.mark.parametrize("shape", [(3, 8), (2, 5, 3, 4)])
def test_rms_norm_and_its_gradients(shape, dtype, scale_dtype, tolerance):
    with cases.float64():
        keys = jax.random.split(jax.random.key(0), 3)
        x, dy = (jax.random.normal(k, shape, dtype) for k in keys[:2])
        scale_D = jax.random.normal(keys[2], shape[-1:], scale_dtype)
        ours, ours_vjp = jax.vjp(lambda x, s: _rms_norm(x, s, 0.1), x, scale_D)
        plain, plain_vjp = jax.vjp(lambda x, s: _formula(x, s, 0.1), x, scale_D)
        for mine, theirs in zip((ours, *ours_vjp(dy)), (plain, *plain_vjp(dy)), strict=True):
            assert mine.dtype == theirs.dtype
            wide = (np.asarray(a.astype("float64")) for a in (mine, theirs))
            np.testing.assert_allclose(*wide, rtol=tolerance, atol=tolerance)
