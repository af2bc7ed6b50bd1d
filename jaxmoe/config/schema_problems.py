"""pydantic's errors in the project's words: path, value, rule, fix."""

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from jaxmoe.config.errors import ABSENT, Problem, show_value
from jaxmoe.config.schema import LARGEST, Config, Section
from jaxmoe.config.schema_walk import all_paths, describe, dotted, limits_of, options, section_class

_MOST_SUGGESTIONS = 3
#: Names that other trainers and Hugging Face use, and ours.
_OTHER_NAMES = {
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "batch_size": "batch.global_batch_size",
    "context_parallel_size": "parallel.sp",
    "cp": "parallel.sp",
    "data_parallel_size": "parallel.dp",
    "dtype": "model.compute_dtype",
    "expert_parallel_size": "parallel.ep",
    "gradient_accumulation_steps": "batch.num_microbatches",
    "hidden_size": "model.d_model",
    "intermediate_size": "model.mlp.hidden_dim",
    "lr": "optimizer.learning_rate",
    "max_grad_norm": "optimizer.clip_norm",
    "max_steps": "run.steps",
    "moe_aux_loss_coeff": "model.moe.router.aux_loss_coeff",
    "moe_intermediate_size": "model.moe.expert_hidden_dim",
    "n_routed_experts": "model.moe.num_experts",
    "n_shared_experts": "model.moe.num_shared_experts",
    "num_attention_heads": "model.attention.num_heads",
    "num_experts_per_tok": "model.moe.experts_per_token",
    "num_hidden_layers": "model.num_layers",
    "num_key_value_heads": "model.attention.num_kv_heads",
    "num_local_experts": "model.moe.num_experts",
    "output_dir": "run.dir",
    "pipeline_parallel_size": "parallel.pp",
    "rms_norm_eps": "model.norm_eps",
    "rope_theta": "model.attention.rope.theta",
    "router_aux_loss_coef": "model.moe.router.aux_loss_coeff",
    "sequence_length": "batch.seq_len",
    "tensor_parallel_size": "parallel.tp",
    "tie_word_embeddings": "model.tie_embeddings",
    "top_k": "model.moe.experts_per_token",
    "train_steps": "run.steps",
    "warmup": "optimizer.schedule.warmup_steps",
}
_SAID_AS_BOOL = {"yes": True, "on": True, "y": True, "no": False, "off": False, "n": False}


@dataclass(frozen=True)
class SchemaProblems:
    problems: list[Problem]
    unreadable: frozenset[str]
    """Paths whose value is missing or wrong, and those that an unknown key probably meant."""


def schema_problems(error: ValidationError, tree: Mapping[str, Any]) -> SchemaProblems:
    """One problem for each path that pydantic refused, in the order of the schema."""
    problems: dict[str, Problem] = {}
    unreadable: set[str] = set()
    for item in error.errors(include_url=False, include_context=False):
        path, field, parent = _locate(item["loc"])
        if path in problems:
            continue
        unreadable.add(path)
        if item["type"] == "extra_forbidden":
            meant = _suggestions(path, parent)
            unreadable.update(meant)
            problems[path] = Problem(path, item["input"], "unknown key", _unknown_key_fix(path, parent, meant))
        elif field is None:
            problems[path] = Problem(path, item["input"], item["msg"], "correct it")
        elif item["type"] == "missing":
            problems[path] = _missing(path, field)
        else:
            value = _value_at(tree, path)
            is_too_large = isinstance(value, int) and value > LARGEST and int in dict(options(field))
            wanted = f"at most {LARGEST}" if is_too_large else describe(field)
            problems[path] = Problem(path, value, f"must be {wanted}", _value_fix(value, field))
    return SchemaProblems(list(problems.values()), frozenset(unreadable))


def _locate(loc: tuple[int | str, ...]) -> tuple[str, FieldInfo | None, type[Section]]:
    """(dotted path, its field, its section). pydantic adds the member of a union and list positions; those go."""
    section: type[Section] | None = Config
    path, field, parent = "", None, Config
    for part in loc:
        if section is None:
            break
        parent = section
        field = section.model_fields.get(str(part))
        path = dotted(path, str(part))
        section = section_class(field.annotation) if field else None
    return path, field, parent


