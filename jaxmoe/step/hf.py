"""States from Hugging Face folders, and back."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmoe.config.errors import UserError
from jaxmoe.config.hf.config import (
    CONFIG_FILE,
    config_tree,
    family_of,
    find_family,
    hf_config,
    read_hf_config,
    read_source_config,
)
from jaxmoe.config.layer_plan import layer_plan
from jaxmoe.config.load import config_from_dict
from jaxmoe.config.schema import Config
from jaxmoe.config.trees import merge_trees
from jaxmoe.interop.folder import DTYPES, WeightFiles, listed
from jaxmoe.interop.load import load_parameters
from jaxmoe.interop.names import NAMES, Names
from jaxmoe.interop.save import FILE_DTYPES, MAX_SHARD_BYTES, shards, tensor_values, write_folder
from jaxmoe.interop.tensors import Stacking, Tensor, flat_parameters, list_tensors, nested_parameters
from jaxmoe.spmd.axes import AXES, DP, EP, PP
from jaxmoe.spmd.program import shardings
from jaxmoe.step.layout import trunk_order
from jaxmoe.step.state import QUICK_COMPILE, TrainState, optimizer_of, state_specs

Tree = Any


def load_hf(path: str | os.PathLike[str], mesh: Mesh, overrides: Sequence[str] = ()) -> TrainState:
    """The weights of a Hugging Face folder under a mesh, with a fresh optimiser.

    `parallel` follows from the mesh, `batch` holds one row for every micro-batch of every rank; both, like the rest,
    can be changed by overrides.

    Raises: UserError (ConfigError) naming fields of config.json that are not understood, or tensors that are missing,
        extra or misshapen.
    """
    sizes = dict(mesh.shape)
    start = {
        "parallel": sizes,
        "batch": {"num_microbatches": sizes[PP], "global_batch_size": sizes[PP] * sizes[DP] * sizes[EP]},
    }
    tree = merge_trees(config_tree(path), start)
    config = config_from_dict(tree, overrides, source=f"{os.fspath(path)}/{CONFIG_FILE}")
    return load_hf_state(config, mesh)


def load_hf_state(config: Config, mesh: Mesh) -> TrainState:
    """The weights of the folder `model.from_hf`, as the state that training starts from.

    Raises: as `load_hf`.
    """
    folder = config.model.from_hf
    assert folder is not None, "the config names no folder"
    sizes = {axis: size for axis, size in config.parallel.model_dump().items() if axis in AXES and size != -1}
    if sizes != {axis: mesh.shape[axis] for axis in sizes}:
        raise ValueError(f"config.parallel has {sizes}, the mesh {dict(mesh.shape)}; use make_mesh(config)")
    values = read_hf_config(folder)
    names = NAMES[family_of(values, folder).model_type]
    specs = state_specs(config, mesh)
    layout = specs.layout
    params_like = _with_shardings(layout.shapes, shardings(mesh, specs.params))
    bias_like = _with_shardings(layout.bias_shapes, shardings(mesh, specs.router_bias))
    with WeightFiles(folder) as files:
        wanted = merge_trees(params_like, bias_like)
        skip = _left_out(config, values, names)
        loaded = load_parameters(files, names, wanted, _stacking(config, mesh.shape[PP]), skip=skip)
    params, bias = _part(loaded, params_like), _part(loaded, bias_like)
    init = jax.jit(
        optimizer_of(layout).init, out_shardings=shardings(mesh, specs.opt_state), compiler_options=QUICK_COMPILE
    )
    step = jax.device_put(jnp.int32(0), NamedSharding(mesh, P()))
    return TrainState(params, bias, init(params), step, step.copy(), config, mesh)


def _left_out(config: Config, values: Tree, names: Names) -> list[str]:
    """Names of the checkpoint's multi-token-prediction modules when the config has none (`model.mtp: null`)."""
    if config.model.mtp is not None:
        return []
    first = config.model.num_layers
    return [names.prefix.format(layer=first + depth) for depth in range(values.get("num_nextn_predict_layers") or 0)]


def _with_shardings(shapes: Tree, own: Tree) -> Tree:
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes, own
    )


def _part(leaves: dict[tuple[Any, ...], jax.Array], like: Tree) -> Tree:
    return nested_parameters({path: leaves[path] for path in flat_parameters(like)})


def _stacking(config: Config, stages: int) -> Stacking:
    plan = layer_plan(config.model)
    return Stacking(len(plan.lead), len(plan.period), trunk_order(config, stages))


def _family_type(config: Config) -> str:
    folder = config.model.from_hf
    model_type = family_of(read_hf_config(folder), folder).model_type if folder else None
    return find_family(config.model, model_type).model_type


