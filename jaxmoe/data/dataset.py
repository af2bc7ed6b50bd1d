"""Batches as a pure function of (data, seed, step), whatever the mesh, the hosts, or the restarts."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from jaxmoe.config.errors import UserError
from jaxmoe.config.schema import Config
from jaxmoe.data.cache import fingerprint
from jaxmoe.data.packing import PLAN_VERSION, fill_rows, make_plan
from jaxmoe.data.sources import Documents
from jaxmoe.data.token_store import TokenStore, open_tokens
from jaxmoe.data.tokenizer import Tokenizer, open_tokenizer

Fields = dict[str, np.ndarray]
"""inputs, targets, positions, segment_ids (int32) and loss_mask (float32, 0 or 1), each [rows, seq_len]; what they
mean is written at `packing.fill_rows`."""


class Dataset:
    """Training batches without end, reshuffled every epoch. Safe to use from several threads."""

    def __init__(self, store: TokenStore, *, batch_rows: int, seq_len: int, packing: str, seed: int | None):
        """`packing` as `data.packing`; `seed` None keeps the documents' order in every epoch."""
        self.store = store
        self.batch_rows = batch_rows
        self.seq_len = seq_len
        self._plan = make_plan(packing, np.diff(store.offsets), seq_len, seed=seed, repeat=True)
        self.fingerprint = fingerprint("rows", PLAN_VERSION, store.fingerprint, batch_rows, seq_len, packing, seed)
        """Two datasets with the same fingerprint give the same batches."""

    @property
    def rows_per_epoch(self) -> int:
        """Rows of one pass over the documents, rounded up."""
        return self._plan.num_rows

    def batch(self, step: int) -> Fields:
        """The batch of one optimiser step, counted from 0: fields [batch_rows, seq_len]."""
        return self.rows(step, 0, self.batch_rows)

    def rows(self, step: int, start: int, stop: int) -> Fields:
        """Rows [start, stop) of `batch(step)`, without making the others: fields [stop - start, seq_len]."""
        assert step >= 0, step
        assert 0 <= start <= stop <= self.batch_rows, (start, stop, self.batch_rows)
        segments = self._plan.segments(step * self.batch_rows + start, stop - start)
        return fill_rows(self.store.tokens, self.store.offsets, segments, stop - start, self.seq_len)


class EvalDataset:
    """Every document once, in file order, in the same rows each time.

    The last batch is filled up with rows of padding, so sums of loss and of targets over all batches are those of the
    set. `split` cuts documents at row borders here too: the first targets after a cut are predicted from less text.
    """

    def __init__(self, store: TokenStore, *, batch_rows: int, seq_len: int, packing: str):
        self.store = store
        self.batch_rows = batch_rows
        self.seq_len = seq_len
        self._plan = make_plan(packing, np.diff(store.offsets), seq_len, seed=None, repeat=False)
        self.fingerprint = fingerprint("eval", PLAN_VERSION, store.fingerprint, batch_rows, seq_len, packing)
        self.num_batches = -(-self._plan.num_rows // batch_rows)
        self.num_targets = store.num_targets
        """Targets of the whole set: the sum of loss_mask over all batches."""
        self.target_bytes = store.target_bytes()
        """Bytes of text behind those targets: the denominator of bits per byte."""

    def batch(self, index: int) -> Fields:
        """Batch 0 <= index < num_batches: fields [batch_rows, seq_len]."""
        return self.rows(index, 0, self.batch_rows)

    def rows(self, index: int, start: int, stop: int) -> Fields:
        """Rows [start, stop) of `batch(index)`, without making the others: fields [stop - start, seq_len]."""
        assert 0 <= index < self.num_batches, (index, self.num_batches)
        assert 0 <= start <= stop <= self.batch_rows, (start, stop, self.batch_rows)
        segments = self._plan.segments(index * self.batch_rows + start, stop - start)
        return fill_rows(self.store.tokens, self.store.offsets, segments, stop - start, self.seq_len)

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[Fields]:
        return map(self.batch, range(self.num_batches))


@dataclass(frozen=True)
class TrainingData:
    """What a run reads."""

    train: Dataset
    validation: EvalDataset | None
    tokenizer: Tokenizer


def open_data(config: Config) -> TrainingData:
    """The data of a run: trains the BPE and tokenises at first use, reads the cache afterwards.

    The order of the documents depends on `run.seed`. Raises: UserError for anything wrong with the data; problems
    with finding the files of both sources come together.
    """
    problems: list[UserError] = []
    found: dict[str, Documents] = {}
    for name, source in (("train", config.data.train), ("validation", config.data.validation)):
        if source is None:
            continue
        try:
            found[name] = Documents(source, f"data.{name}")
        except UserError as error:
            problems.append(error)
    if problems:
        raise UserError("\n".join(map(str, problems)))
    tokenizer = open_tokenizer(config, found["train"])
    size = {"batch_rows": config.batch.global_batch_size, "seq_len": config.batch.seq_len}
    packing = config.data.packing
    validation = None
    if "validation" in found:
        tokens = open_tokens(found["validation"], tokenizer, config.data.cache_dir)
        validation = EvalDataset(tokens, **size, packing=packing)
    train = Dataset(
        open_tokens(found["train"], tokenizer, config.data.cache_dir),
        **size,
        packing=packing,
        seed=config.run.seed if config.data.shuffle else None,
    )
    return TrainingData(train, validation, tokenizer)
