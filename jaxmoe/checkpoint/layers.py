"""Stacked layers in the order of the model, whatever the pipeline that they were trained in.

A pipeline layout holds its repeats of layers in an order of its own, filled up with padding. A checkpoint holds
[repeats, ...] in the order of the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

#: The first dim of what stands below this key is the stacked one.
TRUNK = "trunk"


@dataclass(frozen=True)
class LayerOrder:
    """`order[i]` is the repeat at place i of the stacked dim; -1 is padding."""

    order: tuple[int, ...]

    @property
    def repeats(self) -> int:
        return max(self.order) + 1

    @property
    def is_natural(self) -> bool:
        return self.order == tuple(range(self.repeats))

    @property
    def places(self) -> np.ndarray:
        """The place of each repeat."""
        return np.argsort(self.order)[len(self.order) - self.repeats :]

    def natural_struct(self, leaf: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """Shape and sharding of a stacked leaf in natural order.

        Without padding the number of repeats may not divide by pp; then pp splits another dim instead, if one does.
        """
        shape = (self.repeats, *leaf.shape[1:])
        sharding = leaf.sharding
        assert isinstance(sharding, NamedSharding)
        assert isinstance(sharding.mesh, Mesh)
        spec = _natural_spec(sharding.spec, shape, sharding.mesh)
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=NamedSharding(sharding.mesh, spec))


def _axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def _natural_spec(spec: P, shape: tuple[int, ...], mesh: Mesh) -> P:
    entries = [_axes(entry) for entry in spec] + [()] * (len(shape) - len(spec))

    def ranks(axes: Sequence[str]) -> int:
        return int(np.prod([mesh.shape[axis] for axis in axes]))

    if shape[0] % ranks(entries[0]):
        moved, entries[0] = entries[0], ()
        fits = [d for d in range(1, len(shape)) if shape[d] % ranks(entries[d] + moved) == 0]
        if fits:
            widest = max(fits, key=lambda d: shape[d] // ranks(entries[d]))
            entries[widest] += moved
    return P(*entries)


def to_natural(leaves: Sequence[jax.Array], order: LayerOrder) -> list[jax.Array]:
    """Stacked leaves of a layout -> [repeats, ...] in natural order, new arrays."""
    shardings = [order.natural_struct(leaf).sharding for leaf in leaves]
    return jax.jit(partial(_take_all, order.places), out_shardings=shardings)(list(leaves))


def from_natural(leaves: Sequence[jax.Array], order: LayerOrder, shardings: Sequence[NamedSharding]) -> list[jax.Array]:
    """[repeats, ...] in natural order -> the stacked dim of a layout; padding is zero."""
    return jax.jit(partial(_spread_all, order.order), out_shardings=list(shardings))(list(leaves))


def _take_all(places: np.ndarray, leaves: list[jax.Array]) -> list[jax.Array]:
    return [jnp.take(leaf, places, axis=0) for leaf in leaves]


def _spread_all(order: tuple[int, ...], leaves: list[jax.Array]) -> list[jax.Array]:
    def spread(leaf: jax.Array) -> jax.Array:
        held = np.reshape(np.asarray(order) >= 0, (-1, *(1,) * (leaf.ndim - 1)))
        return jnp.where(held, jnp.take(leaf, np.maximum(order, 0), axis=0), jnp.zeros((), leaf.dtype))

    return [spread(leaf) for leaf in leaves]
