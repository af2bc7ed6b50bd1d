"""Continues a text with a trained model: `python -m jaxmoe.generate --run runs/quickstart --prompt "..."`.

The model runs on the mesh of its run's config; further words are overrides (`parallel.tp=1`). Exit codes: 0, or 2 for
something to mend.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxmoe.config import UserError, check_once, fail_on_user_error, load_config
from jaxmoe.generation.settings import Sampling
from jaxmoe.runtime.arguments import unicode_text
from jaxmoe.runtime.run_folder import CONFIG_FILE, RunFolder


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m jaxmoe.generate", description="Continues a text.")
    parser.add_argument("--run", required=True, help="run folder of a trained model")
    parser.add_argument(
        "--prompt", type=unicode_text, required=True, action="append", help="may be given several times"
    )
    parser.add_argument("--tokens", type=int, default=100, help="most new tokens (default 100)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 always takes the best token (default 0.8)")
    parser.add_argument("--top-k", type=int, default=50, help="choose among the best k only (default 50)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step", type=int, help="checkpoint to use (default: the newest)")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="laid over the run's config")
    return parser.parse_intermixed_args(words)


@fail_on_user_error()
def main(words: Sequence[str] | None = None) -> int:
    """Runs the command; the exit code."""
    arguments = _arguments(words)
    check_once(arguments.overrides)
    folder = RunFolder(arguments.run)
    step = _step(folder, arguments.step)
    if arguments.tokens < 1:
        raise UserError(f"tokens={arguments.tokens}: must be at least 1; use 100")
    if not all(arguments.prompt):
        raise UserError("prompt: is empty; give at least one word to continue")
    config = load_config(folder.path / CONFIG_FILE, arguments.overrides)
    folder.check(config)
    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.seed)
    # JAX takes seconds to start, so a wrong command is refused before it is imported.
    from jaxmoe.runtime.inference import generate_text

    texts = generate_text(config, folder, step, arguments.prompt, num_new=arguments.tokens, sampling=sampling)
    for prompt, text in zip(arguments.prompt, texts, strict=True):
        print(f"{prompt}{text}\n")
    return 0


def _step(folder: RunFolder, asked: int | None) -> int:
    if not (folder.path / CONFIG_FILE).is_file():
        raise UserError(
            f"run={folder.path}: holds no {CONFIG_FILE}, so it is no run folder; name the run.dir of a training run"
        )
    steps = folder.steps
    if not steps:
        raise UserError(f"run={folder.path}: holds no checkpoint yet; train first: {_train_command(folder.path)}")
    if asked is not None and asked not in steps:
        raise UserError(f"step={asked}: {folder.path} has checkpoints of steps {steps}; use one of these")
    return steps[-1] if asked is None else asked


def _train_command(path: Path) -> str:
    return f"python -m jaxmoe.train --config {path / CONFIG_FILE}"


if __name__ == "__main__":
    sys.exit(main())
