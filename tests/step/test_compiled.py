"""What XLA:CPU makes of a step: nothing is computed again for every reader, nothing large is copied."""

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxmoe
from jaxmoe.step.state import fresh_arrays, make_mesh
from tests.reference import cases

ROWS = 2


@pytest.fixture(scope="module")
def program() -> Iterator[str]:
    """The compiled step of four layers that stand side by side in it: a fusion may repeat what it reads."""
    with cases.float64():
        config = cases.make_config(rows=ROWS, layers=4, unroll_layers=4, remat="none")
        state = jax.eval_shape(partial(fresh_arrays, config, make_mesh(config, jax.devices()[:1])), jnp.uint32(0))
        fields = dict.fromkeys(("inputs", "targets", "positions", "segment_ids"), jnp.int32)
        shapes: dict[str, Any] = {
            name: jax.ShapeDtypeStruct((ROWS, cases.SEQ), dtype)
            for name, dtype in (fields | {"loss_mask": jnp.float32}).items()
        }
        lowered = jaxmoe.train_step.lower(state, jaxmoe.Batch(**shapes))
        yield lowered.compile(compiler_options=cases.FAST_COMPILE).as_text() or ""


def test_rope_makes_cos_and_sin_once_for_all_heads_and_layers(program):
    made = re.findall(r"= (\S+) sine\(", program)  # the learning rate has cosines of its own
    assert 1 <= len(made) <= 2, "once forward, once again backward"


def test_the_optimiser_copies_no_moments(program):
    assert re.search(r"%state_opt_state_0__[mn]u__", program)
    assert not re.findall(r" copy\(%state_opt_state_0__[mn]u__.*", program)
