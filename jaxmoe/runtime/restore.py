"""Between a `TrainState` and a checkpoint."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxmoe.checkpoint.store import Checkpoints
from jaxmoe.config import Config
from jaxmoe.spmd.program import shardings
from jaxmoe.step.state import TrainState, fresh_arrays, state_specs

_FIELDS = ("params", "router_bias", "opt_state", "step", "skipped_in_a_row")


def state_arrays(state: TrainState) -> dict[str, Any]:
    """What a checkpoint holds of a state; also of a `TrainState` of specs or shapes."""
    return {name: getattr(state, name) for name in _FIELDS}


def _like(config: Config, mesh: Mesh) -> dict[str, Any]:
    """Shapes, dtypes and shardings of `state_arrays` on this mesh."""
    shapes = jax.eval_shape(lambda: state_arrays(fresh_arrays(config, mesh, jnp.uint32(0))))
    return jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding),
        shapes,
        shardings(mesh, state_arrays(state_specs(config, mesh))),
    )


def load_state(config: Config, mesh: Mesh, checkpoints: Checkpoints, step: int) -> TrainState:
    """The state of a checkpoint on this mesh, each device reading its own pieces.

    Raises: UserError when the checkpoint is damaged.
    """
    like = _like(config, mesh)
    arrays = checkpoints.restore(step, like, state_specs(config, mesh).layout.trunk_order)
    return TrainState(**arrays, config=config, mesh=mesh)


def load_weights(config: Config, mesh: Mesh, checkpoints: Checkpoints, step: int) -> tuple[Any, Any]:
    """(params, router_bias) of a checkpoint, without the optimiser's state.

    Raises: UserError when the checkpoint is damaged.
    """
    like = {name: value for name, value in _like(config, mesh).items() if name in ("params", "router_bias")}
    found = checkpoints.restore(step, like, state_specs(config, mesh).layout.trunk_order)
    return found["params"], found["router_bias"]
