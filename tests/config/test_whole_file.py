"""A file is there whole, or as it was before."""

import os
from pathlib import Path

import pytest

from jaxmoe.config.whole_file import write_whole


@pytest.mark.parametrize("content", ["größer\n", b"\x89PNG"])
def test_the_content_is_there_with_the_permissions_of_any_new_file(tmp_path: Path, content: str | bytes) -> None:
    (tmp_path / "plain").touch()
    write_whole(tmp_path / "file", content)
    assert (tmp_path / "file").read_bytes() == (content if isinstance(content, bytes) else content.encode())
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    write_whole(file, "old")

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        write_whole(file, "new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert file.read_text() == "old"
