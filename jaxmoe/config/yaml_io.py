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
_YAML = "tag:yaml.org,2002:"
_TAGS = ("map", "seq", "str", *(tag for tag, _, _ in _SCALARS))
_DEEPEST = 50
_MOST_DIGITS = 100


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}

    def get_single_data(self) -> Any:
        node = self.get_single_node()
        if node is None:
            return None
        _refuse_bad_nodes(node, (), set())
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
        _class.add_implicit_resolver(f"{_YAML}{_tag}", re.compile(rf"^(?:{_pattern})$"), _first)
_Loader.add_constructor(f"{_YAML}int", _construct_int)


class _BadNodeError(yaml.MarkedYAMLError):
    """Text that YAML can read and a config cannot hold."""

    def __init__(self, node: yaml.Node, rule: str, fix: str) -> None:
        super().__init__(problem=rule, problem_mark=node.start_mark)
        self.fix = fix


def _refuse_bad_nodes(node: yaml.Node, above: tuple[int, ...], seen: set[int]) -> None:
    """Walks the composed document: after construction the first of two equal keys would be gone, and so would the line.

    `above` are the nodes that this one stands in; `seen` are those that need no second look.
    """
    if id(node) in above:
        raise _BadNodeError(node, "this anchor stands within itself", "write out what is meant")
    if len(above) > _DEEPEST:
        raise _BadNodeError(node, f"stands more than {_DEEPEST} levels deep", "close a bracket")
    if id(node) in seen:
        return
    seen.add(id(node))
    above = (*above, id(node))
    if isinstance(node, yaml.ScalarNode):
        _refuse_bad_scalar(node)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_bad_nodes(item, above, seen)
    elif isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or not key.tag.endswith((":str", ":merge")):
                text = repr(key.value) if isinstance(key, yaml.ScalarNode) else "of several values"
                raise _BadNodeError(key, f"the key {text} is not a name", "write a name, or put it in quotes")
            _refuse_bad_scalar(key)
            if key.value in lines:
                text = f"the key {key.value!r} stands here a second time, first in line {lines[key.value]}"
                raise _BadNodeError(key, text, "remove or rename one")
            lines[key.value] = key.start_mark.line + 1
            _refuse_bad_nodes(value, above, seen)
    if node.tag.startswith(_YAML) and node.tag.removeprefix(_YAML) not in _TAGS:
        tag = node.tag.removeprefix(_YAML)
        raise _BadNodeError(node, f"!!{tag} is no kind of value that a config has", "leave the tag out")


def _refuse_bad_scalar(node: yaml.ScalarNode) -> None:
    """Refuses what is not of the kind that its tag says, as in `!!int x`; numbers and characters that nothing holds."""
    tag = node.tag.removeprefix(_YAML)
    pattern = next((pattern for name, pattern, _ in _SCALARS if name == tag), None)
    if pattern is not None and not re.fullmatch(pattern, node.value):
        raise _BadNodeError(node, f"{node.value[:40]!r} is no {tag}", "leave the tag out, or correct the value")
    if tag == "int" and len(node.value) > _MOST_DIGITS:
        rule = f"a whole number of {len(node.value)} digits"
        raise _BadNodeError(node, rule, f"write one of at most {_MOST_DIGITS} digits")
    if any("\ud800" <= character <= "\udfff" for character in node.value):
        raise _BadNodeError(node, f"{node.value[:40]!r} holds half a character", "write the text in UTF-8")


def parse_yaml(text: str, source: str) -> Any:
    """The value of one YAML document. `source` names it in errors.

    Raises: ConfigError with source, line and column when the text is not YAML, or holds what no config can.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark else source
        rule = " ".join(part for part in (error.context, error.problem) if part)
        fix = error.fix if isinstance(error, _BadNodeError) else "correct the YAML at this place"
        raise ConfigError([Problem(place, ABSENT, f"not readable: {rule}", fix)], source) from None
    except yaml.YAMLError as error:
        rule = "not readable: " + " ".join(str(error).split())
        raise ConfigError([Problem(source, ABSENT, rule, "correct the YAML")], source) from None
    except RecursionError:
        rule = f"not readable: stands more than {_DEEPEST} levels deep"
        raise ConfigError([Problem(source, ABSENT, rule, "close a bracket")], source) from None


def dump_yaml(data: Any) -> str:
    """The data as YAML that `parse_yaml` reads back equal; keys keep their order."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
