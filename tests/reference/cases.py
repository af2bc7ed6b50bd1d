"""Small models, ragged batches and states made of given numbers, for tests of the whole step."""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

import jaxmoe
from jaxmoe.config.schema import Config
from jaxmoe.spmd.axes import AXES
from jaxmoe.spmd.program import shardings
from jaxmoe.step.layout import Layout, make_layout
from jaxmoe.step.state import TrainState, fresh_arrays, state_specs
from tests.reference.naive import FAST_COMPILE

Tree = Any
ALL_TERMS = {"aux_loss_coeff": 0.04, "seq_aux_loss_coeff": 0.03, "global_aux_loss_coeff": 0.02, "z_loss_coeff": 0.05}
SIGMOID_BIAS = {"score_function": "sigmoid", "selection_bias": True, "bias_update_rate": 0.01}
VOCAB, SEQ = 32, 16


@contextmanager
def float64() -> Iterator[None]:
    """64-bit mode for as long as the context lasts."""
    before = jax.config.read("jax_enable_x64")
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


def make_config(
    *,
    rows: int = 8,
    microbatches: int = 1,
    layers: int = 3,
    attention: dict | None = None,
    moe: dict | None = None,
    router: dict | None = None,
    model: dict | None = None,
    objective: dict | None = None,
    optimizer: dict | None = None,
    **parallel: Any,
) -> Config:
    """A float64 model of width 16 with 8 experts; every argument adds to or replaces the defaults."""
    default_moe: dict[str, Any] = {
        "num_experts": 8,
        "experts_per_token": 2,
        "expert_hidden_dim": 8,
        "num_shared_experts": 1,
        "num_dense_layers": 1,
    }
    return Config.model_validate(
        {
            "run": {"dir": "runs/test", "steps": 30},
            "data": {"train": {"kind": "sotu"}},
            "batch": {"global_batch_size": rows, "seq_len": SEQ, "num_microbatches": microbatches},
            "model": {
                "vocab_size": VOCAB,
                "d_model": 16,
                "num_layers": layers,
                "attention": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 4, "qk_norm": True} | (attention or {}),
                "mlp": {"hidden_dim": 16},
                "moe": default_moe | (moe or {}) | {"router": ALL_TERMS | (router or {})},
                "compute_dtype": "float64",
                "param_dtype": "float64",
                **(model or {}),
            },
            "objective": objective or {},
            "optimizer": optimizer or {},
            "parallel": {"dp": 1, **parallel},
        }
    )


def ragged_batch(rows: int = 8, seed: int = 0) -> dict[str, np.ndarray]:
    """Packed documents with padding between and after them, weights that are no integers, and of every four quarters
    of the rows the second all padding and the third without a target."""
    random = np.random.default_rng(seed)
    shape = (rows, SEQ)
    batch = {
        "inputs": random.integers(0, VOCAB, shape).astype(np.int32),
        "targets": random.integers(0, VOCAB, shape).astype(np.int32),
        "loss_mask": np.zeros(shape, np.float32),
        "positions": np.zeros(shape, np.int32),
        "segment_ids": np.zeros(shape, np.int32),
    }
    for row in range(rows):
        start, document = 0, 0
        while start < SEQ:
            length = min(int(random.integers(1, 9)), SEQ - start)
            place = slice(start, start + length)
            start += length
            if random.random() < 0.25:
                continue  # padding
            document += 1
            batch["segment_ids"][row, place] = document
            batch["positions"][row, place] = np.arange(length)
            batch["loss_mask"][row, place][:-1] = random.choice([0, 1, 1, 0.5, 0.25], length - 1)
    quarter = rows // 4
    for name in ("segment_ids", "positions", "loss_mask"):
        batch[name][quarter : 2 * quarter] = 0
        batch[name][rows - 1] = 0
    batch["loss_mask"][2 * quarter : 3 * quarter] = 0
    return batch


def _value(path: tuple, shape: tuple[int, ...]) -> np.ndarray:
    name = jax.tree_util.keystr(path)
    noise = np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape)
    if "scale_D" in name:
        return 1 + 0.2 * noise
    return 0.1 * noise if "bias" in name else 0.3 * noise


def natural_layout(config: Config) -> Layout:
    """The layout of a config on one device."""
    return make_layout(cast(Any, config), tuple((axis, 1) for axis in AXES))


