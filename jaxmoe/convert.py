"""Hugging Face folders to run folders, and back.

    python -m jaxmoe.convert hf-to-jaxmoe --from DIR --run runs/x [--config FILE] [key=value ...]
    python -m jaxmoe.convert jaxmoe-to-hf --run runs/x --to DIR [--step N] [--dtype bfloat16]

Runs on the host's processors; the host must hold the model. Exit codes: 0, or 2 for something to mend, which leaves the
output as it was. Training can also start from a Hugging Face folder by itself: `model.from_hf: DIR` in its config.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxmoe.config import Config, UserError, check_once, fail_on_user_error, load_config
from jaxmoe.config.errors import show_value
from jaxmoe.config.hf.config import find_family, read_source_config
from jaxmoe.interop.folder import WeightFiles
from jaxmoe.interop.hf_config import load_hf_config
from jaxmoe.interop.save import check_new_folder
from jaxmoe.runtime.run_folder import CONFIG_FILE, RunFolder

DTYPES = ("bfloat16", "float16", "float32", "float64")


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m jaxmoe.convert", description="Hugging Face folders in and out.")
    commands = parser.add_subparsers(dest="command", required=True)
    inward = commands.add_parser("hf-to-jaxmoe", help="a Hugging Face folder as step 0 of a new run")
    inward.add_argument("--from", dest="source", required=True, help="folder with config.json and *.safetensors")
    inward.add_argument("--run", required=True, help="run folder to make")
    inward.add_argument("--config", help="config file of the run; the least that is needed where not given")
    inward.add_argument("overrides", nargs="*", metavar="section.key=value", help="laid over the config")
    outward = commands.add_parser("jaxmoe-to-hf", help="a run's checkpoint as a Hugging Face folder")
    outward.add_argument("--run", required=True, help="run folder of a trained model")
    outward.add_argument("--to", required=True, help="folder to make")
    outward.add_argument("--step", type=int, help="checkpoint to use (default: the newest)")
    outward.add_argument("--dtype", choices=DTYPES, help="of the weights (default: as they came)")
    outward.add_argument("overrides", nargs="*", metavar="section.key=value", help="laid over the run's config")
    return parser.parse_args(words)


@fail_on_user_error()
def main(words: Sequence[str] | None = None) -> int:
    """Runs the command; the exit code."""
    arguments = _arguments(words)
    check_once(arguments.overrides)
    return _import(arguments) if arguments.command == "hf-to-jaxmoe" else _export(arguments)


def _override(name: str, text: str) -> str:
    """The text as it is: a folder may be called 2026."""
    return f"{name}={json.dumps(text, ensure_ascii=False)}"


def _start_jax() -> None:
    """After all checks that do without it. Weights pass through the host's memory; accelerators would be in the way."""
    import jax

    if getattr(jax.config, "jax_platforms", None) is None:
        jax.config.update("jax_platforms", "cpu")


def _import(arguments: argparse.Namespace) -> int:
    own = [_override("run.dir", arguments.run), *arguments.overrides]
    if arguments.config:
        config = load_config(arguments.config, [_override("model.from_hf", arguments.source), *own])
    else:
        config = load_hf_config(arguments.source, own)
    source = config.model.from_hf
    if source is None or Path(source) != Path(arguments.source):
        raise UserError(f"model.from_hf={show_value(source)}: contradicts --from {arguments.source}; leave it out")
    folder = RunFolder(config.run.dir)
    folder.check_new(apart_from=[Path(source)])
    WeightFiles(source)
    _start_jax()
    from jaxmoe.runtime.convert import import_folder

    import_folder(config, folder)
    print(f"{arguments.source} is step 0 of {folder.path}; {folder.path / CONFIG_FILE} has its config")
    return 0


def _export(arguments: argparse.Namespace) -> int:
    folder = RunFolder(arguments.run)
    if not (folder.path / CONFIG_FILE).is_file():
        raise UserError(f"run={folder.path}: holds no {CONFIG_FILE}; name the run.dir of a training run")
    steps = folder.steps
    step = arguments.step if arguments.step is not None else folder.latest_step
    if step not in steps:
        raise UserError(f"step={step}: {folder.path} holds {steps or 'no checkpoint yet'}; choose one of those")
    config = load_config(folder.path / CONFIG_FILE, arguments.overrides)
    _check_overrides(config, folder)
    source = config.model.from_hf
    read_only = [folder.checkpoints, folder.tokenizer, *([Path(source)] if source else [])]
    check_new_folder("to", arguments.to, apart_from=read_only)
    find_family(config.model, read_source_config(source)["model_type"] if source else None)
    if source:
        WeightFiles(source)
    _start_jax()
    from jaxmoe.runtime.convert import export_run

    export_run(config, folder, step, Path(arguments.to), dtype=arguments.dtype)
    print(f"step {step} of {folder.path} is in {arguments.to}")
    return 0


def _check_overrides(config: Config, folder: RunFolder) -> None:
    """Refuses what would make another model of the weights: an export may go by another folder, or leave out MTP.

    Raises: UserError naming every field that differs.
    """
    saved = load_config(folder.path / CONFIG_FILE).model
    allowed = {"from_hf": saved.from_hf, "mtp": saved.mtp if config.model.mtp is None else config.model.mtp}
    folder.check(config.model_copy(update={"model": config.model.model_copy(update=allowed)}))


if __name__ == "__main__":
    sys.exit(main())
