"""Families without golden vectors against their definition in NumPy: logits to 1e-10, tensors bit-equal."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

import jaxmoe
from tests.interop import naive_hf
from tests.interop.test_round_trip import assert_same_tensors, tensors_of
from tests.reference.cases import float64

ROWS, COLUMNS = 2, 12


@pytest.fixture(scope="module", autouse=True)
def wide():
    with float64():
        yield


@pytest.mark.parametrize("family", naive_hf.FAMILIES)
def test_logits_and_round_trip(family, tmp_path):
    fields, folder = naive_hf.FAMILIES[family], tmp_path / "in"
    tensors = naive_hf.random_tensors(fields)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(tensors, folder / "model.safetensors")
    overrides = ["optimizer.kind=sgd", f"batch={{global_batch_size: {ROWS}, seq_len: {COLUMNS}}}", "parallel.dp=1"]
    mesh = jaxmoe.make_mesh(jaxmoe.load_hf_config(folder, overrides), jax.devices()[:1])
    state = jaxmoe.load_hf(folder, mesh, overrides)
    ids = np.random.default_rng(1).integers(0, fields["vocab_size"], (ROWS, COLUMNS)).astype(np.int32)
    ones = np.ones_like(ids)
    batch = {
        "inputs": ids,
        "targets": ids,
        "loss_mask": ones.astype(np.float32),
        "positions": np.broadcast_to(np.arange(COLUMNS, dtype=np.int32), ids.shape),
        "segment_ids": ones,
    }
    got = np.asarray(jaxmoe.forward(state, jaxmoe.Batch.from_numpy(batch, mesh)))
    want = np.stack([naive_hf.logits(tensors, fields, row) for row in ids])
    assert np.abs(want).max() > 1
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-10 * np.abs(want).max())
    jaxmoe.save_hf(state, tmp_path / "out")
    assert_same_tensors(tensors_of(tmp_path / "out"), tensors)
