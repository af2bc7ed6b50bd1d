"""The MoE layer: router -> dispatch -> experts -> combine (+ shared experts)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxmoe.kernels.expert_mlp import Activation, ClampedSwiglu, expert_mlp
from jaxmoe.model.mlp import Mlp
from jaxmoe.model.norm import at_least_float32
from jaxmoe.model.params import Init
from jaxmoe.model.router import Router, RouterStats
from jaxmoe.model.tokens import Tokens
from jaxmoe.spmd.axes import EP, TP
from jaxmoe.spmd.collectives import gather, rank, scatter_sum

#: Tokens meet the experts over these axes, wherever the experts' own dims are split.
DISPATCH_AXES = (EP, TP)


class Experts(nnx.Module):
    """Routed experts, dropless: exact for any routing.

    Tokens of the ranks along (ep, tp) are gathered; each rank computes its experts (or its slice of the hidden width)
    for all of them; the sum over ranks goes back to the token's owner.

    Layout: x_TD, expert_TK, weight_TK hold this rank's own tokens, in and out. Returned with the tokens: how many
    choices reached an expert held here, int32, a part over every axis; all parts together are all choices.
    """

    def __init__(self, init: Init, *, over: tuple[str, ...]):
        moe, width = init.model.moe, init.model.d_model
        assert moe is not None
        hidden_axis = None if TP in over else TP
        hidden = moe.expert_hidden_dim
        self.gate_up_ED2F = init.normal((moe.num_experts, width, 2, hidden), P(over, None, None, hidden_axis))
        self.down_EFD = init.normal((moe.num_experts, hidden, width), P(over, hidden_axis, None), to_residual=True)
        if moe.expert_bias:
            self.gate_up_bias_E2F = init.zeros((moe.num_experts, 2, hidden), P(over, None, hidden_axis))
            self.down_bias_ED = init.zeros((moe.num_experts, width), P(over, None))
        clamped = moe.clamped_swiglu
        self.activation: Activation = ClampedSwiglu(clamped.limit, clamped.alpha) if clamped else "silu"
        self.has_bias = moe.expert_bias
        self.over = over

    def __call__(self, x_TD: jax.Array, expert_TK: jax.Array, weight_TK: jax.Array) -> tuple[jax.Array, jax.Array]:
        x_TD = gather(x_TD, DISPATCH_AXES, dim=0)
        expert_TK = gather(expert_TK, DISPATCH_AXES, dim=0)
        weight_TK = gather(weight_TK, DISPATCH_AXES, dim=0)
        gate_up, down = self.gate_up_ED2F[...], self.down_EFD[...]
        held = gate_up.shape[0]
        local = expert_TK - rank(self.over) * held
        local = jnp.where((local >= 0) & (local < held), local, held)
        served = jnp.sum(local < held, dtype=jnp.int32)
        dtype = x_TD.dtype
        bias = self.gate_up_bias_E2F[...].astype(dtype) if self.has_bias else None
        y_TD = expert_mlp(
            x_TD, local, weight_TK, gate_up.astype(dtype), down.astype(dtype), bias, activation=self.activation
        )
        if self.has_bias:
            y_TD = y_TD + self._down_bias(local, weight_TK).astype(dtype)
        return scatter_sum(y_TD, DISPATCH_AXES, dim=0), self._once(served)

    def _once(self, value: jax.Array) -> jax.Array:
        """`value`, which the ranks of tp hold alike where they split an expert's hidden width, as a part of a sum."""
        return value if TP in self.over else jnp.where(rank(TP) == 0, value, 0)

    def _down_bias(self, local_TK: jax.Array, weight_TK: jax.Array) -> jax.Array:
        """Each token's weighted sum of the biases that this rank adds, [T, D]."""
        bias_ED = self.down_bias_ED[...]
        chosen_TKE = local_TK[..., None] == jnp.arange(bias_ED.shape[0])
        weight_TE = jnp.sum(jnp.where(chosen_TKE, weight_TK[..., None], 0), axis=1)
        return self._once(weight_TE @ bias_ED.astype(weight_TE.dtype))


class Moe(nnx.Module):
    """In order: route this rank's tokens, send them to their experts, combine, add the shared experts.

    Layout: x_BSD holds this (sp, tp) rank's positions, in and out; padding tokens visit no routed expert.
    """

    def __init__(self, init: Init, *, experts_over: tuple[str, ...]):
        moe = init.model.moe
        assert moe is not None
        self.router = Router(init.split())
        self.experts = Experts(init.split(), over=experts_over)
        self.num_experts = moe.num_experts
        self.has_shared = moe.num_shared_experts > 0
        self.has_shared_gate = moe.shared_expert_gate
        if self.has_shared:
            hidden = moe.num_shared_experts * (moe.shared_hidden_dim or moe.expert_hidden_dim)
            self.shared = Mlp(hidden, "silu", init.split())
            if moe.shared_expert_gate:
                self.shared_gate_D = init.normal((init.model.d_model,), P())

    def __call__(
        self, x_BSD: jax.Array, tokens: Tokens, noise_key: jax.Array | None
    ) -> tuple[jax.Array, RouterStats, jax.Array]:
        """Also what the router saw, and how many choices reached an expert here (see `Experts`)."""
        expert_BSK, weight_BSK, stats = self.router(x_BSD, tokens, noise_key)
        expert_BSK = jnp.where(tokens.valid_BS[..., None], expert_BSK, self.num_experts)
        batch, seq, width = x_BSD.shape
        y_TD, served = self.experts(
            x_BSD.reshape(batch * seq, width),
            expert_BSK.reshape(batch * seq, -1),
            weight_BSK.reshape(batch * seq, -1),
        )
        y_BSD = y_TD.reshape(batch, seq, width)
        if self.has_shared:
            y_BSD = y_BSD + self._shared(x_BSD)
        return y_BSD, stats, served

    def _shared(self, x_BSD: jax.Array) -> jax.Array:
        y_BSD = self.shared(x_BSD)
        if self.has_shared_gate:
            x = at_least_float32(x_BSD)
            gate_BS = jax.nn.sigmoid(jnp.sum(x * self.shared_gate_D[...].astype(x.dtype), axis=-1))
            y_BSD = y_BSD * gate_BS[..., None].astype(y_BSD.dtype)
        return y_BSD
