"""Choosing a token from logits."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@partial(jax.jit, static_argnames=("temperature", "top_k", "num_tokens"))
def choose_tokens(
    logits_BV: Float[Array, "B V"], key: Array, *, temperature: float, top_k: int | None, num_tokens: int
) -> Int[Array, "B"]:
    """One token id per row. Temperature 0 takes the best; ties go to the lowest id.

    Args:
        top_k: only the best k ids may be chosen (those that tie with the k-th too); None for all.
        num_tokens: ids from here on have no text and are never chosen.
    """
    logits_BV = jnp.where(jnp.arange(logits_BV.shape[-1])[None] < num_tokens, logits_BV, -jnp.inf)
    if temperature == 0:
        return jnp.argmax(logits_BV, axis=-1)
    if top_k is not None and top_k < num_tokens:
        least_B1 = jax.lax.top_k(logits_BV, top_k)[0][:, -1:]
        logits_BV = jnp.where(logits_BV >= least_B1, logits_BV, -jnp.inf)
    return jax.random.categorical(key, logits_BV / temperature, axis=-1)
