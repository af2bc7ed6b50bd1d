"""How many floating-point operations a model needs, from its config alone."""

from jaxmoe.config.layer_plan import LayerKind, layer_plan
from jaxmoe.config.schema import Config, Model


def _attention_weights(model: Model, kind: LayerKind) -> int:
    """Weights of one layer's attention, its indexer's included."""
    attention, width = model.attention, model.d_model
    mla, dsa, heads = attention.mla, attention.dsa, attention.num_heads
    if mla is None:
        return width * attention.head_dim * (2 * heads + 2 * attention.num_kv_heads)
    source = mla.q_lora_rank or width
    total = source * heads * attention.head_dim + (width * source if mla.q_lora_rank else 0)
    total += width * (mla.kv_lora_rank + mla.qk_rope_head_dim)
    total += mla.kv_lora_rank * heads * (mla.qk_nope_head_dim + mla.v_head_dim) + heads * mla.v_head_dim * width
    if dsa is not None and kind.owns_indexer:
        total += dsa.index_num_heads * (source * dsa.index_head_dim + width) + width * dsa.index_head_dim
    return total


def active_parameters_per_token(config: Config) -> int:
    """Weights that a token is multiplied with: no embedding look-up, `experts_per_token` of the routed experts."""
    model, width = config.model, config.model.d_model
    depths = model.mtp.num_depths if model.mtp else 0
    total = width * model.vocab_size * (1 + depths) + depths * 2 * width * width
    for kind in layer_plan(model).kinds:
        total += _attention_weights(model, kind)
        if kind.is_moe:
            moe = model.moe
            assert moe is not None
            shared = moe.num_shared_experts * (moe.shared_hidden_dim or moe.expert_hidden_dim)
            total += 3 * width * (moe.experts_per_token * moe.expert_hidden_dim + shared) + width * moe.num_experts
        else:
            assert model.mlp is not None
            total += 3 * width * model.mlp.hidden_dim
    return total


def model_flops_per_token(config: Config) -> float:
    """Forward and backward: 6 x active parameters, and the two products of causal attention over `seq_len`.

    Attention counts the half of the score matrix that a causal mask leaves, forward (2 products) and backward (4).
    Recomputation does not count.
    """
    attention, kinds = config.model.attention, layer_plan(config.model).kinds
    seen = config.batch.seq_len / 2
    if attention.sliding_window is not None:
        seen = min(seen, attention.sliding_window)
    value_width = attention.mla.v_head_dim if attention.mla is not None else attention.head_dim
    scores = 0.0
    if attention.dsa is not None:
        indexers = sum(kind.owns_indexer for kind in kinds)
        scores += 6 * attention.dsa.index_num_heads * attention.dsa.index_head_dim * seen * indexers
        seen = min(seen, attention.dsa.index_topk)
    scores += 6 * attention.num_heads * (attention.head_dim + value_width) * seen * len(kinds)
    return 6 * active_parameters_per_token(config) + scores
