"""Batches that show what ordinary ones hide."""

from typing import Literal

import numpy as np

BatchKind = Literal["ragged", "identical"]


def make_batch(kind: BatchKind, rows: int, columns: int, vocab_size: int, seed: int) -> dict[str, np.ndarray]:
    """`ragged`, or `identical`: the row of the ragged batch with the most targets, in every row."""
    batch = ragged_batch(rows, columns, vocab_size, seed)
    if kind == "ragged":
        return batch
    fullest = int(np.argmax((batch["loss_mask"] > 0).sum(axis=1)))
    return {name: np.repeat(value[fullest : fullest + 1], rows, axis=0) for name, value in batch.items()}


def ragged_batch(rows: int, columns: int, vocab_size: int, seed: int) -> dict[str, np.ndarray]:
    """The five arrays, [rows, columns], with

    - documents of 1 to columns / 3 tokens, packed, with padding between and after them;
    - masks of uneven density and uneven weights;
    - one of 4 micro-batches without a single target, one replica of 8 that is all padding in another;
    - a block of columns (an eighth) without targets in every row.
    """
    rng = np.random.default_rng(seed)
    shape = (rows, columns)
    segments, positions, mask = np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    for row in range(rows):
        density, column, document = rng.uniform(0.1, 1.0), 0, 0
        while column < columns:
            length = min(int(rng.integers(1, columns // 3 + 1)), columns - column)
            place = slice(column, column + length)
            column += length
            if rng.random() < 0.15:
                continue
            document += 1
            segments[row, place] = document
            positions[row, place] = np.arange(length)
            mask[row, place] = (rng.random(length) < density) * rng.choice([0.5, 1.0, 1.0, 2.0], length)
            mask[row, column - 1] = 0
    quarter = rows // 4
    mask[quarter : 2 * quarter] = 0
    empty = slice(2 * quarter, 2 * quarter + max(quarter // 8, 1))
    segments[empty], positions[empty], mask[empty] = 0, 0, 0
    mask[:, columns // 8 : columns // 4] = 0
    return {
        "inputs": rng.integers(0, vocab_size, shape, dtype=np.int32),
        "targets": rng.integers(0, vocab_size, shape, dtype=np.int32),
        "loss_mask": mask,
        "positions": positions,
        "segment_ids": segments,
    }
