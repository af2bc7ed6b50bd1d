"""Which experts a token goes to, with what weights, and what the balance losses and metrics need to know of it."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxmoe.config.schema import Router as RouterConfig
from jaxmoe.model.norm import at_least_float32
from jaxmoe.model.params import Init, RouterBias
from jaxmoe.model.tokens import Tokens

#: Keeps a sum of sigmoid scores away from zero; the value is part of the objective.
SCORE_EPS = 1e-20


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RouterStats:
    """Sums over this rank's valid tokens of one micro-batch: a part over every axis. Scanned layers add a first dim L.

    Returned, never kept in the module, so that recomputation cannot count twice.
    """

    count_E: jax.Array
    """int32, times each expert was chosen."""
    balance_count_BE: jax.Array
    """int32, per row: choices as the balance losses see them (no bias, no groups)."""
    score_sum_BE: jax.Array
    """Per row: summed scores, normalised over all experts. Differentiable."""
    z_sum: jax.Array
    """Sum of logsumexp(logits)^2. Differentiable."""
    entropy_sum: jax.Array
    """Sum of the entropy of the normalised scores, nats."""
    top1_sum: jax.Array
    """Sum of the largest routing weight."""


def _raw_scores(logits_TE: jax.Array, function: str) -> jax.Array:
    if function == "softmax":
        return jax.nn.softmax(logits_TE, axis=-1)
    if function == "sigmoid":
        return jax.nn.sigmoid(logits_TE)
    return jnp.sqrt(jax.nn.softplus(logits_TE))


def balance_scores(logits_TE: jax.Array, function: str) -> jax.Array:
    """Scores that sum to one over all experts, whatever the selection does."""
    scores = _raw_scores(logits_TE, function)
    return scores if function == "softmax" else scores / (scores.sum(axis=-1, keepdims=True) + SCORE_EPS)


def _mask_groups(selection_TE: jax.Array, config: RouterConfig) -> jax.Array:
    """-inf outside the best `topk_groups` groups of each token."""
    if config.num_groups == config.topk_groups:
        return selection_TE
    tokens, experts = selection_TE.shape
    grouped_TGE = selection_TE.reshape(tokens, config.num_groups, experts // config.num_groups)
    group_TG = jax.lax.top_k(grouped_TGE, config.group_score_experts)[0].sum(axis=-1)
    chosen = jax.lax.top_k(group_TG, config.topk_groups)[1]
    keep_TG = (chosen[:, :, None] == jnp.arange(config.num_groups)).any(axis=1)
    return jnp.where(keep_TG[:, :, None], grouped_TGE, -jnp.inf).reshape(tokens, experts)


def route(
    logits_TE: jax.Array, bias_E: jax.Array | None, config: RouterConfig, experts_per_token: int
) -> tuple[jax.Array, jax.Array]:
    """Chosen experts [T, K], int32, best first, and their weights [T, K].

    The bias moves the selection alone; ties go to the lowest expert. Gradients flow through the weights.
    Source: spec of the objective, section 3; groups and bias: DeepSeek-V3, arXiv:2412.19437, section 2.1.2.
    """
    after = config.score_function == "softmax" and not config.softmax_before_topk
    scores = logits_TE if after else _raw_scores(logits_TE, config.score_function)
    selection = jax.lax.stop_gradient(scores if bias_E is None else scores + bias_E.astype(scores.dtype))
    expert_TK = jax.lax.top_k(_mask_groups(selection, config), experts_per_token)[1].astype(jnp.int32)
    weight_TK = jnp.take_along_axis(scores, expert_TK, axis=-1)
    if after:
        weight_TK = jax.nn.softmax(weight_TK, axis=-1)
    elif config.renormalize:
        weight_TK = weight_TK / (weight_TK.sum(axis=-1, keepdims=True) + SCORE_EPS)
    return expert_TK, weight_TK * config.scaling_factor


def count_experts(expert_BSK: jax.Array, valid_BS: jax.Array, num_experts: int) -> jax.Array:
    """How often each expert was chosen by the valid tokens of each row, int32 [B, E]."""
    chosen = (expert_BSK[..., None] == jnp.arange(num_experts)).any(axis=2)
    return (chosen & valid_BS[..., None]).sum(axis=1, dtype=jnp.int32)


def router_stats(
    logits_BSE: jax.Array, expert_BSK: jax.Array, weight_BSK: jax.Array, valid_BS: jax.Array, function: str
) -> RouterStats:
    """The sums of one router call, over valid tokens only."""
    num_experts, k = logits_BSE.shape[-1], expert_BSK.shape[-1]
    scores_BSE = balance_scores(logits_BSE, function)
    balance_BSK = jax.lax.top_k(jax.lax.stop_gradient(scores_BSE), k)[1]
    valid = valid_BS.astype(logits_BSE.dtype)
    log_partition_BS = jax.nn.logsumexp(logits_BSE, axis=-1)
    detached = jax.lax.stop_gradient(scores_BSE)
    entropy_BS = -jnp.sum(jax.scipy.special.xlogy(detached, detached), axis=-1)
    return RouterStats(
        count_E=count_experts(expert_BSK, valid_BS, num_experts).sum(axis=0, dtype=jnp.int32),
        balance_count_BE=count_experts(balance_BSK, valid_BS, num_experts),
        score_sum_BE=jnp.sum(scores_BSE * valid[..., None], axis=1),
        z_sum=jnp.sum(jnp.square(log_partition_BS) * valid),
        entropy_sum=jnp.sum(entropy_BS * valid),
        top1_sum=jnp.sum(jax.lax.stop_gradient(weight_BSK).max(axis=-1) * valid),
    )


def _token_noise(key: jax.Array, id_BS: jax.Array, draw: str, width: int, dtype: jnp.dtype) -> jax.Array:
    """Noise [B, S, width] that depends on the key and each token's place in the global batch, on nothing else."""

    def one(token_id: jax.Array) -> jax.Array:
        own = jax.random.fold_in(key, token_id)
        if draw == "normal":
            return jax.random.normal(own, (width,), dtype)
        return jax.random.uniform(own, (width,), dtype, -1.0, 1.0)

    return jax.vmap(jax.vmap(one))(id_BS)


