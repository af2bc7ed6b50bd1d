"""Global norms of trees whose leaves lie differently on the mesh."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe.model.norm import at_least_float32
from jaxmoe.spmd.collectives import sum_partial, varying_axes


def global_norm(tree: Any) -> jax.Array:
    """L2 norm of the whole tree, every element counted once, equal on all ranks.

    A leaf is split over exactly the axes over which it varies, by type; over the others it is a copy.
    """
    squares: dict[frozenset[str], jax.Array] = {}
    for leaf in jax.tree.leaves(tree):
        axes = varying_axes(leaf)
        square = jnp.sum(jnp.square(at_least_float32(leaf)))
        squares[axes] = squares[axes] + square if axes in squares else square
    return jnp.sqrt(sum((sum_partial(square, sorted(axes)) for axes, square in squares.items()), jnp.float32(0)))


def clip_scale(norm: jax.Array, limit: float | None) -> jax.Array:
    """The factor that brings a gradient of this norm to at most `limit`."""
    return jnp.ones_like(norm) if limit is None else jnp.minimum(1.0, limit / jnp.maximum(norm, limit))
