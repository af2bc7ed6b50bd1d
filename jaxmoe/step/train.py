"""The steps a program calls. Each is one jitted `shard_map` over the whole mesh."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from jaxmoe.kernels.one_by_one import not_before
from jaxmoe.losses.objective import CROSS_ENTROPY, StepCounts, count_step, term_weights
from jaxmoe.model.norm import at_least_float32
from jaxmoe.optim.schedule import learning_rate
from jaxmoe.spmd.axes import AXES, POSITION_AXES, PP, ROW_AXES, SP, TP
from jaxmoe.spmd.collectives import sum_partial
from jaxmoe.spmd.program import manual
from jaxmoe.step.batch import Batch, at_depth, microbatches, zigzag_order
from jaxmoe.step.forward import Arrays, Forward
from jaxmoe.step.gradients import add_step, all_hidden, objective_and_gradients, wide_dtype
from jaxmoe.step.layout import Layout
from jaxmoe.step.metrics import StepMetrics, record
from jaxmoe.step.norms import clip_scale, grouped_norms
from jaxmoe.step.parts import Parts
from jaxmoe.step.router_bias import updated_bias
from jaxmoe.step.state import TrainState, optimizer_of, state_specs

Tree = Any

#: [M / pp, pp, rows, positions]
BATCH_SPEC = P(None, PP, ROW_AXES, POSITION_AXES)


def _columns(state: TrainState, batch: Batch) -> np.ndarray | None:
    """The order in which the columns of the batch are placed over sp; None for the natural one."""
    ranks = state.mesh.shape[SP]
    zigzag = state.config.parallel.sp_placement == "zigzag" and ranks > 1
    return zigzag_order(batch.inputs.shape[1], ranks) if zigzag else None


def _cut(batch: Batch, state: TrainState, num_depths: int = 0) -> Arrays:
    """The batch in micro-batches, columns placed as the config says."""
    config, stages = state.config, state.layout.stages
    return microbatches(batch, config.batch.num_microbatches, stages, _columns(state, batch), num_depths)


def _num_depths(state: TrainState) -> int:
    return len(state.layout.plan.mtp)


def _local(arrays: Arrays) -> Arrays:
    """[M / pp, 1, B, S] of this rank as [M / pp, B, S]."""
    return {name: value[:, 0] for name, value in arrays.items()}


def _count(layout: Layout, arrays: Arrays, depth: int = 0) -> StepCounts:
    mask, segment_ids = (arrays[at_depth(name, depth)] for name in ("loss_mask", "segment_ids"))
    return count_step(mask, segment_ids != 0, layout.config.objective, wide_dtype(layout))


def _noise_key(layout: Layout, step: jax.Array) -> jax.Array | None:
    moe = layout.config.model.moe
    if moe is None or not (moe.router.input_jitter or moe.router.force_balance):
        return None
    return jax.random.fold_in(jax.random.key(layout.config.run.seed), step)


def _gradient_pass(state: TrainState, arrays: Arrays) -> tuple[jax.Array, Parts, Tree, StepCounts]:
    """J, this rank's parts of the step, the reduced gradient, as pieces of the state, and the step's own counts."""
    layout, arrays = state.layout, _local(arrays)
    counts = tuple(_count(layout, arrays, depth) for depth in range(_num_depths(state) + 1))
    weights = layout.collect_once(state.params)
    total, parts, gradients = objective_and_gradients(
        layout, weights, state.router_bias, arrays, counts, _noise_key(layout, state.step)
    )
    return sum_partial(total, AXES), parts, layout.reduce_gradients(gradients), counts[0]


def _train(state: TrainState, arrays: Arrays) -> tuple[TrainState, StepMetrics, Tree]:
    layout, optimizer = state.layout, optimizer_of(state.layout)
    total, parts, raw_gradients, counts = _gradient_pass(state, arrays)
    norm, group_norms = grouped_norms(raw_gradients, layout.map_placements(lambda placement: placement.group))
    applied = (counts.target_M.sum() > 0) & jnp.isfinite(norm) & jnp.isfinite(total)
    scale = clip_scale(norm, layout.config.optimizer.clip_norm)
    gradients = jax.tree.map(lambda g: g * scale.astype(g.dtype), raw_gradients)
    updates, _ = optimizer.update(gradients, state.opt_state, state.params)
    # Weight decay moves a parameter without a gradient too.
    updates = layout.map_placements(lambda placement, update: placement.if_trained(update), updates)
    keep = partial(jax.tree.map, partial(jnp.where, applied))
    params = keep(optax.apply_updates(state.params, updates), state.params)
    # The moments after the parameters, which need the old ones: in the other order XLA:CPU copies them all (150
    # instead of 84 ms, and 0.6 GB more, for 109 million parameters).
    old_opt_state = optax.tree.map_params(optimizer, not_before, state.opt_state, params)
    opt_state = keep(optimizer.update(gradients, old_opt_state, state.params)[1], old_opt_state)
    expert_counts = sum_partial(parts.count_LE, AXES)
    bias = keep(updated_bias(layout, state.router_bias, expert_counts), state.router_bias)
    skipped_in_a_row = jnp.where(applied, 0, state.skipped_in_a_row + 1)
    rate = learning_rate(layout.config.optimizer, layout.config.run.steps)
    metrics = StepMetrics(
        values={
            "loss": sum_partial(parts.cross_entropy, AXES),
            "total_loss": total,
            "grad_norm": norm,
            **{f"grad_norm/{group}": value for group, value in group_norms.items()},
            "learning_rate": jnp.asarray(rate(_updates_done(state.opt_state)), norm.dtype),
            "target_tokens": counts.target_M.sum(),
            "valid_tokens": counts.valid_M.sum(),
            "skipped": ~applied,
            "skipped_in_a_row": skipped_in_a_row,
        },
        tracker=record(layout, parts, state.router_bias, wide_dtype(layout)).sync(),
        expert_counts=expert_counts,
        served=sum_partial(parts.served_L, AXES),
        owns_experts=tuple(kind.is_moe for kind in layout.plan.kinds),
    )
    state = replace(
        state,
        params=params,
        router_bias=bias,
        opt_state=opt_state,
        step=state.step + 1,
        skipped_in_a_row=skipped_in_a_row,
    )
    return state, metrics, raw_gradients


def _updates_done(opt_state: Tree) -> jax.Array:
    """The optimiser's own count: skipped steps do not move the schedule."""
    return optax.tree.get_all_with_path(opt_state, "count")[-1][1]


