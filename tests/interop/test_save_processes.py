"""`save_hf` called by several processes: one writes, the bytes are those of one process, and all hear of a failure.

This file is also what the processes of the test run: `python test_save_processes.py FOLDER [options of a place]`.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxmoe.config.errors import UserError
from jaxmoe.runtime.processes import add_arguments, find_place, joined
from tests.interop import golden_cases as goldens
from tests.interop.test_round_trip import copy_as
from tests.runtime.test_processes import outputs, start

FAMILY = "glm4_moe"
SPOILED = "spoiled"
#: One process alone has this expert.
EXPERT = "model.layers.1.mlp.experts.0.up_proj.weight"


def save(folder: Path) -> list[str]:
    """Saves once, then where something is in the way and where a number does not fit, and loads what is spoiled; what
    the errors say."""
    import jax

    import jaxmoe

    sizes = {"ep": 2, "tp": 2}
    state = goldens.load(FAMILY, sizes, (4, 16), "optimizer.kind=sgd", "parallel.zero=3")
    jaxmoe.save_hf(state, folder / "out", max_shard_bytes=100_000)
    errors = []
    try:
        jaxmoe.save_hf(state, folder / "out")
    except UserError as error:
        errors.append(str(error))
    huge = jax.tree.map(lambda leaf: leaf * 1e6, state.params)
    try:
        jaxmoe.save_hf(replace(state, params=huge), folder / "half", dtype="float16")
    except UserError as error:
        errors.append(str(error))
    try:
        jaxmoe.load_hf(folder.parent / SPOILED, state.mesh, ["optimizer.kind=sgd"])
    except UserError as error:
        errors.append(str(error))
    return errors


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    add_arguments(parser)
    arguments = parser.parse_args()
    with joined(find_place(arguments)) as processes:
        processes.start_jax()
        print("\n".join(save(arguments.folder)))


@pytest.mark.slow  # two processes start
def test_one_of_two_processes_writes_and_both_hear_what_went_wrong(tmp_path):
    (tmp_path / "alone").mkdir()
    (tmp_path / "two").mkdir()
    copy_as(FAMILY, tmp_path / SPOILED, lambda name, value: value * np.float32("nan") if name == EXPERT else value)
    want = save(tmp_path / "alone")
    assert "exists already" in want[0]
    assert "does not fit in float16" in want[1]
    assert f"{EXPERT} holds NaN" in want[2]
    running = start([__file__, str(tmp_path / "two")], 2)
    texts = outputs(running, 300)
    assert [process.returncode for process in running] == [0, 0], "\n".join(texts)
    assert all(text.replace("/alone", "/two") in texts[0] for text in want), texts[0]
    assert texts[1].count("is not written; process 0 says why") == 2, texts[1]
    assert "1 tensors hold numbers that no model can have; another process says which" in texts[1], texts[1]
    assert [item.name for item in (tmp_path / "two").iterdir()] == ["out"]
    files = {file.name: file.read_bytes() for file in (tmp_path / "alone" / "out").iterdir()}
    assert len(files) > 3
    assert {file.name: file.read_bytes() for file in (tmp_path / "two" / "out").iterdir()} == files


if __name__ == "__main__":
    _main()
