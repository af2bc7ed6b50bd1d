"""Products of row groups with one matrix each, as loops over experts: the CPU half of `expert_mlp`.

Letters here: A assignments sorted by expert, P the same plus spare rows, I and J inner and outer width of a
product. Group e is the rows `start_E[e] : start_E[e] + count_E[e]`, groups ascending and dense.

Why loops and not `lax.ragged_dot`: on CPU that lowers to E masked dense products (measured on 2 cores: 0.02
of the matmul ceiling at E=32, against 0.4 to 0.7 here with 256 rows a group and more, 0.2 to 0.3 with 128 rows of
width 128). Inside a group the rows go in chunks of decreasing static size. A
chunk may run over the end of its group by less than the smallest size: in `multiply_groups` the rows it spoils
belong to later groups, which are written later, so nothing is padded and nothing masked; `accumulate_groups`
masks while it copies the chunk. Letting every size run over, not the smallest alone, gave 10 % (one product of
512 rows instead of 256 + 128 + 64 + 64). Only products stand inside the loops: XLA:CPU runs element-wise work
in a `while` body on one thread. No `switch` or `cond`: they copy the buffers they touch.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxmoe.spmd.collectives import vary_like

#: Rows of a product inside a group. Sizes in between cost compile time and bring little.
_LARGE_CHUNKS = (2048, 512, 256, 128, 64, 32)

#: (mean rows of a group, smallest chunk): the smallest bounds the wasted rows, but runs at a lower rate.
_SMALLEST = ((256, 64), (64, 32), (0, 16))


def row_chunks(num_rows: int, num_groups: int) -> tuple[int, ...]:
    """Static chunk sizes, decreasing, for `num_rows` sorted rows in `num_groups` groups."""
    smallest = next(size for mean, size in _SMALLEST if num_rows >= mean * num_groups)
    return (*(size for size in _LARGE_CHUNKS if smallest < size <= num_rows), smallest)


def accumulation_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """fp32 for narrower types, the type itself for fp32 and fp64."""
    return jnp.promote_types(dtype, jnp.float32)


def _over_chunks(
    chunks: tuple[int, ...],
    row: jax.Array,
    end: jax.Array,
    carry: jax.Array,
    body: Callable[[jax.Array, jax.Array, int], jax.Array],
) -> jax.Array:
    """`body(carry, row, size)` for chunks that cover `row` to `end` and less than `chunks[-1]` rows beyond."""
    for size in chunks:
        least = size - chunks[-1] + 1

        def step(state: tuple[jax.Array, jax.Array], size: int = size) -> tuple[jax.Array, jax.Array]:
            return state[0] + size, body(state[1], state[0], size)

        row, carry = lax.while_loop(lambda s, least=least: end - s[0] >= least, step, (row, carry))
    return carry


def _rows(value_PI: jax.Array, row: jax.Array, size: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(value_PI, row, size)


def _own_zeros(shape: tuple[int, ...], dtype: jnp.dtype, after: jax.Array) -> jax.Array:
    """Zeros that XLA makes when the floating-point array `after` exists, and for one loop alone.

    All constant zeros of a shape are one buffer to XLA, which XLA:CPU copies for every loop before the program's first
    step: 0.8 GB for eight layers of `configs/bench_cpu.yaml`.
    """
    # Nothing is greater than infinity, NaN included, and XLA does not know it.
    return jnp.broadcast_to((after[(0,) * after.ndim] > jnp.inf).astype(dtype), shape)


def multiply_groups(
    rows_PI: Float[Array, "P I"],
    matrix_EIJ: Float[Array, "E _ _"],
    start_E: Int[Array, "E"],
    count_E: Int[Array, "E"],
    *,
    chunks: tuple[int, ...],
    transposed: bool = False,
) -> Float[Array, "P J"]:
    """Row r of group e times `matrix_EIJ[e]` (`transposed`: the matrices are given as [E, J, I]).

    Rows outside of all groups hold zeros or products with the matrix of the last group: finite, to be ignored.
    """
    inner = 1 if transposed else 0
    acc = accumulation_dtype(rows_PI.dtype)
    width = matrix_EIJ.shape[2 - inner]
    out_PJ = vary_like(_own_zeros((rows_PI.shape[0], width), rows_PI.dtype, rows_PI), rows_PI, matrix_EIJ, start_E)

    def of_expert(e: jax.Array, out_PJ: jax.Array) -> jax.Array:
        matrix = lax.dynamic_index_in_dim(matrix_EIJ, e, keepdims=False)

        def chunk(out_PJ: jax.Array, row: jax.Array, size: int) -> jax.Array:
            product = lax.dot_general(
                _rows(rows_PI, row, size), matrix, (((1,), (inner,)), ((), ())), preferred_element_type=acc
            )
            return lax.dynamic_update_slice_in_dim(out_PJ, product.astype(out_PJ.dtype), row, 0)

        return _over_chunks(chunks, start_E[e], start_E[e] + count_E[e], out_PJ, chunk)

    return lax.fori_loop(0, matrix_EIJ.shape[0], of_expert, out_PJ)


def accumulate_groups(
    left_PI: Float[Array, "P I"],
    right_PJ: Float[Array, "P J"],
    start_E: Int[Array, "E"],
    count_E: Int[Array, "E"],
    *,
    chunks: tuple[int, ...],
) -> Float[Array, "E I J"]:
    """Sum over the rows r of group e of the outer products of `left[r]` and `right[r]`: a weight gradient.

    Accumulated, and returned, in at least fp32.
    """
    acc = accumulation_dtype(left_PI.dtype)
    shape = (count_E.shape[0], left_PI.shape[1], right_PJ.shape[1])
    out_EIJ = vary_like(_own_zeros(shape, acc, right_PJ), left_PI, right_PJ, start_E)

    def of_expert(e: jax.Array, out_EIJ: jax.Array) -> jax.Array:
        end = start_E[e] + count_E[e]

        def chunk(out_EIJ: jax.Array, row: jax.Array, size: int) -> jax.Array:
            in_group = row + jnp.arange(size, dtype=row.dtype) < end
            left = jnp.where(in_group[:, None], _rows(left_PI, row, size), 0)
            product = lax.dot_general(
                left, _rows(right_PJ, row, size), (((0,), (0,)), ((), ())), preferred_element_type=acc
            )
            # One pass of XLA:CPU, in place; a sum of the group's own would be written once more.
            return lax.dynamic_update_index_in_dim(
                out_EIJ, lax.dynamic_index_in_dim(out_EIJ, e, keepdims=False) + product, e, 0
            )

        return _over_chunks(chunks, start_E[e], end, out_EIJ, chunk)

    return lax.fori_loop(0, shape[0], of_expert, out_EIJ)
