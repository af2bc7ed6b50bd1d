"""The forward pass of one micro-batch, in the pieces that a pipeline takes apart. All inside shard_map."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmoe.losses.cross_entropy import cross_entropy_sum
from jaxmoe.losses.objective import CROSS_ENTROPY
from jaxmoe.model.decoder import Decoder
from jaxmoe.model.layer import scan_layers
from jaxmoe.model.router import RouterStats
from jaxmoe.model.tokens import Tokens
from jaxmoe.spmd.axes import PP, TP
from jaxmoe.spmd.collectives import gather, keep_one_copy, own_piece
from jaxmoe.step.layout import Layout
from jaxmoe.step.parts import Parts, add_router_stats, to_slots

Arrays = dict[str, jax.Array]


@dataclass(frozen=True)
class Forward:
    """A model in place, with the static facts and the randomness of a step.

    `noise_key` seeds the router's noise, the same for all micro-batches of a step: tokens have their own places in
    the global batch. None while evaluating.
    """

    layout: Layout
    model: Decoder
    noise_key: jax.Array | None

    def tokens(self, arrays: Arrays) -> Tokens:
        return self.model.tokens(arrays["ids"], arrays["positions"], arrays["segment_ids"])

    def embed(self, arrays: Arrays, tokens: Tokens) -> jax.Array:
        """Embedding and leading layers: [B, S, D]."""
        return self.model.embed(arrays["inputs"], tokens, self.noise_key, self.layout.collect_layer)

    def own_layer_ids(self) -> jax.Array:
        """Number of the first layer of each repeat that this pp rank holds; -1 is padding."""
        return own_piece(jnp.asarray(self.layout.layer_ids, jnp.int32), PP, dim=0)

    def layers(
        self, x_BSD: jax.Array, tokens: Tokens, trunk: nnx.List, layer_ids: jax.Array
    ) -> tuple[jax.Array, RouterStats | None]:
        """Run stacked layers of the trunk; statistics by slot."""
        x_BSD, stats = scan_layers(
            trunk,
            x_BSD,
            tokens,
            layer_ids=layer_ids,
            noise_key=self.noise_key,
            materialize=self.layout.collect_layer,
            remat=self.layout.config.parallel.remat,
            has_padding=self.layout.has_padding,
        )
        return x_BSD, to_slots(self.layout, stats, layer_ids)

    def head_inputs(self, x_BSD: jax.Array) -> jax.Array:
        """Final hidden states of this sp rank's positions, [T, D], gathered over tp."""
        x_BQD = gather(self.model.final_norm(x_BSD), TP, dim=1)
        return x_BQD.reshape(-1, x_BQD.shape[-1])

    def add_cross_entropy(self, parts: Parts, x_BSD: jax.Array, arrays: Arrays, weights: Arrays) -> Parts:
        """Add a micro-batch's sum over tokens of weight * loss_mask * CE, a part over all axes."""
        target, mask = (gather(arrays[name], TP, dim=1) for name in ("targets", "loss_mask"))
        by_replica_R = weights[CROSS_ENTROPY]
        by_row_B = jnp.repeat(by_replica_R, x_BSD.shape[0] // by_replica_R.shape[0])
        weight = (mask.astype(by_row_B.dtype) * by_row_B[:, None]).reshape(-1)
        x_TD = self.head_inputs(x_BSD)
        total = cross_entropy_sum(x_TD, self.model.head_weight().astype(x_TD.dtype), target.reshape(-1), weight)
        return parts.add(cross_entropy=keep_one_copy(total, TP))

    def hidden(self, arrays: Arrays) -> tuple[jax.Array, RouterStats | None, Tokens]:
        """The trunk's output of a micro-batch, all layers on this rank."""
        tokens = self.tokens(arrays)
        x_BSD, stats = self.layers(self.embed(arrays, tokens), tokens, self.model.trunk, self.own_layer_ids())
        return x_BSD, stats, tokens

    def add_microbatch(self, parts: Parts, arrays: Arrays, weights: Arrays) -> Parts:
        """A whole micro-batch, without a pipeline."""
        x_BSD, stats, tokens = self.hidden(arrays)
        parts = add_router_stats(parts, self.layout, stats, tokens.valid_BS, weights)
        return self.add_cross_entropy(parts, x_BSD, arrays, weights)
