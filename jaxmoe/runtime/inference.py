"""A trained state used for text: sampling on the mesh that it was trained on."""

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxmoe.checkpoint.store import Checkpoints
from jaxmoe.config import Config, UserError
from jaxmoe.data import Tokenizer
from jaxmoe.data.sources import Documents
from jaxmoe.data.tokenizer import open_tokenizer, saved_tokenizer
from jaxmoe.generation.decode import continue_prompts
from jaxmoe.generation.settings import Sampling
from jaxmoe.runtime.restore import load_weights
from jaxmoe.runtime.run_folder import RunFolder
from jaxmoe.spmd.axes import DP, EP, PP, SP, TP
from jaxmoe.spmd.program import shardings
from jaxmoe.step.batch import Batch
from jaxmoe.step.state import TrainState, make_mesh, state_specs
from jaxmoe.step.train import forward


def inference_config(config: Config, mesh: Mesh) -> Config:
    """The config with the least batch that the mesh takes, one row per rank, and an optimiser without arrays."""
    stages, replicas = mesh.shape[PP], mesh.shape[DP] * mesh.shape[EP]
    batch = config.batch.model_copy(update={"num_microbatches": stages, "global_batch_size": stages * replicas})
    optimizer = config.optimizer.model_copy(update={"kind": "sgd"})
    return config.model_copy(update={"batch": batch, "optimizer": optimizer})


def inference_state(params: dict, router_bias: dict, config: Config, mesh: Mesh) -> TrainState:
    """A state that `forward` takes, of these arrays; `config` as `inference_config` gives it."""
    specs = state_specs(config, mesh)
    empty = jax.tree.map(
        lambda sharding: jax.device_put(jnp.zeros((), jnp.int32), sharding), shardings(mesh, specs.opt_state)
    )
    step = jax.device_put(jnp.zeros((), jnp.int32), shardings(mesh, specs.step))
    return TrainState(params, router_bias, empty, step, step, config, mesh)


def window_width(config: Config, mesh: Mesh, wanted: int) -> int:
    """Positions of the window: enough for `wanted`, at most a training row, divisible as the mesh needs."""
    unit = 2 * mesh.shape[SP] * mesh.shape[TP]
    return min(-(-wanted // unit) * unit, config.batch.seq_len)


@jax.jit
def _logits_at(state: TrainState, batch: Batch, last_B: jax.Array) -> jax.Array:
    logits_BSV = forward(state, batch)
    return logits_BSV[jnp.arange(logits_BSV.shape[0]), last_B]


def next_logits(state: TrainState, ids_BW: np.ndarray, last_B: np.ndarray) -> jax.Array:
    """Logits [B, V] after token `last_B` of each row; rows whose `last_B` is -1 are padding."""
    places = np.arange(ids_BW.shape[1])[None, :]
    held = places <= last_B[:, None]
    fields = {
        "inputs": ids_BW,
        "targets": np.zeros_like(ids_BW),
        "loss_mask": np.zeros(ids_BW.shape, np.float32),
        "positions": np.where(held, places, 0).astype(np.int32),
        "segment_ids": held.astype(np.int32),
    }
    return _logits_at(state, Batch.from_numpy(fields, state.mesh), jnp.asarray(np.maximum(last_B, 0)))


def generate(
    state: TrainState, prompts: Sequence[Sequence[int]], tokenizer: Tokenizer, *, num_new: int, sampling: Sampling
) -> list[list[int]]:
    """New ids for each prompt of ids. Takes a state of training as well as one of `inference_state`.

    Raises: UserError for an empty prompt: the model has learned no start of a text.
    """
    if any(len(prompt) == 0 for prompt in prompts):
        raise UserError("prompt: is empty; give at least one word to continue")
    mesh = state.mesh
    config = inference_config(state.config, mesh)
    state = inference_state(state.params, state.router_bias, config, mesh)
    rows = config.batch.global_batch_size
    width = window_width(config, mesh, max(map(len, prompts)) + num_new)
    texts: list[list[int]] = []
    for start in range(0, len(prompts), rows):
        texts += continue_prompts(
            lambda ids, last: next_logits(state, ids, last),
            prompts[start : start + rows],
            num_new=num_new,
            shape=(rows, width),
            num_tokens=tokenizer.vocab_size,
            eos_id=tokenizer.eos_id,
            sampling=replace(sampling, seed=(sampling.seed + start) % 2**32),
        )
    return texts


def generate_text(
    config: Config, folder: RunFolder, step: int, prompts: Sequence[str], *, num_new: int, sampling: Sampling
) -> list[str]:
    """What the model of a run's checkpoint makes of each prompt.

    Raises: UserError when the mesh does not fit the devices, the checkpoint is damaged, or a prompt is empty or longer
        than a row.
    """
    mesh = make_mesh(config)
    if folder.tokenizer.exists() or config.data.tokenizer.kind == "bytes":
        tokenizer = saved_tokenizer(config, folder.tokenizer)
    else:  # converted, never trained
        tokenizer = open_tokenizer(config, Documents(config.data.train, "data.train"))
    ids = [tokenizer.encode(prompt).tolist() for prompt in prompts]
    _check_length(ids, config.batch.seq_len)
    small = inference_config(config, mesh)
    with Checkpoints(folder.checkpoints) as checkpoints:
        params, router_bias = load_weights(small, mesh, checkpoints, step)
    state = inference_state(params, router_bias, small, mesh)
    new = generate(state, ids, tokenizer, num_new=num_new, sampling=sampling)
    return [tokenizer.decode(text) for text in new]


def _check_length(prompts: Sequence[Sequence[int]], seq_len: int) -> None:
    """The model would go on from the end of a longer one, and say nothing of the start that it never read."""
    too_long = [
        f"prompt {number}: has {len(prompt)} tokens, more than the batch.seq_len={seq_len} that the model reads; "
        f"shorten it, or add batch.seq_len={-(-len(prompt) // seq_len) * seq_len}"
        for number, prompt in enumerate(prompts, start=1)
        if len(prompt) > seq_len
    ]
    if too_long:
        raise UserError("\n".join(too_long))
