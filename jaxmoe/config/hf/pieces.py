"""Pieces of config.json that many families share: sizes, rotary embedding, windows, layers with experts."""

from collections.abc import Callable
from typing import Any

from jaxmoe.config.check_model import moe_layers
from jaxmoe.config.hf.fields import REQUIRED, Fields, Piece, Tree, real, same
from jaxmoe.config.schema import Model, RopeScaling

#: Fields that never change a number here. Dropout and the router's own loss act in their trainer, not in the model;
#: `max_position_embeddings` only in kinds of rotary scaling that are refused or say their own length.
HARMLESS = frozenset(
    "architectures auto_map _name_or_path _attn_implementation_autoset transformers_version model_type "
    "dtype torch_dtype use_cache bos_token_id eos_token_id pad_token_id tokenizer_class attention_dropout "
    "max_position_embeddings output_router_logits router_aux_loss_coef pretraining_tp return_dict "
    "output_attentions output_hidden_states id2label label2id problem_type chunk_size_feed_forward "
    "is_encoder_decoder ep_size aux_loss_alpha seq_aux".split()
)


def _heads_decode(fields: Fields) -> Tree:
    heads = fields.whole("num_attention_heads", at_least=1)
    head_dim = fields.get("head_dim", None)
    return {
        "attention": {
            "num_heads": heads,
            "num_kv_heads": fields.whole("num_key_value_heads", None, at_least=1) or heads,
            "head_dim": head_dim if head_dim is not None else fields.whole("hidden_size") // heads,
        }
    }


def _heads_encode(model: Model) -> Tree:
    attention = model.attention
    return {
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
    }


HEADS = Piece(_heads_decode, _heads_encode)
"""Grouped-query heads; the head width is hidden_size / num_attention_heads where a file leaves it out."""


def sizes(tie_default: bool = False) -> tuple[Piece, ...]:
    """What every family has."""
    return (
        same("vocab_size", "vocab_size"),
        same("hidden_size", "d_model"),
        same("num_hidden_layers", "num_layers"),
        real("rms_norm_eps", "norm_eps"),
        same("tie_word_embeddings", "tie_embeddings", tie_default),
        real("initializer_range", "initializer_range", 0.02),
        Piece(_activation_decode, lambda model: {"hidden_act": "silu"}),
    )


def _activation_decode(fields: Fields) -> Tree:
    fields.expect("hidden_act", "silu")
    return {}


# ---------------------------------------------------------------- rotary embedding

#: Keys of each kind of scaling: ours -> (theirs, default or REQUIRED).
_SCALING: dict[str, dict[str, tuple[str, Any]]] = {
    "linear": {},
    "llama3": {"low_freq_factor": ("low_freq_factor", REQUIRED), "high_freq_factor": ("high_freq_factor", REQUIRED)},
    "yarn": {
        "beta_fast": ("beta_fast", 32.0),
        "beta_slow": ("beta_slow", 1.0),
        "attention_factor": ("attention_factor", None),
        "truncate": ("truncate", True),
    },
}
_COMMON_KEYS = {
    "rope_type",
    "type",
    "rope_theta",
    "original_max_position_embeddings",
    "partial_rotary_factor",
}


def rope(theta: float = 10_000.0, fraction: float = 1.0) -> Piece:
    """Rotary embedding in both spellings: `rope_parameters`, or `rope_theta` with `rope_scaling`.

    `theta` and `fraction` are the family's defaults.
    """

    def decode(fields: Fields) -> Tree:
        new, old = fields.section("rope_parameters"), fields.section("rope_scaling")
        if new and old:
            said = {"rope_type" if name == "type" else name: value for name, value in old.values.items()}
            fields.agree("rope_scaling", "rope_parameters", said, {name: new.values.get(name) for name in said})
        inner = new or old or Fields({})
        section: Tree = {
            "theta": float(_either(fields, inner, "rope_theta", theta)),
            "fraction": float(_either(fields, inner, "partial_rotary_factor", fraction)),
        }
        scaling = _scaling(fields, inner)
        return {"attention": {"rope": section | ({"scaling": scaling} if scaling else {})}}

    def encode(model: Model) -> Tree:
        found = model.attention.rope
        encoded = {"rope_theta": found.theta, "rope_scaling": _encode_scaling(found.scaling)}
        return encoded | ({"partial_rotary_factor": found.fraction} if found.fraction != fraction else {})

    return Piece(decode, encode)


def _either(fields: Fields, inner: Fields, name: str, default: float) -> float:
    """A number that stands in the rotary section or, in released files, beside it."""
    one, two = fields.number(name, None), inner.number(name, None)
    fields.agree(name, f"{inner.place}{name}", one, two)
    return next((value for value in (two, one) if value is not None), default)


