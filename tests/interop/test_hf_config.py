"""config.json in both spellings, and every field that would change the numbers."""

import json
import shutil

import pytest

import jaxmoe
from jaxmoe.config.errors import ConfigError, UserError
from jaxmoe.config.hf.config import find_family, hf_config, model_tree, read_hf_config
from jaxmoe.config.hf.families import BY_TYPE
from jaxmoe.config.load import load_config
from jaxmoe.config.schema import Model
from jaxmoe.interop.names import NAMES
from tests.interop.golden_cases import CASES, FOLDER

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
#: What a change of a config.json must be answered with: the field's name.
REFUSED = [
    ("llama", {"mlp_bias": True}, "mlp_bias=true"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("llama", {"sliding_window": 8}, "sliding_window=8"),
    (
        "llama",
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1.0}},
        "rope_parameters.rope_type='longrope'",
    ),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "short": 1}}, "rope_parameters.short=1"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config="),
    ("llama", {"vocab_size": None}, "vocab_size"),
    ("llama", {"torch_dtype": "int8", "dtype": "int8"}, "dtype='int8'"),
    ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1"),
    ("mixtral", {"num_experts_per_tok": "two"}, "experts_per_token"),
    ("qwen3", {"layer_types": ["full_attention"]}, "layer_types="),
    ("glm4_moe", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
    ("glm4_moe", {"topk_method": "greedy"}, "topk_method='greedy'"),
    ("granitemoe", {"shared_intermediate_size": 8}, "shared_intermediate_size=8"),
    ("glm4_moe", {"partial_rotary_factor": 0.25}, "partial_rotary_factor=0.25"),
    ("llama", {"rope_theta": 5.0}, "rope_theta=5.0: and rope_parameters.rope_theta=10000.0 contradict each other"),
    ("llama", {"rope_scaling": {"type": "yarn", "factor": 8.0}}, "rope_scaling="),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_parameters.factor: is missing"),
    ("qwen3_moe", {"num_experts": 16, "num_local_experts": 8}, "num_local_experts=8: and num_experts=16 contradict"),
    ("gpt_oss", {"model_type": "gpt_oss_2"}, "model_type='gpt_oss_2'"),
    (
        "llama",
        {"torch_dtype": "float32", "dtype": "bfloat16"},
        "torch_dtype='float32': and dtype='bfloat16' contradict",
    ),
    ("llama", {"dtype": ""}, "dtype=''"),
    (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "type": "yarn", "factor": 2.0}},
        "rope_parameters.rope_type='linear': and rope_parameters.type='yarn' contradict",
    ),
    ("llama", {"rope_parameters": {"factor": 2.0}}, "rope_parameters.factor=2.0: is not understood for rope_type=def"),
    (
        "llama",
        {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}},
        "rope_parameters.high_freq_factor: is missing",
    ),
    (
        "deepseek_v3",
        {"rope_parameters": YARN | {"mscale_all_dim": 0.7}},
        "rope_parameters.mscale_all_dim=0.7: stands",
    ),
    ("deepseek_v3", {"rope_parameters": YARN | {"mscale": 0.7}}, "rope_parameters.mscale=0.7: stands without"),
    ("deepseek_v3", {"qk_head_dim": 77}, "qk_head_dim=77"),
]
#: Values of the wrong type, one for each way in which fields are read.
WRONG_TYPE = [
    ("qwen3_moe", "num_hidden_layers", 2.5),
    ("qwen3_moe", "num_hidden_layers", True),
    ("qwen3_moe", "num_attention_heads", 0),
    ("qwen3_moe", "rms_norm_eps", "nan"),
    ("qwen3_moe", "rms_norm_eps", float("nan")),
    ("qwen3_moe", "attention_bias", "false"),
    ("qwen3_moe", "use_sliding_window", "false"),
    ("qwen3_moe", "mlp_only_layers", 3),
    ("qwen3_moe", "mlp_only_layers", ["1"]),
    ("qwen3_moe", "decoder_sparse_step", 0.5),
    ("qwen3_moe", "max_position_embeddings", "4096"),
    ("qwen3_moe", "rope_parameters", [1]),
    ("qwen3_moe", "rope_parameters.rope_theta", "big"),
    ("qwen3_moe", "rope_parameters.rope_type", ["yarn"]),
    ("qwen3_moe", "partial_rotary_factor", "half"),
    ("gpt_oss", "rope_parameters.factor", "4"),
    ("gpt_oss", "rope_parameters.factor", None),
    ("gpt_oss", "rope_parameters.truncate", "no"),
    ("gpt_oss", "rope_parameters.beta_fast", float("inf")),
    ("qwen2_moe", "max_window_layers", "2"),
    ("qwen2_moe", "layer_types", 7),
    ("deepseek_v3", "first_k_dense_replace", -1),
    ("deepseek_v3", "rope_interleave", 1),
    ("llama", "model_type", ["llama"]),
    ("llama", "dtype", ["float32"]),
    ("llama", "rms_norm_eps", 10**400),
    ("llama", "num_key_value_heads", 0),
    ("qwen3", "num_hidden_layers", 10**9),
    ("glm4_moe", "num_nextn_predict_layers", 10**9),
    ("glm4_moe", "num_nextn_predict_layers", True),
    ("glm4_moe", "n_group", False),
    ("glm4_moe", "topk_group", ""),
    ("glm4_moe", "n_shared_experts", False),
]
MISSING = ["hidden_size", "num_hidden_layers", "rms_norm_eps", "num_attention_heads", "num_local_experts"]


