"""Golden cases of Hugging Face models: their files, their batches as ours, and a look inside the model."""

from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe.kernels.sparse_attention import Marks, chosen_keys, index_scores, visible
from jaxmoe.model.norm import at_least_float32
from jaxmoe.spmd.axes import POSITION_AXES, ROW_AXES, TP
from jaxmoe.spmd.collectives import own_piece
from jaxmoe.spmd.program import manual
from jaxmoe.step.state import TrainState, state_specs

FOLDER = Path(__file__).parent.parent / "golden" / "hf"
#: Families whose golden numbers are here, with their cases.
CASES = {
    folder.name: tuple(sorted(file.stem for file in folder.glob("*.npz") if file.stem != "dsa_derived"))
    for folder in sorted(FOLDER.iterdir())
    if folder.is_dir()
}
ALL = [(family, case) for family, cases in CASES.items() for case in cases]
#: Numbers of one optimiser step of the goldens: p -= 0.1 * gradient.
RATE = 0.1


@lru_cache
def golden(family: str, case: str) -> dict[str, np.ndarray]:
    """All arrays of a case."""
    with np.load(FOLDER / family / f"{case}.npz") as file:
        return {name: file[name] for name in file.files}


def batch_fields(arrays: dict[str, np.ndarray], rows: int | None = None) -> dict[str, np.ndarray]:
    """The five fields of a batch; `rows` fills up with rows of padding, which change nothing."""
    labels = arrays["labels"]
    shifted = np.full_like(labels, -100)
    shifted[:, :-1] = labels[:, 1:]
    ones = np.ones_like(labels)
    # Documents are counted from 0 there; padding has no number of its own.
    segments = arrays["segment_ids"] + 1 if "segment_ids" in arrays else arrays.get("attention_mask", ones)
    positions = arrays.get("position_ids", np.broadcast_to(np.arange(labels.shape[1]), labels.shape))
    fields = {
        "inputs": arrays["input_ids"],
        "targets": np.where(shifted == -100, 0, shifted),
        "loss_mask": (shifted != -100).astype(np.float32),
        "positions": np.where(segments == 0, 0, positions),
        "segment_ids": segments,
    }
    short = (rows or len(labels)) - len(labels)
    return {name: np.pad(value, ((0, short), (0, 0))).astype(value.dtype) for name, value in fields.items()}


def fitting(family: str, sizes: dict[str, int]) -> dict[str, int]:
    """The sizes of a mesh; a model without experts takes dp in place of ep."""
    if "router_logits" in golden(family, "base"):
        return sizes
    dense = {axis: size for axis, size in sizes.items() if axis != "ep"}
    return dense | {"dp": sizes.get("dp", 1) * sizes.get("ep", 1)}


def load(family: str, mesh_sizes: dict[str, int], shape: tuple[int, int], *overrides: str) -> TrainState:
    """The golden weights on a mesh of these sizes (1 where not given), for batches of this shape."""
    sizes = {axis: mesh_sizes.get(axis, 1) for axis in ("pp", "dp", "ep", "sp", "tp")}
    rows, columns = shape
    own = [f"parallel.{axis}={size}" for axis, size in sizes.items()]
    own += [f"batch.global_batch_size={rows}", f"batch.seq_len={columns}", f"batch.num_microbatches={sizes['pp']}"]
    folder = FOLDER / family
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    mesh = jaxmoe.make_mesh(jaxmoe.load_hf_config(folder, own), devices)
    return jaxmoe.load_hf(folder, mesh, [*own, *overrides])


