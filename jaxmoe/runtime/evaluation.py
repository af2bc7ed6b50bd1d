"""Validation over a whole set, summed first and divided once."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import jax
from jax.sharding import Mesh

from jaxmoe.data import EvalDataset, Prefetcher, bits_per_byte
from jaxmoe.step.batch import Batch
from jaxmoe.step.state import TrainState
from jaxmoe.step.train import EvalSums, eval_step


@dataclass(frozen=True)
class Validation:
    """Of the whole validation set."""

    loss: float
    """Nats per target."""
    bits_per_byte: float


def validate(state: TrainState, data: EvalDataset, mesh: Mesh, prefetch: int) -> Validation:
    """Sum of losses over sum of targets, over every document once. Changes nothing in the state."""

    def load(index: int) -> Batch:
        shape = (data.batch_rows, data.seq_len)
        return Batch.from_rows(lambda start, stop: data.rows(index, start, stop), shape, mesh)

    with Prefetcher(load, range(data.num_batches), prefetch) as batches:
        sums = list(_one_behind(eval_step(state, batch) for batch in batches))
    # Sums of batches are float32 on the devices; over the set they are added up as Python floats.
    loss_sum = math.fsum(float(item.loss_sum) for item in sums)
    weight_sum = math.fsum(float(item.weight_sum) for item in sums)
    assert weight_sum == data.num_targets, (weight_sum, data.num_targets)
    return Validation(loss_sum / weight_sum, bits_per_byte(loss_sum, data.target_bytes))


def _one_behind(sums: Iterator[EvalSums]) -> Iterator[EvalSums]:
    """Fetches each result after the next step is dispatched: at most two batches are on the devices."""
    before = None
    for item in sums:
        if before is not None:
            yield jax.device_get(before)
        before = item
    if before is not None:
        yield jax.device_get(before)