def changed(family, tmp_path, change, drop=()):
    values = {**read_hf_config(FOLDER / family), **change}
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in values.items() if k not in drop}))
    return tmp_path


@pytest.mark.parametrize("family", CASES)
def test_both_spellings_say_the_same(family, tmp_path):
    shutil.copy(FOLDER / family / "config_legacy.json", tmp_path / "config.json")
    legacy, new = (jaxmoe.load_hf_config(folder).model for folder in (tmp_path, FOLDER / family))
    assert legacy.model_copy(update={"from_hf": None}) == new.model_copy(update={"from_hf": None})


@pytest.mark.parametrize(("family", "change", "named"), REFUSED)
def test_what_would_change_the_numbers_is_refused_by_name(family, change, named, tmp_path):
    with pytest.raises(ConfigError) as caught:
        jaxmoe.load_hf_config(changed(family, tmp_path, change))
    assert named in str(caught.value)


@pytest.mark.parametrize(("family", "name", "value"), WRONG_TYPE)
def test_a_value_of_the_wrong_type_is_refused_by_name(family, name, value, tmp_path):
    section, _, key = name.rpartition(".")
    change = {section: {**read_hf_config(FOLDER / family)[section], key: value}} if section else {name: value}
    with pytest.raises(ConfigError) as caught:
        jaxmoe.load_hf_config(changed(family, tmp_path, change))
    assert f"{name}=" in str(caught.value)


@pytest.mark.parametrize("text", [b"not json", b"", b"[]", b"\xff{}", b"[" * 100_000])
def test_a_file_that_is_no_object_is_refused(text, tmp_path):
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(UserError, match=r"config\.json: (cannot be read as JSON|holds no JSON object)"):
        jaxmoe.load_hf_config(tmp_path)


def test_all_problems_come_at_once(tmp_path):
    with pytest.raises(ConfigError) as caught:
        jaxmoe.load_hf_config(changed("llama", tmp_path, {"mlp_bias": True, "strange": 1}, drop=["hidden_size"]))
    text = str(caught.value)
    assert all(name in text for name in ("mlp_bias", "strange=1", "hidden_size"))


@pytest.mark.parametrize("name", MISSING)
def test_a_field_without_a_default_must_be_there(name, tmp_path):
    with pytest.raises(ConfigError, match=name):
        jaxmoe.load_hf_config(changed("mixtral", tmp_path, {}, drop=[name]))


