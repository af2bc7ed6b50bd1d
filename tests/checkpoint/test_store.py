"""What a checkpoint's reader says about files that it cannot have."""

from pathlib import Path

import orbax.checkpoint as ocp
import pytest

from jaxmoe.checkpoint.store import Checkpoints
from jaxmoe.config import UserError


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), ValueError("PERMISSION_DENIED: opening")])
def test_nobody_is_told_to_remove_a_checkpoint_that_may_not_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
):
    def restore(*_, **__):
        raise error

    monkeypatch.setattr(ocp.CheckpointManager, "restore", restore)
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(UserError) as caught:
        checkpoints.about(7)
    assert f"{tmp_path / '7'}: this checkpoint may not be read" in str(caught.value)
    assert "remove that folder" not in str(caught.value)
