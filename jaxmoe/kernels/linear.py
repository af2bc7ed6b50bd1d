"""Products of tokens with a weight, and the gradient of such a weight.

XLA:CPU computes `x.T @ dy` as it comes out of automatic differentiation by its slower routine for products (on two
cores with a ceiling of 450 GFLOP/s: 290 to 360 where a product whose left side lies ready runs at 420 to 450), and
folds a transpose in front of a product back into it. A copy behind `lax.optimization_barrier` stays a copy. Whole
step of `configs/bench_cpu.yaml`, in turn with the plain products: 2.68 against 2.94 s. On other platforms the
product is left as it is.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxmoe.spmd.collectives import vary_like


def sum_outer(
    left_TI: Float[Array, "T I"], right_TJ: Float[Array, "T J"], dtype: DTypeLike | None = None
) -> Float[Array, "I J"]:
    """Sum over the rows t of the outer products of `left[t]` and `right[t]`: a weight's gradient.

    Layout: local; varies over the union of the inputs' axes. `dtype`: of the sums and the result; theirs if None.
    """
    left, right = (vary_like(a, left_TI, right_TJ) for a in (left_TI, right_TJ))

    def turned(left: jax.Array, right: jax.Array) -> jax.Array:
        return jnp.dot(lax.optimization_barrier(left.T), right, preferred_element_type=dtype)

    def plain(left: jax.Array, right: jax.Array) -> jax.Array:
        return jnp.dot(left.T, right, preferred_element_type=dtype)

    return lax.platform_dependent(left, right, cpu=turned, default=plain)


@jax.custom_vjp
def _linear(x: jax.Array, weight_IJ: jax.Array) -> jax.Array:
    return x @ weight_IJ


def _linear_forward(x: jax.Array, weight_IJ: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return x @ weight_IJ, (x, weight_IJ)


def _linear_backward(saved: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weight_IJ = saved
    rows = (a.reshape(-1, a.shape[-1]) for a in (x, dy))
    return dy @ weight_IJ.T, sum_outer(*rows)


_linear.defvjp(_linear_forward, _linear_backward)


def linear(x: Float[Array, "... I"], weight_IJ: Float[Array, "I J"]) -> Float[Array, "... J"]:
    """x @ weight, with the weight's gradient by `sum_outer`.

    Layout: local; varies over the union of the inputs' axes. An input equal over an axis where the other varies gets
    its gradient summed over it. The dtype is that of both inputs.
    """
    return _linear(vary_like(x, x, weight_IJ), vary_like(weight_IJ, x, weight_IJ))
