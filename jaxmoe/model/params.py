"""How parameters are made: value, PartitionSpec and weight decay in one place, beside the layer that owns them."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxmoe.config.schema import Model

ModuleT = TypeVar("ModuleT", bound=nnx.Module)


class RouterBias(nnx.Variable):
    """Selection bias of a router: state, but no parameter. Never touched by the optimiser."""


@dataclass
class Init:
    """Makes the parameters of one module from one key; each parameter takes the next key.

    Values depend on the seed and the place in the model alone: arrays have their global shape here, and JAX's
    partitionable random bits do not change with the sharding.
    """

    key: jax.Array
    model: Model
    sizes: dict[str, int]
    """Ranks along each mesh axis: some specs depend on what divides."""
    _count: int = field(default=0)

    def split(self) -> "Init":
        """An independent maker for a sub-module."""
        return Init(self._next(), self.model, self.sizes)

    def _next(self) -> jax.Array:
        self._count += 1
        return jax.random.fold_in(self.key, self._count)

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(self.model.param_dtype)

    def normal(self, shape: tuple[int, ...], spec: P, *, to_residual: bool = False) -> nnx.Param:
        """N(0, initializer_range); smaller by sqrt(2 * layers) for projections back to the residual stream."""
        std = self.model.initializer_range
        if to_residual:
            std /= math.sqrt(2 * self.model.num_layers)
        # Drawn in float32 whatever the dtype, so that a float64 run starts from the weights of a float32 run.
        value = jax.random.truncated_normal(self._next(), -3.0, 3.0, shape, jnp.float32) * std
        return nnx.Param(value.astype(self.dtype), spec=spec, decay=True)

    def ones(self, shape: tuple[int, ...], spec: P = P()) -> nnx.Param:
        return nnx.Param(jnp.ones(shape, self.dtype), spec=spec, decay=False)

    def zeros(self, shape: tuple[int, ...], spec: P = P()) -> nnx.Param:
        return nnx.Param(jnp.zeros(shape, self.dtype), spec=spec, decay=False)


def stack(make: Callable[[Init], ModuleT], init: Init, layer_ids: tuple[int, ...]) -> ModuleT:
    """One module whose arrays hold many layers along a new first dim, split over `pp`.

    Layer `layer_ids[i]` stands at index i and is made from a key of its own number, so that the order and the
    padding of a pipeline layout do not change its values.
    """

    def state_of(layer_id: jax.Array) -> nnx.State:
        return nnx.state(make(Init(jax.random.fold_in(init.key, layer_id), init.model, init.sizes)))

    graphdef = nnx.graphdef(make(init.split()))
    module = nnx.merge(graphdef, jax.vmap(state_of)(jnp.asarray(np.asarray(layer_ids, np.int32).astype(np.uint32))))
    for _, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Variable):
            node.set_metadata(spec=P("pp", *node.get_metadata("spec")))
    return module
