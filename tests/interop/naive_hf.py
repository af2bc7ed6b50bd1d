"""The forward pass of two families without golden vectors, by their definition, in NumPy float64: names as on the hub.

Sources: modeling_dots1.py (attention of Qwen3, experts of DeepSeek-V3) and modeling_ernie4_5_moe.py of transformers 5.
"""

from typing import Any

import numpy as np

Tensors = dict[str, np.ndarray]
Fields = dict[str, Any]

COMMON: Fields = {
    "vocab_size": 64,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 20,
    "moe_intermediate_size": 6,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.02,
    "max_position_embeddings": 64,
    "torch_dtype": "float64",
}
DOTS1: Fields = COMMON | {
    "model_type": "dots1",
    "head_dim": 8,
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "sliding_window": 4,
    "max_window_layers": 1,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
}
ERNIE4_5_MOE: Fields = COMMON | {
    "model_type": "ernie4_5_moe",
    "use_bias": False,
    "moe_num_experts": 8,
    "moe_k": 3,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}
FAMILIES = {"dots1": DOTS1, "ernie4_5_moe": ERNIE4_5_MOE}


def _head_dim(c: Fields) -> int:
    return c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]


def _shapes(c: Fields) -> dict[str, tuple[int, ...]]:
    width, head = c["hidden_size"], _head_dim(c)
    q, kv = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
    ernie = c["model_type"] == "ernie4_5_moe"
    num_experts = c["moe_num_experts"] if ernie else c["n_routed_experts"]
    shared = (c["moe_num_shared_experts"] if ernie else c["n_shared_experts"]) * c["moe_intermediate_size"]
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c["vocab_size"], width)}
    for layer in range(c["num_hidden_layers"]):
        p = f"model.layers.{layer}"
        found |= {f"{p}.{norm}_layernorm.weight": (width,) for norm in ("input", "post_attention")}
        found |= {f"{p}.self_attn.q_proj.weight": (q, width), f"{p}.self_attn.o_proj.weight": (width, q)}
        found |= {f"{p}.self_attn.{name}_proj.weight": (kv, width) for name in "kv"}
        mlps = {"mlp": c["intermediate_size"]}
        if not ernie:
            found |= {f"{p}.self_attn.{name}_norm.weight": (head,) for name in "qk"}
        if layer >= 1:
            bias = "moe_statics.e_score_correction_bias" if ernie else "gate.e_score_correction_bias"
            found[f"{p}.mlp.gate.weight"] = (num_experts, width)
            found[f"{p}.mlp.{bias}"] = (1, num_experts) if ernie else (num_experts,)
            mlps = {f"mlp.experts.{expert}": c["moe_intermediate_size"] for expert in range(num_experts)}
            mlps["mlp.shared_experts"] = shared
        for name, hidden in mlps.items():
            found |= {f"{p}.{name}.{part}_proj.weight": (hidden, width) for part in ("gate", "up")}
            found[f"{p}.{name}.down_proj.weight"] = (width, hidden)
    found["model.norm.weight"] = (width,)
    return found if c["tie_word_embeddings"] else found | {"lm_head.weight": (c["vocab_size"], width)}


def random_tensors(c: Fields, seed: int = 0) -> Tensors:
    """Weights of some size: norms near 1, biases that change the choice."""
    random = np.random.default_rng(seed)
    found = {}
    for name, shape in _shapes(c).items():
        noise = random.normal(size=shape)
        if name.endswith("correction_bias"):
            found[name] = (0.1 * noise).astype(np.float32)  # float32 in every run
        else:
            found[name] = 1 + 0.2 * noise if "norm" in name else 0.4 * noise
    return found


