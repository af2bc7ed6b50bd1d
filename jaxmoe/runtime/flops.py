"""How many floating-point operations a model needs, from its config alone."""

from jaxmoe.config.schema import Config
from jaxmoe.model.plan import layer_plan


def active_parameters_per_token(config: Config) -> int:
    """Weights that a token is multiplied with: no embedding look-up, `experts_per_token` of the routed experts."""
    model, attention = config.model, config.model.attention
    width, head = model.d_model, attention.head_dim
    total = width * model.vocab_size
    for kind in layer_plan(model).kinds:
        total += width * head * (2 * attention.num_heads + 2 * attention.num_kv_heads)
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
    attention, layers = config.model.attention, config.model.num_layers
    seen = config.batch.seq_len / 2
    if attention.sliding_window is not None:
        seen = min(seen, attention.sliding_window)
    scores = 6 * 2 * attention.num_heads * attention.head_dim * seen * layers
    return 6 * active_parameters_per_token(config) + scores
