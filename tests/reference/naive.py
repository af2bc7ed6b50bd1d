"""The training objective once more, as plainly as it can be written: one device, loops, no sharding.

Written from the objective's definition alone; it shares no code with `jaxmoe`, only the config and the names of the
parameters. One head, one expert and one row are written down and mapped over all: every expert runs for every token.
All terms come from sums per row. Programs are compiled with little optimisation, the longest part of compiling.

`params` is the tree of `TrainState.params` with the repeats of the trunk in their natural order, without padding;
`bias` is the tree of `TrainState.router_bias` in the same order.
"""

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.config.schema import Attention, Config, Moe, Router

Tree = Any
Fields = Mapping[str, Any]
"""Arrays of the batch, of all rows or of one."""

#: Compile quickly: these programs run a few times on a few hundred tokens.
FAST_COMPILE: dict[str, Any] = {"xla_backend_optimization_level": "0", "xla_llvm_disable_expensive_passes": True}
if jax.version.__version_info__ < (0, 11):  # gone in 0.12
    FAST_COMPILE["xla_cpu_use_fusion_emitters"] = False
TERMS = ("aux_loss", "seq_aux_loss", "global_aux_loss", "z_loss")


class RowSums(NamedTuple):
    """What one row gives the objective; [L, ...] holds zeros in layers without experts."""

    ce_S: jax.Array
    logits_SV: jax.Array
    counts_LE: jax.Array
    """Choices of valid tokens."""
    balance_counts_LE: jax.Array
    score_sums_LE: jax.Array
    z_sums_L: jax.Array


class Outcome(NamedTuple):
    total: jax.Array
    terms: dict[str, jax.Array]
    """Without coefficients, summed over layers; "cross_entropy" too."""
    per_layer: dict[str, jax.Array]
    counts_LE: jax.Array


def is_moe(config: Config) -> list[bool]:
    """Of each layer of the model."""
    moe = config.model.moe
    if moe is None:
        return [False] * config.model.num_layers
    rest = config.model.num_layers - moe.num_dense_layers
    pattern = moe.layer_pattern
    flags = [i % pattern == 0 for i in range(rest)] if isinstance(pattern, int) else [p == 1 for p in pattern]
    return [False] * moe.num_dense_layers + flags


def layer_params(params: Tree, config: Config, number: int) -> Tree:
    """The weights (or biases) of one layer, taken out of the stacks."""
    lead = config.model.moe.num_dense_layers if config.model.moe else 0
    if number < lead:
        return params["lead"][number]
    period = len(params["trunk"])
    repeat, position = divmod(number - lead, period)
    return jax.tree.map(lambda stacked: stacked[repeat], params["trunk"][position])


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale[None, :]


def silu(x: jax.Array) -> jax.Array:
    return x / (1 + jnp.exp(-x))


