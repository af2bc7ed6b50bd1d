"""Choosing tokens, and continuing prompts with a model that is known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.config import UserError
from jaxmoe.generation.decode import continue_prompts
from jaxmoe.generation.sampling import choose_tokens
from jaxmoe.generation.settings import Sampling

LOGITS = jnp.log(jnp.asarray([[0.1, 0.4, 0.4, 0.05, 0.05]]))


def frequencies(*, temperature: float, top_k: int | None, num_tokens: int = 5) -> np.ndarray:
    logits = jnp.tile(LOGITS, (20_000, 1))
    chosen = choose_tokens(logits, jax.random.key(1), temperature=temperature, top_k=top_k, num_tokens=num_tokens)
    return np.bincount(np.asarray(chosen), minlength=5) / len(chosen)


def test_temperature_zero_takes_the_best_and_of_equals_the_lowest():
    assert frequencies(temperature=0.0, top_k=None)[1] == 1.0


def test_temperature_one_gives_the_distribution():
    # 20000 draws: standard deviation of a frequency at most 0.0035.
    np.testing.assert_allclose(frequencies(temperature=1.0, top_k=None), np.exp(LOGITS[0]), atol=0.015)


def test_low_temperature_sharpens():
    power = np.exp(2 * np.asarray(LOGITS[0]))
    np.testing.assert_allclose(frequencies(temperature=0.5, top_k=None), power / power.sum(), atol=0.015)


def test_top_k_leaves_the_best_with_their_ratios():
    np.testing.assert_allclose(frequencies(temperature=1.0, top_k=3), np.array([1, 4, 4, 0, 0]) / 9, atol=0.015)


def test_ids_without_a_text_are_never_chosen():
    np.testing.assert_allclose(frequencies(temperature=1.0, top_k=None, num_tokens=2), [0.2, 0.8, 0, 0, 0], atol=0.015)


def counting(ids_BW: np.ndarray, last_B: np.ndarray) -> jax.Array:
    """A model of 8 tokens that always continues with the next number."""
    following = (ids_BW[np.arange(len(ids_BW)), np.maximum(last_B, 0)] + 1) % 8
    return jnp.asarray(np.eye(8)[following])


def count_on(prompts: list[list[int]], *, num_new: int, rows: int = 4, width: int = 6) -> list[list[int]]:
    return continue_prompts(
        counting,
        prompts,
        num_new=num_new,
        shape=(rows, width),
        num_tokens=8,
        eos_id=7,
        sampling=Sampling(temperature=0.0),
    )


def test_prompts_of_unequal_length_are_continued_side_by_side():
    assert count_on([[3], [9, 0, 1]], num_new=3) == [[4, 5, 6], [2, 3, 4]]


def test_a_document_ends_without_its_end_token_while_others_go_on():
    assert count_on([[5], [0]], num_new=4) == [[6], [1, 2, 3, 4]]


def test_a_text_that_outgrows_the_window_goes_on_from_its_end():
    assert count_on([[6, 6, 6, 6, 6, 6, 6, 0]], num_new=6) == [[1, 2, 3, 4, 5, 6]]


def test_the_model_sees_the_latest_tokens_and_no_others():
    seen = []

    def watch(ids_BW: np.ndarray, last_B: np.ndarray) -> jax.Array:
        seen.append((ids_BW[0, : last_B[0] + 1].tolist(), last_B[1]))
        return counting(ids_BW, last_B)

    continue_prompts(
        watch,
        [[0, 1]],
        num_new=3,
        shape=(2, 3),
        num_tokens=8,
        eos_id=7,
        sampling=Sampling(temperature=0.0),
    )
    assert seen == [([0, 1], -1), ([0, 1, 2], -1), ([1, 2, 3], -1)]


def test_bad_settings_are_all_named():
    with pytest.raises(UserError) as error:
        Sampling(temperature=-1.0, top_k=0, seed=-1)
    for name in ("temperature=-1.0", "top-k=0", "seed=-1"):
        assert name in str(error.value)


@pytest.mark.parametrize("temperature", [float("nan"), float("inf"), 1e-300, 1e300])
def test_temperatures_that_leave_no_numbers_in_float32_are_refused(temperature: float):
    with pytest.raises(UserError, match="must be 0 or from 1e-06 to 1e"):
        Sampling(temperature=temperature)


@pytest.mark.parametrize("temperature", [1e-6, 1e6])
def test_the_outermost_temperatures_still_choose_among_the_best(temperature: float):
    assert frequencies(temperature=Sampling(temperature).temperature, top_k=3)[3:].sum() == 0
