"""The forward pass of one micro-batch, in the pieces that a pipeline takes apart. All inside shard_map."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmoe.losses.cross_entropy import cross_entropy_sum, cross_entropy_terms
from jaxmoe.losses.objective import CROSS_ENTROPY, MTP, TARGET_MEAN
from jaxmoe.model.decoder import Decoder
from jaxmoe.model.layer import LayerStats, scan_layers
from jaxmoe.model.tokens import Tokens
from jaxmoe.spmd.axes import PP, TP
from jaxmoe.spmd.collectives import gather, keep_one_copy, own_piece
from jaxmoe.step.batch import at_depth
from jaxmoe.step.layout import Layout
from jaxmoe.step.parts import MTP_ACCEPTANCE, Parts, add_layer_stats, one_to_slot, to_slots

Arrays = dict[str, jax.Array]

#: The weights of terms: those of the batch's own tokens, then of each MTP depth that is computed.
Weights = tuple[Arrays, ...]


@dataclass(frozen=True)
class Forward:
    """A model in place, with the static facts and the randomness of a step.

    `noise_key` seeds the router's noise, the same for all micro-batches of a step: tokens have their own places in
    the global batch. None while evaluating.
    """

    layout: Layout
    model: Decoder
    noise_key: jax.Array | None

    def tokens(self, arrays: Arrays, depth: int = 0) -> Tokens:
        """The tokens of a micro-batch, as the decoder or an MTP depth sees them."""
        return self.model.tokens(arrays["ids"], arrays["positions"], arrays[at_depth("segment_ids", depth)])

    def embed(self, parts: Parts, arrays: Arrays, tokens: Tokens, weights: Weights) -> tuple[Parts, jax.Array]:
        """Embedding and leading layers: [B, S, D]."""
        x_BSD, stats = self.model.embed(arrays["inputs"], tokens, self.noise_key, self.layout.collect_layer)
        for number, stat in enumerate(stats):
            slots = one_to_slot(self.layout, stat, number)
            parts = add_layer_stats(parts, self.layout, slots, tokens.valid_BS, weights[0])
        return parts, x_BSD

    def own_layer_ids(self) -> jax.Array:
        """Number of the first layer of each repeat that this pp rank holds; -1 is padding."""
        return own_piece(jnp.asarray(self.layout.layer_ids, jnp.int32), PP, dim=0)

    def layers(
        self, x_BSD: jax.Array, tokens: Tokens, trunk: nnx.List, layer_ids: jax.Array
    ) -> tuple[jax.Array, LayerStats]:
        """Run stacked layers of the trunk; statistics by slot."""
        x_BSD, stats = scan_layers(
            trunk,
            x_BSD,
            tokens,
            layer_ids=layer_ids,
            noise_key=self.noise_key,
            materialize=self.layout.collect_layer,
            parallel=self.layout.config.parallel,
            has_padding=self.layout.has_padding,
        )
        return x_BSD, to_slots(self.layout, stats, layer_ids)

    def head_inputs(self, h_BSD: jax.Array) -> jax.Array:
        """Normalised hidden states of this sp rank's positions, [T, D], gathered over tp."""
        h_BQD = gather(h_BSD, TP, dim=1)
        return h_BQD.reshape(-1, h_BQD.shape[-1])

    def add_losses(self, parts: Parts, x_BSD: jax.Array, arrays: Arrays, weights: Weights) -> Parts:
        """Add what comes after the trunk: the cross-entropy, and all terms of the MTP depths."""
        h_BSD = self.model.final_norm(x_BSD)
        parts = parts.add(cross_entropy=self._cross_entropy(h_BSD, arrays, weights[0], 0))
        for depth in range(1, len(weights)):
            tokens = self.tokens(arrays, depth)
            h_BSD, stats = self.model.predict_further(
                depth, arrays[at_depth("inputs", depth)], h_BSD, tokens, self.noise_key, self.layout.collect_layer
            )
            slot = self.layout.plan.num_decoder_layers + depth - 1
            slots = one_to_slot(self.layout, stats, slot)
            parts = add_layer_stats(parts, self.layout, slots, tokens.valid_BS, weights[depth])
            here_L = jnp.arange(len(self.layout.plan.kinds)) == slot
            loss = self._cross_entropy(h_BSD, arrays, weights[depth], depth)
            accepted = self._accepted(h_BSD, arrays, weights[depth], depth)
            parts = parts.add(terms={MTP: here_L * loss}, metrics={MTP_ACCEPTANCE: here_L * accepted})
        return parts

    def _cross_entropy(self, h_BSD: jax.Array, arrays: Arrays, weights: Arrays, depth: int) -> jax.Array:
        """A micro-batch's sum over tokens of weight * loss_mask * CE, a part over all axes."""
        target, mask = (gather(arrays[at_depth(name, depth)], TP, dim=1) for name in ("targets", "loss_mask"))
        by_replica_R = weights[CROSS_ENTROPY]
        by_row_B = jnp.repeat(by_replica_R, h_BSD.shape[0] // by_replica_R.shape[0])
        weight = (mask.astype(by_row_B.dtype) * by_row_B[:, None]).reshape(-1)
        h_TD = self.head_inputs(h_BSD)
        total = cross_entropy_sum(h_TD, self.model.head_weight().astype(h_TD.dtype), target.reshape(-1), weight)
        return keep_one_copy(total, TP)

    def _accepted(self, h_BSD: jax.Array, arrays: Arrays, weights: Arrays, depth: int) -> jax.Array:
        """A micro-batch's part of the weighted share of targets that are the most likely word; a part over all axes."""
        target = gather(arrays[at_depth("targets", depth)], TP, dim=1)
        h_TD = self.head_inputs(h_BSD)
        _, hit_T = cross_entropy_terms(h_TD, self.model.head_weight().astype(h_TD.dtype), target.reshape(-1))
        own_hit_BS = own_piece(hit_T.reshape(target.shape), TP, dim=1)
        mask_BS = arrays[at_depth("loss_mask", depth)].astype(weights[TARGET_MEAN].dtype)
        return jnp.sum(mask_BS * own_hit_BS) * weights[TARGET_MEAN]

    def hidden(self, parts: Parts, arrays: Arrays, weights: Weights) -> tuple[Parts, jax.Array]:
        """The trunk's output of a micro-batch, all layers on this rank, and what the layers say."""
        tokens = self.tokens(arrays)
        parts, x_BSD = self.embed(parts, arrays, tokens, weights)
        x_BSD, stats = self.layers(x_BSD, tokens, self.model.trunk, self.own_layer_ids())
        return add_layer_stats(parts, self.layout, stats, tokens.valid_BS, weights[0]), x_BSD

    def add_microbatch(self, parts: Parts, arrays: Arrays, weights: Weights) -> Parts:
        """A whole micro-batch, without a pipeline."""
        parts, x_BSD = self.hidden(parts, arrays, weights)
        return self.add_losses(parts, x_BSD, arrays, weights)
