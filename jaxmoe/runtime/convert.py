"""Hugging Face folders to run folders, and back, on the host's processors alone."""

import os

import jax

from jaxmoe.checkpoint.about import NO_DATA, about
from jaxmoe.checkpoint.store import Checkpoints
from jaxmoe.config import Config
from jaxmoe.runtime.environment import versions
from jaxmoe.runtime.inference import inference_config, inference_state
from jaxmoe.runtime.restore import load_weights, state_arrays
from jaxmoe.runtime.run_folder import RunFolder
from jaxmoe.step.hf import load_hf_state, save_hf
from jaxmoe.step.state import make_mesh


def import_folder(config: Config, folder: RunFolder) -> None:
    """Writes the weights of `model.from_hf` as the checkpoint of step 0 of a new run.

    Raises: UserError when the weights do not fit.
    """
    local = _on_one_device(config)
    mesh = make_mesh(local, jax.devices()[:1])
    state = load_hf_state(local, mesh)
    with folder.locked(), Checkpoints(folder.checkpoints, keep=1, asynchronous=False) as checkpoints:
        folder.write_start(config, {"first_step": 0, "versions": versions(), "from_hf": config.model.from_hf})
        description = about(local, mesh.shape, 0, NO_DATA)
        checkpoints.save(0, state_arrays(state), state.layout.trunk_order, description)


def export_run(
    config: Config, folder: RunFolder, step: int, target: str | os.PathLike[str], *, dtype: str | None
) -> None:
    """Writes a checkpoint of a run as a Hugging Face folder.

    Raises: UserError when the target exists, the checkpoint is damaged, or no family can hold the model.
    """
    local = _on_one_device(config)
    mesh = make_mesh(local, jax.devices()[:1])
    small = inference_config(local, mesh)
    with Checkpoints(folder.checkpoints) as checkpoints:
        params, router_bias = load_weights(small, mesh, checkpoints, step)
    save_hf(inference_state(params, router_bias, small, mesh), target, dtype=dtype, tokenizer_from=folder.tokenizer)


def _on_one_device(config: Config) -> Config:
    sizes = {"pp": 1, "dp": 1, "ep": 1, "sp": 1, "tp": 1, "pipeline_schedule": "gpipe", "pipeline_chunks": 1}
    return config.model_copy(update={"parallel": config.parallel.model_copy(update=sizes)})
