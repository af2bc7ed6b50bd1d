"""What a verification runs, and what each run is compared with."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxmoe.config.errors import ConfigError, Problem
from jaxmoe.config.schema import Config
from jaxmoe.runtime.proof.layouts import MICROBATCHES, Layout, name_of, variant
from jaxmoe.runtime.proof.ragged import BatchKind
from jaxmoe.runtime.proof.shrink import split_dependent

ONE_DEVICE: Layout = {"zero": 0, "pipeline_schedule": "gpipe", "pipeline_chunks": 1}


@dataclass(frozen=True)
class Run:
    """One layout, at one number of micro-batches, on one kind of batch."""

    name: str
    config: Config
    batch: BatchKind

    @property
    def num_microbatches(self) -> int:
        return self.config.batch.num_microbatches


@dataclass(frozen=True)
class Plan:
    """Pairs (run, the one-device run that it must equal), and the layouts that the config cannot have."""

    pairs: list[tuple[Run, Run]]
    left_out: list[tuple[Layout, int, Sequence[Problem]]]

    @property
    def references(self) -> list[Run]:
        return list(dict.fromkeys(reference for _, reference in self.pairs))


def one_device(config: Config, num_microbatches: int, batch: BatchKind) -> Run:
    """The run without a mesh."""
    made = variant(config, ONE_DEVICE, num_microbatches)
    if not isinstance(made, Config):
        raise ConfigError(made)
    return Run("one device" if batch == "ragged" else "one device, identical rows", made, batch)


def make_plan(config: Config, layouts: Sequence[Layout]) -> Plan:
    """Every layout with every number of micro-batches that it can have.

    Where J depends on M by definition, a run is compared at its own M; and one device runs a batch of identical rows,
    on which J must not depend on M after all: that is where a missing 1 / M shows.
    """
    depends = bool(split_dependent(config))
    pairs, left_out = [], []
    for layout in layouts:
        for num_microbatches in MICROBATCHES:
            made = variant(config, layout, num_microbatches)
            if isinstance(made, Config):
                reference = one_device(config, num_microbatches if depends else 1, "ragged")
                pairs.append((Run(name_of(layout), made, "ragged"), reference))
            else:
                left_out.append((layout, num_microbatches, made))
    if depends and pairs:
        reference = one_device(config, 1, "identical")
        pairs += [(one_device(config, m, "identical"), reference) for m in MICROBATCHES[1:]]
    return Plan(pairs, left_out)
