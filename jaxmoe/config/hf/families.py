"""One entry per family of Hugging Face models: how its config.json reads. Tensor names stand in `interop/names.py`.

Sources: the configuration and modelling files of the transformers library, version 5, and the config.json files of the
released checkpoints.
"""

from dataclasses import dataclass
from typing import Any

from jaxmoe.config.hf.fields import Fields, Piece, Tree, only, real, same, unused
from jaxmoe.config.hf.latent import FULL_INDEXERS, INDEXER, LATENT_COMMON, SOFTMAX_GROUPS
from jaxmoe.config.hf.pieces import (
    FIRST_DENSE,
    HEADS,
    SPARSE_STEP,
    dense_width,
    layer_tree,
    rope,
    sizes,
    windows,
)
from jaxmoe.config.schema import MOST_LAYERS, Model


@dataclass(frozen=True)
class Family:
    """A family: its `model_type`, its class in the library, and the pieces that its config.json consists of."""

    model_type: str
    architecture: str
    pieces: tuple[Piece, ...]


def _bias(name: str, default: bool, *, output: bool = True) -> Piece:
    """One switch for the biases of q, k and v, and with `output` of the projection back."""

    def decode(fields: Fields) -> Tree:
        found = fields.flag(name, default)
        return {"attention": {"qkv_bias": found, "output_bias": found and output}}

    return Piece(decode, lambda model: {name: model.attention.qkv_bias})


def _fixed(**attention: Any) -> Piece:
    """Fields of `model.attention` that a family has without saying so."""
    return Piece(lambda fields: {"attention": dict(attention)}, lambda model: {})


DENSE_MLP = Piece(
    lambda fields: {"mlp": {"hidden_dim": fields.number("intermediate_size")}},
    lambda model: {"intermediate_size": dense_width(model)},
)


def _experts(number: tuple[str, ...], width: str, **router: Any) -> Piece:
    """Experts of one width, routed as `router` says. `number`: spellings of their count, the last is written."""

    def decode(fields: Fields) -> Tree:
        found = [fields.get(name) for name in number if name in fields.values]
        if not found:
            fields.get(number[-1])
        elif len(found) > 1:
            fields.agree(number[0], number[-1], *found)
        moe = {
            "num_experts": found[0] if found else 1,
            "experts_per_token": fields.get("num_experts_per_tok"),
            "expert_hidden_dim": fields.get(width),
            "router": dict(router),
        }
        return {"moe": moe}

    def encode(model: Model) -> Tree:
        if model.moe is None:
            return {}
        return {
            number[-1]: model.moe.num_experts,
            "num_experts_per_tok": model.moe.experts_per_token,
            width: model.moe.expert_hidden_dim,
        }

    return Piece(decode, encode)


def _renormalize(default: bool) -> Piece:
    return same("norm_topk_prob", "moe.router.renormalize", default)


def _gated_shared_expert_decode(fields: Fields) -> Tree:
    width = fields.number("shared_expert_intermediate_size")
    return {"moe": {"num_shared_experts": 1, "shared_hidden_dim": width, "shared_expert_gate": True}}


def _shared_width(model: Model) -> int:
    moe = model.moe
    return moe.num_shared_experts * (moe.shared_hidden_dim or moe.expert_hidden_dim) if moe else 0


GATED_SHARED_EXPERT = Piece(
    _gated_shared_expert_decode, lambda model: {"shared_expert_intermediate_size": _shared_width(model)}
)


def _shared_count_decode(fields: Fields) -> Tree:
    return {"moe": {"num_shared_experts": fields.count("n_shared_experts", otherwise=0)}}


SHARED_EXPERTS = Piece(
    _shared_count_decode, lambda model: {"n_shared_experts": model.moe.num_shared_experts if model.moe else 0}
)


def _grouped_router_decode(fields: Fields) -> Tree:
    groups, kept = fields.count("n_group", otherwise=1), fields.count("topk_group", otherwise=1)
    fields.expect("scoring_func", "sigmoid")
    fields.expect("topk_method", "noaux_tc")
    router = {
        "score_function": "sigmoid",
        "selection_bias": True,
        "renormalize": fields.get("norm_topk_prob", True),
        "scaling_factor": float(fields.number("routed_scaling_factor", 1.0)),
        "num_groups": groups,
        "topk_groups": kept,
    }
    return {"moe": {"router": router}}


def _grouped_router_encode(model: Model) -> Tree:
    if model.moe is None:
        return {}
    router = model.moe.router
    return {
        "n_group": router.num_groups,
        "topk_group": router.topk_groups,
        "norm_topk_prob": router.renormalize,
        "routed_scaling_factor": router.scaling_factor,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }


