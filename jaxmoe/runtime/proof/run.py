"""Runs one layout and brings everything comparable to the host."""

import math
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.checkpoint.layers import LayerOrder
from jaxmoe.config.schema import Config
from jaxmoe.runtime.proof.compare import Outcome, flat_tree
from jaxmoe.runtime.proof.ragged import BatchKind, make_batch
from jaxmoe.spmd.axes import AXES
from jaxmoe.spmd.program import shardings
from jaxmoe.step.batch import Batch
from jaxmoe.step.metrics import StepMetrics
from jaxmoe.step.state import QUICK_COMPILE, TrainState, fresh_arrays, init_state, make_mesh, state_specs
from jaxmoe.step.train import probe_step

STEPS = 3

#: Weights and biases by their path, layers of the trunk in the order of the model, without padding.
Natural = dict[str, np.ndarray]


def _natural(state: TrainState, tree: Any) -> Natural:
    places = LayerOrder(state.layout.trunk_order).places
    return {name: leaf[places] if name.startswith("trunk.") else leaf for name, leaf in flat_tree(tree).items()}


def initial_weights(config: Config) -> Natural:
    """The weights and biases that every layout starts from, made on one device."""
    state = init_state(config, make_mesh(config, jax.devices()[:1]))
    return _natural(state, state.params) | _natural(state, state.router_bias)


def _placed(config: Config, start: Natural) -> TrainState:
    """A state with these weights under the config's own layout: placed, not drawn anew, which would compile."""
    devices = math.prod(getattr(config.parallel, axis) for axis in AXES)
    mesh = make_mesh(config, jax.devices()[:devices])
    shapes = jax.eval_shape(partial(fresh_arrays, config, mesh), jnp.uint32(0))
    order = np.asarray(shapes.layout.trunk_order)

    def put(path: Any, shape: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> jax.Array:
        (field, *keys) = path
        value = np.zeros(shape.shape, shape.dtype)
        if field.name in ("params", "router_bias"):
            name = ".".join(str(key.key) for key in keys)
            value = start[name]
            if name.startswith("trunk."):
                held = (order >= 0).reshape(-1, *(1,) * (value.ndim - 1))
                value = np.where(held, value[np.maximum(order, 0)], 0).astype(value.dtype)
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    return jax.tree_util.tree_map_with_path(put, shapes, shardings(mesh, state_specs(config, mesh)))


def _metrics(metrics: StepMetrics) -> dict[str, Natural]:
    """All that a step reports, numbers of like size together."""
    kinds: dict[str, Natural] = {"gradient norms": {}, "counts": {}, "scalar metrics": {}}
    for name, value in metrics.scalars().items():
        kind = (
            "gradient norms"
            if name.startswith("grad_norm")
            else "counts"
            if name.endswith("_tokens")
            else "scalar metrics"
        )
        kinds[kind][name] = np.asarray(value)
    kinds["counts"] |= {"expert_counts": np.asarray(metrics.expert_counts), "served": np.asarray(metrics.served)}
    return kinds | {"per-layer metrics": metrics.per_layer()}


def run_layout(config: Config, start: Natural, kind: BatchKind, seed: int) -> Outcome:
    """Three steps of `config` under its own layout, on as many devices as its mesh has, from the weights `start`."""
    begin = time.monotonic()
    state = _placed(config, start)
    batch = config.batch
    fields = make_batch(kind, batch.global_batch_size, batch.seq_len, config.model.vocab_size, seed)
    on_mesh = Batch.from_numpy(fields, state.mesh)
    step = probe_step.lower(state, on_mesh).compile(compiler_options=QUICK_COMPILE)
    kinds: dict[str, Natural] = {}
    counts = np.zeros(())
    for number in range(STEPS):
        state, metrics, gradients = step(state, on_mesh)
        if number == 0:
            counts = np.asarray(metrics.expert_counts)
            kinds["gradients"] = _natural(state, gradients)
        if number in (0, STEPS - 1):
            # The first step has the weights of `start`; router biases and what skipped steps leave show in the last.
            kinds |= {f"{kind}, step {number + 1}": values for kind, values in _metrics(metrics).items()}
    kinds["router bias"] = _natural(state, state.router_bias)
    kinds[f"parameters after {STEPS} steps"] = _natural(state, state.params)
    return Outcome(kinds, counts, time.monotonic() - begin)
