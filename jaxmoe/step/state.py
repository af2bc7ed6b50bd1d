"""The state of training: a pytree of global arrays, with config and mesh as its static part."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxmoe.config.check import mesh_shape
from jaxmoe.config.schema import Config
from jaxmoe.model.decoder import Decoder
from jaxmoe.model.params import RouterBias
from jaxmoe.optim.optimizer import make_optimizer
from jaxmoe.spmd.program import build_mesh, shardings
from jaxmoe.step.layout import Layout, layout_of

Tree = Any

#: For programs that run once: compiling random bits at full effort takes six times as long (30 s against 5 s of CPU for
#: a tiny model) and wins nothing.
QUICK_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["params", "router_bias", "opt_state", "step", "skipped_in_a_row"],
    meta_fields=["config", "mesh"],
)
@dataclass(frozen=True)
class TrainState:
    """What a step reads and returns, and a checkpoint holds.

    Layout: see `Layout.state_specs`; scalars are equal on all ranks.
    """

    params: Tree
    """Master weights, nested dict, `model.param_dtype`."""
    router_bias: Tree
    """Selection biases, float32; empty without `selection_bias`."""
    opt_state: Tree
    step: jax.Array
    """int32, steps done, skipped ones included."""
    skipped_in_a_row: jax.Array
    """int32."""
    config: Config
    mesh: Mesh

    @property
    def layout(self) -> Layout:
        return layout_of(self.config, self.mesh)


def make_mesh(config: Config, devices: Any = None) -> Mesh:
    """The mesh of `config.parallel` over the visible devices (or those given).

    Turns on JAX's 64-bit mode for a float64 config.

    Raises:
        ConfigError: the sizes do not fit the number of devices.
    """
    if config.model.param_dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    return build_mesh(mesh_shape(config, len(devices) if devices is not None else jax.device_count()), devices)


def optimizer_of(layout: Layout) -> optax.GradientTransformation:
    """The optimiser of a config, with weight decay where the parameters ask for it."""
    decay = layout.map_placements(lambda placement: placement.decay)
    return make_optimizer(layout.config.optimizer, layout.config.run.steps, decay)


def state_specs(config: Config, mesh: Any) -> Any:
    """A `TrainState` of PartitionSpecs in place of arrays."""
    layout = layout_of(config, mesh)
    optimizer = optimizer_of(layout)
    shapes = jax.eval_shape(optimizer.init, layout.shapes)
    specs: dict[str, Any] = {
        "params": layout.state_specs,
        "router_bias": layout.bias_specs,
        "opt_state": optax.tree.map_params(
            optimizer, lambda _, spec: spec, shapes, layout.state_specs, transform_non_params=lambda _: P()
        ),
        "step": P(),
        "skipped_in_a_row": P(),
    }
    return TrainState(**specs, config=config, mesh=mesh)


def fresh_arrays(config: Config, mesh: Mesh, seed: jax.Array) -> TrainState:
    """The initial state, traceable. Values depend on the seed alone."""
    layout = layout_of(config, mesh)
    model = Decoder(config, dict(mesh.shape), jax.random.key(seed), layout.trunk_order)
    _, params, bias = nnx.split(model, nnx.Param, RouterBias)
    params = nnx.to_pure_dict(params)
    return TrainState(
        params=params,
        router_bias=nnx.to_pure_dict(bias),
        opt_state=optimizer_of(layout).init(params),
        step=jnp.int32(0),
        skipped_in_a_row=jnp.int32(0),
        config=config,
        mesh=mesh,
    )


def init_state(config: Config, mesh: Mesh) -> TrainState:
    """A new state from `run.seed`, made in place on its devices: the same numbers on every mesh."""
    out = shardings(mesh, state_specs(config, mesh))
    make = jax.jit(partial(fresh_arrays, config, mesh), out_shardings=out, compiler_options=QUICK_COMPILE)
    return make(jnp.uint32(config.run.seed))
