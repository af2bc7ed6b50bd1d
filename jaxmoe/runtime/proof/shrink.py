"""A config made small without losing any kind of layer, loss term or switch."""

from typing import Any

from jaxmoe.config.layer_plan import LayerKind, layer_plan
from jaxmoe.config.schema import Attention, Config, Model, Moe

#: Divisible by every mesh of 8 devices, for up to 4 micro-batches.
ROWS, COLUMNS = 32, 32
REPEATS = 5
"""Of the trunk's period: enough for 2 stages of 2 chunks, and not divisible, so that a pipeline's padding is seen."""


def _latent(attention: Attention, kinds: tuple[LayerKind, ...]) -> dict[str, Any]:
    """Latent attention keeps its parts, all of unequal widths; the indexer chooses fewer keys than documents have."""
    mla, dsa = attention.mla, attention.dsa
    if mla is None:
        return {}
    widths = {"kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
    small = mla.model_copy(update=widths | {"q_lora_rank": mla.q_lora_rank and 16})
    update: dict[str, Any] = {"mla": small, "head_dim": 10}
    if dsa is not None:
        index = {"index_num_heads": 3, "index_head_dim": 8, "index_topk": 4}
        pattern = tuple(int(kind.owns_indexer) for kind in kinds)
        update["dsa"] = dsa.model_copy(update=index | {"indexer_pattern": pattern})
    return update


def _attention(attention: Attention, kinds: tuple[LayerKind, ...]) -> dict[str, Any]:
    group = attention.num_heads // attention.num_kv_heads
    scaling = attention.rope.scaling
    return {
        "num_heads": 8,
        "num_kv_heads": 8 if group == 1 else 4 if group == 2 else 1 if attention.num_kv_heads == 1 else 2,
        "head_dim": 8,
        "sliding_window": attention.sliding_window and 6,
        "sliding_window_layers": attention.sliding_window_layers
        and tuple(int(kind.window is not None) for kind in kinds),
        "rope": attention.rope.model_copy(
            update={"scaling": scaling and scaling.model_copy(update={"original_seq_len": COLUMNS // 2})}
        ),
        **_latent(attention, kinds),
    }


def _moe(moe: Moe, pattern: tuple[int, ...]) -> dict[str, Any]:
    router = moe.router
    groups = min(router.num_groups, 4)
    topk_groups = groups if router.topk_groups == router.num_groups else min(router.topk_groups, groups - 1)
    return {
        "num_experts": 8 if groups == 1 else 16,
        "experts_per_token": min(moe.experts_per_token, 3),
        "expert_hidden_dim": 16,
        "num_shared_experts": min(moe.num_shared_experts, 2),
        "shared_hidden_dim": 8 if moe.num_shared_experts else None,
        "num_dense_layers": min(moe.num_dense_layers, 1),
        "layer_pattern": pattern,
        "router": router.model_copy(
            update={
                "num_groups": groups,
                "topk_groups": topk_groups,
                "group_score_experts": min(router.group_score_experts, 2),
            }
        ),
    }


def shrink_model(model: Model, dtype: str) -> Model:
    """The same structure at a width of 32: one leading dense layer, `REPEATS` times the period of the others."""
    plan, num_dense = layer_plan(model), model.moe.num_dense_layers if model.moe else 0
    dense = plan.lead[: min(num_dense, 1)]
    kinds = dense + plan.lead[num_dense:] + plan.period * REPEATS
    update: dict[str, Any] = {
        # The fewest ids that a byte-level tokenizer allows and 8 ranks divide.
        "vocab_size": 264,
        "d_model": 32,
        "num_layers": len(kinds),
        "attention": model.attention.model_copy(update=_attention(model.attention, kinds)),
        "compute_dtype": dtype,
        "param_dtype": "float64" if dtype == "float64" else "float32",
        # Larger than usual, so that routing is decided by the input and every term has a gradient worth comparing.
        "initializer_range": 0.15,
    }
    if model.mtp is not None:
        update["mtp"] = model.mtp.model_copy(update={"num_depths": min(model.mtp.num_depths, 2)})
    if model.mlp is not None:
        update["mlp"] = model.mlp.model_copy(update={"hidden_dim": 32})
    if model.moe is not None:
        pattern = tuple(int(kind.is_moe) for kind in kinds[len(dense) :])
        update["moe"] = model.moe.model_copy(update=_moe(model.moe, pattern))
    return model.model_copy(update=update)


def shrink(config: Config, dtype: str) -> Config:
    """The config that is verified. Depends on the split by definition: `aux_loss`, `balance_dp_token: false`; these are
    compared at a fixed number of replicas, 8.

    Float32 and bfloat16 take their optimiser steps with SGD: Adam divides rounding noise by itself.
    """
    optimizer = config.optimizer.model_copy(
        update={
            "kind": config.optimizer.kind if dtype == "float64" else "sgd",
            "learning_rate": 1e-2,
            "clip_norm": config.optimizer.clip_norm and 0.5,
            "schedule": config.optimizer.schedule.model_copy(update={"kind": "constant", "warmup_steps": 0}),
        }
    )
    return config.model_copy(
        update={
            "model": shrink_model(config.model, dtype),
            "optimizer": optimizer,
            "objective": config.objective.model_copy(update={"replicas": 8}),
            "batch": config.batch.model_copy(
                update={"global_batch_size": ROWS, "seq_len": COLUMNS, "num_microbatches": 1}
            ),
        }
    )


def split_dependent(config: Config) -> list[str]:
    """What depends on the number of replicas by definition."""
    found = []
    if config.model.moe and config.model.moe.router.aux_loss_coeff:
        found.append("aux_loss: a statistic of one micro-batch on one replica, so it depends on M and on dp * ep")
    if not config.objective.calculate_per_token_loss:
        found.append("calculate_per_token_loss: false: a mean of micro-batch means, so J depends on M")
        if not config.objective.balance_dp_token:
            found.append("balance_dp_token: false: a mean of replicas' means, so J depends on dp * ep")
    return found
