"""config.json of a Hugging Face folder -> a checked config, and a model -> config.json."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from jaxmoe.config.errors import ABSENT, ConfigError, Problem, UserError
from jaxmoe.config.hf.families import BY_TYPE, FAMILIES, Family
from jaxmoe.config.hf.fields import Fields, Tree
from jaxmoe.config.hf.pieces import HARMLESS, layer_flags
from jaxmoe.config.schema import Model
from jaxmoe.config.trees import merge_trees

CONFIG_FILE = "config.json"
#: The tokenizer files that go along with a checkpoint.
TOKENIZER_FILE = "tokenizer.json"

_COMPUTE_DTYPES = {"bfloat16": "bfloat16", "float16": "float32", "float32": "float32", "float64": "float64"}
_MOST_POSITIONS = 4096
#: What training alone reads, by path in the `model` section; no checkpoint says it.
_TRAINING_ONLY = (
    "from_hf",
    "compute_dtype",
    "param_dtype",
    "initializer_range",
    "mtp.loss_coeff",
    "attention.dsa.stage",
    "attention.dsa.indexer_loss",
    "attention.dsa.indexer_loss_coeff",
    "moe.router.bias_update_rate",
    "moe.router.aux_loss_coeff",
    "moe.router.seq_aux_loss_coeff",
    "moe.router.global_aux_loss_coeff",
    "moe.router.z_loss_coeff",
    "moe.router.input_jitter",
    "moe.router.force_balance",
)


def read_hf_config(folder: str | os.PathLike[str]) -> Tree:
    """The config.json of a folder, as it stands there.

    Raises: UserError when there is none or it is no JSON object.
    """
    path = Path(folder) / CONFIG_FILE
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; name a folder with config.json and *.safetensors") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; name a folder with {CONFIG_FILE} and *.safetensors") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error}); fetch it again") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: holds no JSON object; fetch it again")
    return values


def read_source_config(folder: str | os.PathLike[str]) -> Tree:
    """The config.json that an export goes by, as it stands there.

    Raises: as `read_hf_config` and `model_tree`: it may have changed since its weights were read.
    """
    values = read_hf_config(folder)
    model_tree(values, str(Path(folder) / CONFIG_FILE))
    return values


def family_of(values: Mapping[str, Any], source: str) -> Family:
    """The family that a config.json names.

    Raises: ConfigError for one that is not supported.
    """
    name = values.get("model_type", ABSENT)
    if not isinstance(name, str) or name not in BY_TYPE:
        problem = Problem("model_type", name, "is a family that is not supported", f"supported: {', '.join(BY_TYPE)}")
        raise ConfigError([problem], source)
    return BY_TYPE[name]


def model_tree(values: Mapping[str, Any], source: str) -> Tree:
    """The `model` section of a config.json, as plain dicts.

    Raises: ConfigError naming every field that would change the numbers and is not understood.
    """
    family = family_of(values, source)
    fields = Fields(values)
    tree = _decode(family, fields)
    for name in fields.unread():
        if name not in HARMLESS:
            rule = f"is a field that {family.model_type} does not have here; it may change the numbers"
            fields.refuse(name, values[name], rule, "remove it from config.json if it does not")
    dtype = values.get("dtype", values.get("torch_dtype"))
    dtype = "float32" if dtype is None else dtype
    fields.agree("torch_dtype", "dtype", values.get("torch_dtype"), values.get("dtype"))
    fields.whole("max_position_embeddings", None, at_least=1)
    if not isinstance(dtype, str) or dtype not in _COMPUTE_DTYPES:
        fields.refuse("dtype", dtype, "is no dtype of weights here", f"known: {', '.join(_COMPUTE_DTYPES)}")
    if fields.problems:
        raise ConfigError(fields.problems, source)
    tree["compute_dtype"] = _COMPUTE_DTYPES[dtype]
    tree["param_dtype"] = "float64" if dtype == "float64" else "float32"
    return tree


def _decode(family: Family, fields: Fields) -> Tree:
    tree: Tree = {}
    for piece in family.pieces:
        tree = merge_trees(tree, piece.decode(fields))
    if "moe" in tree and tree["moe"].get("num_dense_layers", 0) >= fields.layers():
        del tree["moe"]  # a checkpoint of a mixture family without a single layer of experts
    return tree


def config_tree(folder: str | os.PathLike[str]) -> Tree:
    """A whole config around the model of a folder: every other section has the least that a config needs."""
    folder = Path(folder)
    source = str(folder / CONFIG_FILE)
    values = read_hf_config(folder)
    positions = values.get("max_position_embeddings")
    length = min(positions, _MOST_POSITIONS) if isinstance(positions, int) else _MOST_POSITIONS
    return {
        "run": {"dir": f"runs/{folder.resolve().name}", "steps": 1},
        "model": model_tree(values, source) | {"from_hf": str(folder)},
        "batch": {"global_batch_size": 1, "seq_len": length},
        "data": {
            "train": {"kind": "sotu"},
            "tokenizer": {"kind": "file", "path": str(folder / TOKENIZER_FILE)},
        },
    }


def with_hf_model(tree: Mapping[str, Any]) -> Tree:
    """A config's tree with `model` filled from the folder that `model.from_hf` names; fields given there win.

    A section that says all by itself (a resolved config) needs no folder.
    """
    model = tree.get("model")
    folder = model.get("from_hf") if isinstance(model, Mapping) else None
    if not isinstance(model, Mapping) or not isinstance(folder, str) or _is_whole(model):
        return dict(tree)
    try:
        found = model_tree(read_hf_config(folder), str(Path(folder) / CONFIG_FILE))
    except ConfigError:
        raise
    except UserError as error:
        raise ConfigError([Problem("model.from_hf", folder, str(error), "correct the path")]) from None
    return {**tree, "model": merge_trees(found, model)}


def _is_whole(model: Mapping[str, Any]) -> bool:
    return all(name in model for name, field in Model.model_fields.items() if field.is_required())


# ---------------------------------------------------------------- a model -> config.json


def _essence(model: Model) -> Tree:
    """What tells one model from another, different spellings of the same made equal."""
    tree = model.model_dump(mode="json")
    for path in _TRAINING_ONLY:
        *parents, last = path.split(".")
        node: Any = tree
        for key in parents:
            node = node and node.get(key)
        if node:
            node.pop(last, None)
    flags = layer_flags(model)
    if all(flags):
        tree["mlp"] = None
    attention, moe = tree["attention"], tree["moe"]
    if attention["sliding_window"] is None or 0 not in (attention["sliding_window_layers"] or ()):
        attention["sliding_window_layers"] = None
    if moe:
        moe["layers"] = flags
        moe["shared"] = moe["num_shared_experts"] * (moe["shared_hidden_dim"] or moe["expert_hidden_dim"])
        for name in ("num_dense_layers", "layer_pattern", "num_shared_experts", "shared_hidden_dim"):
            del moe[name]
        router = moe["router"]
        if router["num_groups"] == router["topk_groups"]:
            router |= {"num_groups": 1, "topk_groups": 1, "group_score_experts": 0}
        if router["score_function"] == "softmax" and not router["softmax_before_topk"]:
            router |= {"renormalize": True}
    return tree


def _differences(one: Any, other: Any, path: str = "model") -> list[str]:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        found = []
        for key in sorted(one.keys() | other.keys()):
            found += _differences(one.get(key), other.get(key), f"{path}.{key}")
        return found
    return [] if one == other else [f"{path}={one!r}"]


def _encode(family: Family, model: Model) -> Tree:
    encoded: Tree = {}
    for piece in family.pieces:
        encoded |= piece.encode(model)
    return encoded


def _unsayable(family: Family, model: Model) -> list[str]:
    """The fields of a model that a config.json of this family cannot express."""
    fields = Fields(_encode(family, model))
    try:
        back = Model.model_validate(_decode(family, fields))
    except (ValidationError, TypeError):
        return ["model"]
    return [str(problem) for problem in fields.problems] or _differences(_essence(model), _essence(back))


def find_family(model: Model, model_type: str | None = None) -> Family:
    """The family (of that `model_type`, where given) whose config.json can express the model.

    Raises: UserError saying what stands in the way.
    """
    candidates = [family for family in FAMILIES if model_type in (None, family.model_type)]
    lacking = {family: _unsayable(family, model) for family in candidates}
    for family, missing in lacking.items():
        if not missing:
            return family
    closest = min(lacking, key=lambda family: len(lacking[family]))
    raise UserError(
        f"no family of Hugging Face models holds this one; closest is {closest.model_type}, which cannot say "
        f"{', '.join(lacking[closest])}"
    )


def hf_config(model: Model, dtype: str, source: Mapping[str, Any] | None) -> Tree:
    """The config.json of a model. With the one that it came from (`source`), only what differs is changed there.

    Raises: UserError when no family can express the model, or not that of `source`.
    """
    if source is None:
        family = find_family(model)
        return {
            "architectures": [family.architecture],
            "model_type": family.model_type,
            **_encode(family, model),
            "torch_dtype": dtype,
        }
    family = find_family(model, source["model_type"])
    written = dict(source)
    try:
        before = _encode(family, Model.model_validate(_decode(family, Fields(source))))
    except (ValidationError, TypeError):
        before = {}  # values that overrides of `model` have mended
    changed = {name: value for name, value in _encode(family, model).items() if value != before.get(name, ABSENT)}
    if any(name in changed for name in ("rope_theta", "rope_scaling", "partial_rotary_factor")):
        after = _encode(family, model)
        changed |= {
            name: after[name] for name in ("rope_theta", "rope_scaling", "partial_rotary_factor") if name in after
        }
        written.pop("rope_parameters", None)
    written |= changed
    written["dtype" if "dtype" in written else "torch_dtype"] = dtype
    return written
