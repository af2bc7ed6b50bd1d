"""From texts on disk to batches: a pure function of (data, seed, step). Host only; does not import jax."""

from jaxmoe.data.baseline import Baseline, bits_per_byte, unigram_baseline
from jaxmoe.data.dataset import Dataset, EvalDataset, TrainingData, open_data
from jaxmoe.data.prefetch import Prefetcher
from jaxmoe.data.tokenizer import Tokenizer

__all__ = [
    "Baseline",
    "Dataset",
    "EvalDataset",
    "Prefetcher",
    "Tokenizer",
    "TrainingData",
    "bits_per_byte",
    "open_data",
    "unigram_baseline",
]
