"""Faults of the kind that trainers have, as small changes of the source text, applied to the live modules."""

import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

import jax
import pytest

from jaxmoe.runtime.proof.ragged import BatchKind
from jaxmoe.spmd import collectives
from jaxmoe.step.layout import make_layout


@dataclass(frozen=True)
class Mutation:
    """In `where` (module:function), `old` becomes `new`; `layout` is where that must show."""

    name: str
    where: str
    old: str
    new: str
    layout: str
    caught_by: Literal["tracing", "verify"]
    num_microbatches: int = 1
    batch: BatchKind = "ragged"
    latent: bool = False
    """In the model with latent and sparse attention and MTP, not the one with grouped heads."""


MUTATIONS = [
    Mutation(
        "attention output not summed",
        "model.attention:Attention.__call__",
        "scatter_sum(partial, TP, dim=1)",
        "own_piece(partial, TP, dim=1)",
        "tp=2",
        "verify",
    ),
    Mutation(
        "MLP output not summed", "model.mlp:Mlp.__call__", "scatter_sum(linear(", "own_piece(linear(", "tp=2", "verify"
    ),
    Mutation(
        "expert output not summed", "model.moe:Experts.__call__", "scatter_sum(y_TD", "own_piece(y_TD", "ep=2", "verify"
    ),
    Mutation(
        "experts of rank 0 on every rank",
        "model.moe:Experts.__call__",
        "rank(self.over) * held",
        "0 * held",
        "ep=2",
        "verify",
    ),
    Mutation(
        "embedding not summed",
        "model.decoder:Embedding.__call__",
        "scatter_sum(found",
        "own_piece(found",
        "tp=2",
        "verify",
    ),
    Mutation(
        "softmax denominator of one vocabulary shard",
        "losses.cross_entropy:_chunk_logits",
        "sum_partial(jnp.sum(jnp.exp(logit_CV - top_C[:, None]), axis=1), TP)",
        "jnp.sum(jnp.exp(logit_CV - top_C[:, None]), axis=1)",
        "tp=2",
        "tracing",
    ),
    Mutation(
        "target logit averaged, not summed",
        "losses.cross_entropy:_chunk_logits",
        "sum_partial(jnp.where(here_C",
        "mean_over(jnp.where(here_C",
        "tp=2",
        "verify",
    ),
    Mutation(
        "cross-entropy added as a copy",
        "step.forward:Forward._cross_entropy",
        "keep_one_copy(total, TP)",
        "total",
        "tp=2",
        "tracing",
    ),
    Mutation(
        "cross-entropy counted once per tp rank",
        "step.forward:Forward._cross_entropy",
        "keep_one_copy(total, TP)",
        "to_varying(total, TP)",
        "tp=2",
        "verify",
    ),
    Mutation(
        "targets averaged over replicas",
        "losses.objective:count_step",
        "target_M=sum_partial(target.sum(axis=1), ROW_AXES)",
        "target_M=mean_over(target.sum(axis=1), ROW_AXES)",
        "dp=2",
        "verify",
    ),
    Mutation(
        "targets counted over a copied axis",
        "losses.objective:count_step",
        "target_M=sum_partial(target.sum(axis=1), ROW_AXES)",
        "target_M=sum_partial(sum_partial(target.sum(axis=1), ROW_AXES), ('sp',))",
        "dp=2,sp=2",
        "tracing",
    ),
    Mutation(
        "rows with tokens averaged over replicas",
        "losses.objective:count_step",
        "sum_partial((row_MB > 0)",
        "mean_over((row_MB > 0)",
        "dp=2",
        "verify",
    ),
    Mutation(
        "1/M left out of cross-entropy",
        "losses.objective:term_weights",
        "weight / num_microbatches",
        "weight / (1 if name == CROSS_ENTROPY else num_microbatches)",
        "dp=1",
        "verify",
        2,
        "identical",
    ),
    Mutation(
        "1/M left out of the z-loss",
        "losses.objective:term_weights",
        "weight / num_microbatches",
        "weight / (1 if name == Z else num_microbatches)",
        "dp=1",
        "verify",
        2,
        "identical",
    ),
    Mutation(
        "1/M left out of aux_loss",
        "losses.objective:term_weights",
        "weight / num_microbatches",
        "weight / (1 if name == AUX else num_microbatches)",
        "dp=1",
        "verify",
        2,
        "identical",
    ),
    Mutation(
        "1/M left out of seq_aux_loss",
        "losses.objective:term_weights",
        "weight / num_microbatches",
        "weight / (1 if name == SEQ_AUX else num_microbatches)",
        "dp=1",
        "verify",
        2,
        "identical",
    ),
    Mutation(
        "balance counts of one position shard",
        "losses.balance:_pool",
        "sum_partial(jax.lax.stop_gradient(value), axes)",
        "jax.lax.stop_gradient(value)",
        "sp=2",
        "verify",
    ),
    Mutation(
        "gradients not reduced",
        "step.layout:Placement.reduce",
        "sum_partial(gradient, rest)",
        "gradient",
        "dp=2,zero=0",
        "tracing",
    ),
    Mutation(
        "gradients reduced twice",
        "step.layout:Placement.reduce",
        "sum_partial(gradient, rest)",
        "sum_partial(sum_partial(gradient, rest), rest)",
        "dp=2,tp=2",
        "tracing",
    ),
    Mutation(
        "gradients averaged",
        "step.layout:Placement.reduce",
        "sum_partial(gradient, rest)",
        "mean_over(gradient, rest)",
        "tp=2",
        "verify",
    ),
    Mutation(
        "gradient pieces not summed",
        "step.layout:Placement.reduce",
        "scatter_sum(gradient",
        "own_piece(gradient",
        "dp=2,zero=1",
        "verify",
    ),
    Mutation(
        "expert gradients divided by ep",
        "step.layout:Placement.reduce",
        "sum_partial(gradient, rest)",
        "sum_partial(gradient, rest) / (axis_size('ep') if 'ep' in _spec_axes(self.spec) else 1)",
        "ep=2",
        "verify",
    ),
    Mutation(
        "weights not cast to varying",
        "step.layout:Placement.collect",
        "to_varying(value, AXES)",
        "value",
        "dp=2,zero=0",
        "tracing",
    ),
    Mutation(
        "norm over ranks' own gradients",
        "step.norms:grouped_norms",
        "sum_partial(jnp.stack(list(by_group.values())), sorted(axes))",
        "jnp.stack(list(by_group.values()))",
        "dp=2,zero=1",
        "tracing",
    ),
    Mutation(
        "norm that counts copies",
        "step.norms:grouped_norms",
        "sum_partial(jnp.stack(list(by_group.values())), sorted(axes))",
        "sum_partial(to_varying(jnp.stack(list(by_group.values())), ('dp', 'tp')), ('dp', 'tp'))",
        "dp=2,tp=2",
        "verify",
    ),
    Mutation(
        "choices that reached an expert counted once per tp rank",
        "model.moe:Experts._once",
        "jnp.where(rank(TP) == 0, value, 0)",
        "value",
        "tp=2,experts_over=ep",
        "verify",
    ),
    Mutation(
        "ranges of router biases in the slots of the first stage",
        "step.router_bias:bias_range",
        "layer_ids + position",
        "jnp.arange(layer_ids.shape[0]) + position",
        "pp=2",
        "verify",
        2,
    ),
    Mutation(
        "pipeline bubble not masked",
        "step.pipeline:_run_trunk",
        'jnp.where(active, own["segment_ids"], 0)',
        'own["segment_ids"]',
        "pp=2",
        "verify",
        2,
    ),
    Mutation(
        "pipeline outputs travel the wrong way",
        "step.pipeline:_run_trunk",
        "shift(output_ring, PP, -1)",
        "shift(output_ring, PP, 1)",
        "pp=4",
        "verify",
        4,
    ),
    Mutation(
        "losses of another rank's micro-batches",
        "step.pipeline:add_losses",
        "scan(jax.checkpoint(add), parts, (hidden,",
        "scan(jax.checkpoint(add), parts, (hidden[::-1],",
        "pp=2",
        "verify",
        4,
    ),
    Mutation(
        "expert counts of one rank",
        "step.train:_train",
        "sum_partial(parts.count_LE, AXES)",
        "parts.count_LE",
        "dp=2",
        "tracing",
    ),
    Mutation(
        "router bias from a shifted layer",
        "step.router_bias:updated_bias",
        "layer_ids + position",
        "layer_ids + position - 1",
        "dp=1",
        "verify",
    ),
    Mutation(
        "positions counted, not read",
        "model.tokens:make_tokens",
        "position_BQ = gather(position_BS, TP, dim=1)",
        "position_BQ = gather(position_BS, TP, dim=1) * 0 + jnp.arange(position_BS.shape[1] * 1)",
        "sp=2",
        "verify",
    ),
    Mutation(
        "targets not placed with their tokens",
        "step.batch:microbatches",
        "jnp.take(value, order, axis=1)",
        'value if name == "targets" else jnp.take(value, order, axis=1)',
        "sp=2,sp_placement=zigzag",
        "verify",
    ),
    Mutation(
        "always the first key/value head",
        "model.attention:Attention._own_kv",
        "rank(TP) * num_kv // ranks",
        "0",
        "tp=8",
        "verify",
    ),
    Mutation(
        "1/M left out of the indexer loss",
        "losses.objective:term_weights",
        "weight / num_microbatches",
        "weight / (1 if name == INDEXER else num_microbatches)",
        "dp=1",
        "verify",
        2,
        "identical",
        latent=True,
    ),
    Mutation(
        "1/M left out of MTP",
        "step.forward:Forward.add_losses",
        "self._cross_entropy(h_BSD, arrays, weights[depth], depth)",
        "self._cross_entropy(h_BSD, arrays, weights[depth], depth) * self.layout.config.batch.num_microbatches",
        "dp=1",
        "verify",
        2,
        "identical",
        latent=True,
    ),
    Mutation(
        "MTP mask not shifted",
        "step.batch:shifted",
        "ahead(getattr(batch, name))",
        'getattr(batch, name) if name == "loss_mask" else ahead(getattr(batch, name))',
        "dp=1",
        "verify",
        latent=True,
    ),
    Mutation(
        "MTP normalised by the counts of the batch",
        "step.gradients:objective_and_gradients",
        "term_weights(count, layout.config.objective)",
        "term_weights(counts[0], layout.config.objective)",
        "dp=1",
        "verify",
        latent=True,
    ),
    Mutation(
        "indexer target of one tp rank's heads",
        "kernels.sparse_attention:_target",
        "scatter_sum(p, TP, dim=1)",
        "own_piece(p, TP, dim=1)",
        "tp=2",
        "verify",
        latent=True,
    ),
    Mutation(
        "KL reaches the attention",
        "kernels.sparse_attention:indexer_loss",
        "lax.stop_gradient(main.q_BQNX)",
        "main.q_BQNX",
        "dp=1",
        "verify",
        latent=True,
    ),
    Mutation(
        "KL reaches the layers before",
        "model.indexer:KeyIndexer.__call__",
        "jax.lax.stop_gradient((x_BSD, source_BSC))",
        "(x_BSD, source_BSC)",
        "dp=1",
        "verify",
        latent=True,
    ),
    Mutation(
        "unused slots attend to key 0",
        "kernels.sparse_attention:sparse_attention",
        "(index_BCP >= 0)",
        "(index_BCP >= -1)",
        "dp=1",
        "verify",
        latent=True,
    ),
    Mutation(
        "equal keys chosen by place, not by position",
        "model.mla:LatentAttention._chosen",
        "jnp.argsort(tokens.id_BT[0]) if self.reorders_keys else None",
        "None",
        "sp=2,sp_placement=zigzag",
        "verify",
        latent=True,
    ),
    Mutation(
        "sums over micro-batches in float32",
        "step.gradients:wide_dtype",
        "jnp.promote_types(layout.config.model.compute_dtype, jnp.float32)",
        "jnp.dtype(jnp.float32)",
        "dp=2",
        "verify",
    ),
]


