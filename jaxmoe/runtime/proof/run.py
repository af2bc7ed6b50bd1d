"""Runs one layout on the ragged batch and brings everything comparable to the host."""

import math
import time

import jax
import numpy as np

from jaxmoe.checkpoint.layers import LayerOrder
from jaxmoe.config.schema import Config
from jaxmoe.runtime.proof.compare import Outcome, flat_tree
from jaxmoe.runtime.proof.ragged import ragged_batch
from jaxmoe.spmd.axes import AXES
from jaxmoe.step.batch import Batch
from jaxmoe.step.metrics import StepMetrics
from jaxmoe.step.state import QUICK_COMPILE, TrainState, init_state, make_mesh
from jaxmoe.step.train import probe_step

STEPS = 3


def _natural(state: TrainState, tree: dict) -> dict[str, np.ndarray]:
    """A tree like the parameters: layers of the trunk in order, without padding."""
    places = LayerOrder(state.layout.trunk_order).places
    return {name: leaf[places] if name.startswith("trunk.") else leaf for name, leaf in flat_tree(tree).items()}


def _metrics(metrics: StepMetrics) -> dict[str, dict[str, np.ndarray]]:
    scalars = metrics.scalars()
    norm = scalars.pop("grad_norm")
    return {
        "loss terms": {name: np.float64(value) for name, value in scalars.items()},
        "per-layer metrics": {**metrics.per_layer(), "expert_counts": np.asarray(metrics.expert_counts)},
        "gradient norm": {"grad_norm": np.float64(norm)},
    }


def run_layout(config: Config, seed: int) -> Outcome:
    """Three steps of `config` under its own layout, on as many devices as its mesh has."""
    start = time.monotonic()
    devices = math.prod(getattr(config.parallel, axis) for axis in AXES)
    mesh = make_mesh(config, jax.devices()[:devices])
    state = init_state(config, mesh)
    batch = config.batch
    fields = ragged_batch(batch.global_batch_size, batch.seq_len, config.model.vocab_size, seed)
    on_mesh = Batch.from_numpy(fields, mesh)
    step = probe_step.lower(state, on_mesh).compile(compiler_options=QUICK_COMPILE)
    kinds: dict[str, dict[str, np.ndarray]] = {}
    counts = np.zeros(())
    for number in range(STEPS):
        state, metrics, gradients = step(state, on_mesh)
        if number == 0:
            counts = np.asarray(metrics.expert_counts)
            kinds |= _metrics(metrics) | {"gradients": _natural(state, gradients)}
    kinds["router bias"] = _natural(state, state.router_bias)
    kinds[f"parameters after {STEPS} steps"] = _natural(state, state.params)
    return Outcome(kinds, counts, time.monotonic() - start)
