import hashlib
import json
import logging
import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from jaxmoe.config.errors import UserError
from jaxmoe.config.schema import Config
from jaxmoe.data import bits_per_byte, open_data, unigram_baseline
from jaxmoe.data.dataset import Dataset, EvalDataset
from jaxmoe.data.token_store import TokenStore

LENGTHS = [7, 2, 30, 1, 5, 16, 16, 3, 48, 9, 11, 2]
PACKINGS = ["split", "best_fit"]
DTYPES = {"inputs": "int32", "targets": "int32", "positions": "int32", "segment_ids": "int32", "loss_mask": "float32"}


def digest(fields):
    return hashlib.sha256(b"".join(name.encode() + fields[name].tobytes() for name in sorted(fields))).hexdigest()


def make(store, packing, seed: int | None = 0, batch_rows=6):
    return Dataset(store, batch_rows=batch_rows, seq_len=16, packing=packing, seed=seed)


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_batch_depends_on_its_step_only(make_store, packing):
    store = make_store(LENGTHS)
    data = make(store, packing)
    straight = [digest(data.batch(step)) for step in range(12)]
    assert len(set(straight)) == 12
    assert [digest(data.batch(step)) for step in reversed(range(12))] == straight[::-1], "in any order"
    assert [digest(make(store, packing).batch(step)) for step in range(12)] == straight, "after a restart"
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda step: digest(data.batch(step)), range(12))) == straight, "from several threads"


@pytest.mark.parametrize("packing", PACKINGS)
def test_rows_are_those_of_the_batch(make_store, packing):
    data = make(make_store(LENGTHS), packing)
    for step in (0, 3, 1000):
        whole = data.batch(step)
        assert {name: field.dtype.name for name, field in whole.items()} == DTYPES
        for start, stop in [(0, 2), (2, 3), (3, 6), (4, 4)]:
            part = data.rows(step, start, stop)
            for name, field in whole.items():
                assert part[name].dtype == field.dtype
                np.testing.assert_array_equal(part[name], field[start:stop], name)


@pytest.mark.parametrize("packing", PACKINGS)
def test_rows_do_not_depend_on_the_size_of_the_batch(make_store, packing):
    """The order of rows is global: a batch is rows [step * G, (step + 1) * G) of it."""
    store = make_store(LENGTHS)
    small = [make(store, packing, batch_rows=2).batch(step)["inputs"] for step in range(9)]
    large = [make(store, packing, batch_rows=6).batch(step)["inputs"] for step in range(3)]
    np.testing.assert_array_equal(np.concatenate(small), np.concatenate(large))


@pytest.mark.parametrize("packing", PACKINGS)
def test_seeds_and_epochs_shuffle_and_no_seed_does_not(make_store, packing):
    store = make_store([16] * 12)  # a row a document: 12 rows are an epoch, in both packings

    def epochs(seed):
        data = make(store, packing, seed, batch_rows=12)
        return [data.batch(epoch)["inputs"].tolist() for epoch in (0, 1)]

    first, second = epochs(0)
    assert first != second
    assert sorted(first) == sorted(second)
    assert epochs(1)[0] != first
    assert epochs(None)[0] == epochs(None)[1] == sorted(first)


def test_a_fingerprint_changes_with_all_that_changes_the_batches(make_store):
    base = make(make_store(LENGTHS), "split")
    others = [
        make(make_store(LENGTHS[1:]), "split"),
        make(make_store(LENGTHS), "best_fit"),
        make(make_store(LENGTHS), "split", seed=1),
        make(make_store(LENGTHS), "split", seed=None),
        make(make_store(LENGTHS), "split", batch_rows=3),
        Dataset(make_store(LENGTHS), batch_rows=6, seq_len=8, packing="split", seed=0),
    ]
    assert base.fingerprint == make(make_store(LENGTHS), "split").fingerprint
    assert len({base.fingerprint, *(other.fingerprint for other in others)}) == 7


