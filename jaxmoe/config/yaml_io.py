"""YAML as the config files use it: YAML 1.2 scalars, text keys, no key twice.

PyYAML speaks YAML 1.1, where `1e-3` is a text, `no` is false, `1:30` is 90 and `010` is 8. Reader and writer share
one table of scalars here, so a text that looks like a number is written in quotes.
"""

import re
from typing import Any, ClassVar

import yaml

from jaxmoe.config.errors import ABSENT, ConfigError, Problem

_DIGITS = r"[0-9]+(?:_[0-9]+)*"
_FINITE = rf"[-+]?(?:{_DIGITS}(?:\.(?:{_DIGITS})?)?|\.{_DIGITS})(?:[eE][-+]?[0-9]+)?"
_FLOAT = rf"{_FINITE}|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
#: (tag, pattern, possible first characters); the first that matches decides, so int stands before float.
_SCALARS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", rf"[-+]?{_DIGITS}|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", _FLOAT, list("-+.0123456789")),
    ("merge", r"<<", ["<"]),
)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}

    def get_single_data(self) -> Any:
        node = self.get_single_node()
        if node is None:
            return None
        _refuse_bad_keys(node, set())
        return self.construct_document(node)


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node)).replace("_", "")
    return int(text, 16) if text.startswith("0x") else int(text)


for _tag, _pattern, _first in _SCALARS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first)
_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)


class _BadKeyError(yaml.MarkedYAMLError):
    pass


def _refuse_bad_keys(node: yaml.Node, seen: set[int]) -> None:
    """Walks the composed document: after construction the first of two equal keys would be gone."""
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_bad_keys(item, seen)
    if isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or not key.tag.endswith((":str", ":merge")):
                raise _BadKeyError(problem=f"the key {_key_text(key)} is not a name", problem_mark=key.start_mark)
            if key.value in lines:
                text = f"the key {key.value!r} stands here a second time, first in line {lines[key.value]}"
                raise _BadKeyError(problem=text, problem_mark=key.start_mark)
            lines[key.value] = key.start_mark.line + 1
            _refuse_bad_keys(value, seen)


def _key_text(key: yaml.Node) -> str:
    return repr(key.value) if isinstance(key, yaml.ScalarNode) else "of several values"


def parse_yaml(text: str, source: str) -> Any:
    """The value of one YAML document. `source` names it in errors.

    Raises: ConfigError with source, line and column when the text is not YAML, or has a key twice.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark else source
        rule = " ".join(part for part in (error.context, error.problem) if part)
        fix = "remove or rename one" if isinstance(error, _BadKeyError) else "correct the YAML at this place"
        if "not a name" in rule:
            fix = "write a name, or put it in quotes"
        raise ConfigError([Problem(place, ABSENT, f"not readable: {rule}", fix)], source) from None
    except yaml.YAMLError as error:
        rule = "not readable: " + " ".join(str(error).split())
        raise ConfigError([Problem(source, ABSENT, rule, "correct the YAML")], source) from None


def dump_yaml(data: Any) -> str:
    """The data as YAML that `parse_yaml` reads back equal; keys keep their order."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
