"""Targets, masks, counts and weights of multi-token prediction against float64 numbers made with another library."""

from functools import lru_cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxmoe.config.schema import Objective
from jaxmoe.losses.objective import CROSS_ENTROPY, TARGET_MEAN, count_step, term_weights
from jaxmoe.spmd.axes import AXES
from jaxmoe.spmd.program import build_mesh, manual
from jaxmoe.step.batch import DTYPES, Batch, at_depth, shifted
from tests.golden import oracle_io

FOLDER = Path(__file__).parents[1] / "golden" / "oracle"
MODES = ["true", *(f"false_balance_{b}_M{m}" for b in ("true", "false_R2") for m in (1, 2, 4))]


@pytest.fixture(autouse=True)
def wide(x64):
    with jax.numpy_rank_promotion("allow"):
        yield


@lru_cache
def oracle(depths: int):
    return oracle_io.load_function(FOLDER / f"mtp_depth{depths}.npz")


def batch_of(arrays) -> Batch:
    return Batch(**{name: jnp.asarray(arrays[f"in/{name}"].astype(dtype)) for name, dtype in DTYPES.items()})


@pytest.mark.parametrize("depths", [1, 2])
def test_fields_of_a_depth(depths):
    _, _, arrays = oracle(depths)
    batch = batch_of(arrays)
    for depth in range(1, depths + 1):
        fields = shifted(batch, depth)
        mask = arrays[f"out/loss_mask_d{depth}"]
        np.testing.assert_array_equal(fields[at_depth("loss_mask", depth)], mask)
        counted = mask > 0
        want = arrays[f"out/targets_d{depth}"]
        np.testing.assert_array_equal(np.asarray(fields[at_depth("targets", depth)])[counted], want[counted])
        inside = arrays[f"out/input_in_document_d{depth}"]
        np.testing.assert_array_equal(np.asarray(fields[at_depth("segment_ids", depth)]) != 0, inside)
        ahead = np.roll(arrays["in/inputs"], -depth, axis=1)
        np.testing.assert_array_equal(np.asarray(fields[at_depth("inputs", depth)])[inside], ahead[inside])


def test_a_depth_longer_than_the_row_has_no_targets():
    batch = batch_of(oracle(1)[2])
    fields = shifted(batch, batch.inputs.shape[1] + 3)
    assert all(value.shape == batch.inputs.shape and not value.any() for value in fields.values())


def objective_of(arrays, cfg, mode: str):
    """J and the terms as functions of the logits, with the weights of the step."""
    microbatches = int(mode.rpartition("_M")[2]) if "_M" in mode else 1
    objective = Objective(
        calculate_per_token_loss=mode == "true", balance_dp_token="balance_false" not in mode, replicas=2
    )
    batch = batch_of(arrays)
    fields = [{"targets": batch.targets, "loss_mask": batch.loss_mask, "segment_ids": batch.segment_ids}]
    for depth in range(1, cfg["D"] + 1):
        made = jax.jit(shifted, static_argnums=1)(batch, depth)
        fields.append({name.rpartition("_")[0]: value for name, value in made.items()})

    def weights(field):
        def body(mask, valid):
            return term_weights(count_step(mask, valid, objective, jnp.dtype("float64")), objective)

        split = [v.reshape(microbatches, -1, cfg["S"]) for v in (field["loss_mask"], field["segment_ids"] != 0)]
        return jax.jit(manual(body, build_mesh(dict.fromkeys(AXES, 1), jax.devices()[:1]), P(), P()))(*split)

    by_depth = [weights(field) for field in fields]

    def terms(logits):
        found = []
        for field, weight, logit_GSV in zip(fields, by_depth, logits, strict=True):
            picked = jnp.take_along_axis(logit_GSV, field["targets"][..., None], axis=-1)[..., 0]
            ce_GS = jax.nn.logsumexp(logit_GSV, axis=-1) - picked
            sums_MR = (field["loss_mask"] * ce_GS).reshape(microbatches, 2, -1).sum(-1)
            found.append(jnp.sum(sums_MR * weight[CROSS_ENTROPY]))
        return jnp.stack(found)

    def total(logits):
        values = terms(logits)
        return values[0] + cfg["coeff"] / cfg["D"] * values[1:].sum()

    return jax.jit(total), jax.jit(terms), by_depth


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("depths", [1, 2])
def test_objective_and_gradient(depths, mode):
    cfg, _, arrays = oracle(depths)
    total, terms, by_depth = objective_of(arrays, cfg, mode)
    logits = jnp.asarray(arrays["in/logits"])
    values = terms(logits)
    np.testing.assert_allclose(values[0], arrays[f"out/{mode}/ce"], rtol=1e-12)
    np.testing.assert_allclose(values[1:], arrays[f"out/{mode}/A_mtp"], rtol=1e-12)
    np.testing.assert_allclose(total(logits), arrays[f"out/{mode}/J"], rtol=1e-12)
    same = f"grad/{mode if mode != 'false_balance_true_M1' else 'true'}/J"
    np.testing.assert_allclose(jax.jit(jax.grad(total))(logits), arrays[same], rtol=0, atol=1e-12)
    for depth in range(1, depths + 1):
        np.testing.assert_allclose(1 / by_depth[depth][TARGET_MEAN][0], arrays[f"out/V_d{depth}"], rtol=1e-12)
