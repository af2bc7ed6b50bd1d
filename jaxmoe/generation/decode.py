"""Continuing prompts token by token, with the whole window read anew for every token."""

from collections.abc import Callable, Sequence

import jax
import numpy as np

from jaxmoe.generation.sampling import choose_tokens
from jaxmoe.generation.settings import Sampling

NextLogits = Callable[[np.ndarray, np.ndarray], jax.Array]
"""(ids int32 [B, W], place of each row's last token [B]; -1 for a row without one) -> logits [B, V] after it."""


def continue_prompts(
    next_logits: NextLogits,
    prompts: Sequence[Sequence[int]],
    *,
    num_new: int,
    shape: tuple[int, int],
    num_tokens: int,
    eos_id: int,
    sampling: Sampling,
) -> list[list[int]]:
    """The new ids of each prompt: `num_new` of them, or fewer where the document ends first.

    Args:
        shape: rows and positions of the window. A row that outgrows it is continued from its last W - 1 tokens or more.
        num_tokens: size of the tokenizer's vocabulary.
    """
    rows, width = shape
    assert 0 < len(prompts) <= rows, (len(prompts), rows)
    assert all(len(prompt) > 0 for prompt in prompts), "a prompt needs a token to start from"
    texts = [list(prompt) for prompt in prompts]
    ended = [False] * len(texts)
    key = jax.random.key(sampling.seed)
    for number in range(num_new):
        ids_BW = np.zeros((rows, width), np.int32)
        last_B = np.full(rows, -1, np.int32)
        for row, text in enumerate(texts):
            shown = text[-width:]
            ids_BW[row, : len(shown)] = shown
            last_B[row] = len(shown) - 1
        chosen = choose_tokens(
            next_logits(ids_BW, last_B),
            jax.random.fold_in(key, number),
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            num_tokens=num_tokens,
        )
        for row, token in enumerate(np.asarray(chosen)[: len(texts)].tolist()):
            ended[row] |= token == eos_id
            if not ended[row]:
                texts[row].append(token)
        if all(ended):
            break
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]
