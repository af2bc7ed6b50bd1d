"""Tokenizers behind one small interface: raw bytes, a byte-level BPE trained here, or a `tokenizer.json`.

Text is never searched for special tokens: a document that contains the characters `<|endoftext|>` gets ordinary
tokens for them, so no text can end a document.
"""

import hashlib
import json
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxmoe.config import schema
from jaxmoe.config.errors import UserError
from jaxmoe.config.whole_file import write_whole
from jaxmoe.data.byte_lengths import token_byte_lengths
from jaxmoe.data.cache import cached_folder, fingerprint
from jaxmoe.data.sources import Documents

TOKENIZER_FILE, _CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
END_OF_TEXT = "<|endoftext|>"
BPE_TRAINING_BYTES = 256 * 2**20
"""BPE learns from the first documents up to this many bytes: more text hardly changes the merges, but costs time."""
_PIECE_CHARACTERS = 4096
_EOS_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<\uff5cend\u2581of\u2581sentence\uff5c>")
_SAFE_CUT = re.compile(r"(?<=[!-~])(?=[ \n])")
_log = logging.getLogger(__name__)


class Tokenizer(Protocol):
    """What the trainer needs of a tokenizer. `encode` adds no special token; whoever packs documents adds `eos_id`."""

    vocab_size: int
    """Every id is below it."""
    eos_id: int
    """Ends a document."""
    token_bytes: np.ndarray
    """Bytes of text behind each token, int64 [vocab_size]; special tokens 0."""
    fingerprint: str
    """Changes whenever any text might be encoded differently."""

    def encode(self, text: str) -> np.ndarray:
        """Token ids of the text, uint32 [tokens]."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each, in parallel."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of the ids; special tokens and ids without a token yield nothing, broken UTF-8 yields U+FFFD."""
        ...


class ByteTokenizer:
    """One token a byte of UTF-8; 256 ends a document."""

    vocab_size = 257
    eos_id = 256
    fingerprint = "bytes-1"

    def __init__(self) -> None:
        self.token_bytes = np.ones(self.vocab_size, np.int64)
        self.token_bytes[self.eos_id] = 0

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return bytes(int(i) for i in ids if 0 <= i < 256).decode(errors="replace")


class SubwordTokenizer:
    """A `tokenizer.json` of the `tokenizers` library, byte-level or with byte fallback."""

    def __init__(self, definition: str, *, eos_token: str | None, place: str, cut_long_texts: bool):
        """`definition` is the content of the tokenizer.json, `place` what messages call it.

        `cut_long_texts` encodes long texts in pieces, cut between a printable ASCII character and a space or line
        break. That leaves every token as it is where the text is first split by GPT-2's pattern, in which no match
        reaches across such a place and none looks behind; so for the BPE trained here, not for any other.

        Raises: UserError when the definition is broken, has no known token that ends a document, or has tokens whose
        bytes cannot be counted.
        """
        try:
            parsed = json.loads(definition)
            self._inner = tokenizers.Tokenizer.from_str(definition)
        except Exception as error:  # `tokenizers` raises nothing narrower
            raise UserError(f"{place}: no tokenizer.json ({error}); give a file that `tokenizers` has saved") from error
        self._inner.encode_special_tokens = True
        self._inner.no_truncation()
        self._inner.no_padding()
        self._cut_long_texts = cut_long_texts
        self._definition = definition
        vocabulary = self._inner.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self.eos_id = _find_eos(vocabulary, parsed, eos_token, place)
        lengths_V = token_byte_lengths(parsed, vocabulary, self.vocab_size)
        if lengths_V is None:
            raise UserError(
                f"{place}: neither a byte-level tokenizer nor one with byte fallback, so the bytes of its tokens are "
                f"unknown and bits per byte cannot be computed; use another tokenizer.json or data.tokenizer.kind=bpe"
            )
        self.token_bytes = lengths_V
        self.token_bytes[self.eos_id] = 0
        self.fingerprint = hashlib.sha256(f"{self.eos_id} {definition}".encode()).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        pieces = [list(cut_text(text)) if self._cut_long_texts else [text] for text in texts]
        flat = self._inner.encode_batch_fast([piece for part in pieces for piece in part], add_special_tokens=False)
        encoded = iter(flat)
        return [np.array([i for _ in part for i in next(encoded).ids], np.uint32) for part in pieces]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self._inner.decode([int(i) for i in ids], skip_special_tokens=True)

    def save(self, folder: Path) -> None:
        """Writes tokenizer.json and, for the token that ends a document, tokenizer_config.json; each whole or not."""
        folder.mkdir(parents=True, exist_ok=True)
        eos = {"eos_token": self._inner.id_to_token(self.eos_id)}
        for name, text in ((TOKENIZER_FILE, self._definition), (_CONFIG_FILE, json.dumps(eos))):
            write_whole(folder / name, text)


def saved_tokenizer(config: schema.Config, folder: Path) -> Tokenizer:
    """The tokenizer that a run saved in `folder`, without its training text.

    Raises: UserError when there is none, or it is broken.
    """
    if config.data.tokenizer.kind == "bytes":
        return ByteTokenizer()
    return _from_file(schema.Tokenizer(kind="file", path=str(folder / TOKENIZER_FILE)))