class Router(nnx.Module):
    """Logits, choice and weights in at least float32.

    Layout: tokens are this rank's own, disjoint over all axes; the weight and the bias are equal on all ranks.
    """

    def __init__(self, init: Init):
        moe = init.model.moe
        assert moe is not None
        self.gate_DE = init.normal((init.model.d_model, moe.num_experts), P())
        if moe.router.logits_bias:
            self.gate_bias_E = init.zeros((moe.num_experts,))
        if moe.router.selection_bias:
            self.bias_E = RouterBias(jnp.zeros((moe.num_experts,), jnp.float32), spec=P(), decay=False)
        self.config = moe.router
        self.experts_per_token = moe.experts_per_token

    def __call__(
        self, x_BSD: jax.Array, tokens: Tokens, noise_key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, RouterStats]:
        """Experts and weights [B, S, K], and the statistics. `noise_key` is given while training only."""
        config = self.config
        x = at_least_float32(x_BSD)
        if config.input_jitter and noise_key is not None:
            noise = _token_noise(noise_key, tokens.id_BS, "uniform", x.shape[-1], x.dtype)
            x = x * (1 + config.input_jitter * noise)
        logits_BSE = x @ self.gate_DE[...].astype(x.dtype)
        if config.logits_bias:
            logits_BSE = logits_BSE + self.gate_bias_E[...].astype(x.dtype)
        if config.force_balance and noise_key is not None:
            forced = _token_noise(noise_key, tokens.id_BS, "normal", logits_BSE.shape[-1], x.dtype)
            logits_BSE = forced + (logits_BSE - jax.lax.stop_gradient(logits_BSE))
        batch, seq, num_experts = logits_BSE.shape
        bias_E = self.bias_E[...] if config.selection_bias else None
        expert_TK, weight_TK = route(
            logits_BSE.reshape(batch * seq, num_experts), bias_E, config, self.experts_per_token
        )
        expert_BSK = expert_TK.reshape(batch, seq, -1)
        weight_BSK = weight_TK.reshape(batch, seq, -1)
        stats = router_stats(logits_BSE, expert_BSK, weight_BSK, tokens.valid_BS, config.score_function)
        return expert_BSK, weight_BSK, stats
