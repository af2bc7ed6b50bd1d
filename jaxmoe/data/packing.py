"""Which tokens stand where: plans that map rows to pieces of documents, by index alone.

A plan numbers its rows 0, 1, 2, ... for ever (`repeat`) or once through the documents. Any row can be asked for
without making those before it, which is what lets a restarted run, or a host that loads some rows only, see the same
data. Shuffling uses raw bits of PCG64, which numpy promises not to change.

`SplitPlan` joins the documents of an epoch in its order, one epoch after the other without a seam, and cuts the stream
every S tokens. No token is lost and no row has padding: what is left at the end of an epoch shares a row with the start
of the next one. A document that a cut goes through continues at the start of the next row as a new segment.

`BestFitPlan` keeps documents whole; those longer than S are cut into pieces of S and a rest. Pieces are placed by
best-fit-decreasing, among the documents of a window, into rows that end with padding. The rows are made once, from
documents shuffled by the seed; an epoch shuffles the rows. So all epochs have the same number of rows, and a row's
epoch is a division.
"""

import bisect
import functools
from dataclasses import dataclass
from typing import Protocol

import numpy as np

PLAN_VERSION = 1
"""Goes up whenever the same documents and settings would give other rows."""
_WINDOW_DOCUMENTS = 4096


@dataclass(frozen=True)
class Segments:
    """Pieces of documents placed in rows, sorted by (row, column). All int64 [segments]."""

    row: np.ndarray
    """Counted from the first row asked for."""
    column: np.ndarray
    length: np.ndarray
    document: np.ndarray
    start: np.ndarray
    """Of the piece within its document."""


class Plan(Protocol):
    """Rows of `seq_len` tokens."""

    num_rows: int
    """In one pass over the documents; rounded up where passes share a row."""

    def segments(self, first_row: int, num_rows: int) -> Segments:
        """The pieces in rows [first_row, first_row + num_rows). Rows past the end of a plan that ends are empty."""
        ...