def _tensors(tree: Tree, config: Config) -> list[Tensor]:
    shapes = {path: tuple(leaf.shape) for path, leaf in flat_parameters(tree).items()}
    return list_tensors(shapes, NAMES[_family_type(config)], _stacking(config, config.parallel.pp))


def to_hf_tree(tree: Tree, config: Config) -> dict[str, np.ndarray]:
    """Parameters, gradients or router biases by the names of a checkpoint, on the host; the maps of `save_hf`.

    Args:
        tree: nested dict like `TrainState.params` or `TrainState.router_bias`, whole or in part, in the layout of
            `config`.

    Raises: UserError when no family can express the model.
    """
    leaves = {path: np.asarray(leaf) for path, leaf in flat_parameters(tree).items()}

    def fetch(tensor: Tensor) -> np.ndarray:
        leaf = leaves[tensor.path]
        return leaf if tensor.place is None else leaf[tensor.place]

    return dict(tensor_values([tensor for tensor in _tensors(tree, config) if not tensor.is_copy], fetch))


def save_hf(
    state: TrainState,
    path: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    tokenizer_from: str | os.PathLike[str] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes the weights and router biases as a Hugging Face folder; the bytes do not depend on the layout.

    A state that came from a folder (`model.from_hf`) keeps its config.json, its tokenizer files and the dtype of each
    tensor; another one is float32, or bfloat16 where that is the compute dtype. All processes call it, one writes.

    Args:
        dtype: bfloat16, float16, float32 or float64 for all weights; router biases are float32 at least.
        tokenizer_from: folder whose tokenizer files are copied for a state without `model.from_hf`.
        max_shard_bytes: larger checkpoints are cut into files with an index.

    Raises: UserError, in all processes, when the folder exists or cannot be written, `model.from_hf` does not exist, or
        no family can express the model.
    """
    config = state.config
    source = config.model.from_hf
    values = read_source_config(source) if source else None
    leaves = flat_parameters(state.params) | flat_parameters(state.router_bias)
    stored = WeightFiles(source).tensors if source else None
    tensors = [
        tensor
        for tensor in _tensors(_merged(state), config)
        if not tensor.is_copy or stored is None or tensor.name in stored
    ]
    chosen = _chosen_dtype(config, values, dtype)
    dtypes = dict.fromkeys((tensor.name for tensor in tensors), FILE_DTYPES[chosen])
    dtypes |= {tensor.name: "F32" for tensor in tensors if _is_bias(tensor) and dtypes[tensor.name] in ("BF16", "F16")}
    if stored is not None and dtype is None:
        dtypes |= {name: stored[name].dtype for name in dtypes if name in stored}
        odd = [
            f"{name} is {found}; only {', '.join(DTYPES)} are written"
            for name, found in dtypes.items()
            if found not in DTYPES
        ]
        if odd:
            raise UserError(listed(f"{source}: {len(odd)} tensors are not those that the model came from", odd))
    tokenizer_folder = source or tokenizer_from
    write_folder(
        path,
        hf_config(config.model, chosen, values),
        shards(tensors, dtypes, max_shard_bytes),
        dtypes,
        lambda tensor: _on_host(leaves[tensor.path], tensor.place),
        tokenizer_from=Path(tokenizer_folder) if tokenizer_folder else None,
        process=jax.process_index(),
        failed_first=_said_by_first if jax.process_count() > 1 else None,
    )


def _said_by_first(value: bool) -> bool:
    return bool(multihost_utils.broadcast_one_to_all(np.bool_(value)))


def _merged(state: TrainState) -> Tree:
    return merge_trees(state.params, state.router_bias)


def _is_bias(tensor: Tensor) -> bool:
    return tensor.row.leaf == "moe.router.bias_E"


def _chosen_dtype(config: Config, values: Tree | None, dtype: str | None) -> str:
    found = dtype or (values and (values.get("dtype") or values.get("torch_dtype")))
    found = found or ("bfloat16" if config.model.compute_dtype == "bfloat16" else "float32")
    if found not in FILE_DTYPES:
        raise UserError(f"dtype={found}: must be one of {', '.join(FILE_DTYPES)}")
    return found


def _on_host(leaf: jax.Array, place: int | None) -> np.ndarray:
    """A parameter of one layer, whole."""
    if not leaf.is_fully_addressable:
        everywhere = NamedSharding(leaf.sharding.mesh, P())  # type: ignore[attr-defined]
        take: Callable[[jax.Array], jax.Array] = partial(_take, place=place)
        return np.asarray(jax.jit(take, out_shardings=everywhere)(leaf).addressable_data(0))
    return np.asarray(_take(leaf, place))


def _take(leaf: jax.Array, place: int | None) -> jax.Array:
    return leaf if place is None else leaf[place]
