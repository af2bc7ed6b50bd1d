"""Record, sync, report, clear: rules, edge cases and isolation. Values of one process; meshes where ranks matter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxmoe.metrics import (
    DEFAULT_RULES,
    MEGATRON_RULES,
    SUM_OF_PARTS,
    MetricError,
    MetricRule,
    MoEMetricsTracker,
    count_moe_layers,
)
from jaxmoe.spmd.axes import AXES
from jaxmoe.spmd.collectives import ReductionError, keep_one_copy, rank
from jaxmoe.spmd.program import build_mesh, manual


class Recorder:
    """A writer that keeps what it is given."""

    def __init__(self):
        self.calls = []

    def write(self, step, scalars, per_layer, counts=None):
        self.calls.append((step, dict(scalars), dict(per_layer)))


def make(names="x", slots=4, owning: int | dict[str, int] | None = 2, rule=SUM_OF_PARTS, **options):
    return MoEMetricsTracker.create(dict.fromkeys(names.split(), rule), slots, owning, **options)


def on_mesh(function, *args, **sizes):
    shape = {axis: sizes.get(axis, 1) for axis in AXES}
    mesh = build_mesh(shape, jax.devices()[: np.prod(list(shape.values()))])
    return jax.jit(manual(function, mesh, (P(),) * len(args), P()))(*args)


def part(axes):
    """One per rank along `axes`: rank index + 1, varying over exactly them."""
    return rank(axes).astype(jnp.float32) + 1


# ---------------------------------------------------------------- record


def test_record_adds_into_the_slot_of_a_layer_counted_from_one_and_leaves_the_old_tracker_alone():
    empty = make()
    tracker = empty.record("x", 2.0, 1).record("x", 3.0, 1).record("x", 5.0, 4)
    np.testing.assert_array_equal(tracker.values["x"], [5.0, 0.0, 0.0, 5.0])
    np.testing.assert_array_equal(empty.values["x"], np.zeros(4))


def test_record_layers_adds_a_vector():
    tracker = make().record("x", 2.0, 1).record_layers("x", jnp.arange(4.0))
    np.testing.assert_array_equal(tracker.values["x"], [2.0, 1.0, 2.0, 3.0])


def test_layer_number_none_records_nothing():
    tracker = make()
    assert tracker.record("x", 2.0, None) is tracker


@pytest.mark.parametrize("layer_number", [0, -1, 5])
def test_a_layer_without_a_slot_is_an_error(layer_number):
    with pytest.raises(MetricError, match=rf"layer_number={layer_number} must lie in 1\.\.4"):
        make().record("x", 2.0, layer_number)


def test_a_traced_layer_number_is_an_error_that_names_the_way_out():
    with pytest.raises(MetricError, match="record_layers"):
        jax.jit(lambda t, i: t.record("x", 1.0, i))(make(), 1)


@pytest.mark.parametrize("name", ["y", "x_", "X", ""])
def test_names_are_exact(name):
    tracker = make("x xx").sync()
    for call in (tracker.clear, tracker.per_layer, lambda n: tracker.report(track_names=n)):
        args = () if call == tracker.per_layer else (name,)
        kwargs = {"track_names": name} if call == tracker.per_layer else {}
        with pytest.raises(MetricError, match="unknown metrics"):
            call(*args, **kwargs)
    with pytest.raises(MetricError, match="unknown metrics"):
        make("x xx").record(name, 1.0, 1)


def test_values_of_another_shape_are_errors():
    with pytest.raises(MetricError, match="must be a scalar"):
        make().record("x", jnp.zeros(1), 1)
    with pytest.raises(MetricError, match=r"must have shape \(4,\)"):
        make().record_layers("x", jnp.zeros(3))


def test_sums_of_bfloat16_values_are_float32():
    tracker = make()
    for _ in range(300):
        tracker = tracker.record("x", jnp.bfloat16(1.0), 1)
    assert tracker.values["x"].dtype == jnp.float32
    assert tracker.values["x"][0] == 300  # bfloat16 sums stop at 256


@pytest.mark.usefixtures("x64")
def test_sums_are_float64_in_64_bit_mode():
    assert make().record("x", jnp.float64(1e-12), 1).record("x", 1.0, 1).values["x"][0] == 1.0 + 1e-12


def test_no_tracker_sums_in_bfloat16():
    with pytest.raises(MetricError, match="at least 32 bits"):
        make(dtype=jnp.bfloat16)


def test_no_gradient_flows_through_a_recorded_value():
    gradient = jax.grad(lambda x: make().record("x", x * x, 1).values["x"].sum() + x)(3.0)
    assert gradient == 1.0


# ---------------------------------------------------------------- rules and sync on meshes


@pytest.mark.parametrize(
    ("rule", "over"),
    [
        (SUM_OF_PARTS, AXES),
        (MetricRule(), ("pp",)),
        (MetricRule(("sp", "tp")), ("pp", "sp", "tp")),
        (MetricRule(("dp", "ep", "sp", "tp"), needs_dp_avg=False), AXES),
        (MetricRule((), ("sp", "tp")), ("pp",)),
    ],
)
@pytest.mark.parametrize("sizes", [{"pp": 2, "dp": 2, "sp": 2}, {"ep": 2, "sp": 2, "tp": 2}, {"pp": 4, "tp": 2}, {}])
def test_ones_count_the_ranks_that_hold_parts(rule, over, sizes):
    def body():
        everywhere = jnp.where(part(rule.axes) > 0, 1.0, 0.0)
        return make(rule=rule).record("x", everywhere, 3).sync()

    tracker = on_mesh(body, **sizes)
    ranks = np.prod([sizes.get(axis, 1) for axis in over])
    np.testing.assert_array_equal(tracker.per_layer()["x"], [0, 0, ranks, 0])


def test_the_dp_mean_skips_axes_that_are_reduced_already():
    rule = MetricRule(("dp", "sp", "tp"), needs_dp_avg=True)
    assert rule.dp_mean_axes == ("ep",)
    tracker = on_mesh(lambda: make(rule=rule).record("x", part(rule.axes), 1).sync(), dp=2, ep=2)
    assert tracker.per_layer()["x"][0] == (1 + 2 + 3 + 4) / 2


def test_recording_a_copy_where_parts_are_summed_is_an_error_while_tracing():
    with pytest.raises(ReductionError, match=r"equal over \['tp'\], so copies would be counted"):
        on_mesh(lambda: make().record("x", part(("dp", "sp")), 1).sync(), dp=2, sp=2, tp=2)


def test_the_check_holds_for_a_carry_that_was_made_varying():
    with pytest.raises(ReductionError, match=r"equal over \['tp'\]"):
        on_mesh(lambda: make().varying().record("x", part("dp"), 1).sync(), dp=2, tp=2)


def test_a_copy_recorded_by_one_rank_counts_once():
    def body():
        return make().record("x", keep_one_copy(part("dp"), "tp"), 1).sync()

    assert on_mesh(body, dp=2, tp=2).per_layer()["x"][0] == 3


def test_a_value_that_differs_over_an_axis_without_a_rule_is_an_error_while_tracing():
    with pytest.raises(ReductionError, match=r"differs over \['sp'\], which its rule"):
        on_mesh(lambda: make(rule=MetricRule()).record("x", part(("dp", "sp")), 1).sync(), dp=2, sp=2)


def test_a_value_that_is_equal_over_an_averaged_axis_keeps_its_value():
    rule = MEGATRON_RULES["z_loss"]
    assert on_mesh(lambda: make(rule=rule).record("x", jnp.float32(7), 1).sync(), dp=2, tp=2).per_layer()["x"][0] == 7


def test_a_stage_that_records_nothing_reduces_like_the_others():
    """Megatron-Core skips the sum over tp on such a stage, and prints its part."""

    def body():
        value = jnp.where(rank("pp") == 0, part("tp"), 0.0)
        return make(rule=MetricRule(("sp", "tp"))).record("x", value, 1).sync()

    assert on_mesh(body, pp=2, tp=4).per_layer()["x"][0] == 1 + 2 + 3 + 4


def test_metrics_that_nobody_recorded_reduce_and_report_zero():
    tracker = on_mesh(lambda: make("x y").record("x", part(AXES), 1).sync(), pp=2, dp=2, tp=2)
    assert tracker.scalars() == {"x": 18.0, "y": 0.0}


def test_a_second_sync_is_an_error():
    with pytest.raises(MetricError, match=r"\['x'\] are synced already"):
        make().sync().sync()
    with pytest.raises(MetricError, match=r"\['x'\] are synced already"):
        make("x y").sync("x").sync()
    with pytest.raises(MetricError, match="synced already"):
        on_mesh(lambda: make().record("x", part(AXES), 1).sync().sync(), dp=2)


def test_recording_after_sync_is_an_error_until_cleared():
    synced = make().sync()
    with pytest.raises(MetricError, match="clear"):
        synced.record("x", 1.0, 1)
    np.testing.assert_array_equal(synced.clear().record("x", 1.0, 1).values["x"], [1, 0, 0, 0])


@pytest.mark.parametrize("remat", [False, True])
def test_a_carry_through_scans_with_remat_counts_each_layer_and_micro_batch_once(remat):
    def body(weights, rows):
        def layer(carry, layer_id):
            x, values = carry
            x = jnp.sin(x * weights[layer_id])
            return (x, values.at[layer_id].add(x * x)), None

        def micro_batch(carry, row):
            total, tracker = carry

            def loss(w):
                step = (
                    (lambda c, i: layer((c[0] * w, c[1]), i))
                    if not remat
                    else jax.checkpoint(lambda c, i: layer((c[0] * w, c[1]), i))
                )
                start = (row * part(AXES), jnp.zeros(4) * part(AXES))
                (x, values), _ = jax.lax.scan(step, start, jnp.arange(4))
                return x, values

            (_, values), grad = jax.value_and_grad(loss, has_aux=True)(jnp.float32(1))
            return (total + 0 * grad, tracker.record_layers("x", values)), None

        start = (jnp.float32(0), make().varying())
        (_, tracker), _ = jax.lax.scan(micro_batch, start, rows)
        return tracker.sync()

    weights, rows = np.array([0.5, 1.5, 2.0, 0.7], np.float32), np.array([0.3, 0.9, 1.1], np.float32)
    got = on_mesh(body, weights, rows, dp=2, sp=2).per_layer()["x"]
    want = np.zeros(4)
    for start in np.outer(rows, np.arange(1, 5)).ravel():
        x = start
        for i in range(4):
            x = np.sin(x * weights[i])
            want[i] += x * x
    np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"reduce_axes": ("dp", "pp")}, r"\['pp'\] must be among"),
        ({"avg_axes": "cp"}, r"\['cp'\] must be among"),
        ({"reduce_axes": ("tp", "sp"), "avg_axes": "tp"}, "summed or averaged"),
    ],
)
def test_a_wrong_rule_is_an_error(options, text):
    with pytest.raises(MetricError, match=text):
        MetricRule(**options)


def test_rules_are_equal_however_their_axes_are_spelled():
    assert MetricRule(("tp", "sp")) == MetricRule(["sp", "tp"]) != MetricRule("sp")
    assert hash(MetricRule(("tp", "sp"))) == hash(MetricRule(["sp", "tp"]))


def test_the_step_records_parts_that_only_add():
    assert all(rule == SUM_OF_PARTS for rule in DEFAULT_RULES.values())


# ---------------------------------------------------------------- report


def test_the_scalar_is_the_sum_over_slots_over_the_layers_that_own_the_metric():
    tracker = make("x y", owning={"x": 2, "y": 4}).record("x", 6.0, 2).record("x", 2.0, 4).record("y", 6.0, 1).sync()
    assert tracker.scalars(loss_scale=0.5) == {"x": 2.0, "y": 0.75}
    assert tracker.scalars(num_moe_layers=8) == {"x": 1.0, "y": 0.75}


@pytest.mark.parametrize("count", [0, -1])
def test_no_owning_layers_is_an_error(count):
    with pytest.raises(MetricError, match=f"num_moe_layers={count} must be at least 1"):
        make().sync().report(num_moe_layers=count)


def test_an_unknown_number_of_owning_layers_is_an_error():
    with pytest.raises(MetricError, match="pass num_moe_layers"):
        make(owning=None).sync().report()


def test_reporting_one_ranks_part_is_an_error():
    with pytest.raises(MetricError, match="sync"):
        make().report()


def test_text_keeps_the_declared_order_and_two_decimals():
    tracker = make("z_loss a", owning=1).record("z_loss", 1.005, 1).record("a", 12.346, 1).sync()
    assert tracker.report() == " z_loss: 1.00 | a: 12.35 |"
    assert tracker.report(track_names=["a", "z_loss"]) == " a: 12.35 | z_loss: 1.00 |"
    assert tracker.report(track_names="a") == " a: 12.35 |"


def test_nan_shows_as_nan_everywhere():
    writer, totals = Recorder(), {}
    tracker = make("x z_loss").record("x", jnp.nan, 1).record("x", 1.0, 2).record("z_loss", jnp.nan, 1).sync()
    text = tracker.report(writers=[writer], total_loss_dict=totals, percentiles={"x": [0.5]}, per_layer_logging=True)
    assert text == " x_p50: nan | x: nan |"
    assert np.isnan(totals["z_loss"])
    assert np.isnan(writer.calls[0][1]["x"])
    assert np.isnan(writer.calls[0][2]["x"][0])


def test_losses_go_to_the_total_and_leave_the_text_but_are_written():
    writer, totals = Recorder(), {"z_Loss": 1.0}
    tracker = make("z_Loss load", owning=1).record("z_Loss", 2.0, 1).record("load", 3.0, 1).sync()
    assert tracker.report(0.5, 7, [writer], total_loss_dict=totals) == " load: 1.50 |"
    assert totals == {"z_Loss": 2.0}
    assert writer.calls == [(7, {"z_Loss": 1.0, "load": 1.5}, {})]


def test_per_layer_values_are_scaled_only_and_include_dense_layers():
    writer = Recorder()
    make(owning=2).record("x", 8.0, 3).sync().report(0.5, 1, [writer], per_layer_logging=True)
    np.testing.assert_array_equal(writer.calls[0][2]["x"], [0, 0, 4, 0])


def test_percentiles_use_positive_slots_and_stand_before_the_mean():
    values = jnp.array([0.0, 1.0, 2.0, 4.0])
    writer, tracker = Recorder(), make("x y", owning=3).record_layers("x", values).sync()
    tracker.report(writers=[writer], percentiles={"x": [0.29, 0.5]}, per_layer_logging=True)
    _, scalars, per_layer = writer.calls[0]
    assert list(scalars) == ["x_p28", "x_p50", "x", "y"]
    np.testing.assert_allclose(list(scalars.values()), [1.58, 2.0, 7 / 3, 0.0])
    assert per_layer["x"].mask.tolist() == [True, False, False, False]
    assert not np.ma.isMaskedArray(per_layer["y"])


def test_percentiles_of_an_unknown_name_or_outside_0_1_are_errors():
    with pytest.raises(MetricError, match="unknown metrics"):
        make().sync().report(percentiles={"y": [0.5]})
    with pytest.raises(MetricError, match=r"\[50\] must lie in \[0, 1\]"):
        make().sync().report(percentiles={"x": [50]})


def test_a_percentile_never_stands_in_for_another_number():
    with pytest.raises(MetricError, match=r"\['x_p50'\] are metrics themselves"):
        make("x_p50 x").record("x", 1.0, 1).record("x_p50", 2.0, 1).sync().report(percentiles={"x": [0.5]})
    with pytest.raises(MetricError, match=r"\['x_p28'\] would name two of them"):
        make().record("x", 1.0, 1).sync().report(percentiles={"x": [0.281, 0.29]})


@pytest.mark.parametrize("names", ["z z_loss", "z_loss z"])
def test_a_name_that_begins_another_keeps_its_own_values(names):
    tracker = make(names, owning=1).record("z", 1.0, 1).record("z_loss", jnp.nan, 1).sync()
    assert tracker.scalars(track_names="z", percentiles={"z": [0.5]}) == {"z_p50": 1.0, "z": 1.0}
    assert tracker.per_layer(track_names=("z",))["z"].tolist() == [1, 0, 0, 0]
    totals: dict[str, float] = {}
    assert tracker.report(total_loss_dict=totals, per_layer_logging=True) == " z: 1.00 |"
    assert list(totals) == ["z_loss"]
    cleared = tracker.clear("z")
    assert (float(cleared.values["z"][0]), bool(jnp.isnan(cleared.values["z_loss"][0]))) == (0.0, True)


@pytest.mark.parametrize(
    ("num_layers", "freq", "mtp", "count"),
    [
        (6, None, None, 6),
        (6, 2, None, 3),
        (7, 2, None, 4),
        (6, 1, 2, 8),
        (6, [0, 1, 1, 0, 0, 1], 1, 4),
        (None, (1, 0), 0, 1),
    ],
)
def test_moe_layers_are_counted(num_layers, freq, mtp, count):
    assert count_moe_layers(num_layers, freq, mtp) == count


@pytest.mark.parametrize(("num_layers", "freq"), [(6, "2"), (6, 1.5), (6, True), (None, 2), (None, None), (6, 0)])
def test_a_pattern_that_cannot_be_counted_is_an_error(num_layers, freq):
    with pytest.raises(MetricError):
        count_moe_layers(num_layers, freq)


# ---------------------------------------------------------------- clear and isolation


def test_clear_zeroes_values_and_keeps_metrics_sizes_and_rules():
    tracker = make("x y").record("x", 1.0, 1).record("y", 2.0, 1).sync()
    cleared = tracker.clear()
    assert jax.tree.structure(cleared) == jax.tree.structure(make("x y"))
    assert not cleared.values["x"].any()
    assert tracker.clear("x").values["y"][0] == 2.0


def test_two_models_trained_in_turn_never_see_each_others_values():
    one, two = make("z_loss", slots=2, owning=2), make("z_loss", slots=5, owning=1)
    step = jax.jit(lambda tracker, value: tracker.clear().record("z_loss", value, 2).sync())
    for turn in range(1, 4):
        one, two = step(one, 1.0 * turn), step(two, 100.0 * turn)
        assert one.scalars() == {"z_loss": turn / 2}
        assert two.scalars() == {"z_loss": 100.0 * turn}
    assert (one.num_slots("z_loss"), two.num_slots("z_loss")) == (2, 5)
