"""The command that draws training curves of several layouts over each other."""

import io
from pathlib import Path

from PIL import Image
from rich.console import Console

from jaxmoe.config.load import load_config
from jaxmoe.runtime.proof.curves import draw_curves
from tests.e2e.commands import tiny_tree, write_config


def test_losses_of_two_layouts_lie_on_each_other(tmp_path: Path):
    config = load_config(write_config(tmp_path / "tiny.yaml", tiny_tree(tmp_path, tmp_path / "run")), ["run.steps=4"])
    said = io.StringIO()
    layouts = [{}, {"dp": 2, "zero": 1}]
    picture = tmp_path / "curves.png"
    worst = draw_curves(config, picture, layouts=layouts, steps=3, dtype="float32", console=Console(file=said))
    assert 0 < worst < 1e-5
    assert said.getvalue().count(": loss ") == 2
    with Image.open(picture) as image:
        assert image.size[0] > 500