@pytest.mark.parametrize(
    ("values", "flags"),
    [
        ({"decoder_sparse_step": 2, "mlp_only_layers": []}, (0, 1, 0, 1)),
        ({"decoder_sparse_step": 1, "mlp_only_layers": [2]}, (1, 1, 0, 1)),
        ({"decoder_sparse_step": 1, "mlp_only_layers": [0]}, None),
    ],
)
def test_layers_with_experts(values, flags, tmp_path):
    moe = jaxmoe.load_hf_config(changed("qwen3_moe", tmp_path, values)).model.moe
    assert moe is not None
    if flags is None:
        assert (moe.num_dense_layers, moe.layer_pattern) == (1, 1)
    else:
        assert (moe.num_dense_layers, moe.layer_pattern) == (0, flags)


@pytest.mark.parametrize(
    ("family", "values", "flags"),
    [
        ("qwen3", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}, (0, 1, 1)),
        ("qwen2_moe", {"max_window_layers": 2}, (1, 0, 0, 0)),
        ("gpt_oss", {}, (1, 0, 1, 0)),
    ],
)
def test_layers_with_a_window_where_none_are_listed(family, values, flags, tmp_path):
    attention = jaxmoe.load_hf_config(changed(family, tmp_path, values, drop=["layer_types"])).model.attention
    assert attention.sliding_window_layers == flags


def test_a_window_that_is_switched_off_is_none(tmp_path):
    assert (
        jaxmoe.load_hf_config(
            changed("qwen2_moe", tmp_path, {"use_sliding_window": False})
        ).model.attention.sliding_window
        is None
    )


@pytest.mark.parametrize("family", CASES)
def test_a_model_without_a_source_finds_a_family_that_says_all_of_it(family):
    model = jaxmoe.load_hf_config(FOLDER / family).model.model_copy(update={"from_hf": None})
    values = hf_config(model, "float32", None)
    again = Model.model_validate(model_tree(values, "written"))
    assert find_family(again, values["model_type"]).model_type == find_family(model).model_type
    assert hf_config(again, "float32", None) == values


def test_a_model_that_no_family_holds_is_named_with_what_stands_in_the_way():
    model = load_config("configs/quickstart.yaml").model
    with pytest.raises(UserError, match="no family of Hugging Face models holds this one"):
        find_family(model.model_copy(update={"embedding_multiplier": 2.0}))


def test_changed_fields_are_written_into_the_source_s_config(tmp_path):
    model = jaxmoe.load_hf_config(FOLDER / "llama").model
    rope = model.attention.rope.model_copy(update={"scaling": None})
    attention = model.attention.model_copy(update={"rope": rope})
    written = hf_config(model.model_copy(update={"attention": attention}), "float32", read_hf_config(FOLDER / "llama"))
    assert written["rope_scaling"] is None
    assert "rope_parameters" not in written
    assert model_tree(written, "written")["attention"]["rope"] == {"theta": 10000.0, "fraction": 1.0}


def test_every_family_has_names_for_its_tensors():
    assert BY_TYPE.keys() == NAMES.keys()


def test_a_config_file_takes_its_model_from_a_folder(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        f"run: {{dir: runs/x, steps: 5}}\nbatch: {{global_batch_size: 2, seq_len: 16}}\n"
        f"data: {{train: {{kind: sotu}}, tokenizer: {{kind: file, path: t.json}}}}\n"
        f"model: {{from_hf: {FOLDER / 'qwen3_moe'}, moe: {{router: {{aux_loss_coeff: 0.5}}}}}}\n"
    )
    moe = load_config(path).model.moe
    assert moe is not None
    assert (moe.router.aux_loss_coeff, moe.num_experts) == (0.5, 8)
    with pytest.raises(ConfigError, match="from_hf"):
        load_config(path, [f"model.from_hf={tmp_path / 'nowhere'}"])