def _owner(where: str) -> tuple[Any, Any, str]:
    module_name, _, path = where.partition(":")
    module = import_module(f"jaxmoe.{module_name}")
    *classes, name = path.split(".")
    owner: Any = module
    for part in classes:
        owner = getattr(owner, part)
    return module, owner, name


def forget_traces() -> None:
    """JAX and the layout cache know functions by identity, not by what they call."""
    jax.clear_caches()
    make_layout.cache_clear()


def _changed(mutation: Mutation, module: Any, function: Callable[..., Any]) -> Any:
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(mutation.old) == 1, f"{mutation.where}: {source.count(mutation.old)} x {mutation.old!r}"
    scope: dict[str, Any] = {}
    code = compile(source.replace(mutation.old, mutation.new), f"<mutated {mutation.where}>", "exec")
    exec(code, module.__dict__, scope)
    return scope[function.__name__]


@contextmanager
def applied(mutation: Mutation) -> Iterator[None]:
    """The fault is in all modules that know the function, and gone afterwards."""
    module, owner, name = _owner(mutation.where)
    original = inspect.getattr_static(owner, name)
    with pytest.MonkeyPatch.context() as patch:
        for verb in ("own_piece", "mean_over", "to_varying", "axis_size", "sum_partial"):
            if not hasattr(module, verb):
                patch.setattr(module, verb, getattr(collectives, verb), raising=False)
        changed = _changed(mutation, module, original)
        patch.setattr(owner, name, changed)
        for other in [m for key, m in sys.modules.items() if key.startswith("jaxmoe.")]:
            if getattr(other, name, None) is original:
                patch.setattr(other, name, changed)
        forget_traces()
        yield
    forget_traces()
