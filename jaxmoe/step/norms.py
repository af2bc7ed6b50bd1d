"""Global norms of trees whose leaves lie differently on the mesh."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe.model.norm import at_least_float32
from jaxmoe.spmd.collectives import sum_partial, varying_axes


def grouped_norms(tree: Any, groups: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    """L2 norm of the whole tree, and of the leaves of each group; every element counted once, equal on all ranks.

    `groups` names the group of every leaf. A leaf is split over exactly the axes over which it varies, by type; over
    the others it is a copy. One reduction for each such set of axes.
    """
    squares: dict[frozenset[str], dict[str, jax.Array]] = {}
    for leaf, group in zip(jax.tree.leaves(tree), jax.tree.leaves(groups), strict=True):
        by_group = squares.setdefault(varying_axes(leaf), {})
        by_group[group] = by_group.get(group, 0) + jnp.sum(jnp.square(at_least_float32(leaf)))
    sums: dict[str, jax.Array] = {}
    for axes, by_group in squares.items():
        whole_G = sum_partial(jnp.stack(list(by_group.values())), sorted(axes))
        for group, square in zip(by_group, whole_G, strict=True):
            sums[group] = sums.get(group, 0) + square
    return jnp.sqrt(sum(sums.values())), {group: jnp.sqrt(square) for group, square in sums.items()}


def clip_scale(norm: jax.Array, limit: float | None) -> jax.Array:
    """The factor that brings a gradient of this norm to at most `limit`."""
    return jnp.ones_like(norm) if limit is None else jnp.minimum(1.0, limit / jnp.maximum(norm, limit))