def close(got: Any, want: np.ndarray, name: str, live: np.ndarray | None = None) -> None:
    """The comparison of the goldens' README: 1e-4 of each number plus 1e-4; gradients 1e-4 of the largest plus 1e-6."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, name
    if live is not None:
        got, want = got[..., live, :], want[..., live, :]
    tolerance = 1e-4 * np.abs(want).max() + 1e-6 if name.startswith("grad") else 1e-4 + 1e-4 * np.abs(want)
    assert (np.abs(got - want) <= tolerance).all(), (name, np.abs(got - want).max())


# ---------------------------------------------------------------- inside the model


def _layers(model: Any) -> list[Any]:
    """The decoder layers one by one, in order."""
    graphdef, state = nnx.split(model.trunk)
    layers = list(model.lead)
    for repeat in range(jax.tree.leaves(state)[0].shape[0]):
        layers += list(nnx.merge(graphdef, jax.tree.map(lambda leaf, r=repeat: leaf[r], state)))
    return layers


def _routing(layer: Any, normed: jax.Array, tokens: Any) -> tuple[jax.Array, ...]:
    router = layer.moe.router
    logits = at_least_float32(normed) @ router.gate_DE[...]
    if router.config.logits_bias:
        logits = logits + router.gate_bias_E[...]
    expert, weight, stats = router(normed, tokens, None)
    order = jnp.argsort(expert, axis=-1)
    return logits, jnp.take_along_axis(expert, order, -1), jnp.take_along_axis(weight, order, -1), stats


def _index(attention: Any, normed: jax.Array, tokens: Any) -> tuple[jax.Array, jax.Array]:
    """Scores of the indexer where a query may see a key (0 elsewhere), and the keys that it chooses, [B, S, T]."""
    indexer = attention.indexer(normed, attention.query_source(normed), tokens)
    own = (own_piece(value, TP, dim=1) for value in (tokens.segment_BQ, tokens.position_BQ))
    marks = Marks(*own, tokens.segment_BT, tokens.position_BT)
    scores = index_scores(indexer.q_BSJI, indexer.w_BSJ, indexer.k_BTI, relu=indexer.relu)
    chosen = chosen_keys(indexer, marks, attention.dsa.index_topk)
    selected = jax.nn.one_hot(chosen, scores.shape[-1], dtype=jnp.int32).sum(axis=2)
    return jnp.where(visible(marks), scores, 0), selected


def _look(state: TrainState, fields: dict[str, jax.Array]) -> dict[str, jax.Array]:
    layout = state.layout
    model = layout.merge(layout.collect_once(state.params), state.router_bias)
    tokens = model.tokens(fields["ids"], fields["positions"], fields["segment_ids"])
    x = model.embedding(fields["inputs"], model.dtype)
    found: dict[str, list] = {name: [] for name in ("hidden", "attn_out", "mlp_out", "router_logits")}
    found |= {name: [] for name in ("topk_idx", "topk_weight", "index_scores", "index_selected")}
    found["hidden"].append(x)
    factor = state.config.model.residual_multiplier
    chosen = None
    for layer in _layers(model):
        attended, _, _ = layer.attend(layer.attention_norm(x), chosen, tokens)
        if state.config.model.attention.dsa is not None:
            scores, selected = _index(layer.attention, layer.attention_norm(x), tokens)
            found["index_scores"].append(scores)
            found["index_selected"].append(selected)
        normed = layer.mlp_norm(x + factor * attended)
        mixed = layer.moe(normed, tokens, None)[0] if layer.is_moe else layer.mlp(normed)
        x, chosen, _ = layer(x, chosen, tokens, None)
        for name, value in {"hidden": x, "attn_out": attended, "mlp_out": mixed}.items():
            found[name].append(value)
        if layer.is_moe:
            values = _routing(layer, normed, tokens)[:3]
            for name, value in zip(("router_logits", "topk_idx", "topk_weight"), values, strict=True):
                found[name].append(value)
    stacked = {name: jnp.stack(values) for name, values in found.items() if values}
    return stacked | {"final_hidden": model.final_norm(x)[None]}


def _on_mesh(state: TrainState, fields: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    ids = np.arange(fields["inputs"].size, dtype=np.int32).reshape(fields["inputs"].shape)
    return {**fields, "ids": ids}


def look(state: TrainState, fields: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Hidden states, outputs of modules and routing of every layer, by the goldens' names. Not for pipelines."""
    batch = _on_mesh(state, fields)
    has_experts = state.config.model.moe is not None
    names = ["hidden", "attn_out", "mlp_out", "final_hidden"]
    names += ["router_logits", "topk_idx", "topk_weight"] if has_experts else []
    names += ["index_scores", "index_selected"] if state.config.model.attention.dsa is not None else []
    out = dict.fromkeys(names, P(None, ROW_AXES, POSITION_AXES))
    specs = state_specs(state.config, state.mesh)
    inputs = dict.fromkeys(batch, P(ROW_AXES, POSITION_AXES))
    found = jax.jit(manual(_look, state.mesh, in_specs=(specs, inputs), out_specs=out))(state, batch)
    found = {name: np.asarray(value) for name, value in found.items()}
    return found | {"final_hidden": found["final_hidden"][0]}


def _pooled_balance(state: TrainState, fields: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
    """The library's balance loss: rows of all layers pooled, all picks counted; and its gradient."""
    layout = state.layout

    def loss(params: Any) -> jax.Array:
        model = layout.merge(params, state.router_bias)
        tokens = model.tokens(fields["ids"], fields["positions"], fields["segment_ids"])
        x = model.embedding(fields["inputs"], model.dtype)
        counts, scores, layers, chosen = jnp.zeros(()), jnp.zeros(()), 0, None
        for layer in _layers(model):
            x, chosen, stats = layer(x, chosen, tokens, None)
            if stats.router is not None:
                counts += stats.router.balance_count_BE.sum(0)
                scores += stats.router.score_sum_BE.sum(0)
                layers += 1
        rows = layers * tokens.valid_BS.sum()
        return counts.shape[0] * jnp.sum(jax.lax.stop_gradient(counts) / rows * scores / rows)

    return jax.value_and_grad(loss)(state.params)


def pooled_balance(state: TrainState, fields: dict[str, np.ndarray]) -> tuple[float, dict[str, np.ndarray]]:
    """The balance loss as the library pools it, and its gradients by the names of the checkpoint. One device."""
    batch = _on_mesh(state, fields)
    specs = state_specs(state.config, state.mesh)
    run = manual(_pooled_balance, state.mesh, in_specs=(specs, P()), out_specs=(P(), specs.params))
    value, gradient = jax.jit(run)(state, batch)
    return float(value), jaxmoe.to_hf_tree(gradient, state.config)
