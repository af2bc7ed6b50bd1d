"""The folder of a run, before training writes to it."""

import os
from pathlib import Path

import pytest

from jaxmoe.config import UserError
from jaxmoe.runtime.run_folder import RunFolder


@pytest.mark.parametrize("part", ["checkpoints", "tokenizer"])
def test_a_part_that_may_not_be_written_is_named_before_any_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "tokenizer").mkdir()
    # The superuser may write everywhere, so the system's answer is stood in for.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != part)
    with (
        pytest.raises(UserError, match=f"run.dir={tmp_path}: .*/{part} cannot be written"),
        RunFolder(tmp_path).locked(),
    ):
        pass