@partial(jax.jit, donate_argnums=0)
def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
    """One optimiser step on one global batch. Donates `state`.

    A step without a single target, or with a gradient that is not finite, is skipped: parameters, optimiser state and
    router bias stay, `skipped_in_a_row` counts.
    """
    return probe_step(state, batch)[:2]


@jax.jit
def probe_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics, Tree]:
    """`train_step` that keeps its input and also returns the gradient before clipping, a tree like the parameters."""
    specs = state_specs(state.config, state.mesh)
    step = manual(_train, state.mesh, in_specs=(specs, BATCH_SPEC), out_specs=(specs, P(), specs.params))
    return step(state, _cut(batch, state, _num_depths(state)))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossAndGrads:
    """The objective and its gradient. Values are not clipped and not scaled."""

    total: jax.Array
    """J."""
    terms: dict[str, jax.Array]
    """Every term without coefficient; per-layer terms summed over layers."""
    per_layer: dict[str, jax.Array]
    """Per-layer terms, one slot per layer of the model."""
    expert_counts: jax.Array
    """int32 [slots, E], choices by valid tokens."""
    grads: Tree
    """dJ / dparameter, the tree of `TrainState.params`."""


@jax.jit
def loss_and_grads(state: TrainState, batch: Batch) -> LossAndGrads:
    """J, its terms and its gradient on one global batch, as `train_step` computes them."""

    def body(state: TrainState, arrays: Arrays) -> LossAndGrads:
        total, parts, gradients, _ = _gradient_pass(state, arrays)
        parts = parts.summed()
        return LossAndGrads(
            total=total,
            terms={CROSS_ENTROPY: parts.cross_entropy} | {name: value.sum() for name, value in parts.terms.items()},
            per_layer=parts.terms,
            expert_counts=parts.count_LE,
            grads=gradients,
        )

    specs = state_specs(state.config, state.mesh)
    prefixes: dict[str, Any] = dict.fromkeys(("total", "terms", "per_layer", "expert_counts"), P())
    out = LossAndGrads(**prefixes, grads=specs.params)
    return manual(body, state.mesh, in_specs=(specs, BATCH_SPEC), out_specs=out)(
        state, _cut(batch, state, _num_depths(state))
    )


def _evaluating(state: TrainState) -> Forward:
    layout = state.layout
    return Forward(layout, layout.merge(layout.collect_once(state.params), state.router_bias), noise_key=None)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EvalSums:
    """Sums over a batch, to be added over batches and divided once."""

    loss_sum: jax.Array
    """Sum of loss_mask * CE, nats."""
    weight_sum: jax.Array
    """Sum of loss_mask."""


@jax.jit
def eval_step(state: TrainState, batch: Batch) -> EvalSums:
    """Cross-entropy sums of one batch. Changes nothing: no router bias, no count."""

    def body(state: TrainState, arrays: Arrays) -> EvalSums:
        layout, arrays = state.layout, _local(arrays)
        counts = _count(layout, arrays)
        ones = (jax.tree.map(jnp.ones_like, term_weights(counts, layout.config.objective)),)
        parts = add_step(_evaluating(state), Parts.zeros(layout, wide_dtype(layout)), arrays, ones)
        return EvalSums(loss_sum=sum_partial(parts.cross_entropy, AXES), weight_sum=counts.target_M.sum())

    specs = state_specs(state.config, state.mesh)
    return manual(body, state.mesh, in_specs=(specs, BATCH_SPEC), out_specs=P())(state, _cut(batch, state))


@jax.jit
def forward(state: TrainState, batch: Batch) -> jax.Array:
    """Logits [G, S, V], at least float32, for tests and inspection: the whole vocabulary of every token is held."""

    def body(state: TrainState, arrays: Arrays) -> jax.Array:
        arrays = _local(arrays)
        model = _evaluating(state)
        weights = (term_weights(_count(state.layout, arrays), state.config.objective),)
        hidden = all_hidden(model, arrays, weights)

        def logits(x_BSD: jax.Array) -> jax.Array:
            x_TD = model.head_inputs(model.model.final_norm(x_BSD))
            wide = at_least_float32(x_TD) @ at_least_float32(model.model.head_weight().astype(x_TD.dtype))
            return wide.reshape(x_BSD.shape[0], -1, wide.shape[-1])

        return jax.lax.map(logits, hidden)[:, None]

    specs = state_specs(state.config, state.mesh)
    out = P(None, PP, ROW_AXES, SP, TP)
    logits = manual(body, state.mesh, in_specs=(specs, BATCH_SPEC), out_specs=out)(state, _cut(batch, state))
    logits = logits.reshape(*batch.inputs.shape, -1)
    order = _columns(state, batch)
    return logits if order is None else jnp.take(logits, np.argsort(order), axis=1)
