"""A whole training run: devices, state new or resumed, the loop, the summary."""

import json
from typing import Any

import jax
from jax.sharding import Mesh

from jaxmoe.checkpoint.about import check_data, check_model
from jaxmoe.checkpoint.store import Checkpoints
from jaxmoe.config import Config
from jaxmoe.data import TrainingData, unigram_baseline
from jaxmoe.data.tokenizer import SubwordTokenizer
from jaxmoe.generation.settings import Sampling
from jaxmoe.runtime.environment import commit, variables, versions
from jaxmoe.runtime.inference import generate
from jaxmoe.runtime.loop import Loop, Places
from jaxmoe.runtime.progress import Display
from jaxmoe.runtime.restore import load_state
from jaxmoe.runtime.run_folder import RunFolder
from jaxmoe.runtime.signals import StopSignals
from jaxmoe.runtime.sinks import open_sinks
from jaxmoe.step.hf import load_hf_state
from jaxmoe.step.state import TrainState, init_state, make_mesh

#: Tokens of a validation text that the sample continues when the config names no prompt.
_PROMPT_TOKENS = 16


def train(
    config: Config,
    data: TrainingData,
    folder: RunFolder,
    display: Display,
    stop: StopSignals,
    *,
    accept_other_data: bool = False,
) -> None:
    """Trains until `run.steps`, from the newest checkpoint of the folder where there is one.

    Returns early, with everything saved, when a signal asks to stop.

    Raises:
        UserError: the devices do not fit the mesh, or the checkpoint belongs to another model or to other data.
        TrainingFailedError: too many steps in a row were skipped.
    """
    mesh = make_mesh(config)
    primary = display.primary = jax.process_index() == 0
    settings = config.checkpoint
    with Checkpoints(folder.checkpoints, keep=settings.keep, asynchronous=settings.asynchronous) as checkpoints:
        state = _start(config, mesh, data, checkpoints, display, accept_other_data=accept_other_data)
        first = int(state.step)
        if primary:
            folder.write_start(config, _facts(config, mesh, data, first))
            if isinstance(data.tokenizer, SubwordTokenizer):
                data.tokenizer.save(folder.tokenizer)
        _announce(config, state, data, display)
        sinks = open_sinks(config, folder.path, first, primary=primary, emit=display.emit)
        try:
            loop = Loop(config, data, Places(sinks, display, checkpoints), stop)
            state = loop.run(state)
            done = int(state.step)
            if done < config.run.steps:
                display.emit(_stopped(stop, done, folder))
                return
            loop.validate(state, done)
        finally:
            sinks.close()
        _summarize(config, state, data, loop, folder, display)


def _start(
    config: Config,
    mesh: Mesh,
    data: TrainingData,
    checkpoints: Checkpoints,
    display: Display,
    *,
    accept_other_data: bool,
) -> TrainState:
    steps = checkpoints.steps()
    if not steps:
        if config.model.from_hf is None:
            return init_state(config, mesh)
        display.emit(f"starting from the weights in {config.model.from_hf}")
        return load_hf_state(config, mesh)
    place = str(checkpoints.folder / str(steps[-1]))
    saved = checkpoints.about(steps[-1])
    check_model(saved.model, saved.optimizer, config, place)
    if not accept_other_data:
        check_data(saved.data, config, data.train.fingerprint, place)
    display.emit(f"resuming from step {steps[-1]} of {config.run.steps} ({place})")
    return load_state(config, mesh, checkpoints, steps[-1])


def _facts(config: Config, mesh: Mesh, data: TrainingData, first: int) -> dict[str, Any]:
    """What run.json keeps of a start."""
    device = jax.devices()[0]
    return {
        "first_step": first,
        "versions": versions(),
        "source": commit(),
        "variables": variables(),
        "device": {"kind": device.device_kind, "platform": device.platform, "count": jax.device_count()},
        "processes": jax.process_count(),
        "mesh": dict(mesh.shape),
        "seed": config.run.seed,
        "data": {
            "train": data.train.fingerprint,
            "validation": data.validation.fingerprint if data.validation else None,
        },
    }


def _announce(config: Config, state: TrainState, data: TrainingData, display: Display) -> None:
    numbers = sum(leaf.size for leaf in jax.tree.leaves(state.layout.shapes))
    mesh = " ".join(f"{axis}={size}" for axis, size in state.mesh.shape.items() if size > 1) or "one device"
    batch = config.batch
    display.emit(
        f"{numbers / 1e6:.1f} M parameters on {jax.device_count()} x {jax.devices()[0].device_kind} ({mesh}); "
        f"{batch.global_batch_size} rows of {batch.seq_len} tokens a step, {config.run.steps} steps"
    )
    if state.mesh.shape["ep"] * state.mesh.shape["tp"] > 1 and config.model.moe is not None:
        display.emit(
            "experts: tokens gathered over ep and tp, outputs summed back by reduce-scatter: exact for any routing, "
            "since no buffer depends on where tokens go"
        )
    text = f"training text: {data.train.store.num_documents:,} documents, {data.train.store.num_tokens:,} tokens"
    if data.validation is not None:
        baseline = unigram_baseline(data.train, data.validation)
        text += (
            f"; validation: {data.validation.num_targets:,} targets, of which a unigram model reaches "
            f"{baseline.nats_per_token:.4f} nats per token, {baseline.bits_per_byte:.4f} bits per byte"
        )
    display.emit(text)


def _stopped(stop: StopSignals, done: int, folder: RunFolder) -> str:
    what = f"saved step {done}" if done else "no step was done"
    return f"stopped by {stop.reason}: {what} in {folder.path}; the same command goes on from there"


def _summarize(
    config: Config, state: TrainState, data: TrainingData, loop: Loop, folder: RunFolder, display: Display
) -> None:
    if loop.validation is not None and data.validation is not None:
        found, baseline = loop.validation[1], unigram_baseline(data.train, data.validation)
        display.emit(
            f"validation loss {found.loss:.4f}, {found.bits_per_byte:.4f} bits per byte "
            f"(unigram baseline {baseline.bits_per_byte:.4f})"
        )
    if config.run.sample_tokens:
        display.emit(sample_text(config, state, data))
    display.emit(f"run folder: {folder.path}")


def sample_text(config: Config, state: TrainState, data: TrainingData) -> str:
    """The prompt of the config, or the start of a held-out text, and what the model makes of it."""
    store = (data.validation or data.train).store
    prompt = data.tokenizer.encode(config.run.sample_prompt).tolist() or store.document(0)[:_PROMPT_TOKENS].tolist()
    sampling = Sampling(seed=config.run.seed % 2**32)
    new = generate(state, [prompt], data.tokenizer, num_new=config.run.sample_tokens, sampling=sampling)[0]
    return f"sample: {json.dumps(data.tokenizer.decode(prompt), ensure_ascii=False)} ->\n{data.tokenizer.decode(new)}"
