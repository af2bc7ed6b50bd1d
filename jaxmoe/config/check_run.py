"""Rules between the fields of the run: schedule, tokenizer, texts."""

from collections.abc import Iterator
from unicodedata import category

from jaxmoe.config.check_model import Rule
from jaxmoe.config.errors import ABSENT, Problem
from jaxmoe.config.schema import Config, Source

#: 256 bytes and the token that ends a document.
SMALLEST_VOCABULARY = 257
_FIRST_SPEECH = 1790
_SCHEDULE = "optimizer.schedule"
_TOKENIZER = "data.tokenizer"


def _run_dir(config: Config) -> Iterator[Problem]:
    if not config.run.dir.strip():
        yield Problem("run.dir", config.run.dir, "must name a folder", "use a path such as runs/first")


def _paths(config: Config) -> Iterator[Problem]:
    """What is on this machine's disk is judged by `check_files`."""
    named = {
        "run.dir": config.run.dir,
        "model.from_hf": config.model.from_hf,
        "data.cache_dir": config.data.cache_dir,
        f"{_TOKENIZER}.path": config.data.tokenizer.path,
        **{f"{path}.path": source.path for path, source in sources(config)},
    }
    for path, text in named.items():
        if any(category(character) == "Cc" for character in text or ""):
            yield Problem(path, text, "holds a line break or another control character", "remove it")
        if (text or "").startswith("~"):
            home = "begins with ~, which the shell replaces by your home only at the start of a word"
            yield Problem(path, text, home, "write the whole path (./~ for a folder of this name)")


def _warmup(config: Config) -> Iterator[Problem]:
    warmup, steps = config.optimizer.schedule.warmup_steps, config.run.steps
    if warmup >= steps:
        rule = f"must be below run.steps={steps}"
        fix = f"use {steps // 10}, or run.steps of {warmup + 1} or more"
        yield Problem(f"{_SCHEDULE}.warmup_steps", warmup, rule, fix)


def _decay(config: Config) -> Iterator[Problem]:
    schedule, steps = config.optimizer.schedule, config.run.steps
    path, decay, left = f"{_SCHEDULE}.decay_steps", schedule.decay_steps, steps - schedule.warmup_steps
    if schedule.kind == "constant":
        if decay is not None:
            yield Problem(path, decay, f"has no effect with {_SCHEDULE}.kind=constant", "remove it, or use kind: wsd")
        return
    if left < 1:
        return  # reported by _warmup
    example = max(1, left // 5)
    if schedule.kind == "wsd" and decay is None:
        yield Problem(path, ABSENT, f"is needed with {_SCHEDULE}.kind=wsd", f"use {example}")
    elif decay == 0:
        yield Problem(path, decay, "must be at least 1", f"use {example}")
    elif decay is not None and decay > left:
        rule = f"must be at most {left} = run.steps={steps} - {_SCHEDULE}.warmup_steps={schedule.warmup_steps}"
        yield Problem(path, decay, rule, f"use {left}, or run.steps of {decay + schedule.warmup_steps} or more")


def _tokenizer(config: Config) -> Iterator[Problem]:
    tokenizer, model_size = config.data.tokenizer, config.model.vocab_size
    if tokenizer.kind == "file" and not tokenizer.path:
        yield Problem(f"{_TOKENIZER}.path", tokenizer.path, "is needed with kind=file", "name a tokenizer.json")
    for name, kind in (("path", "file"), ("eos_token", "file"), ("vocab_size", "bpe")):
        value = getattr(tokenizer, name)
        if value is not None and tokenizer.kind != kind:
            rule = f"is for kind={kind} only, and {_TOKENIZER}.kind={tokenizer.kind}"
            yield Problem(f"{_TOKENIZER}.{name}", value, rule, f"remove it, or use kind: {kind}")
    if tokenizer.kind == "file":
        return
    if model_size < SMALLEST_VOCABULARY:
        needed = f"{SMALLEST_VOCABULARY} (256 bytes, end of document)"
        rule = f"must be at least {needed} with {_TOKENIZER}.kind={tokenizer.kind}"
        yield Problem("model.vocab_size", model_size, rule, f"use {SMALLEST_VOCABULARY} or more")
    elif tokenizer.kind == "bpe" and tokenizer.vocab_size is not None:
        yield from _bpe_size(tokenizer.vocab_size, model_size)


def _bpe_size(size: int, model_size: int) -> Iterator[Problem]:
    if size < SMALLEST_VOCABULARY:
        rule = f"must be at least {SMALLEST_VOCABULARY} (256 bytes, end of document)"
        yield Problem(f"{_TOKENIZER}.vocab_size", size, rule, f"use {model_size}, the size of the model's")
    elif size > model_size:
        rule = f"must be at most model.vocab_size={model_size}"
        yield Problem(f"{_TOKENIZER}.vocab_size", size, rule, f"use {model_size}, or model.vocab_size: {size}")


def sources(config: Config) -> Iterator[tuple[str, Source]]:
    """(dotted path, source) of the texts that the config names."""
    yield "data.train", config.data.train
    if config.data.validation is not None:
        yield "data.validation", config.data.validation


def _train_source(config: Config) -> Iterator[Problem]:
    yield from _source("data.train", config.data.train)


def _validation_source(config: Config) -> Iterator[Problem]:
    if config.data.validation is not None:
        yield from _source("data.validation", config.data.validation)


def _source(path: str, source: Source) -> Iterator[Problem]:
    if source.kind == "sotu":
        yield from _years(path, source)
        return
    if not source.path:
        rule = f"is needed with kind={source.kind}"
        yield Problem(f"{path}.path", source.path, rule, f"name a .{source.kind} file or a folder of them")
    for name in ("first_year", "last_year"):
        year = getattr(source, name)
        if year is not None:
            yield Problem(f"{path}.{name}", year, f"is for kind=sotu only, and {path}.kind={source.kind}", "remove it")


def _years(path: str, source: Source) -> Iterator[Problem]:
    if source.path is not None:
        rule = "is not for kind=sotu, whose texts come from the installed package"
        yield Problem(f"{path}.path", source.path, rule, "remove it, or use kind: txt")
    if source.last_year is not None and source.last_year < _FIRST_SPEECH:
        rule = f"must be at least {_FIRST_SPEECH}, the year of the first speech"
        yield Problem(f"{path}.last_year", source.last_year, rule, f"use {_FIRST_SPEECH} or later")
    elif source.first_year is not None and source.last_year is not None and source.first_year > source.last_year:
        rule = f"must be at most {path}.last_year={source.last_year}"
        yield Problem(f"{path}.first_year", source.first_year, rule, f"use {source.last_year} or earlier")


RUN_RULES: tuple[Rule, ...] = (_run_dir, _paths, _warmup, _decay, _tokenizer, _train_source, _validation_source)
