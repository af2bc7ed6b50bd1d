"""`linear` against the plain product: value and both gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.kernels.linear import linear, sum_outer


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_linear_is_the_plain_product_with_its_gradients(dtype):
    keys = jax.random.split(jax.random.key(0), 3)
    x, weight, dy = (jax.random.normal(k, s, dtype) for k, s in zip(keys, ((2, 5, 8), (8, 6), (2, 5, 6)), strict=True))
    ours, ours_vjp = jax.vjp(linear, x, weight)
    plain, plain_vjp = jax.vjp(lambda x, weight: x @ weight, x, weight)
    np.testing.assert_array_equal(ours, plain)
    tolerance = 1e-5 if dtype == jnp.float32 else 2e-2
    for mine, theirs in zip(ours_vjp(dy), plain_vjp(dy), strict=True):
        assert mine.dtype == theirs.dtype
        np.testing.assert_allclose(mine.astype(jnp.float32), theirs.astype(jnp.float32), rtol=tolerance, atol=tolerance)


def test_the_left_side_is_turned_before_the_product_on_cpu():
    left, right = jnp.ones((64, 32)), jnp.ones((64, 16))
    program = jax.jit(sum_outer).lower(left, right).compile().as_text()
    assert "lhs_contracting_dims={0}" not in program
    np.testing.assert_array_equal(sum_outer(left, right), np.full((32, 16), 64))