@pytest.mark.parametrize("tokenizer", [{"kind": "bytes"}, {"kind": "bpe"}])
@pytest.mark.parametrize("packing", PACKINGS)
def test_the_rows_hold_the_files(make_config, speeches, tokenizer, packing):
    data = open_data(make_config(tokenizer=tokenizer, packing=packing, shuffle=False))
    texts = [path.read_bytes().decode() for path in sorted((speeches / "validation").glob("*.txt"))]
    assert data.validation is not None
    store = data.validation.store
    assert [data.tokenizer.decode(store.document(d)) for d in range(store.num_documents)] == texts
    batches = list(data.validation)
    inputs, valid, targets, mask = (
        np.concatenate([b[name] for b in batches]) for name in ("inputs", "segment_ids", "targets", "loss_mask")
    )
    if packing == "split":
        assert data.tokenizer.decode(inputs[valid > 0]) == "".join(texts)
    first = [data.tokenizer.token_bytes[store.document(d)[0]] for d in range(len(texts))]
    num_bytes = sum(len(text.encode()) for text in texts) - sum(first)
    assert data.validation.target_bytes == num_bytes == data.tokenizer.token_bytes[targets[mask > 0]].sum()
    assert data.validation.num_targets == mask.sum(dtype=np.float64)
    assert inputs.max() < data.tokenizer.vocab_size


def test_bits_per_byte_of_certain_bytes_is_their_entropy():
    assert bits_per_byte(100 * math.log(256), 100) == pytest.approx(8.0, rel=1e-12)


def test_the_unigram_baseline_counts_targets_with_one_added():
    """Tokens a=0, b=1, end=2; one byte each but the end. Training targets of "abb", "ba": b b end, a end."""
    token_bytes = np.array([1, 1, 0])
    train = TokenStore(np.array([0, 1, 1, 2, 1, 0, 2], np.uint16), np.array([0, 4, 7]), token_bytes, "t")
    held = TokenStore(np.array([1, 0, 1, 2], np.uint16), np.array([0, 4]), token_bytes, "v")  # targets: a b end
    baseline = unigram_baseline(
        Dataset(train, batch_rows=1, seq_len=4, packing="split", seed=0),
        EvalDataset(held, batch_rows=1, seq_len=4, packing="split"),
    )
    nats = -(math.log(2 / 8) + math.log(3 / 8) + math.log(3 / 8))
    assert baseline.nats_per_token == pytest.approx(nats / 3, rel=1e-12)
    assert baseline.bits_per_byte == pytest.approx(nats / math.log(2) / 2, rel=1e-12)


def test_a_real_baseline_lies_below_the_uniform_one(make_config):
    data = open_data(make_config(tokenizer={"kind": "bytes"}))
    assert data.validation is not None
    assert 4.0 < unigram_baseline(data.train, data.validation).bits_per_byte < 4.6  # English letters: about 4.3


OPEN = """
import hashlib, json, logging, sys
from jaxmoe.config.schema import Config
from jaxmoe.data import open_data
logging.basicConfig(level=logging.INFO, stream=sys.stderr)
data = open_data(Config.model_validate(json.loads(sys.argv[1])))
batch = data.train.batch(7)
print(data.tokenizer.fingerprint, hashlib.sha256(b"".join(batch[name].tobytes() for name in sorted(batch))).hexdigest())
"""