GROUPED_ROUTER = Piece(_grouped_router_decode, _grouped_router_encode)
"""Sigmoid scores, groups and a selection bias, as DeepSeek-V3 has them."""


def _mtp_decode(fields: Fields) -> Tree:
    depths = fields.whole("num_nextn_predict_layers", None, at_most=MOST_LAYERS)
    return {"mtp": {"num_depths": depths}} if depths else {}


MTP = Piece(
    _mtp_decode, lambda model: {"num_nextn_predict_layers": model.mtp.num_depths if model.mtp is not None else 0}
)
"""Modules that predict further tokens; overriding `model.mtp: null` leaves them out."""


def _no_mtp_decode(fields: Fields) -> Tree:
    fields.whole("num_nextn_predict_layers", None, at_most=MOST_LAYERS)
    return {}


NO_MTP = Piece(_no_mtp_decode, lambda model: {})
"""The family has none; files of relatives that say how many are read all the same, without them."""

LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    (*sizes(), HEADS, rope(), _bias("attention_bias", False), only("mlp_bias", False), DENSE_MLP),
)

QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    (
        *sizes(),
        HEADS,
        rope(),
        _bias("attention_bias", False),
        _fixed(qk_norm=True),
        windows(lambda i, first: i >= first, switch=True),
        DENSE_MLP,
    ),
)

MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    (
        *sizes(),
        HEADS,
        rope(1_000_000.0),
        windows(None, switch=False),
        only("router_jitter_noise", 0.0),
        _experts(("num_local_experts",), "intermediate_size"),
    ),
)

QWEN2_MOE = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    (
        *sizes(),
        HEADS,
        rope(),
        _bias("qkv_bias", True, output=False),
        windows(lambda i, first: i % 2 == 0 and i < first, switch=True, window_default=4096),
        DENSE_MLP,
        _experts(("num_local_experts", "num_experts"), "moe_intermediate_size"),
        _renormalize(False),
        SPARSE_STEP,
        GATED_SHARED_EXPERT,
    ),
)

QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    (
        *sizes(),
        HEADS,
        rope(),
        _bias("attention_bias", False),
        _fixed(qk_norm=True),
        windows(None, switch=True),
        DENSE_MLP,
        _experts(("num_local_experts", "num_experts"), "moe_intermediate_size"),
        _renormalize(False),
        SPARSE_STEP,
    ),
)

OLMOE = Family(
    "olmoe",
    "OlmoeForCausalLM",
    (
        *sizes(),
        HEADS,
        rope(),
        _bias("attention_bias", False),
        _fixed(qk_norm=True, qk_norm_over="projection"),
        same("clip_qkv", "attention.clip_qkv", None),
        _experts(("num_local_experts", "num_experts"), "intermediate_size"),
        _renormalize(False),
    ),
)

GRANITEMOE = Family(
    "granitemoe",
    "GraniteMoeForCausalLM",
    (
        *sizes(),
        HEADS,
        rope(),
        _bias("attention_bias", False),
        real("attention_multiplier", "attention.scale", 1.0),
        real("embedding_multiplier", "embedding_multiplier", 1.0),
        real("residual_multiplier", "residual_multiplier", 1.0),
        real("logits_scaling", "logits_divisor", 1.0),
        _experts(("num_local_experts",), "intermediate_size", softmax_before_topk=False),
    ),
)

GLM4_MOE = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    (
        *sizes(),
        HEADS,
        rope(fraction=0.5),
        _bias("attention_bias", False, output=False),
        same("use_qk_norm", "attention.qk_norm", False),
        DENSE_MLP,
        _experts(("n_routed_experts",), "moe_intermediate_size"),
        GROUPED_ROUTER,
        FIRST_DENSE,
        SHARED_EXPERTS,
        MTP,
    ),
)

DOTS1 = Family(
    "dots1",
    "Dots1ForCausalLM",
    (
        *sizes(),
        HEADS,
        rope(),
        _bias("attention_bias", False),
        _fixed(qk_norm=True),
        windows(lambda i, first: i >= first, switch=False, first_default=62, window_default=4096),
        DENSE_MLP,
        _experts(("n_routed_experts",), "moe_intermediate_size"),
        GROUPED_ROUTER,
        FIRST_DENSE,
        SHARED_EXPERTS,
    ),
)


