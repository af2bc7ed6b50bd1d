"""A checkpoint saved under one layout is the same state under any other."""

import hashlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxmoe.checkpoint.about import about
from jaxmoe.checkpoint.store import Checkpoints
from jaxmoe.config import Config, config_from_dict
from jaxmoe.runtime.restore import load_state, load_weights, state_arrays
from jaxmoe.step.batch import Batch
from jaxmoe.step.state import TrainState, init_state, make_mesh
from jaxmoe.step.train import train_step

# Five MoE layers after the dense one: neither the two stages nor the four chunks divide them.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one device": (1, {"zero": 0}),
    "dp4": (4, {"zero": 1}),
    "tp2 sp2": (4, {"tp": 2, "sp": 2, "zero": 3}),
    "pp2 ep2": (4, {"pp": 2, "ep": 2}),
    "pp2 circular": (2, {"pp": 2, "pipeline_schedule": "circular", "pipeline_chunks": 2}),
    "ep over hidden": (4, {"ep": 2, "tp": 2, "experts_over": "ep", "zero": 3}),
}
ROWS, WIDTH = 8, 16


def config_of(layout: str) -> Config:
    return config_from_dict(
        {
            "run": {"dir": "none", "steps": 10},
            "model": {
                "vocab_size": 260,
                "d_model": 8,
                "num_layers": 6,
                "attention": {"num_heads": 2, "num_kv_heads": 2, "head_dim": 4},
                "mlp": {"hidden_dim": 8},
                "moe": {
                    "num_experts": 4,
                    "experts_per_token": 2,
                    "expert_hidden_dim": 8,
                    "num_dense_layers": 1,
                    "router": {"selection_bias": True, "score_function": "sigmoid", "seq_aux_loss_coeff": 0.01},
                },
                "compute_dtype": "float64",
                "param_dtype": "float64",
            },
            "batch": {"global_batch_size": ROWS, "seq_len": WIDTH, "num_microbatches": 2},
            "optimizer": {"learning_rate": 0.01},
            "data": {"train": {"kind": "txt", "path": "none"}},
            "parallel": LAYOUTS[layout][1],
        }
    )


def mesh_of(config: Config, layout: str) -> jax.sharding.Mesh:
    return make_mesh(config, jax.devices()[: LAYOUTS[layout][0]])


def marked_state(layout: str) -> TrainState:
    """A fresh state whose moments differ from element to element, and from each other."""
    config = config_of(layout)
    state = init_state(config, mesh_of(config, layout))

    def mark(path: tuple, leaf: jax.Array) -> jax.Array:
        if leaf.ndim == 0:
            return leaf
        number = sum(jax.tree_util.keystr(path[:2]).encode())
        return jax.device_put(_marks(np.asarray(_weights_at(state.params, path)), number), leaf.sharding)

    opt_state = jax.tree_util.tree_map_with_path(mark, state.opt_state)
    return TrainState(**(state_arrays(state) | {"opt_state": opt_state}), config=config, mesh=state.mesh)


def _weights_at(params: Any, path: tuple) -> jax.Array:
    for entry in path:
        if isinstance(entry, jax.tree_util.DictKey):
            params = params[entry.key]
    return params


def _marks(values: np.ndarray, number: int) -> np.ndarray:
    """A function of the weights, so that the order of layers is the same: no two moments are equal."""
    return np.sin(values * 1000 + number)


def by_name(state: TrainState) -> dict[str, np.ndarray]:
    """Every array with its layers in the order of the model, worked out on the host from `trunk_order` alone."""
    order = state.layout.trunk_order
    places = [order.index(repeat) for repeat in range(max(order) + 1)]
    found = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(state_arrays(state))[0]:
        name = jax.tree_util.keystr(path)
        found[name] = np.asarray(leaf)[places] if "'trunk'" in name else np.asarray(leaf)
    return found