def start(config: Config, hash_seed: int) -> subprocess.Popen:
    root = Path(__file__).parents[2]
    return subprocess.Popen(
        [sys.executable, "-c", OPEN, config.model_dump_json()],
        cwd=root, env={"PYTHONPATH": str(root), "PYTHONHASHSEED": str(hash_seed), "PATH": "/usr/bin:/bin"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def finish(process: subprocess.Popen) -> tuple[str, str]:
    out, log = process.communicate(timeout=120)
    assert process.returncode == 0, log
    return out, log


def test_processes_that_start_from_nothing_train_the_same_bpe_and_see_the_same_batches(make_config, tmp_path):
    bpe = {"kind": "bpe", "vocab_size": 400}
    runs = [start(make_config(tokenizer=bpe, cache_dir=str(tmp_path / str(i))), hash_seed=i) for i in (1, 2)]
    outputs = [finish(process)[0] for process in runs]
    assert outputs[0] == outputs[1]
    own = open_data(make_config(tokenizer=bpe, cache_dir=str(tmp_path / "own")))
    assert own.tokenizer.fingerprint == outputs[0].split()[0]


def test_processes_that_start_together_prepare_the_data_once(make_config):
    config = make_config(tokenizer={"kind": "bpe"})
    results = [finish(process) for process in [start(config, i) for i in range(3)]]
    assert len({output for output, _ in results}) == 1
    assert sum(log.count("training a byte-level BPE") for _, log in results) == 1
    assert sum(log.count("tokenised data.train") for _, log in results) == 1
    assert sum(log.count("tokenised data.validation") for _, log in results) == 1


def test_a_second_start_reads_the_cache(make_config, caplog):
    caplog.set_level(logging.INFO)
    first = open_data(make_config(tokenizer={"kind": "bpe"}))
    assert "tokenised data.train" in caplog.text
    caplog.clear()
    second = open_data(make_config(tokenizer={"kind": "bpe"}))
    assert caplog.text == ""
    assert digest(first.train.batch(3)) == digest(second.train.batch(3))


def test_changed_text_or_tokenizer_is_tokenised_again(make_config, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    path = tmp_path / "a.txt"
    path.write_text("one text")
    train = {"kind": "txt", "path": str(path)}
    before = open_data(make_config(train=train))
    path.write_text("two text")  # the same size
    after = open_data(make_config(train=train))
    assert after.tokenizer.decode(after.train.store.document(0)) == "two text"
    assert before.train.fingerprint != after.train.fingerprint
    caplog.clear()
    open_data(make_config(train=train, tokenizer={"kind": "bpe"}))
    assert "tokenised data.train" in caplog.text


def test_a_damaged_token_cache_is_built_again_with_the_reason(make_config, tmp_path, caplog):
    before = digest(open_data(make_config()).train.batch(0))
    for file in (tmp_path / "cache").glob("tokens-*/tokens.bin"):
        file.write_bytes(file.read_bytes()[:-2])
    assert digest(open_data(make_config()).train.batch(0)) == before
    assert caplog.text.count("built again: tokens.bin has") == 2


def test_problems_of_both_sources_come_together(make_config):
    config = make_config(train={"kind": "txt", "path": "no/such"}, validation={"kind": "jsonl", "path": "none"})
    with pytest.raises(UserError) as caught:
        open_data(config)
    assert "data.train.path=no/such" in str(caught.value)
    assert "data.validation.path=none" in str(caught.value)


def test_without_validation_there_is_none(make_config):
    assert open_data(make_config(validation=None)).validation is None


def test_a_wide_vocabulary_is_kept_whole(make_config, monkeypatch):
    """Ids beyond 16 bits survive the cache."""
    from jaxmoe.data import dataset
    from jaxmoe.data.tokenizer import ByteTokenizer

    class Wide(ByteTokenizer):
        vocab_size = 100_257
        fingerprint = "wide"

        def encode(self, text):
            return super().encode(text) + np.uint32(100_000)

    monkeypatch.setattr(dataset, "open_tokenizer", lambda *_: Wide())
    store = open_data(make_config(validation=None)).train.store
    assert store.document(0)[:7].tolist() == [100_000 + byte for byte in b"Fellow-"]


def test_json_config_round_trip_used_by_the_process_tests(make_config):
    config = make_config()
    assert Config.model_validate(json.loads(config.model_dump_json())) == config
