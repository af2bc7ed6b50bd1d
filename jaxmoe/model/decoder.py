"""The whole model as a tree of parameters with the parts of its forward pass."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxmoe.config.layer_plan import layer_plan
from jaxmoe.config.schema import Config
from jaxmoe.model.attention import rope_dim
from jaxmoe.model.layer import Layer, LayerStats, Materialize, layer_key, rematerialized
from jaxmoe.model.mtp import MtpModule
from jaxmoe.model.norm import RmsNorm
from jaxmoe.model.params import Init, stack
from jaxmoe.model.tokens import Tokens, make_tokens
from jaxmoe.spmd.axes import TP
from jaxmoe.spmd.collectives import gather, rank, scatter_sum


class Embedding(nnx.Module):
    """Token vectors; the vocabulary is split over tp."""

    def __init__(self, init: Init):
        self.table_VD = init.normal((init.model.vocab_size, init.model.d_model), P(TP, None))
        self.multiplier = init.model.embedding_multiplier

    def __call__(self, inputs_BS: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """[B, S] ids of this (sp, tp) rank's positions -> [B, S, D], the same positions.

        Every tp rank looks up what it holds of the ids of all tp ranks; all but one find nothing, so the sum is exact.
        """
        ids = gather(inputs_BS, TP, dim=1)
        table = self.table_VD[...]
        local = ids - rank(TP) * table.shape[0]
        held = (local >= 0) & (local < table.shape[0])
        found = jnp.where(held[..., None], table[jnp.where(held, local, 0)].astype(dtype), 0)
        x_BSD = scatter_sum(found, TP, dim=1)
        return x_BSD if self.multiplier == 1 else x_BSD * self.multiplier


class Head(nnx.Module):
    """Projection to the vocabulary, split over tp."""

    def __init__(self, init: Init):
        self.weight_DV = init.normal((init.model.d_model, init.model.vocab_size), P(None, TP))


def _run_module(
    graphdef: nnx.GraphDef,
    tokens: Tokens,
    key: jax.Array | None,
    materialize: Materialize,
    weights: nnx.State,
    *inputs: jax.Array | None,
) -> Any:
    """What a layer, or a module around one, that is not scanned returns."""
    return nnx.merge(graphdef, materialize(weights))(*inputs, tokens, key)


class Decoder(nnx.Module):
    """Embedding, leading dense layers, the trunk, final norm, head; and the modules that predict further tokens.

    The trunk is what a pipeline splits: one stacked `Layer` per position of the period, arrays [repeats, ...] over pp.
    `trunk_order` lists the repeat that stands at each place of that dim; -1 is padding.
    """

    def __init__(self, config: Config, sizes: dict[str, int], key: jax.Array, trunk_order: tuple[int, ...]):
        model, init = config.model, Init(key, config.model, sizes)
        plan = layer_plan(model)
        self.embedding = Embedding(init.split())
        self.lead = nnx.List([Layer(config, kind, init.split()) for kind in plan.lead])
        self.trunk = nnx.List(
            [
                stack(lambda maker, kind=kind: Layer(config, kind, maker), init.split(), trunk_order)
                for kind in plan.period
            ]
        )
        self.final_norm = RmsNorm(model.d_model, init)
        if not model.tie_embeddings:
            self.head = Head(init.split())
        if model.mtp is not None:
            self.mtp = nnx.List([MtpModule(config, kind, init.split()) for kind in plan.mtp])
        self.config = config

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(self.config.model.compute_dtype)

    def tokens(self, ids_BS: jax.Array, positions_BS: jax.Array, segment_ids_BS: jax.Array) -> Tokens:
        """What the layers need to know of a micro-batch."""
        attention = self.config.model.attention
        return make_tokens(ids_BS, positions_BS, segment_ids_BS, attention.rope, rope_dim(attention), self.dtype)

    def embed(
        self, inputs_BS: jax.Array, tokens: Tokens, noise_key: jax.Array | None, materialize: Materialize
    ) -> tuple[jax.Array, list[LayerStats]]:
        """Token vectors after the leading layers, [B, S, D] on this (sp, tp) rank's positions; what the layers say."""
        x_BSD, chosen, stats = self.embedding(inputs_BS, self.dtype), None, []
        for number, layer in enumerate(self.lead):
            graphdef, state = nnx.split(layer)
            run = partial(_run_module, graphdef, tokens, layer_key(noise_key, number), materialize)
            x_BSD, chosen, stat = rematerialized(run, self.config.parallel.remat)(state, x_BSD, chosen)
            stats.append(stat)
        return x_BSD, stats

    def predict_further(
        self,
        depth: int,
        inputs_BS: jax.Array,
        h_BSD: jax.Array,
        tokens: Tokens,
        noise_key: jax.Array | None,
        materialize: Materialize,
    ) -> tuple[jax.Array, LayerStats]:
        """Normalised hidden states of `depth` (from 1) from those of the depth before; see `MtpModule`.

        `inputs_BS`: the tokens `depth` further on. `tokens` mark as padding where there is none in the same document.
        """
        graphdef, state = nnx.split(self.mtp[depth - 1])
        key = layer_key(noise_key, self.config.model.num_layers + depth - 1)
        run = partial(_run_module, graphdef, tokens, key, materialize)
        e_BSD = self.embedding(inputs_BS, self.dtype)
        return rematerialized(run, self.config.parallel.remat)(state, e_BSD, h_BSD)

    def head_weight(self) -> jax.Array:
        """[D, V], this rank's columns of the vocabulary, divided by `logits_divisor`."""
        model = self.config.model
        weight_DV = self.embedding.table_VD[...].T if model.tie_embeddings else self.head.weight_DV[...]
        return weight_DV if model.logits_divisor == 1 else weight_DV / model.logits_divisor
