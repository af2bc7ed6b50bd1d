"""`python -m jaxmoe.bench --attention`: three measurements at each length, printed and drawn."""

import json
from pathlib import Path

import pytest

from jaxmoe.bench import main

CONFIG = str(Path(__file__).parents[2] / "configs" / "deepseek_mini.yaml")


def test_every_length_is_measured_and_drawn(tmp_path, capsys):
    chart = tmp_path / "chart.png"
    arguments = ["--config", CONFIG, "--attention", str(chart), "--lengths", "64,256", "--json"]
    assert main([*arguments, "model.attention.dsa.index_topk=16"]) == 0
    points = json.loads(capsys.readouterr().out)
    assert [(p["length"], p["kind"]) for p in points] == [
        (length, kind) for length in (64, 256) for kind in ("dense", "sparse", "sparse_loss")
    ]
    assert all(p["seconds"] > 0 and p["megabytes"] > 0 for p in points)
    memory = {(p["length"], p["kind"]): p["megabytes"] for p in points}
    assert memory[256, "dense"] > memory[64, "dense"]
    assert memory[256, "sparse_loss"] > memory[256, "sparse"], "the loss is computed where it is asked for"
    assert chart.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("wrong", ["64,many", ""])
def test_lengths_are_numbers(wrong, capsys):
    with pytest.raises(SystemExit):
        main(["--config", CONFIG, "--attention", "chart.png", "--lengths", wrong])
    assert "--lengths" in capsys.readouterr().err


def test_a_config_without_sparse_attention_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--config", CONFIG, "--attention", "chart.png", "model.attention.dsa=null"])
    assert "model.attention.dsa" in capsys.readouterr().err
