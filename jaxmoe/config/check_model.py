"""Rules between the fields of the model."""

from collections.abc import Callable, Iterator

from jaxmoe.config.errors import Problem
from jaxmoe.config.layer_plan import moe_layers
from jaxmoe.config.numbers import divisors, next_multiple, one_of
from jaxmoe.config.schema import Config, RopeScaling

Rule = Callable[[Config], Iterator[Problem]]

_ROPE = "model.attention.rope"
_ROUTER = "model.moe.router"
_ONLY_FOR = {
    "low_freq_factor": "llama3",
    "high_freq_factor": "llama3",
    "beta_fast": "yarn",
    "beta_slow": "yarn",
    "mscale": "yarn",
    "mscale_all_dim": "yarn",
    "attention_factor": "yarn",
    "truncate": "yarn",
}


def has_dense_layers(config: Config) -> bool:
    moe = config.model.moe
    return moe is None or not all(moe_layers(moe, config.model.num_layers))


def _heads(config: Config) -> Iterator[Problem]:
    attention = config.model.attention
    if attention.num_heads % attention.num_kv_heads:
        rule = f"must divide model.attention.num_heads={attention.num_heads}"
        fix = f"use one of {one_of(divisors(attention.num_heads))}"
        yield Problem("model.attention.num_kv_heads", attention.num_kv_heads, rule, fix)


def window_layers(config: Config) -> Iterator[Problem]:
    attention, num_layers = config.model.attention, config.model.num_layers
    flags = attention.sliding_window_layers
    if flags is None:
        return
    path = "model.attention.sliding_window_layers"
    if attention.sliding_window is None:
        rule = "says where a sliding window is, and model.attention.sliding_window is null"
        yield Problem(path, flags, rule, "remove it, or give the sliding_window")
    elif len(flags) != num_layers:
        rule = f"must have {num_layers} entries, one for each of model.num_layers, not {len(flags)}"
        yield Problem(path, flags, rule, f"use {[*flags, *[1] * num_layers][:num_layers]}, or null for all layers")


def _rotated_width(config: Config) -> Iterator[Problem]:
    if config.model.attention.mla is not None:
        return
    head_dim, fraction = config.model.attention.head_dim, config.model.attention.rope.fraction
    width = head_dim * fraction
    if abs(width - round(width)) < 1e-6 and round(width) % 2 == 0:
        return
    if fraction == 1.0:
        rule = "must be even: RoPE turns pairs of dims"
        yield Problem("model.attention.head_dim", head_dim, rule, f"use {next_multiple(head_dim, 2)}")
        return
    even = max(2, 2 * round(width / 2))
    rule = f"times model.attention.head_dim={head_dim} must be an even whole number, not {width:g}"
    fix = f"use {even / head_dim!r} ({even} dims)" if even <= head_dim else "use 0.0"
    yield Problem(f"{_ROPE}.fraction", fraction, rule, fix)


def _rope_scaling(config: Config) -> Iterator[Problem]:
    scaling = config.model.attention.rope.scaling
    if scaling is None:
        return
    for name, kind in _ONLY_FOR.items():
        default = RopeScaling.model_fields[name].default
        value = getattr(scaling, name)
        if scaling.type != kind and value != default:
            rule = f"is for type={kind} only, and {_ROPE}.scaling.type={scaling.type}"
            yield Problem(f"{_ROPE}.scaling.{name}", value, rule, f"remove it or use type: {kind}")
    if scaling.type == "llama3" and scaling.high_freq_factor <= scaling.low_freq_factor:
        low = scaling.low_freq_factor
        rule = f"must be above {_ROPE}.scaling.low_freq_factor={low:g}"
        yield Problem(f"{_ROPE}.scaling.high_freq_factor", scaling.high_freq_factor, rule, f"use {4 * low:g}")
    if scaling.type == "yarn" and scaling.beta_fast <= scaling.beta_slow:
        slow = scaling.beta_slow
        rule = f"must be above {_ROPE}.scaling.beta_slow={slow:g}"
        yield Problem(f"{_ROPE}.scaling.beta_fast", scaling.beta_fast, rule, f"use {32 * slow:g}")


def _experts_per_token(config: Config) -> Iterator[Problem]:
    moe = config.model.moe
    if moe and moe.experts_per_token > moe.num_experts:
        rule = f"must be at most model.moe.num_experts={moe.num_experts}"
        fix = f"use {moe.num_experts} or less"
        yield Problem("model.moe.experts_per_token", moe.experts_per_token, rule, fix)


