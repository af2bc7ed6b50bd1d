"""What a report knows of a run: the numbers of its metrics.jsonl and its config, nothing else.

Reads runs in progress and runs that died while writing: what cannot be read becomes a note.
"""

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jaxmoe.config import UserError
from jaxmoe.config.load import read_tree
from jaxmoe.runtime.metrics_file import METRICS_FILE, Kind, Record, iterate_metrics

CONFIG_FILE = "config.yaml"

#: Moments whose expert counts are kept: a long run of a large model has gigabytes of them.
_MOST_MOMENTS = 64


@dataclass(frozen=True)
class Series:
    """Numbers by step, in order of steps; values [steps] or [steps, slots]."""

    steps: np.ndarray
    values: np.ndarray


@dataclass
class RunData:
    """One run folder. `counts` holds (step, tokens per expert [slots, E]) at up to 64 moments, the last included."""

    name: str
    path: Path
    config: Mapping[str, Any] | None
    records: list[Record]
    counts: list[tuple[int, np.ndarray]]
    notes: list[str] = field(default_factory=list)

    @property
    def num_steps(self) -> int | None:
        """Steps that the config asks for."""
        steps = (self.config or {}).get("run", {}).get("steps")
        return steps if isinstance(steps, int) else None

    @property
    def num_depths(self) -> int:
        """Depths of multi-token prediction: the last slots of a per-layer metric."""
        model = (self.config or {}).get("model") or {}
        return (model.get("mtp") or {}).get("num_depths", 0)

    @property
    def last_step(self) -> int:
        """The last step with numbers; 0 if there is none."""
        return max((record.step for record in self.records), default=0)

    @property
    def last_time(self) -> datetime.datetime | None:
        """When the last line was written."""
        return self.records[-1].time if self.records else None

    def names(self, kind: Kind) -> list[str]:
        """Scalars of a kind, in order of appearance."""
        return list(dict.fromkeys(name for r in self.records if r.kind == kind for name in r.scalars))

    def layer_names(self) -> list[str]:
        """Per-layer metrics of training, in order of appearance."""
        return list(dict.fromkeys(name for r in self.records if r.kind == "train" for name in r.per_layer))

    def series(self, kind: Kind, name: str) -> Series:
        """One scalar; of two lines about one step the later counts."""
        points = {r.step: r.scalars[name] for r in self.records if r.kind == kind and name in r.scalars}
        steps = sorted(points)
        return Series(np.array(steps, np.int64), np.array([points[step] for step in steps], np.float64))

    def layers(self, name: str) -> Series:
        """One per-layer metric. Rows of another length than the last one (a changed model) are left out."""
        rows = {r.step: r.per_layer[name] for r in self.records if r.kind == "train" and name in r.per_layer}
        length = len(rows[max(rows)]) if rows else 0
        steps = [step for step in sorted(rows) if len(rows[step]) == length]
        return Series(np.array(steps, np.int64), np.array([rows[step] for step in steps]).reshape(len(steps), length))


def read_run(path: Path, name: str) -> RunData:
    """A run folder's numbers.

    Raises:
        UserError: the path is not a run folder.
    """
    if not path.is_dir():
        kind = "is a file" if path.exists() else "does not exist"
        raise UserError(f"{path}: {kind}; give the run folder itself, which holds {METRICS_FILE} and {CONFIG_FILE}")
    metrics, config_path = path / METRICS_FILE, path / CONFIG_FILE
    if not metrics.is_file() and not config_path.is_file():
        inside = sorted(child.parent.name for child in path.glob(f"*/{METRICS_FILE}"))[:3]
        hint = f"; did you mean {', '.join(str(path / child) for child in inside)}?" if inside else ""
        raise UserError(f"{path}: holds neither {METRICS_FILE} nor {CONFIG_FILE}, so it is no run folder{hint}")
    run = RunData(name, path, None, [], [])
    if config_path.is_file():
        try:
            run.config = read_tree(config_path)
        except UserError as error:
            run.notes.append(str(error))
    else:
        run.notes.append(f"{CONFIG_FILE} is missing, so the settings of this run are unknown")
    _read_records(run, metrics)
    return run


def _read_records(run: RunData, metrics: Path) -> None:
    if not metrics.is_file():
        run.notes.append(f"{METRICS_FILE} is not there yet: no step has been logged")
        return
    every, seen, broken = 1, 0, []
    for found in iterate_metrics(metrics):
        if isinstance(found, str):
            broken.append(found)
            continue
        counts, slim = found.expert_counts, Record(**{**vars(found), "expert_counts": None})
        run.records.append(slim)
        if counts is None or found.kind != "train" or counts.ndim != 2:
            continue
        if seen % every and run.counts:
            run.counts[-1] = (found.step, counts)  # the last moment is always the latest
        else:
            run.counts.append((found.step, counts))
        seen += 1
        if len(run.counts) > _MOST_MOMENTS:
            run.counts[:] = [*run.counts[:-1:2], run.counts[-1]]
            every *= 2
    if not run.records:
        run.notes.append("no step has been logged yet")
    if broken:
        shown = "; ".join(broken[:3]) + (f"; and {len(broken) - 3} more" if len(broken) > 3 else "")
        run.notes.append(f"left out what cannot be read (a line that is being written, or was cut off): {shown}")


def read_runs(paths: Sequence[str]) -> list[RunData]:
    """Run folders, each with a name of its own: the folder's, with as much of the path before it as tells them apart.

    Raises:
        UserError: every path that is not a run folder, at once; or one folder given twice.
    """
    folders = [Path(path).resolve() for path in paths]
    twice = sorted({str(folder) for folder in folders if folders.count(folder) > 1})
    if twice:
        raise UserError(f"{', '.join(twice)}: given twice; name each run once")
    depth = 1
    while len({folder.parts[-depth:] for folder in folders}) < len(folders):
        depth += 1
    runs, problems = [], []
    for path, folder in zip(paths, folders, strict=True):
        try:
            runs.append(read_run(Path(path), "/".join(folder.parts[-depth:])))
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("\n".join(problems))
    return runs


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """A config as dotted paths."""
    if not isinstance(tree, Mapping) or not tree:
        return {prefix: tree}
    out: dict[str, Any] = {}
    for key, value in tree.items():
        out |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return out


#: Stands for a key that a config does not have.
MISSING = "-"


def config_differences(runs: Sequence[RunData]) -> dict[str, list[str]]:
    """Dotted path -> value of each run, for every setting that is not the same in all runs whose config is known."""
    known = [(run, flatten(run.config)) for run in runs if run.config is not None]
    paths = list(dict.fromkeys(path for _, flat in known for path in flat))
    table = {}
    for path in paths:
        values = {run.name: _shown(flat[path]) if path in flat else MISSING for run, flat in known}
        if len(set(values.values())) > 1:
            table[path] = [values.get(run.name, "unknown") for run in runs]
    return table


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