def _rms(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _rotate(x_SNH: np.ndarray, theta: float, *, interleaved: bool) -> np.ndarray:
    length, _, width = x_SNH.shape
    out = np.empty_like(x_SNH)
    for position in range(length):
        for pair in range(width // 2):
            angle = position * theta ** (-2 * pair / width)
            i, j = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + width // 2)
            a, b = x_SNH[position, :, i], x_SNH[position, :, j]
            out[position, :, i] = a * np.cos(angle) - b * np.sin(angle)
            out[position, :, j] = b * np.cos(angle) + a * np.sin(angle)
    return out


def _attention(t: Tensors, c: Fields, layer: int, x_SD: np.ndarray) -> np.ndarray:
    p, head, ernie = f"model.layers.{layer}.self_attn", _head_dim(c), c["model_type"] == "ernie4_5_moe"
    length = len(x_SD)
    q, k, v = ((x_SD @ t[f"{p}.{name}_proj.weight"].T).reshape(length, -1, head) for name in "qkv")
    if not ernie:
        q, k = (_rms(x, t[f"{p}.{name}_norm.weight"], c["rms_norm_eps"]) for x, name in ((q, "q"), (k, "k")))
    q, k = (_rotate(x, c["rope_theta"], interleaved=ernie) for x in (q, k))
    window = c["sliding_window"] if not ernie and layer >= c["max_window_layers"] else length
    out = np.zeros_like(q)
    for n in range(q.shape[1]):
        own = n // (q.shape[1] // k.shape[1])
        for i in range(length):
            start = max(0, i - window + 1)
            p_T = _softmax(k[start : i + 1, own] @ q[i, n] / np.sqrt(head))
            out[i, n] = p_T @ v[start : i + 1, own]
    return out.reshape(length, -1) @ t[f"{p}.o_proj.weight"].T


def _mlp(t: Tensors, name: str, x: np.ndarray) -> np.ndarray:
    gate, up = (x @ t[f"{name}.{part}_proj.weight"].T for part in ("gate", "up"))
    return (gate * _sigmoid(gate) * up) @ t[f"{name}.down_proj.weight"].T


def _choose_dots1(t: Tensors, c: Fields, name: str, x_D: np.ndarray) -> dict[int, float]:
    scores = _sigmoid(t[f"{name}.gate.weight"] @ x_D)
    selection = scores + t[f"{name}.gate.e_score_correction_bias"]
    groups = selection.reshape(c["n_group"], -1)
    best = np.argsort(-np.sort(groups, axis=1)[:, -2:].sum(1))[: c["topk_group"]]
    masked = np.full_like(groups, -np.inf)
    masked[best] = groups[best]
    chosen = np.argsort(-masked.reshape(-1))[: c["num_experts_per_tok"]]
    return {int(e): scores[e] / scores[chosen].sum() * c["routed_scaling_factor"] for e in chosen}


def _choose_ernie(t: Tensors, c: Fields, name: str, x_D: np.ndarray) -> dict[int, float]:
    scores = _softmax(t[f"{name}.gate.weight"] @ x_D)
    chosen = np.argsort(-(scores + t[f"{name}.moe_statics.e_score_correction_bias"][0]))[: c["moe_k"]]
    return {int(e): scores[e] / max(scores[chosen].sum(), 1e-12) for e in chosen}


def _experts(t: Tensors, c: Fields, layer: int, x_SD: np.ndarray) -> np.ndarray:
    name = f"model.layers.{layer}.mlp"
    choose = _choose_ernie if c["model_type"] == "ernie4_5_moe" else _choose_dots1
    y = _mlp(t, f"{name}.shared_experts", x_SD)
    for i, x_D in enumerate(x_SD):
        for expert, weight in choose(t, c, name, x_D).items():
            y[i] += weight * _mlp(t, f"{name}.experts.{expert}", x_D)
    return y


def logits(t: Tensors, c: Fields, ids_S: np.ndarray) -> np.ndarray:
    """[S, V] of one document."""
    x = t["model.embed_tokens.weight"][ids_S]
    for layer in range(c["num_hidden_layers"]):
        p = f"model.layers.{layer}"
        x = x + _attention(t, c, layer, _rms(x, t[f"{p}.input_layernorm.weight"], c["rms_norm_eps"]))
        normed = _rms(x, t[f"{p}.post_attention_layernorm.weight"], c["rms_norm_eps"])
        x = x + (_experts(t, c, layer, normed) if layer >= 1 else _mlp(t, f"{p}.mlp", normed))
    head = t["model.embed_tokens.weight"] if c["tie_word_embeddings"] else t["lm_head.weight"]
    return _rms(x, t["model.norm.weight"], c["rms_norm_eps"]) @ head.T
