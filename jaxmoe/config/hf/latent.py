"""Families with latent attention: DeepSeek V2, V3, V3.2, Kimi K2, GLM-5."""

from jaxmoe.config.hf.fields import Fields, Piece, Tree, only, unused
from jaxmoe.config.schema import Model


def _latent_decode(fields: Fields) -> Tree:
    heads = fields.number("num_attention_heads")
    nope, rope = fields.number("qk_nope_head_dim"), fields.number("qk_rope_head_dim")
    fields.expect("num_key_value_heads", heads)
    fields.expect("qk_head_dim", nope + rope)
    fields.read.add("head_dim")  # follows from the others: the width of the rotated part, or of the whole
    mla = {
        "q_lora_rank": fields.get("q_lora_rank"),
        "kv_lora_rank": fields.number("kv_lora_rank"),
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": fields.number("v_head_dim"),
        "rope_interleaved": fields.flag("rope_interleave", True),
    }
    return {"attention": {"num_heads": heads, "num_kv_heads": heads, "head_dim": nope + rope, "mla": mla}}


def _latent_encode(model: Model) -> Tree:
    mla = model.attention.mla
    if mla is None:
        return {}
    return {
        "num_attention_heads": model.attention.num_heads,
        "num_key_value_heads": model.attention.num_heads,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_nope_head_dim": mla.qk_nope_head_dim,
        "qk_rope_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "rope_interleave": mla.rope_interleaved,
    }


LATENT_HEADS = Piece(_latent_decode, _latent_encode)
"""Latent attention. The norms of the latents have eps 1e-6 there, whatever the file says."""


def _indexer_decode(fields: Fields) -> Tree:
    layers, dense = fields.layers(), fields.whole("first_k_dense_replace")
    # Said twice by files of version 5; another pattern would be another model.
    if fields.get("layer_types", None) != ["deepseek_sparse_attention"] * layers:
        fields.expect("layer_types", ["indexed_attention"] * layers)
    fields.expect("mlp_layer_types", ["dense"] * dense + ["sparse"] * (layers - dense))
    dsa = {
        "index_num_heads": fields.number("index_n_heads"),
        "index_head_dim": fields.number("index_head_dim"),
        "index_topk": fields.number("index_topk"),
    }
    return {"attention": {"dsa": dsa}}


def _indexer_encode(model: Model) -> Tree:
    dsa = model.attention.dsa
    if dsa is None:
        return {}
    return {
        "index_n_heads": dsa.index_num_heads,
        "index_head_dim": dsa.index_head_dim,
        "index_topk": dsa.index_topk,
    }


INDEXER = Piece(_indexer_decode, _indexer_encode)
"""Sparse attention; the indexer's rotated channels are half-split, without a Hadamard rotation."""


def _full_indexers_decode(fields: Fields) -> Tree:
    fields.expect("indexer_types", ["full"] * fields.layers())
    fields.expect("index_topk_freq", 1)
    fields.expect("index_topk_pattern", None)
    fields.expect("indexer_rope_interleave", True)
    fields.read.add("index_skip_topk_offset")  # counts from where layers share, and none does
    return {"attention": {"dsa": {"rope_interleaved": True}}}


FULL_INDEXERS = Piece(_full_indexers_decode, lambda model: {})
"""Every layer has an indexer of its own, whose rotated channels are neighbours, as those of the attention."""


def _softmax_router_decode(fields: Fields) -> Tree:
    method = fields.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        fields.refuse("topk_method", method, "is not supported", "greedy and group_limited_greedy are")
    groups, kept = fields.count("n_group", otherwise=1), fields.count("topk_group", otherwise=1)
    grouped = method == "group_limited_greedy"
    router = {
        "score_function": "softmax",
        "renormalize": False,
        "scaling_factor": float(fields.number("routed_scaling_factor", 1.0)),
        "num_groups": groups if grouped else 1,
        "topk_groups": kept if grouped else 1,
        "group_score_experts": 1 if grouped else 2,
    }
    return {"moe": {"router": router}}


def _softmax_router_encode(model: Model) -> Tree:
    if model.moe is None:
        return {}
    router = model.moe.router
    return {
        "topk_method": "group_limited_greedy" if router.num_groups > 1 else "greedy",
        "n_group": router.num_groups,
        "topk_group": router.topk_groups,
        "routed_scaling_factor": router.scaling_factor,
    }


SOFTMAX_GROUPS = (Piece(_softmax_router_decode, _softmax_router_encode), only("norm_topk_prob", False))
"""Softmax over all experts, never renormalised; the score of a group is its best expert's."""

LATENT_COMMON = (
    LATENT_HEADS,
    only("attention_bias", False),
    only("mlp_bias", False),
    only("moe_layer_freq", 1),
    unused("rope_interleave"),
)
