"""Old names of Megatron-Core, and the process-wide default tracker behind them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxmoe.metrics import (
    MetricError,
    MetricRule,
    MoEMetricsTracker,
    TrackerHolder,
    destroy_moe_metrics_tracker,
    get_moe_metrics_tracker,
    set_moe_metrics_tracker,
)
from jaxmoe.metrics.deprecated import (
    clear_aux_losses_tracker,
    get_moe_layer_wise_logging_tracker,
    reduce_aux_losses_tracker_across_ranks,
    save_to_aux_losses_tracker,
    track_moe_metrics,
)
from jaxmoe.spmd.axes import AXES
from jaxmoe.spmd.collectives import rank
from jaxmoe.spmd.program import build_mesh, manual

pytestmark = pytest.mark.filterwarnings("ignore:.* is deprecated; use MoEMetricsTracker:DeprecationWarning")


@pytest.fixture(autouse=True)
def fresh_default():
    destroy_moe_metrics_tracker()
    yield
    destroy_moe_metrics_tracker()


class Board:
    def __init__(self):
        self.values = {}

    def add_scalar(self, tag, scalar_value, global_step):
        self.values[tag, global_step] = scalar_value

    def log(self, data, step):
        self.values |= {(name, step): value for name, value in data.items()}


@pytest.mark.parametrize(
    "call",
    [
        lambda: save_to_aux_losses_tracker("z_loss", 1.0, 1, 2),
        reduce_aux_losses_tracker_across_ranks,
        clear_aux_losses_tracker,
        get_moe_layer_wise_logging_tracker,
        lambda: track_moe_metrics(1.0, 0),
    ],
)
def test_every_old_name_warns_at_the_callers_line(call):
    with pytest.warns(DeprecationWarning, match="is deprecated; use MoEMetricsTracker") as seen:
        call()
    assert len(seen) == 1
    if call.__name__ == "<lambda>":
        assert seen[0].filename == __file__


def test_a_life_under_the_old_names_gives_megatrons_numbers():
    board, wandb, totals = Board(), Board(), {}
    for value in (1.0, 3.0):  # two micro-batches
        save_to_aux_losses_tracker("load_balancing_loss", value, 1, 3, ("tp", "sp"))
        save_to_aux_losses_tracker("overload", 2 * value, 3, 3)
    save_to_aux_losses_tracker("overload", 99.0, None, 3)
    text = track_moe_metrics(
        0.5, 10, board, wandb, totals, per_layer_logging=True, num_layers=3, moe_layer_freq=[1, 0, 1]
    )
    assert text == " overload: 2.00 |"
    assert totals == {"load_balancing_loss": 1.0}
    assert board.values == wandb.values
    assert board.values == {
        ("load_balancing_loss", 10): 1.0,
        ("overload", 10): 2.0,
        ("moe/load_balancing_loss_layer_0", 10): 2.0,
        ("moe/load_balancing_loss_layer_1", 10): 0.0,
        ("moe/load_balancing_loss_layer_2", 10): 0.0,
        ("moe/overload_layer_0", 10): 0.0,
        ("moe/overload_layer_1", 10): 0.0,
        ("moe/overload_layer_2", 10): 4.0,
    }
    assert not get_moe_layer_wise_logging_tracker()["overload"]["values"].any()


def test_groups_become_a_rule_and_has_dp_is_the_opposite_of_needs_dp_avg():
    save_to_aux_losses_tracker("a", 1.0, 1, 2, ("sp", "tp"), reduce_group_has_dp=False)
    save_to_aux_losses_tracker("b", 1.0, 1, 2, AXES[1:], reduce_group_has_dp=True)
    save_to_aux_losses_tracker("c", 1.0, 1, 2, avg_group="tp")
    seen = get_moe_layer_wise_logging_tracker()
    assert {name: {k: v for k, v in entry.items() if k != "values"} for name, entry in seen.items()} == {
        "a": {"reduce_group": ("sp", "tp"), "avg_group": None, "needs_dp_avg": True},
        "b": {"reduce_group": AXES[1:], "avg_group": None, "needs_dp_avg": False},
        "c": {"reduce_group": None, "avg_group": ("tp",), "needs_dp_avg": True},
    }


def test_reduction_across_ranks_follows_the_rule_once():
    def body():
        destroy_moe_metrics_tracker()
        value = rank(("dp", "tp")).astype(jnp.float32) + 1
        save_to_aux_losses_tracker("x", value, 1, 2, ("sp", "tp"))
        reduce_aux_losses_tracker_across_ranks()
        with pytest.raises(MetricError, match="synced already"):
            reduce_aux_losses_tracker_across_ranks()
        values = get_moe_layer_wise_logging_tracker()["x"]["values"]
        destroy_moe_metrics_tracker()
        return values

    mesh = build_mesh({"pp": 1, "dp": 2, "ep": 1, "sp": 1, "tp": 2}, jax.devices()[:4])
    np.testing.assert_array_equal(jax.jit(manual(body, mesh, (), P()))(), [(1 + 2 + 3 + 4) / 2, 0])


def test_one_name_has_one_rule_and_one_size():
    save_to_aux_losses_tracker("x", 1.0, 1, 2)
    with pytest.raises(MetricError, match="contradicts"):
        save_to_aux_losses_tracker("x", 1.0, 1, 2, "tp")
    with pytest.raises(MetricError, match=r"must lie in 1\.\.2"):
        save_to_aux_losses_tracker("x", 1.0, 3, 3)


def test_forced_metrics_print_zero_with_the_rule_of_their_name():
    assert track_moe_metrics(1.0, 0, force_initialize=True, track_names="z_loss", num_layers=2) == " z_loss: 0.00 |"
    entry = get_moe_layer_wise_logging_tracker()["z_loss"]
    assert entry["values"].shape == (2,)
    assert entry["avg_group"] == AXES[1:]
    with pytest.raises(MetricError, match="num_layers"):
        track_moe_metrics(1.0, 0, force_initialize=True, track_names="z_loss")
    with pytest.raises(MetricError, match="has no rule"):
        track_moe_metrics(1.0, 0, force_initialize=True, track_names="z", num_layers=2)


def test_forced_metrics_have_slots_for_mtp_layers_and_count_them():
    save_to_aux_losses_tracker("z_loss", 6.0, 3, 3)
    names = ["z_loss", "load_balancing_loss"]
    text = track_moe_metrics(1.0, 0, force_initialize=True, track_names=names, num_layers=2, mtp_num_layers=1)
    assert text == " z_loss: 2.00 | load_balancing_loss: 0.00 |"


def test_no_metrics_is_an_empty_line():
    assert track_moe_metrics(1.0, 0) == ""


def test_a_report_of_some_metrics_keeps_the_others():
    """Megatron-Core clears everything, so what was not reported is lost."""
    save_to_aux_losses_tracker("a", 1.0, 1, 1)
    save_to_aux_losses_tracker("b", 2.0, 1, 1)
    assert track_moe_metrics(1.0, 0, track_names="a", num_layers=1) == " a: 1.00 |"
    assert track_moe_metrics(1.0, 0, num_layers=1) == " a: 0.00 | b: 2.00 |"


def test_reporting_after_an_explicit_sync_does_not_reduce_again():
    save_to_aux_losses_tracker("a", 1.0, 1, 1)
    reduce_aux_losses_tracker_across_ranks()
    assert track_moe_metrics(1.0, 0, num_layers=1) == " a: 1.00 |"


def test_process_groups_are_refused():
    with pytest.raises(MetricError, match="mesh axes"):
        track_moe_metrics(1.0, 0, pg_collection=object())


def test_the_default_tracker_is_made_once_and_can_be_replaced():
    first = get_moe_metrics_tracker()
    assert get_moe_metrics_tracker() is first is MoEMetricsTracker.get_instance()
    own = MoEMetricsTracker.create({"x": MetricRule()}, 2)
    set_moe_metrics_tracker(own)
    assert get_moe_metrics_tracker().tracker is own
    holder = TrackerHolder()
    set_moe_metrics_tracker(holder)
    assert get_moe_metrics_tracker() is holder
    destroy_moe_metrics_tracker()
    assert get_moe_metrics_tracker() not in (first, holder)
