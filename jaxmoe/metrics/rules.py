"""How the values of one metric that the ranks hold become one number: a static rule per name, in one table.

Rules belong to the name, never to the rank or the call: a pipeline stage without MoE layers reduces exactly like
all others, so nobody waits for a collective that a peer skips and nobody prints a part for a whole.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from jaxmoe.spmd.axes import AXES, PP, REPLICA_AXES, ROW_AXES
from jaxmoe.spmd.types import Axes, as_tuple


class MetricError(ValueError):
    """A metric that is recorded, reduced or reported in a way that would give a wrong number."""


@dataclass(frozen=True, init=False)
class MetricRule:
    """Sum over pp, then sum over `reduce_axes`, then mean over `avg_axes`, then mean over dp and ep, in this order.

    The last mean is taken if `needs_dp_avg`, and only over those of dp and ep that no earlier step covered: there
    all ranks already agree, and a mean of equal numbers changes nothing.

    Raises:
        MetricError: an unknown axis, pp (always summed first), or one axis both summed and averaged.
    """

    reduce_axes: tuple[str, ...]
    avg_axes: tuple[str, ...]
    needs_dp_avg: bool

    def __init__(self, reduce_axes: Axes = (), avg_axes: Axes = (), needs_dp_avg: bool = True) -> None:
        for field, axes in (("reduce_axes", reduce_axes), ("avg_axes", avg_axes)):
            # Mesh order, so that two spellings of one rule are equal and compile to one collective.
            object.__setattr__(self, field, tuple(axis for axis in AXES if axis in as_tuple(axes)))
            wrong = [axis for axis in as_tuple(axes) if axis not in AXES or axis == PP]
            if wrong:
                raise MetricError(
                    f"MetricRule.{field}={as_tuple(axes)}: {wrong} must be among {AXES[1:]}; "
                    f"every metric is summed over {PP} first, without being told"
                )
        object.__setattr__(self, "needs_dp_avg", needs_dp_avg)
        both = [axis for axis in self.reduce_axes if axis in self.avg_axes]
        if both:
            raise MetricError(f"MetricRule: {both} stand in reduce_axes and in avg_axes; a value is summed or averaged")

    @property
    def sum_axes(self) -> tuple[str, ...]:
        """Axes over which the ranks hold parts: pp and `reduce_axes`."""
        return (PP, *self.reduce_axes)

    @property
    def dp_mean_axes(self) -> tuple[str, ...]:
        """Axes of the last step, the mean over data-parallel replicas."""
        done = self.reduce_axes + self.avg_axes
        return tuple(axis for axis in ROW_AXES if axis not in done) if self.needs_dp_avg else ()

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes that the rule covers: a recorded value may differ between ranks along these and no others."""
        return self.sum_axes + self.avg_axes + self.dp_mean_axes


#: For values that carry their weight in the objective: every rank holds a part, and parts only add.
SUM_OF_PARTS = MetricRule(reduce_axes=AXES[1:], needs_dp_avg=False)

#: What `train_step` records, per layer: already weighted (`loss_scale=1`), without coefficients.
DEFAULT_RULES: Mapping[str, MetricRule] = MappingProxyType(
    {
        "load_balancing_loss": SUM_OF_PARTS,
        "seq_load_balancing_loss": SUM_OF_PARTS,
        "global_load_balancing_loss": SUM_OF_PARTS,
        "z_loss": SUM_OF_PARTS,
        "indexer_loss": SUM_OF_PARTS,
        "mtp_loss": SUM_OF_PARTS,
        "mtp_acceptance": SUM_OF_PARTS,
        "router_entropy": SUM_OF_PARTS,
        "top1_weight": SUM_OF_PARTS,
        "router_bias_range": SUM_OF_PARTS,
    }
)

#: For programs that record unweighted values once per micro-batch, as in Megatron-Core, and report with
#: `loss_scale = 1 / num_microbatches`. TP+CP is ("sp", "tp"), TP+DP+CP all axes but pp.
MEGATRON_RULES: Mapping[str, MetricRule] = MappingProxyType(
    {
        "load_balancing_loss": MetricRule(reduce_axes=REPLICA_AXES),
        "seq_load_balancing_loss": MetricRule(reduce_axes=REPLICA_AXES),
        "global_load_balancing_loss": MetricRule(reduce_axes=ROW_AXES + REPLICA_AXES, needs_dp_avg=False),
        "z_loss": MetricRule(avg_axes=ROW_AXES + REPLICA_AXES, needs_dp_avg=False),
    }
)
