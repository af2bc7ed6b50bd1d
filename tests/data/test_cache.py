import json

import pytest

from jaxmoe.config.errors import UserError
from jaxmoe.data.cache import cached_folder


class Build:
    def __init__(self):
        self.count = 0

    def __call__(self, folder):
        self.count += 1
        (folder / "a.bin").write_bytes(b"0123456789")
        (folder / "b.txt").write_text("text")


def truncate(folder):
    (folder / "a.bin").write_bytes(b"01234")


def change_a_byte(folder):
    (folder / "a.bin").write_bytes(b"0123456780")


def remove_a_file(folder):
    (folder / "b.txt").unlink()


def remove_the_manifest(folder):
    (folder / "manifest.json").unlink()


def cut_the_manifest(folder):
    (folder / "manifest.json").write_text((folder / "manifest.json").read_text()[:-9])


def replace_the_manifest(folder):
    (folder / "manifest.json").write_text(json.dumps(["no", "manifest"]))


DAMAGES = [
    (truncate, "a.bin has 5 bytes in place of 10"),
    (change_a_byte, "the content of a.bin has changed"),
    (remove_a_file, "b.txt is missing"),
    (remove_the_manifest, "manifest.json is missing"),
    (cut_the_manifest, "manifest.json is broken"),
    (replace_the_manifest, "manifest.json is broken"),
]


def test_a_folder_is_built_once(tmp_path, caplog):
    build = Build()
    folders = {cached_folder(tmp_path / "c", "x", build) for _ in range(3)}
    assert build.count == 1
    assert folders == {tmp_path / "c" / "x"}
    assert caplog.text == ""


@pytest.mark.parametrize(("damage", "reason"), DAMAGES, ids=[damage.__name__ for damage, _ in DAMAGES])
def test_a_damaged_folder_is_built_again_with_the_reason(tmp_path, caplog, damage, reason):
    build = Build()
    folder = cached_folder(tmp_path, "x", build)
    damage(folder)
    assert cached_folder(tmp_path, "x", build) == folder
    assert build.count == 2
    assert f"built again: {reason}" in caplog.text
    assert (folder / "a.bin").read_bytes() == b"0123456789"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x", "x.lock"]


def test_a_build_that_fails_leaves_nothing(tmp_path):
    def fail(folder):
        (folder / "half").write_text("half")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        cached_folder(tmp_path, "x", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["x.lock"]


def test_what_a_killed_build_left_is_removed(tmp_path):
    (tmp_path / "x.new-123").mkdir()
    (tmp_path / "x.new-123" / "half").write_text("half")
    (tmp_path / "y.new-123").mkdir()
    cached_folder(tmp_path, "x", Build())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x", "x.lock", "y.new-123"]


def test_a_cache_dir_that_is_a_file_is_an_error(tmp_path):
    (tmp_path / "c").write_text("a file")
    with pytest.raises(UserError, match=r"data\.cache_dir=.*cannot be written"):
        cached_folder(tmp_path / "c", "x", Build())
