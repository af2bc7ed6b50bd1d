"""What several tests need of a run is made once."""

from pathlib import Path

import pytest

from tests.e2e.commands import finish, start, tiny_tree, write_config


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("e2e")


@pytest.fixture(scope="session")
def trained(shared: Path) -> tuple[Path, str]:
    """(run folder, output) of a run that was never stopped."""
    config = write_config(shared / "tiny.yaml", tiny_tree(shared, shared / "whole"))
    words = ["run.sample_tokens=4", "run.sample_prompt=The people"]
    return shared / "whole", finish(start("train", "--config", str(config), *words))
