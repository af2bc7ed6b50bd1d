"""Rules between sizes and the mesh, as far as they need no devices."""

from collections.abc import Iterator
from math import gcd, lcm

from jaxmoe.config.check_latent import dsa_pattern
from jaxmoe.config.check_model import Rule, has_dense_layers, layer_kinds, window_layers
from jaxmoe.config.errors import Problem
from jaxmoe.config.layer_plan import LayerPlan, layer_plan
from jaxmoe.config.numbers import divisors, next_multiple, one_of
from jaxmoe.config.schema import Config, Moe


def _dp(config: Config) -> Iterator[Problem]:
    dp = config.parallel.dp
    if dp != -1 and dp < 1:
        rule = "must be at least 1, or -1 for what the devices leave"
        yield Problem("parallel.dp", dp, rule, "use -1")


def _rows(config: Config) -> Iterator[Problem]:
    parallel, batch = config.parallel, config.batch
    rows, micro = batch.global_batch_size, batch.num_microbatches
    dp = max(parallel.dp, 1)
    unit = micro * dp * parallel.ep
    if rows % unit == 0:
        return
    known = f"parallel.dp={dp} * " if parallel.dp > 0 else ""
    rule = (
        f"must be a multiple of {unit} = batch.num_microbatches={micro} * {known}parallel.ep={parallel.ep}, "
        "so that every replica has as many rows of each micro-batch"
    )
    fix = f"use {next_multiple(rows, unit)}"
    replicas = dp * parallel.ep
    fits = [value for value in divisors(rows // replicas) if value % parallel.pp == 0] if rows % replicas == 0 else []
    if fits:
        fix += f", or num_microbatches in {one_of(fits)}"
    yield Problem("batch.global_batch_size", rows, rule, fix)


def _positions(config: Config) -> Iterator[Problem]:
    parallel, seq_len = config.parallel, config.batch.seq_len
    ranks = parallel.sp * parallel.tp
    unit, why = ranks, f"parallel.sp={parallel.sp} * parallel.tp={parallel.tp}"
    if parallel.sp_placement == "zigzag" and parallel.sp > 1:
        unit, why = lcm(ranks, 2 * parallel.sp), f"{why} and of two chunks for each rank of sp (zigzag)"
    if seq_len % unit:
        rule = f"must be a multiple of {unit}: of {why}"
        yield Problem("batch.seq_len", seq_len, rule, f"use {next_multiple(seq_len, unit)}")


def _tp_heads(config: Config) -> Iterator[Problem]:
    tp, attention = config.parallel.tp, config.model.attention
    if attention.num_heads % tp:
        rule = f"must be a multiple of parallel.tp={tp}"
        fix = f"use {next_multiple(attention.num_heads, tp)}, or tp in {one_of(divisors(attention.num_heads))}"
        yield Problem("model.attention.num_heads", attention.num_heads, rule, fix)
        return
    kv_heads = attention.num_kv_heads
    if kv_heads % tp and tp % kv_heads:
        rule = f"must divide parallel.tp={tp} or be a multiple of it"
        fits = [value for value in divisors(attention.num_heads) if (kv_heads % value == 0 or value % kv_heads == 0)]
        yield Problem("model.attention.num_kv_heads", kv_heads, rule, f"use tp in {one_of(fits)}")


def _tp_vocabulary(config: Config) -> Iterator[Problem]:
    tp, vocab_size = config.parallel.tp, config.model.vocab_size
    if vocab_size % tp:
        fix = f"use {next_multiple(vocab_size, tp)} (the added ids are never targets)"
        yield Problem("model.vocab_size", vocab_size, f"must be a multiple of parallel.tp={tp}", fix)


def _tp_dense_mlp(config: Config) -> Iterator[Problem]:
    tp, mlp = config.parallel.tp, config.model.mlp
    if mlp and mlp.hidden_dim % tp and has_dense_layers(config):
        fix = f"use {next_multiple(mlp.hidden_dim, tp)}, or tp in {one_of(divisors(mlp.hidden_dim))}"
        yield Problem("model.mlp.hidden_dim", mlp.hidden_dim, f"must be a multiple of parallel.tp={tp}", fix)


def _tp_shared_experts(config: Config) -> Iterator[Problem]:
    tp, moe = config.parallel.tp, config.model.moe
    if moe is None or moe.num_shared_experts == 0:
        return
    hidden = moe.shared_hidden_dim if moe.shared_hidden_dim is not None else moe.expert_hidden_dim
    width = moe.num_shared_experts * hidden
    if width % tp:
        rule = f"times model.moe.num_shared_experts={moe.num_shared_experts} must be a multiple of parallel.tp={tp}"
        fix = f"use {next_multiple(hidden, tp // gcd(tp, moe.num_shared_experts))}, or tp in {one_of(divisors(width))}"
        yield Problem("model.moe.shared_hidden_dim", hidden, rule, fix)


def _experts(config: Config) -> Iterator[Problem]:
    moe, parallel = config.model.moe, config.parallel
    if moe is None:
        if parallel.ep > 1:
            rule = "splits experts, and model.moe is null"
            yield Problem("parallel.ep", parallel.ep, rule, "use ep: 1 and a larger dp")
    elif parallel.experts_over == "ep_tp":
        yield from _whole_experts(moe, parallel.ep, parallel.tp)
    else:
        yield from _sliced_experts(moe, parallel.ep, parallel.tp)


def _whole_experts(moe: Moe, ep: int, tp: int) -> Iterator[Problem]:
    ranks = ep * tp
    if moe.num_experts % ranks == 0:
        return
    rule = f"must be a multiple of parallel.ep={ep}"
    if tp > 1:
        rule = f"must be a multiple of {ranks} = parallel.ep={ep} * parallel.tp={tp} (parallel.experts_over=ep_tp)"
    fix = f"use {next_multiple(moe.num_experts, ranks)}"
    if moe.num_experts % tp == 0:
        fix += f", or ep in {one_of(divisors(moe.num_experts // tp))}"
    if tp > 1 and moe.num_experts % ep == 0 and moe.expert_hidden_dim % tp == 0:
        fix += ", or parallel.experts_over: ep"
    yield Problem("model.moe.num_experts", moe.num_experts, rule, fix)


def _sliced_experts(moe: Moe, ep: int, tp: int) -> Iterator[Problem]:
    if moe.num_experts % ep:
        fix = f"use {next_multiple(moe.num_experts, ep)}, or ep in {one_of(divisors(moe.num_experts))}"
        yield Problem("model.moe.num_experts", moe.num_experts, f"must be a multiple of parallel.ep={ep}", fix)
    if moe.expert_hidden_dim % tp:
        rule = f"must be a multiple of parallel.tp={tp} (parallel.experts_over=ep)"
        fix = f"use {next_multiple(moe.expert_hidden_dim, tp)}"
        if moe.num_experts % (ep * tp) == 0:
            fix += ", or parallel.experts_over: ep_tp"
        yield Problem("model.moe.expert_hidden_dim", moe.expert_hidden_dim, rule, fix)


def _ulysses(config: Config) -> Iterator[Problem]:
    parallel = config.parallel
    if parallel.sp_attention != "ulysses":
        return
    if parallel.sp_placement == "zigzag":
        rule = "splits heads over contiguous positions, and parallel.sp_placement=zigzag"
        fix = "use sp_placement: contiguous (its causal work is balanced already), or sp_attention: allgather"
        yield Problem("parallel.sp_attention", "ulysses", rule, fix)
    num_heads = config.model.attention.num_heads
    if num_heads % parallel.tp:
        return  # reported by _tp_heads
    heads = num_heads // parallel.tp
    if heads % parallel.sp:
        rule = f"must divide the {heads} heads of a rank of tp (parallel.sp_attention=ulysses)"
        fix = f"use sp in {one_of(divisors(heads))}, or sp_attention: allgather"
        yield Problem("parallel.sp", parallel.sp, rule, fix)


def _pipeline(config: Config) -> Iterator[Problem]:
    parallel = config.parallel
    if parallel.pipeline_schedule == "gpipe" and parallel.pipeline_chunks != 1:
        rule = "is for parallel.pipeline_schedule=circular only"
        yield Problem("parallel.pipeline_chunks", parallel.pipeline_chunks, rule, "use 1, or circular")
    if parallel.pp == 1:
        return
    micro = config.batch.num_microbatches
    if micro % parallel.pp:
        rule = f"must be a multiple of parallel.pp={parallel.pp}: what stands outside the trunk is split over pp"
        fix = f"use {next_multiple(micro, parallel.pp)}, or pp in {one_of(divisors(micro))}"
        yield Problem("batch.num_microbatches", micro, rule, fix)
    if any(problem for rule in (window_layers, layer_kinds, dsa_pattern) for problem in rule(config)):
        return  # reported by that rule; there is no plan of such layers
    yield from _stages(config, layer_plan(config.model))


def _stages(config: Config, plan: LayerPlan) -> Iterator[Problem]:
    """At most one stage, or chunk of a stage, for each layer of the trunk.

    A chunk holds whole repeats of the pattern of layers, so with a pattern of several layers some chunks may hold
    skipped layers only: that costs time, not exactness, and lets a small model run on any mesh.
    """
    pp, chunks, layers = config.parallel.pp, config.parallel.pipeline_chunks, len(plan.period) * plan.repeats
    shared = f"the {layers} layers of the trunk"
    if pp > layers:
        fits = [size for size in divisors(config.batch.num_microbatches) if size <= layers]
        yield Problem("parallel.pp", pp, f"must be at most {shared}, or a stage has none", f"use pp in {one_of(fits)}")
    elif config.parallel.pipeline_schedule == "circular" and pp * chunks > layers:
        rule = f"times parallel.pp={pp} must be at most {shared}, or a chunk has none"
        yield Problem("parallel.pipeline_chunks", chunks, rule, f"use {layers // pp} or less")


LAYOUT_RULES: tuple[Rule, ...] = (
    _dp,
    _rows,
    _positions,
    _tp_heads,
    _tp_vocabulary,
    _tp_dense_mlp,
    _tp_shared_experts,
    _experts,
    _ulysses,
    _pipeline,
)
