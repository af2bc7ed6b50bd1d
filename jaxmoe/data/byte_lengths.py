"""How many bytes of text each token of a `tokenizer.json` stands for."""

import re
from typing import Any

import numpy as np

_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


def byte_level_alphabet() -> frozenset[str]:
    """The 256 characters by which byte-level BPE writes bytes: printable Latin-1 stands for itself, the rest for
    U+0100 and up. Source: Radford et al. 2019, GPT-2 (encoder.py, `bytes_to_unicode`)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    return frozenset(map(chr, printable)) | frozenset(chr(0x100 + i) for i in range(256 - len(printable)))


def token_byte_lengths(definition: dict[str, Any], vocabulary: dict[str, int], num_tokens: int) -> np.ndarray | None:
    """Raw-byte length of every token, int64 [num_tokens]; special tokens and unused ids 0.

    Counted from the raw bytes, not from decoded strings: a token may hold a part of a character.
    `definition` is the parsed tokenizer.json. None when the tokenizer is neither byte-level nor one with byte
    fallback, so that no rule is known.
    """
    kinds = _step_types(definition.get("decoder")) | _step_types(definition.get("pre_tokenizer"))
    lengths_V = np.zeros(num_tokens, np.int64)
    added = {token["content"]: token["special"] for token in definition.get("added_tokens", [])}
    alphabet = byte_level_alphabet()
    for text, token_id in vocabulary.items():
        if text in added:
            length = 0 if added[text] else len(text.encode())
        elif "ByteLevel" in kinds:
            length = len(text) if alphabet.issuperset(text) else len(text.encode())
        elif "ByteFallback" in kinds:
            length = 1 if _BYTE_TOKEN.fullmatch(text) else len(text.replace("\u2581", " ").encode())
        else:
            return None
        lengths_V[token_id] = length
    return lengths_V


def _step_types(step: dict[str, Any] | None) -> set[str]:
    """The types of a pre-tokenizer or decoder and of all steps inside it."""
    if not step:
        return set()
    inner = [*step.get("decoders", []), *step.get("pretokenizers", [])]
    return {step["type"]}.union(*(_step_types(part) for part in inner))