def _clamp_decode(fields: Fields) -> Tree:
    clamp = {"limit": float(fields.number("swiglu_limit", 7.0)), "alpha": float(fields.number("swiglu_alpha", 1.702))}
    router = {"softmax_before_topk": False, "logits_bias": True}
    return {"moe": {"clamped_swiglu": clamp, "expert_bias": True, "router": router}}


def _clamp_encode(model: Model) -> Tree:
    clamp = model.moe.clamped_swiglu if model.moe else None
    if clamp is None:
        return {}
    encoded = {"swiglu_limit": clamp.limit}
    return encoded | ({"swiglu_alpha": clamp.alpha} if clamp.alpha != 1.702 else {})


GPT_OSS = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    (
        *sizes(),
        HEADS,
        rope(150_000.0),
        _bias("attention_bias", True),
        _fixed(sinks=True),
        windows(lambda i, first: i % 2 == 0, switch=False, window_default=128),
        _experts(("num_local_experts",), "intermediate_size"),
        Piece(_clamp_decode, _clamp_encode),
        unused("initial_context_length", "experts_per_token"),
    ),
)


def _ernie_experts_decode(fields: Fields) -> Tree:
    layers = fields.layers()
    first, last = fields.whole("moe_layer_start_index", 1), fields.whole("moe_layer_end_index", -1, at_least=-1)
    last = layers - 1 if last == -1 else last
    interval = fields.whole("moe_layer_interval", 1, at_least=1)
    moe = {
        "num_experts": fields.get("moe_num_experts"),
        "experts_per_token": fields.get("moe_k"),
        "expert_hidden_dim": fields.get("moe_intermediate_size"),
        "num_shared_experts": fields.count("moe_num_shared_experts", otherwise=0),
        "router": {"score_function": "softmax", "selection_bias": True, "renormalize": True},
    }
    return {"moe": moe | layer_tree([first <= i <= last and (i + 1) % interval == 0 for i in range(layers)])}


def _ernie_experts_encode(model: Model) -> Tree:
    moe = model.moe
    if moe is None:
        return {}
    return {
        "moe_num_experts": moe.num_experts,
        "moe_k": moe.experts_per_token,
        "moe_intermediate_size": moe.expert_hidden_dim,
        "moe_num_shared_experts": moe.num_shared_experts,
        "moe_layer_start_index": moe.num_dense_layers,
    }


ERNIE4_5_MOE = Family(
    "ernie4_5_moe",
    "Ernie4_5_MoeForCausalLM",
    (
        *sizes(tie_default=True),
        HEADS,
        rope(500_000.0),
        # Pairs of neighbouring channels are rotated; its biases would be in the MLPs too.
        _fixed(rope={"interleaved": True}),
        only("use_bias", False),
        DENSE_MLP,
        Piece(_ernie_experts_decode, _ernie_experts_encode),
        only("moe_norm_min", 1e-12),
        only("moe_use_aux_free", True),
        only("num_nextn_predict_layers", 0),
        unused("moe_capacity"),
    ),
)

DEEPSEEK_V2 = Family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    (
        *sizes(),
        *LATENT_COMMON,
        rope(),
        DENSE_MLP,
        _experts(("n_routed_experts",), "moe_intermediate_size"),
        *SOFTMAX_GROUPS,
        FIRST_DENSE,
        SHARED_EXPERTS,
        only("scoring_func", "softmax"),
        NO_MTP,
    ),
)

DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    (
        *sizes(),
        *LATENT_COMMON,
        rope(),
        DENSE_MLP,
        _experts(("n_routed_experts",), "moe_intermediate_size"),
        GROUPED_ROUTER,
        FIRST_DENSE,
        SHARED_EXPERTS,
        MTP,
    ),
)

DEEPSEEK_V32 = Family("deepseek_v32", "DeepseekV32ForCausalLM", (*DEEPSEEK_V3.pieces, INDEXER))

KIMI_K2 = Family("kimi_k2", "DeepseekV3ForCausalLM", DEEPSEEK_V3.pieces)

GLM_MOE_DSA = Family("glm_moe_dsa", "GlmMoeDsaForCausalLM", (*DEEPSEEK_V32.pieces, FULL_INDEXERS))

#: In the order in which a family is looked for that can hold a model.
FAMILIES: tuple[Family, ...] = (
    LLAMA,
    QWEN3,
    QWEN3_MOE,
    MIXTRAL,
    QWEN2_MOE,
    OLMOE,
    GRANITEMOE,
    GLM4_MOE,
    DOTS1,
    GPT_OSS,
    ERNIE4_5_MOE,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    KIMI_K2,
    GLM_MOE_DSA,
)
BY_TYPE = {family.model_type: family for family in FAMILIES}