def _groups(config: Config) -> Iterator[Problem]:
    moe = config.model.moe
    if moe is None:
        return
    router = moe.router
    if router.topk_groups > router.num_groups:
        rule = f"must be at most {_ROUTER}.num_groups={router.num_groups}"
        yield Problem(f"{_ROUTER}.topk_groups", router.topk_groups, rule, f"use {router.num_groups} or less")
    if router.num_groups == 1:
        return
    if moe.num_experts % router.num_groups:
        rule = f"must divide model.moe.num_experts={moe.num_experts}"
        fix = f"use one of {one_of(divisors(moe.num_experts))}"
        yield Problem(f"{_ROUTER}.num_groups", router.num_groups, rule, fix)
        return
    per_group = moe.num_experts // router.num_groups
    if per_group < router.group_score_experts:
        rule = f"must be at most the {per_group} experts of a group"
        fix = f"use {per_group}, or num_groups in {one_of(divisors(moe.num_experts // router.group_score_experts))}"
        if moe.num_experts % router.group_score_experts:
            fix = f"use {per_group}"
        yield Problem(f"{_ROUTER}.group_score_experts", router.group_score_experts, rule, fix)
    reachable = min(router.topk_groups, router.num_groups) * per_group
    if moe.experts_per_token <= moe.num_experts and reachable < moe.experts_per_token:
        rule = f"leaves {reachable} experts to choose from, and model.moe.experts_per_token={moe.experts_per_token}"
        fix = f"use {-(-moe.experts_per_token // per_group)} or more"
        yield Problem(f"{_ROUTER}.topk_groups", router.topk_groups, rule, fix)


def _router_learns(config: Config) -> Iterator[Problem]:
    moe = config.model.moe
    if moe is None or moe.router.score_function != "softmax":
        return
    if not moe.router.softmax_before_topk and moe.experts_per_token == 1:
        rule = "with model.moe.experts_per_token=1 gives every token weight 1, so the router's gradient is zero"
        yield Problem(f"{_ROUTER}.softmax_before_topk", False, rule, "use true, or experts_per_token of 2 or more")


def _selection_bias(config: Config) -> Iterator[Problem]:
    moe = config.model.moe
    if moe is None or not moe.router.selection_bias:
        return
    if moe.router.score_function == "softmax" and not moe.router.softmax_before_topk:
        rule = f"needs scores before the choice, and {_ROUTER}.softmax_before_topk=false takes them of the chosen alone"
        fix = "use score_function: sigmoid, or softmax_before_topk: true, or selection_bias: false"
        yield Problem(f"{_ROUTER}.selection_bias", True, rule, fix)


def _shared_gate(config: Config) -> Iterator[Problem]:
    moe = config.model.moe
    if moe and moe.shared_expert_gate and moe.num_shared_experts == 0:
        rule = "has nothing to gate: model.moe.num_shared_experts=0"
        yield Problem("model.moe.shared_expert_gate", True, rule, "use false, or num_shared_experts: 1")


def layer_kinds(config: Config) -> Iterator[Problem]:
    moe, num_layers = config.model.moe, config.model.num_layers
    if moe is None:
        return
    if moe.num_dense_layers >= num_layers:
        rule = f"must be below model.num_layers={num_layers}, or no layer has experts"
        fix = f"use {num_layers - 1} or less, or model.moe: null for a dense model"
        yield Problem("model.moe.num_dense_layers", moe.num_dense_layers, rule, fix)
        return
    pattern, trunk = moe.layer_pattern, num_layers - moe.num_dense_layers
    if isinstance(pattern, int):
        return
    if len(pattern) != trunk:
        rule = (
            f"must have {trunk} entries, one for each of model.num_layers={num_layers} less "
            f"model.moe.num_dense_layers={moe.num_dense_layers}, not {len(pattern)}"
        )
        wanted = [*pattern, *[1] * trunk][:trunk]
        yield Problem("model.moe.layer_pattern", pattern, rule, f"use {wanted}, or 1 for all")
    elif 1 not in pattern:
        rule = "leaves no layer with experts"
        yield Problem("model.moe.layer_pattern", pattern, rule, "put a 1, or use model.moe: null for a dense model")


def _dense_mlp(config: Config) -> Iterator[Problem]:
    if config.model.mlp is not None or not has_dense_layers(config):
        return
    moe, width = config.model.moe, 4 * config.model.d_model
    if moe is None:
        rule, fix = "is needed when model.moe is null", f"add mlp: {{hidden_dim: {width}}} or a moe section"
    else:
        dense = [layer_id for layer_id, has_moe in enumerate(moe_layers(moe, config.model.num_layers)) if not has_moe]
        rule = f"is needed for the dense layers {one_of(dense)}"
        fix = f"add mlp: {{hidden_dim: {width}}}, or use moe.num_dense_layers: 0 and moe.layer_pattern: 1"
    yield Problem("model.mlp", None, rule, fix)


def _dtypes(config: Config) -> Iterator[Problem]:
    # The reverse, float64 weights under a narrower compute dtype, is fine: master weights may be finer than the maths.
    if config.model.compute_dtype == "float64" and config.model.param_dtype != "float64":
        rule = "must be at least as fine as model.compute_dtype=float64"
        fix = "use param_dtype: float64, or compute_dtype: float32"
        yield Problem("model.param_dtype", config.model.param_dtype, rule, fix)


MODEL_RULES: tuple[Rule, ...] = (
    _heads,
    window_layers,
    _rotated_width,
    _rope_scaling,
    _experts_per_token,
    _groups,
    _router_learns,
    _selection_bias,
    _shared_gate,
    layer_kinds,
    _dense_mlp,
    _dtypes,
)