class SplitPlan:
    """Documents joined and cut every `seq_len` tokens."""

    def __init__(self, lengths: np.ndarray, seq_len: int, *, seed: int | None, repeat: bool):
        """`lengths` int64 [documents], all > 0; `seed` None keeps the order given."""
        self._lengths = np.asarray(lengths, np.int64)
        self._total = int(self._lengths.sum())
        self._seq_len = seq_len
        self._seed = seed
        self._repeat = repeat
        self._epoch = functools.lru_cache(maxsize=2)(self._make_epoch)
        self.num_rows = -(-self._total // seq_len)

    def _make_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The epoch's documents in order, and where each begins in the stream of the epoch."""
        order = shuffled(len(self._lengths), self._seed, epoch)
        lengths = self._lengths[order]
        return order, np.cumsum(lengths) - lengths

    def segments(self, first_row: int, num_rows: int) -> Segments:
        size = self._seq_len
        stop = (first_row + num_rows) * size
        if not self._repeat:
            stop = min(stop, self._total)
        parts = []
        begin = first_row * size
        while begin < stop:  # one turn per epoch that the rows touch
            epoch = begin // self._total
            end = min(stop, (epoch + 1) * self._total)
            parts.append(self._in_epoch(epoch, begin, end))
            begin = end
        position, length, document, start = np.concatenate(parts, axis=1) if parts else np.zeros((4, 0), np.int64)
        return Segments(position // size - first_row, position % size, length, document, start)

    def _in_epoch(self, epoch: int, begin: int, end: int) -> np.ndarray:
        """Pieces between two places of the endless stream, within one epoch: position, length, document, start."""
        order, starts = self._epoch(epoch)
        base = epoch * self._total
        first, last = np.searchsorted(starts, [begin - base, end - base], side="left")
        borders = np.arange(-(-begin // self._seq_len) * self._seq_len, end, self._seq_len)
        position = np.unique(np.concatenate([[begin], starts[first:last] + base, borders]))
        length = np.diff(position, append=end)
        place = np.searchsorted(starts, position - base, side="right") - 1
        return np.stack([position, length, order[place], position - base - starts[place]])


class BestFitPlan:
    """Whole documents where they fit, the rest of a row padding."""

    def __init__(self, lengths: np.ndarray, seq_len: int, *, seed: int | None, repeat: bool):
        """`lengths` int64 [documents], all > 0; `seed` None keeps documents and rows in the order given."""
        order = shuffled(len(lengths), seed, 0, stream=1)
        rows: list[list[tuple[int, int, int]]] = []
        for first in range(0, len(order), _WINDOW_DOCUMENTS):
            window = order[first : first + _WINDOW_DOCUMENTS]
            pieces = [
                (document, start, min(seq_len, length - start))
                for document, length in zip(window.tolist(), lengths[window].tolist(), strict=True)
                for start in range(0, length, seq_len)
            ]
            rows.extend(best_fit_decreasing(pieces, seq_len))
        self._pieces = np.array([piece for row in rows for piece in row], np.int64).reshape(-1, 3)
        self._row_starts = np.cumsum([0, *map(len, rows)])
        self._seed = seed
        self._repeat = repeat
        self._order = functools.lru_cache(maxsize=2)(functools.partial(shuffled, len(rows), seed))
        self.num_rows = len(rows)

    def segments(self, first_row: int, num_rows: int) -> Segments:
        numbers = range(first_row, first_row + num_rows if self._repeat else min(first_row + num_rows, self.num_rows))
        rows = np.array([self._order(n // self.num_rows)[n % self.num_rows] for n in numbers], np.int64)
        counts = self._row_starts[rows + 1] - self._row_starts[rows]
        which = np.repeat(self._row_starts[rows], counts) + _count_up(counts)
        document, start, length = self._pieces[which].T
        row = np.repeat(np.arange(len(rows)), counts)
        begins = np.cumsum(length) - length
        column = begins - begins[np.searchsorted(row, row)]
        return Segments(row, column, length, document, start)


def make_plan(packing: str, lengths: np.ndarray, seq_len: int, *, seed: int | None, repeat: bool) -> Plan:
    """The plan that `data.packing` names."""
    kind = {"split": SplitPlan, "best_fit": BestFitPlan}[packing]
    return kind(lengths, seq_len, seed=seed, repeat=repeat)


def best_fit_decreasing(pieces: list[tuple[int, int, int]], room: int) -> list[list[tuple[int, int, int]]]:
    """Rows of pieces (document, start, length) that fit into `room` each: longest piece first, into the fullest row
    that can take it, else into a new row. Rows stand in the order in which they were opened; equal pieces in the order
    given."""
    rows: list[list[tuple[int, int, int]]] = []
    open_rows: list[tuple[int, int]] = []  # (room left, row), sorted
    for piece in sorted(pieces, key=lambda piece: -piece[2]):
        at = bisect.bisect_left(open_rows, (piece[2], -1))
        if at < len(open_rows):
            left, row = open_rows.pop(at)
        else:
            left, row = room, len(rows)
            rows.append([])
        rows[row].append(piece)
        if left > piece[2]:
            bisect.insort(open_rows, (left - piece[2], row))
    return rows


def shuffled(count: int, seed: int | None, epoch: int, stream: int = 0) -> np.ndarray:
    """The numbers below `count`, int64, in an order that (seed, epoch, stream) determine; None: in their order."""
    if seed is None:
        return np.arange(count)
    bits = np.random.PCG64(np.random.SeedSequence([seed, epoch, stream])).random_raw(count)
    return np.argsort(bits, kind="stable")


def fill_rows(
    tokens: np.ndarray, offsets: np.ndarray, segments: Segments, num_rows: int, seq_len: int
) -> dict[str, np.ndarray]:
    """The five fields of a batch, each [num_rows, seq_len], from the pieces placed in its rows.

    A token's target is the next one of its document, also where that stands in another row; a document's last token
    has loss_mask 0 and target 0. Segments count from 1 in every row, positions from 0 in every segment.
    """
    shape = (num_rows, seq_len)
    names = ("inputs", "targets", "positions", "segment_ids")
    fields: dict[str, np.ndarray] = {name: np.zeros(shape, np.int32) for name in names}
    fields["loss_mask"] = np.zeros(shape, np.float32)
    position = _count_up(segments.length)

    def spread(values: np.ndarray) -> np.ndarray:
        return np.repeat(values, segments.length)

    place = spread(segments.row * seq_len + segments.column) + position
    source = spread(offsets[segments.document] + segments.start) + position
    has_target = source + 1 < spread(offsets[segments.document + 1])
    number = np.arange(len(segments.row)) - np.searchsorted(segments.row, segments.row) + 1
    fields["inputs"].reshape(-1)[place] = tokens[source]
    fields["targets"].reshape(-1)[place[has_target]] = tokens[source[has_target] + 1]
    fields["loss_mask"].reshape(-1)[place] = has_target
    fields["positions"].reshape(-1)[place] = position
    fields["segment_ids"].reshape(-1)[place] = spread(number)
    return fields


def _count_up(counts: np.ndarray) -> np.ndarray:
    """0 .. c - 1 for every c of `counts`, joined."""
    total = int(counts.sum())
    return np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
