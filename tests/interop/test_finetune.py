"""From a Hugging Face folder to a further trained one, by the commands of configs/finetune_hf.yaml."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import jaxmoe
from jaxmoe import convert, train
from tests.interop.golden_cases import FOLDER
from tests.interop.test_round_trip import tensors_of

TEXT = "the cat sat on the mat and the dog sat on the log. " * 40
CONFIG = "configs/finetune_hf.yaml"


@pytest.fixture
def folder(tmp_path):
    """A golden checkpoint with a tokenizer of its vocabulary."""
    target = shutil.copytree(FOLDER / "qwen3_moe", tmp_path / "hf", ignore=shutil.ignore_patterns("*.npz"))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=100, special_tokens=["<eos>"]))
    tokenizer.save(str(target / "tokenizer.json"))
    (tmp_path / "texts").mkdir()
    for number in range(4):
        (tmp_path / "texts" / f"{number}.txt").write_text(TEXT)
    return target


def words(folder, tmp_path):
    return [
        "--config",
        CONFIG,
        f"model.from_hf={folder}",
        f"run={{dir: {tmp_path / 'run'}, steps: 2}}",
        f"data={{train: {{kind: txt, path: {tmp_path / 'texts'}, last_year: null}}, validation: null}}",
        f"data.cache_dir={tmp_path / 'cache'}",
        f"data.tokenizer={{kind: file, path: {folder / 'tokenizer.json'}, eos_token: <eos>}}",
        "batch={global_batch_size: 8, seq_len: 16, num_microbatches: 1}",
        "optimizer={learning_rate: 0.001, schedule: {kind: constant, warmup_steps: 0}}",
        "parallel={dp: 2, ep: 2, tp: 2}",
        "logging={every: 1, tensorboard: false}",
    ]


@pytest.mark.slow
def test_a_checkpoint_is_trained_further_and_written_back(folder, tmp_path, capsys):
    run, out = tmp_path / "run", tmp_path / "further"
    assert train.main(words(folder, tmp_path)) == 0
    assert f"starting from the weights in {folder}" in capsys.readouterr().out
    assert convert.main(["jaxmoe-to-hf", "--run", str(run), "--to", str(out)]) == 0
    before, after = tensors_of(folder), tensors_of(out)
    assert before.keys() == after.keys()
    moved = {name: np.abs(after[name] - value).max() for name, value in before.items()}
    # Adam moves every weight that has a gradient by about the learning rate in each of two steps.
    assert 1e-4 < moved["lm_head.weight"] < 0.01
    assert all(0 <= value < 0.01 for value in moved.values())
    assert (out / "tokenizer.json").read_text() == (folder / "tokenizer.json").read_text()
    assert json.loads((out / "config.json").read_text()) == json.loads((folder / "config.json").read_text())
    jaxmoe.load_hf_config(out)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-100]), "is damaged or cut short"),
        (lambda file: save_file({"lm_head.weight": load_file(file)["lm_head.weight"]}, file), "is missing"),
    ],
)
def test_a_start_from_a_wrong_folder_leaves_no_run(spoil, text, folder, tmp_path, capsys):
    spoil(folder / "model.safetensors")
    with pytest.raises(SystemExit) as caught:
        train.main(words(folder, tmp_path))
    assert caught.value.code == 2
    assert text in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_run_folder_that_was_there_stays(folder, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "note").write_text("mine")
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(SystemExit):
        train.main(words(folder, tmp_path))
    assert (tmp_path / "run" / "note").read_text() == "mine"