def _value_at(tree: Mapping[str, Any], path: str) -> Any:
    value: Any = tree
    for key in path.split("."):
        value = value[key] if isinstance(value, Mapping) else getattr(value, key)
    return value


def _missing(path: str, field: FieldInfo) -> Problem:
    section = section_class(field.annotation)
    name = path.rpartition(".")[2]
    if section:
        required = [key for key, inner in section.model_fields.items() if inner.is_required()]
        return Problem(path, ABSENT, "required section is missing", f"add `{name}:` with {', '.join(required)}")
    return Problem(path, ABSENT, "required key is missing", f"add `{name}:` with {describe(field)}")


def _suggestions(path: str, parent: type[Section]) -> list[str]:
    """Paths that an unknown key may have meant, likeliest first."""
    above, _, name = path.rpartition(".")
    near = [dotted(above, key) for key in difflib.get_close_matches(name, parent.model_fields, n=2, cutoff=0.6)]
    same = [known for known in all_paths() if known.rpartition(".")[2] == name]
    other = [_OTHER_NAMES[name]] if name in _OTHER_NAMES else []
    found = list(dict.fromkeys([*near, *other, *same]))
    if not found:
        names = [known.rpartition(".")[2] for known in all_paths()]
        close = difflib.get_close_matches(name, names, n=1, cutoff=0.8)
        found = [known for known in all_paths() if known.rpartition(".")[2] in close]
    return found[:_MOST_SUGGESTIONS]


def _unknown_key_fix(path: str, parent: type[Section], meant: list[str]) -> str:
    if meant and path not in meant:
        return f"did you mean {' or '.join(meant)}?"
    above = path.rpartition(".")[0]
    if path in all_paths():  # a key with dots in its name
        return f"the file has sections: write `{path.rpartition('.')[2]}:` below `{above}:`"
    return f"{above or 'the top level'} has the keys {', '.join(parent.model_fields)}"


def _value_fix(value: Any, field: FieldInfo) -> str:
    """A value that works, taken from what was written where possible."""
    kinds = options(field)
    for kind, bounds in kinds:
        near = _near_value(value, kind, bounds)
        if near is not None:
            return f"write {show_value(near)}"
    if not field.is_required():
        default = field.get_default(call_default_factory=True)
        return "leave the key out" if isinstance(default, Section) else f"the default is {show_value(default)}"
    section = section_class(field.annotation)
    if section:
        required = [key for key, inner in section.model_fields.items() if inner.is_required()]
        return f"write the keys {', '.join(required)} below it, one a line"
    return "give such a value"


def _near_value(value: Any, kind: Any, bounds: list[Any]) -> Any:
    """The allowed value of this kind that was probably meant; None when there is no telling."""
    if get_origin(kind) is Literal:
        return _near_choice(value, get_args(kind))
    if kind is bool:
        if isinstance(value, str):
            return _SAID_AS_BOOL.get(value.strip().lower())
        return bool(value) if value in (0, 1) else None
    if kind is str:
        return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
    if kind in (int, float):
        number = _as_number(value)
        if number is None or (kind is int and number != int(number)):
            return None
        number = int(number) if kind is int else number
        return _into_limits(number, bounds)
    return None


def _near_choice(value: Any, choices: tuple[Any, ...]) -> Any:
    texts = {str(choice).lower(): choice for choice in choices}
    close = difflib.get_close_matches(str(value).lower(), texts, n=1, cutoff=0.5)
    if isinstance(value, bool) or not close:
        return None
    return texts[close[0]]


def _as_number(value: Any) -> int | float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value) if isinstance(value, str) else value
        return number if math.isfinite(number) else None
    except (ValueError, OverflowError):
        return None


def _into_limits(number: int | float, bounds: list[Any]) -> int | float | None:
    """The number moved to the nearest inclusive limit; None past an exclusive one, which has no nearest value."""
    for sign, limit in limits_of(bounds):
        if (sign == ">=" and number < limit) or (sign == "<=" and number > limit):
            number = limit
        elif (sign == ">" and number <= limit) or (sign == "<" and number >= limit):
            return None
    return number
