"""The whole of a verification: plan, run, compare, print."""

import gc
import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from jaxmoe.config.errors import ConfigError, UserError
from jaxmoe.config.schema import Config
from jaxmoe.config.whole_file import write_whole
from jaxmoe.runtime.proof.compare import Difference, Outcome, differences, flipped_routes
from jaxmoe.runtime.proof.curves import CURVE_LAYOUTS, draw_curves
from jaxmoe.runtime.proof.layouts import chosen_layouts, name_of
from jaxmoe.runtime.proof.plan import Plan, Run, make_plan
from jaxmoe.runtime.proof.run import initial_weights, run_layout
from jaxmoe.runtime.proof.shrink import shrink, split_dependent

TOLERANCE = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 5e-2}

#: Then compiled programs are dropped: each takes thousands of memory maps, and Linux ends a process that needs more
#: than 65,530 (seen after some fifty programs of a small model).
_PROGRAMS_AT_ONCE = 12


@dataclass(frozen=True)
class Comparison:
    """One layout against one device, at one number of micro-batches."""

    layout: str
    num_microbatches: int
    found: Sequence[Difference]
    flipped: int
    seconds: float

    @property
    def worst(self) -> Difference:
        return max(self.found, key=lambda d: d.value)

    def passes(self, tolerance: float) -> bool:
        return self.worst.value <= tolerance


def _use_cpu_devices(count: int) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)
    jax.config.update("jax_default_matmul_precision", "highest")
    if jax.device_count() < count:
        raise UserError(f"--devices={count}: JAX already runs with {jax.device_count()} devices; start a new process")


def execute(plan: Plan, seed: int, console: Console) -> list[Comparison]:
    """Run everything, as many at once as there are cores: compiling takes nearly all the time."""
    now = TextColumn("{task.fields[now]}")
    columns = (TextColumn("verify"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), now)
    with Progress(*columns, console=console, transient=True) as bar, ThreadPoolExecutor(os.cpu_count()) as pool:
        task = bar.add_task("verify", total=len(plan.references) + len(plan.pairs), now="one device")
        start = initial_weights(plan.references[0].config)
        runs = [*plan.references, *(run for run, _ in plan.pairs)]
        outcomes: dict[Run, Outcome] = {}
        for first in range(0, len(runs), _PROGRAMS_AT_ONCE):
            wave = runs[first : first + _PROGRAMS_AT_ONCE]
            futures = {pool.submit(run_layout, run.config, start, run.batch, seed): run for run in wave}
            for future in as_completed(futures):
                run = futures[future]
                outcomes[run] = future.result()
                bar.update(task, advance=1, now=f"{run.name} M={run.num_microbatches}")
            jax.clear_caches()
            gc.collect()
    return [compare(run, outcomes[run], outcomes[reference]) for run, reference in plan.pairs]


def compare(run: Run, outcome: Outcome, reference: Outcome) -> Comparison:
    """How far a run is from its reference."""
    found, flipped = differences(reference, outcome), flipped_routes(reference, outcome)
    return Comparison(run.name, run.num_microbatches, found, flipped, outcome.seconds)


def _table(comparisons: Sequence[Comparison], tolerance: float, dtype: str) -> Table:
    table = Table(title=f"largest relative difference from one device, {dtype}, tolerance {tolerance:g}")
    table.add_column("layout", overflow="fold")
    table.add_column("M", justify="right")
    table.add_column("difference", justify="right")
    table.add_column("kind")
    table.add_column("worst leaf", overflow="fold")
    table.add_column("flipped routes", justify="right")
    table.add_column("seconds", justify="right")
    table.add_column("")
    for item in comparisons:
        worst, good = item.worst, item.passes(tolerance)
        table.add_row(
            item.layout,
            str(item.num_microbatches),
            f"{worst.value:.1e}",
            worst.kind,
            worst.worst_leaf,
            str(item.flipped),
            f"{item.seconds:.1f}",
            "[green]equal[/]" if good else "[red]DIFFERS[/]",
        )
    return table


def _report(plan: Plan, comparisons: Sequence[Comparison], config: Config, dtype: str, console: Console) -> None:
    tolerance = TOLERANCE[dtype]
    console.print(_table(comparisons, tolerance, dtype))
    for text in split_dependent(config):
        console.print(
            f"By definition: {text}. Compared at the same M and at 8 replicas (objective.replicas); on identical rows "
            "nothing depends on M."
        )
    for layout, m, problems in plan.left_out:
        console.print(f"[dim]Left out {name_of(layout)} M={m}: {problems[0].rule}[/]")
    flipped = [c for c in comparisons if c.flipped]
    if flipped:
        console.print(
            f"{len(flipped)} comparisons chose other experts for some tokens. Rounding decides near ties: if another "
            "--seed shows none, there was nothing else."
        )
    failed = sum(not c.passes(tolerance) for c in comparisons)
    verdict = "[green]PASS[/]" if not failed else f"[red]FAIL[/]: {failed} of"
    count = len({c.layout for c in comparisons})
    console.print(f"{verdict} {len(comparisons)} comparisons of {count} layout{'' if count == 1 else 's'}.")


def _write_json(path: Path, comparisons: Sequence[Comparison], tolerance: float, dtype: str) -> None:
    result = {
        "dtype": dtype,
        "tolerance": tolerance,
        "passed": all(c.passes(tolerance) for c in comparisons),
        "comparisons": [
            {
                "layout": c.layout,
                "num_microbatches": c.num_microbatches,
                "differences": {d.kind: {"value": d.value, "worst_leaf": d.worst_leaf} for d in c.found},
                "flipped_routes": c.flipped,
                "seconds": c.seconds,
                "passed": c.passes(tolerance),
            }
            for c in comparisons
        ],
    }
    write_whole(path, json.dumps(result, indent=2).replace("Infinity", '"inf"') + "\n")


def curves(config: Config, path: Path, *, layouts: str | None, devices: int, dtype: str, steps: int) -> int:
    """Draw the training curves of one device and of the layouts, eight in all when none are named; the exit code."""
    chosen = [{}, *chosen_layouts(layouts, devices)] if layouts is not None else CURVE_LAYOUTS
    _use_cpu_devices(devices)
    draw_curves(config, path, layouts=chosen, steps=steps, dtype=dtype, console=Console())
    return 0


def verify(config: Config, *, layouts: str | None, devices: int, dtype: str, json_path: Path | None, seed: int) -> int:
    """The exit code: 0 when every comparison is within the tolerance of `dtype`."""
    # A file or a pipe has no width of its own: wide enough that no cell is cut.
    console = Console() if sys.stdout.isatty() else Console(width=160)
    small = shrink(config, dtype)
    plan = make_plan(small, chosen_layouts(layouts, devices))
    if not plan.pairs:
        raise ConfigError(list(dict.fromkeys(problem for _, _, problems in plan.left_out for problem in problems)))
    _use_cpu_devices(devices)
    comparisons = execute(plan, seed, console)
    _report(plan, comparisons, config, dtype, console)
    if json_path:
        _write_json(json_path, comparisons, TOLERANCE[dtype], dtype)
    return 0 if all(c.passes(TOLERANCE[dtype]) for c in comparisons) else 1
