"""Bits per byte, and what a model without context reaches."""

import math
from dataclasses import dataclass

import numpy as np

from jaxmoe.data.dataset import Dataset, EvalDataset


@dataclass(frozen=True)
class Baseline:
    nats_per_token: float
    """Mean cross-entropy of the validation targets."""
    bits_per_byte: float


def bits_per_byte(loss_sum_nats: float, target_bytes: int) -> float:
    """Summed cross-entropy of some targets, per byte of text behind them, in bits: comparable between tokenizers.

    `target_bytes` of a whole validation set is `EvalDataset.target_bytes`.
    """
    assert target_bytes > 0, target_bytes
    return loss_sum_nats / math.log(2) / target_bytes


def unigram_baseline(train: Dataset, validation: EvalDataset) -> Baseline:
    """Cross-entropy of the validation targets under the frequencies of tokens among the training targets.

    p(v) = (count(v) + 1) / (sum of counts + vocabulary), with the tokenizer's vocabulary. Both sides count targets,
    as the loss does: no document's first token.
    """
    counts_V = train.store.target_counts() + 1
    log_p_V = np.log(counts_V) - np.log(counts_V.sum())
    loss_sum = -float(validation.store.target_counts() @ log_p_V)
    return Baseline(loss_sum / validation.num_targets, bits_per_byte(loss_sum, validation.target_bytes))
