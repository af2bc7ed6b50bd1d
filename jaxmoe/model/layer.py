"""One decoder layer, and the scan over the layers of the trunk."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from jaxmoe.config.layer_plan import LayerKind
from jaxmoe.config.schema import Config, Parallel
from jaxmoe.model.attention import Attention
from jaxmoe.model.mla import LatentAttention
from jaxmoe.model.mlp import Mlp
from jaxmoe.model.moe import Moe
from jaxmoe.model.norm import RmsNorm
from jaxmoe.model.params import Init
from jaxmoe.model.router import RouterStats
from jaxmoe.model.tokens import Tokens
from jaxmoe.spmd.axes import SP
from jaxmoe.spmd.collectives import zeros_of

#: Brings the weights of one layer to this rank (`parallel.zero: 3`); the identity otherwise.
Materialize = Callable[[Any], Any]

REMAT_POLICIES = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "layer": None,
}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerStats:
    """What a layer returns beside its output, each a part over every axis; None where it owns no such thing.

    Returned, never kept in the module, so that recomputation cannot count twice. Scanned layers add a first dim.
    """

    router: RouterStats | None = None
    served: jax.Array | None = None
    """int32, choices of an expert, by valid tokens, that reached an expert held here."""
    indexer_loss_sum: jax.Array | None = None
    """Sum over this rank's valid tokens of KL(attention || indexer). Differentiable."""


#: The keys [B, Q, P] that a layer of sparse attention chose, for the layers after it; None where there are none.
Chosen = jax.Array | None


class Layer(nnx.Module):
    """x + c attention(norm(x)), then x + c mlp_or_moe(norm(x)), c the `residual_multiplier`.

    Layout: x_BSD holds this (sp, tp) rank's positions, in and out.
    """

    def __init__(self, config: Config, kind: LayerKind, init: Init):
        model = config.model
        self.attention_norm = RmsNorm(model.d_model, init)
        ulysses = config.parallel.sp_attention == "ulysses"
        if model.attention.mla is not None:
            zigzag = config.parallel.sp_placement == "zigzag" and init.sizes[SP] > 1
            self.attention = LatentAttention(init.split(), reorders_keys=zigzag, owns_indexer=kind.owns_indexer)
        else:
            self.attention = Attention(init.split(), ulysses=ulysses, window=kind.window)
        self.mlp_norm = RmsNorm(model.d_model, init)
        self.residual_multiplier = model.residual_multiplier
        self.is_moe = kind.is_moe
        if kind.is_moe:
            over = ("ep", "tp") if config.parallel.experts_over == "ep_tp" else ("ep",)
            self.moe = Moe(init.split(), experts_over=over)
        else:
            assert model.mlp is not None
            self.mlp = Mlp(model.mlp.hidden_dim, model.mlp.activation, init.split())

    def __call__(
        self, x_BSD: jax.Array, chosen: Chosen, tokens: Tokens, noise_key: jax.Array | None
    ) -> tuple[jax.Array, Chosen, LayerStats]:
        y_BSD, loss, chosen = self.attend(self.attention_norm(x_BSD), chosen, tokens)
        x_BSD = x_BSD + self._scaled(y_BSD)
        normed = self.mlp_norm(x_BSD)
        if not self.is_moe:
            return x_BSD + self._scaled(self.mlp(normed)), chosen, LayerStats(indexer_loss_sum=loss)
        y_BSD, stats, served = self.moe(normed, tokens, noise_key)
        return x_BSD + self._scaled(y_BSD), chosen, LayerStats(stats, served, loss)

    def attend(self, x_BSD: jax.Array, chosen: Chosen, tokens: Tokens) -> tuple[jax.Array, jax.Array | None, Chosen]:
        """The attention; this rank's part of its indexer's loss, where there is one; the keys for the next layer."""
        if isinstance(self.attention, LatentAttention):
            return self.attention(x_BSD, chosen, tokens)
        return self.attention(x_BSD, tokens), None, None

    def _scaled(self, y_BSD: jax.Array) -> jax.Array:
        return y_BSD if self.residual_multiplier == 1 else y_BSD * self.residual_multiplier


def rematerialized(function: Callable[..., Any], policy: str) -> Callable[..., Any]:
    """`function`, of which the backward pass recomputes what `policy` (`parallel.remat`) says."""
    if policy == "none":
        return function
    return jax.checkpoint(function, policy=REMAT_POLICIES[policy], prevent_cse=False)


def layer_key(noise_key: jax.Array | None, layer_id: jax.Array | int) -> jax.Array | None:
    """The randomness of one layer."""
    return None if noise_key is None else jax.random.fold_in(noise_key, layer_id)


def scan_layers(
    period: nnx.List,
    x_BSD: jax.Array,
    tokens: Tokens,
    *,
    layer_ids: jax.Array,
    noise_key: jax.Array | None,
    materialize: Materialize,
    parallel: Parallel,
    has_padding: bool,
) -> tuple[jax.Array, list[LayerStats]]:
    """Run stacked layers in order: all of the first repeat of the period, then the second, ...

    Args:
        period: one stacked `Layer` per position of the period; arrays are [R, ...], R repeats held here.
        layer_ids: int32 [R], number of the first layer of each repeat; -1 is a padding repeat, which is skipped.
        parallel: its `remat` and `unroll_layers`.
        has_padding: whether any rank holds padding repeats; only then is each repeat run through `lax.cond`.

    Returns the hidden states and, per position of the period, statistics with a first dim R.
    """
    graphdef, state = nnx.split(period)

    def run(x: jax.Array, weights: Any, layer_id: jax.Array) -> tuple[jax.Array, list[LayerStats]]:
        layers = nnx.merge(graphdef, materialize(weights))
        stats, chosen = [], None
        for position, layer in enumerate(layers):
            x, chosen, stat = layer(x, chosen, tokens, layer_key(noise_key, layer_id + position))
            stats.append(stat)
        return x, stats

    run = rematerialized(run, parallel.remat)

    def body(x: jax.Array, inputs: tuple[Any, jax.Array]) -> tuple[jax.Array, list[LayerStats]]:
        weights, layer_id = inputs
        if not has_padding:
            return run(x, weights, layer_id)
        _, types = jax.eval_shape(run, x, weights, layer_id)
        return jax.lax.cond(layer_id >= 0, run, lambda x, *_: (x, jax.tree.map(zeros_of, types)), x, weights, layer_id)

    return jax.lax.scan(body, x_BSD, (state, layer_ids), unroll=parallel.unroll_layers)
