"""Trains a model: `python -m jaxmoe.train --config configs/quickstart.yaml [section.key=value ...]`.

An existing run folder is resumed. Exit codes: 0 finished, or stopped by a signal and saved; 1 training failed;
2 something in the command, the config, the data or the run folder is to be mended.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext

from jaxmoe.config import Config, check_once, fail_on_user_error, load_config
from jaxmoe.runtime.environment import restart_with_huge_pages
from jaxmoe.runtime.processes import Processes, add_arguments, find_place, joined
from jaxmoe.runtime.progress import Display
from jaxmoe.runtime.run_folder import RunFolder
from jaxmoe.runtime.signals import ABORTED, StopSignals


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m jaxmoe.train", description="Trains a Mixture-of-Experts model.")
    parser.add_argument("--config", required=True, help="YAML file of the run")
    parser.add_argument(
        "--accept-other-data",
        action="store_true",
        help="resume although the batches are not those of before (other texts, batch size, row length, seed)",
    )
    add_arguments(parser)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="laid over the file: run.steps=20")
    return parser.parse_intermixed_args(words)


@fail_on_user_error()
def main(words: Sequence[str] | None = None) -> int:
    """Runs the command; the exit code."""
    arguments = _arguments(words)
    place = find_place(arguments)
    with fail_on_user_error(is_told=place.speaks):
        check_once(arguments.overrides)
        config = load_config(arguments.config, arguments.overrides, require_files=True)
        folder = RunFolder(config.run.dir)
        folder.check(config)
        is_finished = _is_finished(config, folder, is_told=place.speaks)
    if is_finished:
        return 0
    with (
        joined(place) as processes,
        folder.locked() if processes.is_first else nullcontext(),
        Display() as display,
        StopSignals() as stop,
    ):
        display.primary = processes.is_first
        return _train(config, folder, display, stop, processes, accept_other_data=arguments.accept_other_data)


def _is_finished(config: Config, folder: RunFolder, *, is_told: bool) -> bool:
    step = folder.latest_step
    if step is None or step < config.run.steps:
        return False
    validation = folder.last_validation(step)
    if config.data.validation is not None and validation is None:
        return False  # killed between the last step and its validation
    if not is_told:
        return True
    print(f"already trained: {folder.path} holds step {step} of run.steps={config.run.steps}")
    if validation is not None:
        numbers = validation.scalars
        print(f"validation loss {numbers['loss']:.4f}, {numbers['bits_per_byte']:.4f} bits per byte")
    print(
        f"to train on: run.steps={2 * step}; to train anew: another run.dir; "
        f'to see text: python -m jaxmoe.generate --run {folder.path} --prompt "..."'
    )
    return True


def _train(
    config: Config,
    folder: RunFolder,
    display: Display,
    stop: StopSignals,
    processes: Processes,
    *,
    accept_other_data: bool,
) -> int:
    # JAX takes seconds to start, so broken texts are found before it is imported.
    from jaxmoe.data import open_data

    data = open_data(config)
    processes.start_jax()
    from jaxmoe.runtime.loop import TrainingFailedError
    from jaxmoe.runtime.training import train

    try:
        train(config, data, folder, display, stop, accept_other_data=accept_other_data)
    except TrainingFailedError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    restart_with_huge_pages()
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("aborted", file=sys.stderr)
        sys.exit(ABORTED)
