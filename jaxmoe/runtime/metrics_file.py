"""`metrics.jsonl`: one strict JSON object a line, appended while training, readable at any moment.

    {"step": 10, "time": "2026-01-31T12:00:00+00:00", "kind": "train" | "eval", <scalar>: number, ...,
     "per_layer": {<name>: [numbers]}, "expert_counts": [[integers]]}

Numbers that JSON does not have are the strings "nan", "inf" and "-inf"; a slot that is not reported is null.
"""

import datetime
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxmoe.config.whole_file import write_whole

METRICS_FILE = "metrics.jsonl"
Kind = Literal["train", "eval"]
_RESERVED = ("step", "time", "kind", "per_layer", "expert_counts")
_NOT_IN_JSON = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True)
class Record:
    """One line. `per_layer` values are float64 [slots], NaN where a slot is not reported."""

    step: int
    time: datetime.datetime
    kind: Kind
    scalars: dict[str, float]
    per_layer: dict[str, np.ndarray]
    expert_counts: np.ndarray | None


def _number(value: float) -> float | str:
    value = float(value)
    return value if math.isfinite(value) else str(value)


def _row(values_L: np.ndarray) -> list[float | str | None]:
    hidden = np.ma.getmaskarray(values_L)
    data = np.ma.getdata(values_L)
    return [None if skip else _number(value) for value, skip in zip(data.tolist(), hidden.tolist(), strict=True)]


def encode_record(
    step: int,
    kind: Kind,
    scalars: Mapping[str, float],
    per_layer: Mapping[str, np.ndarray],
    counts: np.ndarray | None,
) -> str:
    """One line of the file, with its newline."""
    taken = [name for name in scalars if name in _RESERVED]
    assert not taken, f"scalars {taken} have names that mean something else in {METRICS_FILE}"
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    line: dict[str, Any] = {"step": int(step), "time": now, "kind": kind}
    line |= {name: _number(value) for name, value in scalars.items()}
    if per_layer:
        line["per_layer"] = {name: _row(np.asanyarray(values)) for name, values in per_layer.items()}
    if counts is not None:
        line["expert_counts"] = np.asarray(counts).tolist()
    return json.dumps(line, allow_nan=False) + "\n"


def _float(value: float | str | None) -> float:
    if isinstance(value, str):
        return _NOT_IN_JSON[value]
    return math.nan if value is None else float(value)


def decode_record(line: str) -> Record:
    """The inverse of `encode_record`.

    Raises:
        ValueError: the line is cut short or is not one of ours.
    """
    try:
        raw = json.loads(line)
        time = datetime.datetime.fromisoformat(raw["time"])
        if raw["kind"] not in ("train", "eval"):
            raise ValueError(f"kind {raw['kind']!r} is neither train nor eval")
        counts = raw.get("expert_counts")
        return Record(
            step=int(raw["step"]),
            time=time,
            kind=raw["kind"],
            scalars={name: _float(value) for name, value in raw.items() if name not in _RESERVED},
            per_layer={n: np.array([_float(v) for v in row]) for n, row in raw.get("per_layer", {}).items()},
            expert_counts=None if counts is None else np.array(counts, np.int64),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a line of {METRICS_FILE}: {error!r}") from error


def iterate_metrics(path: Path) -> Iterator[Record | str]:
    """The records in order of the file; in place of a line that is not readable, a sentence about it."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield decode_record(line)
            except ValueError as error:
                yield f"{path.name}:{number}: {str(error)[:120]}"


def rewind_metrics(path: Path, resume_step: int) -> list[str]:
    """Make an existing file fit a run that goes on after `resume_step`: later and broken lines leave it.

    The file is replaced as a whole, so a crash leaves the old one. Returns a sentence per broken line.
    """
    if not path.exists():
        return []
    with path.open(encoding="utf-8", errors="replace") as file:
        lines = file.readlines()
    kept, problems = [], []
    for line, found in zip(lines, iterate_metrics(path), strict=True):
        if isinstance(found, str):
            problems.append(found)
        elif found.step <= resume_step:
            kept.append(line.removesuffix("\n") + "\n")
    if kept != lines:
        write_whole(path, "".join(kept))
    return problems
