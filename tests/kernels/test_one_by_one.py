"""Waiting changes no bit of a value, whatever stands in the arrays that it waits for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.kernels.one_by_one import not_before


@pytest.mark.parametrize("done", [0.0, -1.0, np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_value_that_waited_is_the_value_to_the_bit(done, dtype):
    value = jnp.asarray([0.0, -0.0, 1.5, np.nan, np.inf, -np.inf], dtype)
    got = jax.jit(not_before)(value, jnp.ones((2, 3)), jnp.full((1, 2), done, dtype))
    assert got.dtype == dtype
    assert np.asarray(got).tobytes() == np.asarray(value).tobytes()


def test_without_anything_to_wait_for_there_is_no_work():
    assert not jax.make_jaxpr(not_before)(jnp.ones(3)).eqns