def open_tokenizer(config: schema.Config, training: Documents) -> Tokenizer:
    """The tokenizer of `data.tokenizer`; trains and caches the BPE when there is none yet for these documents.

    Raises: UserError when `model.vocab_size` is too small for it, or its file is missing or broken.
    """
    settings = config.data.tokenizer
    if settings.kind == "bytes":
        tokenizer: Tokenizer = ByteTokenizer()
    elif settings.kind == "bpe":
        size = settings.vocab_size or config.model.vocab_size
        _check_vocab_size(config, size, "data.tokenizer.vocab_size")
        tokenizer = _bpe(training, size, config.data.cache_dir)
    else:
        tokenizer = _from_file(settings)
    _check_vocab_size(config, tokenizer.vocab_size, "the vocabulary of data.tokenizer")
    return tokenizer


def train_bpe(texts: Iterable[str], vocab_size: int) -> str:
    """The tokenizer.json of a byte-level BPE learned from the texts. The same texts give the same file.

    Has fewer than `vocab_size` tokens when the texts are too short for more merges. At least 257: 256 bytes and
    `<|endoftext|>`, which is id 0.
    """
    assert vocab_size >= 257, vocab_size
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((piece for text in texts for piece in cut_text(text)), trainer)
    return tokenizer.to_str(pretty=True)


def cut_text(text: str) -> Iterator[str]:
    """Pieces of the text, in order, for faster encoding; see `SubwordTokenizer` on where it is cut."""
    start = 0
    while (cut := _SAFE_CUT.search(text, start + _PIECE_CHARACTERS)) is not None:
        yield text[start : cut.start()]
        start = cut.start()
    yield text[start:]


def _bpe(training: Documents, vocab_size: int, cache_dir: str) -> SubwordTokenizer:
    if vocab_size < 257:
        raise UserError(
            f"data.tokenizer.vocab_size={vocab_size}: byte-level BPE needs at least 257 (256 bytes and {END_OF_TEXT})"
        )

    def build(folder: Path) -> None:
        _log.info("training a byte-level BPE of %d tokens on %s", vocab_size, training.section)
        definition = train_bpe(_first_texts(training), vocab_size)
        (folder / TOKENIZER_FILE).write_text(definition, encoding="utf-8")

    # The library's version counts: another one may break ties between merges differently.
    key = fingerprint("bpe", training.content_hash, vocab_size, BPE_TRAINING_BYTES, tokenizers.__version__)
    file = cached_folder(cache_dir, f"bpe-{key[:16]}", build) / TOKENIZER_FILE
    tokenizer = SubwordTokenizer(
        file.read_text(encoding="utf-8"), eos_token=END_OF_TEXT, place=str(file), cut_long_texts=True
    )
    if tokenizer.vocab_size < vocab_size:
        _log.info("the training text is too short for %d tokens: the BPE has %d", vocab_size, tokenizer.vocab_size)
    return tokenizer


def _first_texts(training: Documents) -> Iterator[str]:
    num_bytes = 0
    for text in training:
        yield text
        num_bytes += len(text.encode())
        if num_bytes >= BPE_TRAINING_BYTES:
            _log.info("the BPE learns from the first %d bytes of %s", num_bytes, training.section)
            return


def _from_file(settings: schema.Tokenizer) -> SubwordTokenizer:
    if settings.path is None:
        raise UserError("data.tokenizer.path is missing: kind file reads a tokenizer.json; give its path")
    place = f"data.tokenizer.path={settings.path}"
    path = Path(settings.path)
    try:
        definition = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{place}: not UTF-8 text at byte {error.start}; give a tokenizer.json") from error
    except OSError as error:
        raise UserError(f"{place}: cannot be read ({error.strerror}); give a tokenizer.json") from error
    eos_token = settings.eos_token or _eos_of_config(path.with_name(_CONFIG_FILE))
    return SubwordTokenizer(definition, eos_token=eos_token, place=place, cut_long_texts=False)


def _eos_of_config(path: Path) -> str | None:
    """The `eos_token` of a Hugging Face tokenizer_config.json, when there is one."""
    if not path.exists():
        return None
    try:
        eos = json.loads(path.read_text(encoding="utf-8")).get("eos_token")
    except (ValueError, AttributeError) as error:
        raise UserError(f"{path}: no JSON object ({error}); mend it or set data.tokenizer.eos_token") from error
    return eos["content"] if isinstance(eos, dict) else eos


def _find_eos(vocabulary: dict[str, int], definition: dict, eos_token: str | None, place: str) -> int:
    if eos_token is not None:
        if eos_token not in vocabulary:
            raise UserError(f'{place}: has no token "{eos_token}" to end documents; set data.tokenizer.eos_token')
        return vocabulary[eos_token]
    known = [name for name in _EOS_NAMES if name in vocabulary]
    if len(known) != 1:
        special = ", ".join(t["content"] for t in definition.get("added_tokens", []) if t["special"]) or "none"
        raise UserError(
            f"{place}: {'several tokens' if known else 'no token'} known to end a document; "
            f"set data.tokenizer.eos_token to one of its special tokens: {special}"
        )
    return vocabulary[known[0]]


def _check_vocab_size(config: schema.Config, needed: int, what: str) -> None:
    if config.model.vocab_size < needed:
        raise UserError(
            f"model.vocab_size={config.model.vocab_size} must be at least {needed}, {what}; "
            f"set model.vocab_size to {-(-needed // 64) * 64} or use a smaller vocabulary"
        )