def _scaling(fields: Fields, inner: Fields) -> Tree | None:
    spelling = "rope_type" if "rope_type" in inner.values else "type"
    kind = inner.get(spelling, None) or "default"
    inner.agree("rope_type", f"{inner.place}type", inner.values.get("rope_type"), inner.values.get("type"))
    kinds = ["default", *_SCALING]
    if kind not in kinds:
        rule = "is a kind of rotary scaling that is not supported"
        inner.refuse("rope_type", kind, rule, f"known: {', '.join(kinds)}")
        return None
    allowed = _COMMON_KEYS | {theirs for theirs, _ in _SCALING.get(kind, {}).values()}
    allowed |= {"factor"} if kind != "default" else set()
    allowed |= {"mscale", "mscale_all_dim"} if kind == "yarn" else set()
    for key in inner.values:
        if key not in allowed:
            inner.refuse(key, inner.values[key], f"is not understood for rope_type={kind}", "remove it if unused")
    if kind == "default":
        return None
    length = inner.get("original_max_position_embeddings", None) or fields.get("max_position_embeddings")
    section: Tree = {"type": kind, "factor": float(inner.number("factor")), "original_seq_len": length}
    for ours, (theirs, default) in _SCALING[kind].items():
        value = inner.flag(theirs, default) if isinstance(default, bool) else inner.number(theirs, default)
        if value not in (default, None):
            section[ours] = value if isinstance(value, bool) else float(value)
    mscale, mscale_all_dim = inner.number("mscale", None), inner.number("mscale_all_dim", None)
    if mscale and mscale_all_dim:
        section |= {"mscale": float(mscale), "mscale_all_dim": float(mscale_all_dim)}
    elif mscale_all_dim or mscale not in (None, 0, 1):
        name = "mscale_all_dim" if mscale_all_dim else "mscale"
        rule = "stands without its partner of mscale and mscale_all_dim, which programs read in different ways"
        inner.refuse(name, inner.values[name], rule, "give both, or remove it")
    return section


def _encode_scaling(scaling: RopeScaling | None) -> Tree | None:
    if scaling is None:
        return None
    section = {
        "rope_type": scaling.type,
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_seq_len,
    }
    for ours, (theirs, default) in _SCALING[scaling.type].items():
        value = getattr(scaling, ours)
        if value != default or scaling.type == "llama3":
            section[theirs] = value
    if scaling.mscale_all_dim:
        section |= {"mscale": scaling.mscale, "mscale_all_dim": scaling.mscale_all_dim}
    return section


# ---------------------------------------------------------------- sliding windows

#: Whether layer i slides, given i and `max_window_layers`.
Slides = Callable[[int, int], bool]


def windows(
    slides: Slides | None, *, switch: bool, first_default: int = 28, window_default: int | None = None
) -> Piece:
    """`sliding_window` on the layers that `layer_types` names, or on those that `slides` says.

    Args:
        slides: the family's own rule; None for all layers, where the family knows no `layer_types`.
        switch: the family has `use_sliding_window`, off where a file leaves it out.
        first_default, window_default: `max_window_layers` and `sliding_window` where a file leaves them out.
    """

    def decode(fields: Fields) -> Tree:
        on = fields.flag("use_sliding_window", False) if switch else True
        window = fields.get("sliding_window", window_default)
        first = fields.whole("max_window_layers", first_default)
        layers = fields.layers()
        types = fields.listed("layer_types", str) if slides else None
        if types:
            known = ("full_attention", "sliding_attention")
            if len(types) != layers or any(kind not in known for kind in types):
                fields.refuse("layer_types", types, f"must name {layers} layers, each one of {known}", "correct it")
                return {}
            flags = [int(kind == "sliding_attention") for kind in types]
        else:
            flags = [int(slides is None or slides(i, first)) for i in range(layers)]
        if not on or window is None or 1 not in flags:
            return {}
        section: Tree = {"sliding_window": window}
        return {"attention": section if 0 not in flags else section | {"sliding_window_layers": flags}}

    def encode(model: Model) -> Tree:
        attention = model.attention
        window = attention.sliding_window
        encoded: Tree = {"sliding_window": window}
        if switch:
            encoded["use_sliding_window"] = window is not None
        if slides and window is not None:
            flags = attention.sliding_window_layers or (1,) * model.num_layers
            encoded["layer_types"] = ["sliding_attention" if flag else "full_attention" for flag in flags]
        return encoded

    return Piece(decode, encode)


# ---------------------------------------------------------------- layers with experts


def layer_tree(flags: list[bool]) -> Tree:
    """The fields of `model.moe` that say which layers have experts."""
    dense = flags.index(True) if True in flags else len(flags)
    if all(flags[dense:]):
        return {"num_dense_layers": dense, "layer_pattern": 1}
    return {"num_dense_layers": 0, "layer_pattern": [int(flag) for flag in flags]}


def layer_flags(model: Model) -> list[bool]:
    """For each layer whether it has experts."""
    return moe_layers(model.moe, model.num_layers) if model.moe else [False] * model.num_layers


def dense_width(model: Model) -> int:
    """Width of the dense layers; where there are none the experts' stands in, and nobody reads it."""
    if model.mlp is not None:
        return model.mlp.hidden_dim
    return model.moe.expert_hidden_dim if model.moe else 0


def _first_dense_decode(fields: Fields) -> Tree:
    dense, layers = fields.whole("first_k_dense_replace"), fields.layers()
    return {"moe": layer_tree([i >= dense for i in range(layers)])}


FIRST_DENSE = Piece(
    _first_dense_decode,
    lambda model: {"first_k_dense_replace": model.moe.num_dense_layers if model.moe else model.num_layers},
)


def _sparse_step_decode(fields: Fields) -> Tree:
    step, layers = fields.whole("decoder_sparse_step", 1), fields.layers()
    dense = fields.listed("mlp_only_layers", int) or []
    return {"moe": layer_tree([step > 0 and (i + 1) % step == 0 and i not in dense for i in range(layers)])}


SPARSE_STEP = Piece(
    _sparse_step_decode,
    lambda model: {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, has_experts in enumerate(layer_flags(model)) if not has_experts],
    },
)
"""Every `decoder_sparse_step`-th layer has experts, but for those in `mlp_only_layers`."""