def gated_mlp(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return (silu(x @ gate) * (x @ up)) @ down


def turn(x_SH: jax.Array, position_S: jax.Array, config: Attention) -> jax.Array:
    """Rotate the pairs (i, i + width / 2) of the first `width` channels by position * theta^(-2i / width)."""
    assert config.rope.scaling is None
    width = round(config.head_dim * config.rope.fraction)
    channels = [x_SH[:, i] for i in range(config.head_dim)]
    for i in range(width // 2):
        angle = position_S * config.rope.theta ** (-2 * i / width)
        a, b = channels[i], channels[i + width // 2]
        channels[i] = a * jnp.cos(angle) - b * jnp.sin(angle)
        channels[i + width // 2] = a * jnp.sin(angle) + b * jnp.cos(angle)
    return jnp.stack(channels, axis=1)


def one_head(x_SD: jax.Array, row: Fields, p: Tree, *, config: Attention, eps: float) -> jax.Array:
    """One head of queries with its keys and values, projected back: [S, D]. `p` holds the weights of that head."""
    segment, position = row["segment_ids"], row["positions"]
    seq = segment.shape[0]
    before = jnp.arange(seq)[:, None] >= jnp.arange(seq)[None, :]
    sees = before & (segment[:, None] == segment[None, :]) & (segment[:, None] != 0)
    if config.sliding_window is not None:
        sees &= position[:, None] - position[None, :] < config.sliding_window
    q, k, v = x_SD @ p["q"], x_SD @ p["k"], x_SD @ p["v"]
    if config.qkv_bias:
        q, k, v = q + p["q_bias"][None, :], k + p["k_bias"][None, :], v + p["v_bias"][None, :]
    if config.qk_norm:
        q, k = rms_norm(q, p["q_scale"], eps), rms_norm(k, p["k_scale"], eps)
    scores = turn(q, position, config) @ turn(k, position, config).T / math.sqrt(config.head_dim)
    top = jax.lax.stop_gradient(jnp.where(sees, scores, -1e9).max(1, keepdims=True))
    weights = jnp.where(sees, jnp.exp(jnp.where(sees, scores - top, 0)), 0)
    total = weights.sum(1, keepdims=True)
    return weights / jnp.where(total == 0, 1, total) @ v @ p["o"]


def attend(p: Tree, x_SD: jax.Array, row: Fields, config: Attention, eps: float) -> jax.Array:
    kv = np.arange(config.num_heads) * config.num_kv_heads // config.num_heads
    own = {"q": p["q_DNH"].swapaxes(0, 1), "o": p["o_NHD"]}
    own |= {"k": p["k_DKH"].swapaxes(0, 1)[kv], "v": p["v_DKH"].swapaxes(0, 1)[kv]}
    shared = {}
    if config.qkv_bias:
        own |= {"q_bias": p["q_bias_NH"], "k_bias": p["k_bias_KH"][kv], "v_bias": p["v_bias_KH"][kv]}
    if config.qk_norm:
        shared = {"q_scale": p["q_norm"]["scale_D"], "k_scale": p["k_norm"]["scale_D"]}
    y_SD = jax.vmap(lambda head: one_head(x_SD, row, head | shared, config=config, eps=eps))(own).sum(0)
    return y_SD + p["o_bias_D"][None, :] if config.output_bias else y_SD


def log_sum_exp(values: jax.Array) -> jax.Array:
    """Over the last dim."""
    top = jax.lax.stop_gradient(values.max(-1, keepdims=True))
    return (top + jnp.log(jnp.exp(values - top).sum(-1, keepdims=True)))[..., 0]


def best(values_SE: jax.Array, k: int) -> jax.Array:
    """Ids of the k largest, largest first, ties to the lowest id."""
    return jnp.argsort(-values_SE, axis=1, stable=True)[:, :k]


def scores_of(logits_SE: jax.Array, function: str) -> jax.Array:
    if function == "softmax":
        exp = jnp.exp(logits_SE - logits_SE.max(1, keepdims=True))
        return exp / exp.sum(1, keepdims=True)
    if function == "sigmoid":
        return 1 / (1 + jnp.exp(-logits_SE))
    return jnp.sqrt(jnp.log1p(jnp.exp(logits_SE)))


def in_best_groups(selection_SE: jax.Array, router: Router) -> jax.Array:
    """bool [S, E]: whether the expert's group is one of the best."""
    groups = jnp.split(selection_SE, router.num_groups, axis=1)
    score_SG = jnp.stack([jnp.sort(g, axis=1)[:, ::-1][:, : router.group_score_experts].sum(1) for g in groups], 1)
    chosen = best(score_SG, router.topk_groups)
    return jnp.concatenate([jnp.broadcast_to((chosen == g).any(1)[:, None], v.shape) for g, v in enumerate(groups)], 1)


def choose(logits_SE: jax.Array, bias_E: jax.Array | None, router: Router, k: int) -> tuple[jax.Array, jax.Array]:
    """Chosen experts [S, K] and the routing weight of every expert [S, E], zero where not chosen."""
    num_experts = logits_SE.shape[1]
    scores = scores_of(logits_SE, router.score_function)
    after = router.score_function == "softmax" and not router.softmax_before_topk
    selection = logits_SE if after else scores
    if bias_E is not None:
        selection = selection + bias_E[None, :]
    if router.topk_groups < router.num_groups:
        selection = jnp.where(in_best_groups(selection, router), selection, -jnp.inf)
    expert_SK = best(selection, k)
    chosen_SE = jnp.stack([(expert_SK == e).any(1) for e in range(num_experts)], 1)
    weight_SE = jnp.where(chosen_SE, scores, 0)
    if after or router.renormalize:
        weight_SE = weight_SE / (weight_SE.sum(1, keepdims=True) + (0 if after else 1e-20))
    return expert_SK, weight_SE * router.scaling_factor


def route(logits_SE: jax.Array, bias_E: jax.Array | None, valid_S: jax.Array, *, moe: Moe) -> tuple[jax.Array, tuple]:
    """Routing weights [S, E], and (counts, balance counts, score sums, z sum) over the row's valid tokens."""
    router, k = moe.router, moe.experts_per_token
    expert_SK, weight_SE = choose(logits_SE, bias_E, router, k)
    scores = scores_of(logits_SE, router.score_function)
    if router.score_function != "softmax":
        scores = scores / (scores.sum(1, keepdims=True) + 1e-20)

    def count(ids_SK: jax.Array) -> jax.Array:
        return jnp.stack([((ids_SK == e).any(1) & valid_S).sum() for e in range(moe.num_experts)])

    sums = jnp.where(valid_S[:, None], scores, 0).sum(0)
    z = jnp.where(valid_S, log_sum_exp(logits_SE) ** 2, 0).sum()
    return weight_SE, (count(expert_SK), count(best(scores, k)), sums, z)


def mixture(p: Tree, bias_E, x_SD: jax.Array, valid_S: jax.Array, moe: Moe) -> tuple[jax.Array, tuple]:
    """The MoE layer of one row, and what `route` says of it."""
    weight_SE, sums = route(x_SD @ p["router"]["gate_DE"], bias_E, valid_S, moe=moe)
    gate, up = p["experts"]["gate_up_ED2F"][:, :, 0], p["experts"]["gate_up_ED2F"][:, :, 1]
    out_ESD = jax.vmap(gated_mlp, (None, 0, 0, 0))(x_SD, gate, up, p["experts"]["down_EFD"])
    y_SD = (weight_SE.T[:, :, None] * out_ESD).sum(0)
    if moe.num_shared_experts:
        shared = p["shared"]
        y = gated_mlp(x_SD, shared["gate_up_D2F"][:, 0], shared["gate_up_D2F"][:, 1], shared["down_FD"])
        if moe.shared_expert_gate:
            y = y / (1 + jnp.exp(-(x_SD @ p["shared_gate_D"])))[:, None]
        y_SD += y
    return y_SD, sums


def row_sums(params: Tree, bias: Tree, config: Config, row: Fields) -> RowSums:
    """The forward pass of one row."""
    model, eps = config.model, config.model.norm_eps
    valid_S = row["segment_ids"] != 0
    x_SD = params["embedding"]["table_VD"][row["inputs"]]
    experts = model.moe.num_experts if model.moe else 0
    nothing = (jnp.zeros(experts, int), jnp.zeros(experts, int), jnp.zeros(experts), jnp.zeros(()))
    collected = []
    for number, has_experts in enumerate(is_moe(config)):
        p = layer_params(params, config, number)
        normed = rms_norm(x_SD, p["attention_norm"]["scale_D"], eps)
        x_SD = x_SD + attend(p["attention"], normed, row, model.attention, eps)
        normed = rms_norm(x_SD, p["mlp_norm"]["scale_D"], eps)
        if has_experts:
            assert model.moe is not None
            own = layer_params(bias, config, number)["moe"]["router"]["bias_E"] if bias else None
            y_SD, sums = mixture(p["moe"], own, normed, valid_S, model.moe)
        else:
            mlp = p["mlp"]
            y_SD = gated_mlp(normed, mlp["gate_up_D2F"][:, 0], mlp["gate_up_D2F"][:, 1], mlp["down_FD"])
            sums = nothing
        x_SD = x_SD + y_SD
        collected.append(sums)
    x_SD = rms_norm(x_SD, params["final_norm"]["scale_D"], eps)
    head = params["embedding"]["table_VD"].T if model.tie_embeddings else params["head"]["weight_DV"]
    logits_SV = x_SD @ head
    is_target = jnp.arange(logits_SV.shape[1])[None, :] == row["targets"][:, None]
    ce_S = log_sum_exp(logits_SV) - jnp.where(is_target, logits_SV, 0).sum(1)
    return RowSums(ce_S, logits_SV, *(jnp.stack(values) for values in zip(*collected, strict=True)))


def all_rows(params: Tree, bias: Tree, config: Config, batch: Fields) -> RowSums:
    """`RowSums` with a first dim G."""
    return jax.vmap(lambda row: row_sums(params, bias, config, row))(batch)


@partial(jax.jit, static_argnames="config", compiler_options=FAST_COMPILE)
def compiled_rows(params: Tree, bias: Tree, batch: Fields, *, config: Config) -> RowSums:
    return all_rows(params, bias, config, batch)


@partial(jax.jit, static_argnames="config", compiler_options=FAST_COMPILE)
def compiled_pullback(params: Tree, bias: Tree, batch: Fields, cotangents: Tree, *, config: Config) -> Tree:
    """The gradient by the parameters of sum(cotangents * differentiable of `all_rows`)."""

    def scalar(params: Tree) -> jax.Array:
        rows = all_rows(params, bias, config, batch)
        return total_of((rows._asdict()[name] * value).sum() for name, value in cotangents.items())

    return jax.grad(scalar)(params)


def balance(rows: list[RowSums], num_tokens: float, k: int) -> jax.Array:
    """E / (k n^2) * sum_i C_i Q_i over the tokens of these rows together, per layer; 0 without tokens."""
    counts = total_of(row.balance_counts_LE for row in rows)
    sums = total_of(row.score_sums_LE for row in rows)
    if num_tokens == 0:
        return jnp.zeros(len(rows[0].z_sums_L))
    return rows[0].score_sums_LE.shape[1] / (k * num_tokens**2) * (counts * sums).sum(1)


def total_of(values: Iterable[Any]) -> Any:
    """The sum, of whatever type it has."""
    return sum(values)


def ratio(numerator: Any, denominator: float) -> Any:
    """0 for an empty set."""
    return numerator / denominator if denominator > 0 else 0 * numerator


def objective(
    stacked: RowSums, config: Config, batch: Fields, replicas: int, num_microbatches: int
) -> tuple[jax.Array, Outcome]:
    """J of one step and all that it is made of. The rows of a micro-batch are split over `replicas`."""
    per_token, settings = config.objective.calculate_per_token_loss, config.objective
    weight = np.asarray(batch["loss_mask"], np.float64)
    tokens = (batch["segment_ids"] != 0).sum(1)  # valid tokens of each row
    rows = [jax.tree.map(lambda value, g=g: value[g], stacked) for g in range(len(weight))]
    ce = [(jnp.asarray(weight[g]) * row.ce_S).sum() for g, row in enumerate(rows)]
    targets = weight.sum(1)
    total_rows = len(rows)
    micro = [list(ids) for ids in np.split(np.arange(total_rows), num_microbatches)]
    N, V, live_rows = tokens.sum(), targets.sum(), (tokens > 0).sum()

    # The cross-entropy.
    loss = jnp.zeros(())
    for ids in micro:
        if per_token:
            loss += ratio(total_of(ce[g] for g in ids), V)
        elif settings.balance_dp_token:
            loss += ratio(total_of(ce[g] for g in ids), targets[ids].sum()) / num_microbatches
        else:
            for own in np.split(np.asarray(ids), replicas):
                loss += ratio(total_of(ce[g] for g in own), targets[own].sum()) / replicas / num_microbatches

    moe = config.model.moe
    counts_LE = total_of(row.counts_LE for row in rows)
    if moe is None:
        return loss, Outcome(loss, {"cross_entropy": loss}, {}, counts_LE)

    # The routers' terms, per layer.
    k, layers = moe.experts_per_token, config.model.num_layers
    values = {name: jnp.zeros(layers) for name in TERMS}
    values["global_aux_loss"] += balance(rows, N, k)
    for ids in micro:
        z = total_of(rows[g].z_sums_L for g in ids)
        by_row = total_of(balance([rows[g]], tokens[g], k) for g in ids)
        by_replica = total_of(
            balance([rows[g] for g in own], tokens[own].sum(), k) for own in np.split(np.asarray(ids), replicas)
        )
        if per_token:
            values["z_loss"] += ratio(z, N)
            values["seq_aux_loss"] += ratio(by_row, live_rows)
            values["aux_loss"] += tokens[ids].sum() / N * by_replica / replicas
        else:
            values["z_loss"] += ratio(z, tokens[ids].sum()) / num_microbatches
            values["seq_aux_loss"] += ratio(by_row, (tokens[ids] > 0).sum()) / num_microbatches
            values["aux_loss"] += by_replica / replicas / num_microbatches
    coefficients = {name: getattr(moe.router, f"{name}_coeff") for name in TERMS}
    total = loss + total_of(coefficients[name] * values[name].sum() for name in TERMS)
    used = {name: values[name] for name in TERMS if coefficients[name] > 0}
    terms = {"cross_entropy": loss} | {name: value.sum() for name, value in used.items()}
    return total, Outcome(total, terms, used, counts_LE)


def value_and_grad(
    params: Tree, bias: Tree, config: Config, batch: Fields, replicas: int, num_microbatches: int
) -> tuple[Outcome, Tree]:
    """The objective and its gradient by plain automatic differentiation, through the sums of the rows."""
    rows = compiled_rows(params, bias, batch, config=config)
    smooth = {name: value for name, value in rows._asdict().items() if jnp.issubdtype(value.dtype, jnp.floating)}

    def of_smooth(smooth: Tree) -> tuple[jax.Array, Outcome]:
        return objective(rows._replace(**smooth), config, batch, replicas, num_microbatches)

    cotangents, outcome = jax.grad(of_smooth, has_aux=True)(smooth)
    return outcome, compiled_pullback(params, bias, batch, cotangents, config=config)


def moved_bias(bias: Tree, config: Config, counts_LE: np.ndarray) -> Tree:
    """The router biases after a step with these counts, in exact integers and float32."""
    moe = config.model.moe
    assert moe is not None
    rate = np.float32(moe.router.bias_update_rate)
    lead, period = moe.num_dense_layers, len(bias["trunk"]) if bias else 0
    out = {}
    for position, tree in (bias["trunk"] if bias else {}).items():
        old = np.array(tree["moe"]["router"]["bias_E"], np.float32)
        for repeat in range(len(old)):
            counts = [int(c) for c in counts_LE[lead + repeat * period + position]]
            for e, own in enumerate(counts):
                old[repeat, e] += rate * np.float32(np.sign(sum(counts) - len(counts) * own))
        out[position] = {"moe": {"router": {"bias_E": old}}}
    return {"trunk": out} if out else bias
