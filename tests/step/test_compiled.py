"""What XLA:CPU makes of a step: nothing is computed again for every reader, nothing large is copied."""

import re

import pytest

from jaxmoe.kernels.grouped_matmul import row_chunks
from tests.reference import cases


@pytest.fixture(scope="module")
def program() -> str:
    """The compiled step of four layers that stand side by side in it: a fusion may repeat what it reads."""
    with cases.float64():
        return cases.compiled_step(cases.make_config(rows=2, layers=4, unroll_layers=4, remat="none"))


def test_rope_makes_cos_and_sin_once_for_all_heads_and_layers(program):
    made = re.findall(r"= (\S+) sine\(", program)  # the learning rate has cosines of its own
    assert 1 <= len(made) <= 2, "once forward, once again backward"


def test_the_optimiser_copies_no_moments(program):
    assert re.search(r"%state_opt_state_0__[mn]u__", program)
    assert not re.findall(r" copy\(%state_opt_state_0__[mn]u__.*", program)


def test_no_loop_over_experts_starts_from_a_copy_of_common_zeros(program):
    experts, choices = 8, 2 * cases.SEQ * 2
    rows = choices + row_chunks(choices, experts)[-1]
    of_rows, of_matrices = rf"f64\[{rows},\d+\]", rf"f64\[{experts},16,\d+\]"
    for shape in of_rows, of_matrices:
        made = re.findall(rf"= {shape}\S* fusion\(.*broadcast_in_dim", program)
        assert len(made) >= 3, "one for each layer with experts"
    assert not re.findall(rf"= {of_rows}\S* copy\(%\S*broadcast", program)
