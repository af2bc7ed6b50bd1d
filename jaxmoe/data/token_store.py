"""Tokenised documents in a memory-mapped file: random access to any of them, without reading the rest."""

import array
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxmoe.data.cache import cached_folder, fingerprint
from jaxmoe.data.sources import Documents
from jaxmoe.data.tokenizer import Tokenizer

_BATCH_CHARACTERS = 2**20
_LOG_SECONDS = 5.0
_CHUNK_TOKENS = 2**24
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TokenStore:
    """All documents of a source as one run of tokens; each ends with the tokenizer's `eos_id`.

    A document of n tokens (the end included) has n - 1 targets: all its tokens but the first.
    """

    tokens: np.ndarray
    """uint16 or uint32 [num_tokens], memory-mapped, read-only."""
    offsets: np.ndarray
    """int64 [num_documents + 1]: document d is tokens[offsets[d] : offsets[d + 1]]."""
    token_bytes: np.ndarray
    """int64 [vocabulary]: bytes of text behind each token."""
    fingerprint: str
    """Of the documents' bytes, how they are read, and the tokenizer."""

    @property
    def num_documents(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        return int(self.offsets[-1])

    @property
    def num_targets(self) -> int:
        return self.num_tokens - self.num_documents

    def document(self, document_id: int) -> np.ndarray:
        """The tokens of one document, its end included."""
        return self.tokens[self.offsets[document_id] : self.offsets[document_id + 1]]

    def target_counts(self) -> np.ndarray:
        """How often each token is a target, int64 [vocabulary]; one pass over all tokens."""
        counts_V = np.zeros(len(self.token_bytes), np.int64)
        for start in range(0, self.num_tokens, _CHUNK_TOKENS):
            counts_V += np.bincount(self.tokens[start : start + _CHUNK_TOKENS], minlength=len(counts_V))
        return counts_V - np.bincount(self.tokens[self.offsets[:-1]], minlength=len(counts_V))

    def target_bytes(self) -> int:
        """Bytes of text behind all targets: every document's, less the bytes of its first token."""
        return int(self.target_counts() @ self.token_bytes)


def open_tokens(documents: Documents, tokenizer: Tokenizer, cache_dir: str) -> TokenStore:
    """The documents' tokens from the cache, tokenised first where there is no intact entry.

    Raises: UserError from reading the documents, or when all of them are empty.
    """
    key = fingerprint("tokens", documents.content_hash, tokenizer.fingerprint)
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")
    folder = cached_folder(
        cache_dir, f"tokens-{key[:16]}", lambda folder: _tokenise(documents, tokenizer, dtype, folder)
    )
    return TokenStore(
        tokens=np.memmap(folder / "tokens.bin", dtype, mode="r"),
        offsets=np.load(folder / "offsets.npy", allow_pickle=False),
        token_bytes=tokenizer.token_bytes,
        fingerprint=key,
    )


def _tokenise(documents: Documents, tokenizer: Tokenizer, dtype: np.dtype, folder: Path) -> None:
    offsets = array.array("q", [0])
    num_bytes, start = 0, time.monotonic()
    next_log = start + _LOG_SECONDS
    with (folder / "tokens.bin").open("wb") as stream:
        for texts in _batches(documents):
            for ids in tokenizer.encode_batch(texts):
                stream.write(np.append(ids, np.uint32(tokenizer.eos_id)).astype(dtype).tobytes())
                offsets.append(offsets[-1] + len(ids) + 1)
            num_bytes += sum(len(text.encode()) for text in texts)
            if time.monotonic() >= next_log:
                next_log = time.monotonic() + _LOG_SECONDS
                _log.info("tokenising %s: %.1f MB, %d documents", documents.section, num_bytes / 1e6, len(offsets) - 1)
    np.save(folder / "offsets.npy", np.array(offsets, np.int64))
    _log.info(
        "tokenised %s in %.1f s: %d documents, %.1f MB of text, %d tokens",
        documents.section, time.monotonic() - start, len(offsets) - 1, num_bytes / 1e6, offsets[-1],
    )  # fmt: skip


def _batches(documents: Documents) -> Iterator[list[str]]:
    """Documents in order, in groups of about `_BATCH_CHARACTERS`, so that memory stays bounded."""
    texts, size = [], 0
    for text in documents:
        texts.append(text)
        size += len(text)
        if size >= _BATCH_CHARACTERS:
            yield texts
            texts, size = [], 0
    if texts:
        yield texts
