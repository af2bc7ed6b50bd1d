"""What a token may depend on: the earlier tokens of its own document, bit for bit."""

import jax
import numpy as np
import pytest

import jaxmoe
from tests.reference import cases

TWO_DOCUMENTS = (6, 8)  # lengths; two columns of padding between them, none after


@pytest.fixture(scope="module", autouse=True)
def float64():
    with cases.float64():
        yield


@pytest.fixture(scope="module")
def state():
    config = cases.make_config(router=cases.SIGMOID_BIAS, microbatches=2, attention={"qkv_bias": True})
    return cases.make_state(config, 1)


def packed_batch(seed: int = 0) -> dict[str, np.ndarray]:
    """Every row holds two documents with padding between them."""
    random = np.random.default_rng(seed)
    batch = cases.ragged_batch(seed=seed)
    first, second = TWO_DOCUMENTS
    segment = np.repeat([1, 0, 2], [first, cases.SEQ - first - second, second])
    position = np.concatenate([np.arange(first), np.zeros(cases.SEQ - first - second), np.arange(second)])
    weight = random.choice([0.5, 1.0], (8, cases.SEQ)) * (segment != 0)
    weight[:, [first - 1, -1]] = 0
    batch["segment_ids"] = np.broadcast_to(segment, (8, cases.SEQ)).astype(np.int32)
    batch["positions"] = np.broadcast_to(position, (8, cases.SEQ)).astype(np.int32)
    batch["loss_mask"] = weight.astype(np.float32)
    return batch


def other_tokens(batch, columns) -> dict[str, np.ndarray]:
    """The batch with every token of these columns replaced."""
    inputs = batch["inputs"].copy()
    inputs[:, columns] = (inputs[:, columns] + 1 + np.arange(inputs[:, columns].shape[1])) % cases.VOCAB
    assert (inputs != batch["inputs"]).any()
    return batch | {"inputs": inputs}


def test_the_second_document_does_not_see_the_first(state):
    batch, first = packed_batch(), TWO_DOCUMENTS[0]
    before = np.asarray(cases.run(jaxmoe.forward, state, batch))
    after = np.asarray(cases.run(jaxmoe.forward, state, other_tokens(batch, slice(0, first))))
    np.testing.assert_array_equal(after[:, -TWO_DOCUMENTS[1] :], before[:, -TWO_DOCUMENTS[1] :])
    assert (after[:, :first] != before[:, :first]).any(axis=2).all()


def test_a_token_does_not_see_later_ones(state):
    batch = packed_batch()
    before = np.asarray(cases.run(jaxmoe.forward, state, batch))
    after = np.asarray(cases.run(jaxmoe.forward, state, other_tokens(batch, slice(11, None))))
    np.testing.assert_array_equal(after[:, :11], before[:, :11])
    assert (after[:, 11:] != before[:, 11:]).any(axis=2).all()


def test_tokens_see_all_earlier_ones_of_their_document(state):
    batch, start = packed_batch(), cases.SEQ - TWO_DOCUMENTS[1]
    before = np.asarray(cases.run(jaxmoe.forward, state, batch))
    after = np.asarray(cases.run(jaxmoe.forward, state, other_tokens(batch, slice(start, start + 1))))
    assert (after[:, start:] != before[:, start:]).any(axis=2).all()


def test_the_number_of_a_document_is_a_name_only(state):
    batch = packed_batch()
    renamed = batch | {"segment_ids": np.where(batch["segment_ids"] == 2, 7, batch["segment_ids"])}
    jax.tree.map(
        np.testing.assert_array_equal,
        *(cases.run(jaxmoe.loss_and_grads, state, own) for own in (batch, renamed)),
    )


def test_tokens_in_padding_change_nothing(state):
    batch = cases.ragged_batch()
    padding, random = batch["segment_ids"] == 0, np.random.default_rng(1)
    noise = random.integers(0, cases.VOCAB, padding.shape).astype(np.int32)
    names = ("inputs", "targets", "positions")
    changed = batch | {name: np.where(padding, noise % 16, batch[name]) for name in names}
    got, want = (cases.run(jaxmoe.loss_and_grads, state, own) for own in (changed, batch))
    np.testing.assert_array_equal(got.expert_counts, want.expert_counts)
    cases.assert_close(got, want, 1e-13)


def test_more_padding_changes_nothing(state):
    batch = cases.ragged_batch()
    wider = {name: np.pad(value, ((0, 0), (0, 8))) for name, value in batch.items()}
    got, want = (cases.run(jaxmoe.loss_and_grads, state, own) for own in (wider, batch))
    np.testing.assert_array_equal(got.expert_counts, want.expert_counts)
    cases.assert_close(got, want, 1e-12)


def test_packed_documents_equal_rows_of_their_own(state):
    """All but `seq_aux_loss`, for which a row is a row."""
    packed, (first, second) = packed_batch(), TWO_DOCUMENTS
    apart = {name: np.zeros_like(value) for name, value in packed.items()}
    for half in (0, 4):  # documents stay in their micro-batch
        for row in range(2):
            for name, value in packed.items():
                apart[name][half + row, :first] = value[half + row, :first]
                apart[name][half + row + 2, :second] = value[half + row, -second:]
    for name in ("segment_ids", "loss_mask", "positions"):
        packed[name] = packed[name].copy()
        packed[name][[2, 3, 6, 7]] = 0
    got, want = (cases.run(jaxmoe.loss_and_grads, state, own) for own in (packed, apart))
    np.testing.assert_array_equal(got.expert_counts, want.expert_counts)
    assert got.expert_counts.sum() == 2 * 2 * 4 * (first + second)  # layers, experts a token, rows
    for name in ("cross_entropy", "z_loss", "global_aux_loss", "aux_loss"):
        cases.assert_close(got.terms[name], want.terms[name], 1e-12, name)


def test_order_of_rows_within_a_microbatch_is_of_no_matter(state):
    batch = cases.ragged_batch()
    order = np.array([2, 0, 3, 1, 7, 6, 4, 5])
    got, want = (
        cases.run(jaxmoe.loss_and_grads, state, own)
        for own in ({name: value[order] for name, value in batch.items()}, batch)
    )
    np.testing.assert_array_equal(got.expert_counts, want.expert_counts)
    cases.assert_close(got, want, 1e-12)
