"""YAML file and dotted overrides -> a checked Config, and back. Does not import jax.

A file may name others to start from: `base: model.yaml` or `base: [model.yaml, mesh.yaml]`, paths relative to the
file. Sections are merged key by key, later over earlier, the file itself last; any other value is replaced, so a
`null` removes an optional section.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError

from jaxmoe.config.check import check, check_files
from jaxmoe.config.errors import ABSENT, ConfigError, Problem, show_value
from jaxmoe.config.hf.config import with_hf_model
from jaxmoe.config.partial import readable_part
from jaxmoe.config.paths import missing_path_fix
from jaxmoe.config.schema import Config
from jaxmoe.config.schema_problems import schema_problems
from jaxmoe.config.trees import merge_trees, shared_key
from jaxmoe.config.whole_file import write_whole
from jaxmoe.config.yaml_io import dump_yaml, parse_yaml

BASE_KEY = "base"


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = (), *, require_files: bool = False) -> Config:
    """The checked config of a YAML file, with overrides like `"parallel.tp=2"` laid over it.

    `require_files` also checks that the files and folders it names are there, as training needs; without it a
    config can be planned or verified on a machine that does not hold the data.

    Raises: ConfigError with every problem found.
    """
    return config_from_dict(read_tree(path), overrides, source=str(path), require_files=require_files)


def config_from_dict(
    data: Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    source: str | None = None,
    require_files: bool = False,
) -> Config:
    """The checked config of a tree of plain dicts. `source` names it in errors.

    Raises: ConfigError with every problem found: of the overrides, of single fields and, as far as the fields can be
        read, between fields.
    """
    tree, problems = apply_overrides(data, overrides)
    tree = with_hf_model(tree)
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        found = schema_problems(error, tree)
        view = readable_part(tree, found.unreadable)
        problems += [*found.problems, *check(view)]
        if require_files:
            problems += check_files(view)
        raise ConfigError(problems, source) from None
    problems += check(config)
    if require_files:
        problems += check_files(config)
    if problems:
        raise ConfigError(problems, source)
    return config


def config_to_dict(config: Config) -> dict[str, Any]:
    """The whole tree as plain dicts, lists and scalars, defaults included; `config_from_dict` reads it back equal."""
    return config.model_dump(mode="json")


def save_config(config: Config, path: str | os.PathLike[str]) -> None:
    """Writes the resolved config as YAML, whole or not at all."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, dump_yaml(config_to_dict(config)))


def read_tree(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The file's tree with its bases merged in, unchecked.

    Raises: ConfigError when a file is missing, unreadable, no mapping, or its own base.
    """
    return _read_with_bases(Path(path), ())


def _read_with_bases(path: Path, children: tuple[Path, ...]) -> dict[str, Any]:
    try:
        resolved = path.resolve()
        is_folder, exists = path.is_dir(), path.exists()
    except (OSError, ValueError, RuntimeError) as error:  # a name too long, a NUL in it, a circle of links
        _refuse(path, f"cannot be read: {error}", "correct the name")
    if is_folder:
        _refuse(path, "is a folder, not a file", "name a .yaml file in it")
    if not exists:
        _refuse(path, "no such file", missing_path_fix(path))
    if resolved in children:
        chain = " -> ".join(str(item) for item in (*children, resolved))
        _refuse(path, f"is its own base: {chain}", "remove one `base`")
    tree = _read_mapping(path)
    bases = tree.pop(BASE_KEY, [])
    names = [bases] if isinstance(bases, str) else bases
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        problem = Problem(BASE_KEY, bases, "must be a file name or a list of file names", f"write `{BASE_KEY}: x.yaml`")
        raise ConfigError([problem], str(path))
    merged: dict[str, Any] = {}
    for name in names:
        merged = merge_trees(merged, _read_with_bases(path.parent / name, (*children, resolved)))
    return merge_trees(merged, tree)


def _read_mapping(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        _refuse(path, f"is not UTF-8 text (byte {error.start})", "save it as UTF-8")
    except OSError as error:
        _refuse(path, f"cannot be read: {error.strerror}", "check its permissions")
    tree = parse_yaml(text, str(path))
    if not isinstance(tree, dict):
        what = "is empty" if tree is None else "holds no sections"
        _refuse(path, what, "write sections such as `model:`, `batch:`, `data:`, `run:`")
    return tree


def _refuse(path: Path, rule: str, fix: str) -> NoReturn:
    raise ConfigError([Problem(str(path), ABSENT, rule, fix)], str(path)) from None


def apply_overrides(data: Mapping[str, Any], overrides: Sequence[str]) -> tuple[dict[str, Any], list[Problem]]:
    """The tree with `a.b.c=value` laid over it (value in YAML, missing sections made), and what was wrong with them."""
    tree = merge_trees({}, data)
    problems: list[Problem] = []
    for override in overrides:
        try:
            tree = merge_trees(tree, _override_tree(override))
        except ConfigError as error:
            problems.extend(error.problems)
    return tree, problems


def _override_tree(override: str) -> dict[str, Any]:
    name, equals, text = override.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(key.strip() == key and key for key in keys):
        raise ConfigError([Problem(override, ABSENT, "is no override", "write section.key=value, as in run.steps=20")])
    tree: Any = parse_yaml(text, f"override {name}")
    for key in reversed(keys):
        tree = {key: tree}
    return tree


def check_once(overrides: Sequence[str]) -> None:
    """For commands, where the same key twice is a slip; in a program, which lays lists together, the later one wins.

    Raises: ConfigError when two of them set the same key.
    """
    laid: list[tuple[str, dict[str, Any]]] = []
    problems: list[Problem] = []
    for override in overrides:
        try:
            tree = _override_tree(override)
        except ConfigError:
            continue  # told when it is laid over a file
        for other, earlier in laid:
            key = shared_key(earlier, tree)
            if key is not None:
                rule = f"is set by {show_value(other)} and by {show_value(override)}"
                problems.append(Problem(key, ABSENT, rule, "leave one of them out"))
        laid.append((override, tree))
    if problems:
        raise ConfigError(problems, "the command line")
