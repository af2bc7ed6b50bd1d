"""Wrong options of the commands: one message, code 2, before any work; a wrong layout is not a default one."""

import importlib
from pathlib import Path

import pytest

from jaxmoe.config import ConfigError
from jaxmoe.runtime.proof.layouts import chosen_layouts

ROOT = Path(__file__).parents[2]
MINIMAL = str(ROOT / "tests" / "config" / "minimal.yaml")


@pytest.mark.parametrize(
    ("command", "words", "says"),
    [
        ("plan", "--devices 0", "--devices: '0' must be a whole number from 1 to 1048576"),
        ("plan", "--devices -8", "--devices: '-8' must be"),
        ("plan", "--devices 9999999999999999", "must be a whole number from 1 to 1048576"),
        ("verify", "--devices 2.5", "--devices: '2.5' must be a whole number from 1"),
        ("verify", "--seed -1", "--seed: '-1' must be a whole number from 0"),
        ("verify", "--steps 0 --curves x.png", "--steps: '0' must be"),
        ("verify", "--json /nowhere/x.json", "there is no folder /nowhere"),
        ("verify", f"--curves {ROOT}", "is no file name"),
        ("verify", "--steps 5", "--steps: has no effect without --curves; leave it out"),
        ("verify", "--curves x.png --json x.json", "--json: has no effect with --curves"),
        ("verify", "--curves x.png --seed 0", "--seed: has no effect with --curves"),
        ("verify", "run.seed=1 --curves x.png data.train.kind=txt data.train.path=/no", "'/no': no such file"),
        ("bench", "--steps 0", "--steps: '0' must be"),
        ("bench", "--lengths 512", "--lengths: has no effect without --attention"),
        ("bench", "--attention x.png --steps 3", "--steps: has no effect with --attention"),
        ("bench", "--lengths 512,", "--lengths: '' must be a whole number from 1"),
        ("bench", "--lengths 512,-4", "--lengths: '-4' must be"),
        ("bench", "--attention /nowhere/x.png", "there is no folder /nowhere"),
    ],
)
def test_a_wrong_option_is_refused_at_once(command: str, words: str, says: str, capsys: pytest.CaptureFixture[str]):
    main = importlib.import_module(f"jaxmoe.{command}").main
    with pytest.raises(SystemExit) as exit_:
        main(["--config", MINIMAL, *words.split()])
    assert exit_.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(("command", "option"), [("verify", "--curves"), ("bench", "--attention")])
def test_a_picture_without_the_package_that_draws_it_is_refused_before_the_work(
    command: str, option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("jaxmoe.runtime.arguments.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as exit_:
        importlib.import_module(f"jaxmoe.{command}").main(["--config", MINIMAL, option, "x.png"])
    assert exit_.value.code == 2
    assert f'{option}: needs the package matplotlib; pip install "jaxmoe[demo]"' in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "verify", "plan", "generate", "bench", "convert"])
def test_the_same_key_twice_is_refused_by_both_words(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = {
        "generate": ["--run", str(tmp_path), "--prompt", "x"],
        "convert": ["jaxmoe-to-hf", "--run", str(tmp_path), "--to", str(tmp_path / "hf")],
    }.get(command, ["--config", MINIMAL])
    main = importlib.import_module(f"jaxmoe.{command}").main
    with pytest.raises(SystemExit) as exit_:
        main(
            [*words, "run.steps=5", "model.mtp=null", "run.steps=6", "model={mtp: {num_depths: 2}}", "model.d_model=8"]
        )
    assert exit_.value.code == 2
    said = capsys.readouterr().err
    assert "2 problems in the command line" in said
    assert "run.steps: is set by 'run.steps=5' and by 'run.steps=6'; leave one of them out" in said
    assert "model.mtp: is set by 'model.mtp=null' and by 'model={mtp: {num_depths: 2}}'" in said


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "names no layout"),
        (" ; ", "names no layout"),
        ("tp", "must be name=value with a field of parallel"),
        ("foo=1", "must be name=value with a field of parallel"),
        ("tp=2;dp=2,dp=4", "has dp twice"),
        ("tp=0", "tp must be a whole number from 1"),
        ("tp=-2", "tp must be a whole number from 1"),
        ("tp=", "tp must be a whole number from 1"),
        ("tp=true", "tp must be a whole number from 1"),
        ("tp=[", "not readable"),
        ("tp=3", "takes 3 devices, which must divide --devices=8"),
        ("tp=16", "takes 16 devices, and --devices is 8"),
        ("dp=4,tp=4", "takes 16 devices, and --devices is 8"),
    ],
)
def test_a_wrong_layout_is_refused(text: str, says: str):
    with pytest.raises(ConfigError) as caught:
        chosen_layouts(text, 8)
    assert says in str(caught.value)


def test_a_layout_is_filled_with_dp():
    assert chosen_layouts("tp=2, sp=2;dp=2", 8) == [{"tp": 2, "sp": 2, "dp": 2}, {"dp": 2}]