def natural_arrays(config: Config) -> tuple[Tree, Tree]:
    """Parameters and router biases of some size, on the host, by name: the same for every mesh."""
    layout = natural_layout(config)
    params = jax.tree_util.tree_map_with_path(lambda path, leaf: _value(path, leaf.shape), layout.shapes)
    bias = jax.tree_util.tree_map_with_path(
        lambda path, leaf: _value(path, leaf.shape).astype(np.float32), layout.bias_shapes
    )
    return params, bias


def _trunk(tree: Tree, function) -> Tree:
    return {**tree, "trunk": jax.tree.map(function, tree["trunk"])} if "trunk" in tree else tree


def to_natural(tree: Tree, state: TrainState) -> Tree:
    """On the host, repeats of the trunk in their order, padding left out."""
    order = state.layout.trunk_order
    places = np.array([order.index(repeat) for repeat in range(max(order) + 1)])
    return _trunk(jax.tree.map(np.asarray, tree), lambda value: value[places])


def from_natural(tree: Tree, state: TrainState) -> Tree:
    """The inverse of `to_natural`; padding repeats hold the last layer's numbers."""
    return _trunk(tree, lambda value: value[np.array(state.layout.trunk_order)])


def make_state(config: Config, devices: int, arrays: tuple[Tree, Tree] | None = None) -> TrainState:
    """A state on the first `devices` devices, from natural arrays, with a fresh optimiser."""
    mesh = jaxmoe.make_mesh(config, jax.devices()[:devices])
    specs = state_specs(config, mesh)
    shapes = jax.eval_shape(partial(fresh_arrays, config, mesh), jnp.uint32(0))
    state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    params, bias = (from_natural(tree, state) for tree in arrays or natural_arrays(config))
    state = TrainState(params, bias, state.opt_state, state.step, state.skipped_in_a_row, config, mesh)
    return jax.device_put(state, shardings(mesh, specs))


@lru_cache(maxsize=64)
def _program(function: Any, structure: Any, leaves: tuple[tuple, ...]) -> Any:
    arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype, sharding in leaves]
    return function.lower(*jax.tree.unflatten(structure, arguments)).compile(compiler_options=FAST_COMPILE)


def compiled_step(config: Config) -> str:
    """The text of `train_step`, compiled for one device and full batches of the config."""
    state = jax.eval_shape(partial(fresh_arrays, config, jaxmoe.make_mesh(config, jax.devices()[:1])), jnp.uint32(0))
    fields = dict.fromkeys(("inputs", "targets", "positions", "segment_ids"), jnp.int32) | {"loss_mask": jnp.float32}
    shape = (config.batch.global_batch_size, config.batch.seq_len)
    batch: dict[str, Any] = {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in fields.items()}
    lowered = jaxmoe.train_step.lower(state, jaxmoe.Batch(**batch))
    return lowered.compile(compiler_options=FAST_COMPILE).as_text() or ""


def run(function: Any, state: TrainState, batch: dict[str, np.ndarray]) -> Any:
    """`jaxmoe.loss_and_grads` or its like, on host arrays.

    The program is the users' but for XLA's last optimisations, which take three quarters of the time to compile.
    """
    arguments = (state, jaxmoe.Batch.from_numpy(batch, state.mesh))
    leaves, structure = jax.tree.flatten(arguments)
    return _program(function, structure, tuple((x.shape, x.dtype, x.sharding) for x in leaves))(*arguments)


def assert_close(got: Any, want: Any, tolerance: float = 1e-10, what: str = "") -> None:
    """Every leaf equal to `tolerance` of its largest element."""
    got_leaves = jax.tree_util.tree_leaves_with_path(got)
    want_leaves = jax.tree_util.tree_leaves_with_path(want)
    assert [path for path, _ in got_leaves] == [path for path, _ in want_leaves]
    for (path, got_leaf), (_, want_leaf) in zip(got_leaves, want_leaves, strict=True):
        g, w = np.asarray(got_leaf), np.asarray(want_leaf)
        assert g.shape == w.shape
        scale = max(float(np.abs(w).max(initial=0)), 1e-4)
        name = what + jax.tree_util.keystr(path)
        np.testing.assert_allclose(g, w, rtol=0, atol=tolerance * scale, err_msg=name)
