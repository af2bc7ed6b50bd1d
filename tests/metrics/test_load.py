"""Expert load from counts, against numbers worked out by hand."""

import numpy as np
import pytest

from jaxmoe.metrics import MetricError
from jaxmoe.metrics.load import load_per_layer, load_scalars

COUNTS_LE = np.array([[0, 0, 0, 0], [3, 3, 3, 3], [8, 0, 0, 0], [6, 2, 4, 0]])
OWNS_L = np.array([False, True, True, True])
SERVED_L = np.array([0, 12, 6, 15])


def test_load_per_layer_matches_hand_worked_numbers():
    got = load_per_layer(COUNTS_LE, SERVED_L)
    np.testing.assert_allclose(got["load_max_over_mean"], [0, 1, 4, 2])
    np.testing.assert_allclose(got["load_variation"], [0, 0, np.sqrt(12) / 2, np.sqrt(5) / 3])
    np.testing.assert_allclose(got["dead_experts"], [0, 0, 3, 1])
    np.testing.assert_array_equal(got["dropped_share"], [0, 0, 0.25, -0.25])


def test_scalars_are_means_over_the_layers_that_have_experts():
    got = load_scalars(COUNTS_LE, SERVED_L - [0, 0, 0, 3], OWNS_L)
    assert got["load_max_over_mean"] == pytest.approx(7 / 3)
    assert got["dead_experts"] == pytest.approx(4 / 3)
    assert got["dropped_share"] == pytest.approx(0.25 / 3)


def test_a_layer_with_experts_but_without_tokens_counts_as_zero():
    assert load_scalars(COUNTS_LE, SERVED_L, np.ones(4, bool))["load_max_over_mean"] == pytest.approx(7 / 4)


@pytest.mark.parametrize(
    ("counts", "owns", "text"),
    [
        (COUNTS_LE * 1.0, OWNS_L, "must be integers"),
        (COUNTS_LE[0], OWNS_L, r"\[layers, experts\]"),
        (-COUNTS_LE, OWNS_L, "must be integers >= 0"),
        (COUNTS_LE, np.zeros(4, bool), "at least one of the 4"),
        (COUNTS_LE, OWNS_L[:3], "at least one of the 4"),
        (COUNTS_LE, np.array([False, True, True, False]), r"layers \[3\] have counts but no experts"),
    ],
)
def test_wrong_counts_are_errors(counts, owns, text):
    with pytest.raises(MetricError, match=text):
        load_scalars(counts, SERVED_L, owns)