def hashes(state: TrainState) -> dict[str, str]:
    """Of every array; of expert weights and their moments, of every expert of every layer."""
    parts: dict[str, np.ndarray] = {}
    for name, value in by_name(state).items():
        if "'experts'" in name:
            parts |= {f"{name} layer {i} expert {e}": value[i, e] for i, e in np.ndindex(value.shape[:2])}
        else:
            parts[name] = value
    return {name: hashlib.sha256(np.ascontiguousarray(part).tobytes()).hexdigest() for name, part in parts.items()}


def save(folder: Path, state: TrainState, step: int) -> None:
    with Checkpoints(folder, keep=2) as checkpoints:
        description = about(state.config, state.mesh.shape, step, "none")
        checkpoints.save(step, state_arrays(state), state.layout.trunk_order, description)


def load(folder: Path, layout: str, step: int) -> TrainState:
    config = config_of(layout)
    with Checkpoints(folder) as checkpoints:
        return load_state(config, mesh_of(config, layout), checkpoints, step)


def batch(step: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(step)
    ids = random.integers(0, 260, (ROWS, WIDTH + 1)).astype(np.int32)
    return {
        "inputs": ids[:, :-1],
        "targets": ids[:, 1:],
        "loss_mask": random.integers(0, 2, (ROWS, WIDTH)).astype(np.float32),
        "positions": np.tile(np.arange(WIDTH, dtype=np.int32), (ROWS, 1)),
        "segment_ids": np.ones((ROWS, WIDTH), np.int32),
    }


@pytest.fixture(scope="module", autouse=True)
def wide() -> Any:
    """64-bit mode for the file, as a float64 config turns it on."""
    before = jax.config.read("jax_enable_x64")
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


@pytest.mark.parametrize("saved", ["dp4", "pp2 ep2", "pp2 circular", "ep over hidden"])
def test_every_layout_loads_every_expert_and_moment_that_another_saved(tmp_path: Path, saved: str):
    state = marked_state(saved)
    expected = hashes(state)
    assert len([name for name in expected if "expert 3" in name]) == 2 * 3 * 5, "weights and two moments of 5 layers"
    assert len(set(expected.values())) > 0.9 * len(expected), "marks that are equal prove nothing"
    save(tmp_path / "c", state, 1)
    for layout in LAYOUTS:
        loaded = load(tmp_path / "c", layout, 1)
        assert hashes(loaded) == expected, layout
        specs = jax.tree.map(lambda leaf: leaf.sharding, state_arrays(init_state(loaded.config, loaded.mesh)))
        assert jax.tree.map(lambda leaf: leaf.sharding, state_arrays(loaded)) == specs, layout


def test_weights_load_without_the_optimizer(tmp_path: Path):
    state = marked_state("pp2 circular")
    save(tmp_path / "c", state, 1)
    config = config_of("dp4")
    with Checkpoints(tmp_path / "c") as checkpoints:
        params, bias = load_weights(config, mesh_of(config, "dp4"), checkpoints, 1)
    whole = load(tmp_path / "c", "dp4", 1)
    jax.tree.map(np.testing.assert_array_equal, (params, bias), (whole.params, whole.router_bias))


@pytest.mark.slow  # compiles the step for four layouts
def test_a_run_that_changes_its_layout_at_every_step_gives_the_numbers_of_one_device(tmp_path: Path):
    losses, state = [], None
    for step, layout in enumerate(["dp4", "tp2 sp2", "pp2 ep2", "one device"]):
        if state is None:
            config = config_of(layout)
            state = init_state(config, mesh_of(config, layout))
        else:
            save(tmp_path / "c", state, step)
            state = load(tmp_path / "c", layout, step)
        assert int(state.step) == step
        state, metrics = train_step(state, Batch.from_numpy(batch(step), state.mesh))
        losses.append(metrics.scalars()["loss"])
    config = config_of("one device")
    alone, expected = init_state(config, mesh_of(config, "one device")), []
    for step in range(4):
        alone, metrics = train_step(alone, Batch.from_numpy(batch(step), alone.mesh))
        expected.append(metrics.scalars()["loss"])
    assert state is not None
    np.testing.assert_allclose(losses, expected, rtol=1e-10)
    for name, value in by_name(state).items():
        np.testing.assert_allclose(value, by_name(alone)[name], rtol=1e-10, atol=1e-13, err_msg=name)
