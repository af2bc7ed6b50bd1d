"""The only file that calls `jax.lax` collectives: verbs named for what they mean, strict about axes.

Why strict: `lax.psum` of a value that does not vary over an axis multiplies it by the size of the axis, and
nothing complains. Here such a call is a `ReductionError` while tracing. `check_vma=True` (everywhere) proves
the other half: that a value that is claimed to be equal over an axis was in fact reduced over it.

Axes of size one are skipped: they leave no collective in the program. All functions run inside `shard_map`.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from jaxmoe.spmd.axes import AXES
from jaxmoe.spmd.types import Axes, as_tuple


class ReductionError(ValueError):
    """A collective over an axis where the value is not what the verb needs."""


def axis_size(axes: Axes) -> int:
    """Number of ranks along `axes` together: a Python int, known while tracing."""
    return math.prod(lax.axis_size(axis) for axis in as_tuple(axes))


def varying_axes(value: jax.Array) -> frozenset[str]:
    """The axes over which `value` may differ between ranks. Axes of size one never appear."""
    return frozenset(a for a in jax.typeof(value).manual_axis_type.varying if lax.axis_size(a) > 1)


def _wide(axes: Axes) -> tuple[str, ...]:
    return tuple(axis for axis in as_tuple(axes) if lax.axis_size(axis) > 1)


def _require_varying(value: jax.Array, axes: Axes, verb: str) -> tuple[str, ...]:
    wide = _wide(axes)
    equal = [axis for axis in wide if axis not in varying_axes(value)]
    if equal:
        raise ReductionError(
            f"{verb} over {wide}: the value {jax.typeof(value)} is equal over {equal}, so summing there would "
            f"count copies; reduce over {[a for a in wide if a not in equal]} only"
        )
    return wide


def rank(axes: Axes) -> jax.Array:
    """Index of this rank along `axes` (first axis major), int32; varies over exactly `axes`."""
    index = jnp.int32(0)
    for axis in _wide(axes):
        index = index * lax.axis_size(axis) + lax.axis_index(axis).astype(jnp.int32)
    return index


def to_varying(value: jax.Array, axes: Axes) -> jax.Array:
    """The same numbers, typed as varying over `axes` too. Its transpose sums gradients over the new axes."""
    new = tuple(axis for axis in _wide(axes) if axis not in varying_axes(value))
    return lax.pcast(value, new, to="varying") if new else value


def vary_like(value: jax.Array, *references: jax.Array) -> jax.Array:
    """`value` varying over every axis that any reference varies over: initial carries of a scan or loop."""
    return to_varying(value, frozenset[str]().union(*(varying_axes(r) for r in references)))


def zeros_of(like: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
    """Zeros with the shape, dtype and varying axes of an array or of what `jax.eval_shape` says of one."""
    varying = like.manual_axis_type.varying if isinstance(like, jax.ShapeDtypeStruct) else varying_axes(like)
    return to_varying(jnp.zeros(like.shape, like.dtype), varying)


def as_part(value: jax.Array, axes: Axes = AXES) -> jax.Array:
    """`value` itself, proven to be a part over all of `axes`: what an objective's terms and records must be."""
    _require_varying(value, axes, "as_part")
    return value


def sum_partial(value: jax.Array, axes: Axes) -> jax.Array:
    """Sum of the ranks' parts over `axes`; equal over them afterwards."""
    wide = _require_varying(value, axes, "sum_partial")
    return lax.psum(value, wide) if wide else value


def mean_over(value: jax.Array, axes: Axes) -> jax.Array:
    """Mean of the ranks' values over `axes`."""
    return sum_partial(value, axes) / axis_size(axes)


def max_over(value: jax.Array, axes: Axes) -> jax.Array:
    """Largest of the ranks' values over `axes`. Has no gradient."""
    wide = _require_varying(value, axes, "max_over")
    return lax.pmax(lax.stop_gradient(value), wide) if wide else value


def min_over(value: jax.Array, axes: Axes) -> jax.Array:
    """Smallest of the ranks' values over `axes`. Has no gradient."""
    wide = _require_varying(value, axes, "min_over")
    return lax.pmin(lax.stop_gradient(value), wide) if wide else value


def keep_one_copy(value: jax.Array, axes: Axes) -> jax.Array:
    """A value that is equal over `axes` as a part: rank 0 keeps it, the others hold zero.

    The way to bring a finished number into a sum over `axes` without counting it once per rank.
    """
    wide = _wide(axes)
    varying = [axis for axis in wide if axis in varying_axes(value)]
    if varying:
        raise ReductionError(f"keep_one_copy over {wide}: the value {jax.typeof(value)} differs over {varying}")
    return jnp.where(rank(wide) == 0, value, jnp.zeros_like(value)) if wide else value


def gather(value: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """The ranks' pieces along `dim`, joined in rank order (first axis major). Typed varying over `axes`.

    Its transpose adds every rank's gradient and returns each rank its own piece (a `scatter_sum`).
    """
    wide = _require_varying(value, axes, "gather")
    return lax.all_gather(value, wide, axis=dim, tiled=True) if wide else value


def gather_equal(value: jax.Array, axis: str, dim: int) -> jax.Array:
    """As `gather` over one axis, but equal over it by type: for small values that every rank must agree on."""
    if not _require_varying(value, axis, "gather_equal"):
        return value
    shape = list(value.shape)
    size = shape[dim]
    shape[dim] = size * axis_size(axis)
    whole = jax.lax.dynamic_update_slice_in_dim(
        vary_like(jnp.zeros(shape, value.dtype), value), value, rank(axis) * size, dim
    )
    return sum_partial(whole, axis)


def scatter_sum(value: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """Sum of the ranks' parts over `axes`, of which each rank keeps its piece along `dim`."""
    wide = _require_varying(value, axes, "scatter_sum")
    return lax.psum_scatter(value, wide, scatter_dimension=dim, tiled=True) if wide else value


def exchange(value: jax.Array, axis: str, *, split_dim: int, join_dim: int) -> jax.Array:
    """All-to-all along one axis: `split_dim` is cut over the ranks, the received pieces are joined at `join_dim`."""
    wide = _require_varying(value, axis, "exchange")
    if not wide:
        return value
    return lax.all_to_all(value, axis, split_axis=split_dim, concat_axis=join_dim, tiled=True)


def shift(value: jax.Array, axis: str, by: int) -> jax.Array:
    """Every rank receives the value of rank - `by`, cyclically."""
    wide = _require_varying(value, axis, "shift")
    size = lax.axis_size(axis)
    return lax.ppermute(value, axis, [(i, (i + by) % size) for i in range(size)]) if wide else value


def own_piece(value: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """This rank's piece along `dim` of an array that every rank along `axes` holds whole."""
    wide = _wide(axes)
    if not wide:
        return value
    size, rest = divmod(value.shape[dim], axis_size(wide))
    assert rest == 0, f"dim {dim} of {value.shape} is no multiple of the {axis_size(wide)} ranks of {wide}"
    return lax.dynamic_slice_in_dim(vary_like(value, rank(wide)), rank(wide) * size, size, dim)
