"""The report as one HTML file that needs no network: pictures inside, text beside them."""

import base64
import datetime
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from html import escape
from itertools import chain, count

import numpy as np

from jaxmoe.config.yaml_io import dump_yaml
from jaxmoe.runtime import report_plots as plots
from jaxmoe.runtime.console_line import console_line
from jaxmoe.runtime.metrics_file import Kind
from jaxmoe.runtime.report_plots import Picture
from jaxmoe.runtime.report_read import RunData, config_differences

_LAST_LINES = 10
_QUIET = datetime.timedelta(minutes=10)

_STYLE = """
:root { --line: #ddd; --soft: #666; --paper: #fff; --ground: #f4f5f7; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: #1a1a1a; font: 15px/1.45 system-ui, sans-serif; }
main { max-width: 1560px; margin: 0 auto; padding: 16px; }
h1 { font-size: 22px; margin: 8px 0 16px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 28px 0 10px; }
h3 { font-size: 15px; margin: 0 0 8px; overflow-wrap: anywhere; }
.grid { display: grid; gap: 14px; align-items: start;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 400px), 1fr)); }
.card, figure { background: var(--paper); border: 1px solid var(--line); border-radius: 8px; padding: 12px;
  margin: 0; min-width: 0; }
figure img { width: 100%; height: auto; display: block; }
figcaption { font-weight: 600; margin-bottom: 6px; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 14px; margin: 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
.note { color: #8a4b00; margin: 8px 0 0; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: 5px 12px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td, th { overflow-wrap: anywhere; }
.log div { font: 12.5px/1.45 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere;
  padding-left: 1.5em; text-indent: -1.5em; }
.cards { display: grid; gap: 14px; }
pre { font-size: 12.5px; white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; }
details { margin-top: 10px; } summary { cursor: pointer; color: #2166ac; }
@media (max-width: 640px) {  /* a phone: one setting below the other, each value after its run's name */
  table, tbody, tr, th, td { display: block; }
  tr:first-child { display: none; }
  th { border: 0; padding: 6px 0 2px; } td { padding: 2px 0 4px 12px; }
  td::before { content: attr(data-run) ": "; color: var(--soft); }
}
"""


@dataclass
class Part:
    """A section of the page."""

    title: str
    pictures: list[Picture] = field(default_factory=list)


#: Curves of the first section: scalar, title, axis label, options of `plots.curves`.
_LEARNING: tuple[tuple[str, str, str, dict[str, bool]], ...] = (
    ("loss", "Loss", "cross-entropy", {"evaluation": True}),
    ("bits_per_byte", "Bits per byte", "bits per byte", {"evaluation": True}),
    ("total_loss", "Total loss", "objective J", {}),
    ("learning_rate", "Learning rate", "learning rate", {}),
    ("grad_norm", "Gradient norm", "L2 norm", {"log": True}),
    ("tokens_per_second", "Tokens per second", "tokens/s", {}),
)

#: Which section a metric belongs to: the first whose pattern is found in its name.
_SECTIONS: tuple[tuple[str, str], ...] = (
    ("Gradient norms", r"^grad_norm"),
    ("Multi-token prediction", r"^mtp"),
    ("Sparse-attention indexer", r"^indexer"),
    ("Router bias", r"bias"),
    ("Balance of experts", r"load|balanc|dead|entropy|z_loss|top1|dropped"),
)
_OTHER = "Other numbers"
#: Counters that are better read as numbers than as curves.
_NOT_DRAWN = ("skipped", "skipped_in_a_row", "target_tokens", "valid_tokens")


def _section_of(name: str) -> str:
    return next((title for title, pattern in _SECTIONS if re.search(pattern, name)), _OTHER)


def _ordered(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def draw_parts(runs: Sequence[RunData]) -> list[Part]:
    """All pictures, by section. Sections and pictures without numbers do not appear."""
    learning = Part("Learning")
    for name, title, label, options in _LEARNING:
        learning.pictures += plots.picture(name, title, partial(plots.curves, runs, name, label, **options))
    parts = {"Balance of experts": Part("Balance of experts")}
    parts |= {title: parts.get(title) or Part(title) for title, _ in _SECTIONS} | {_OTHER: Part(_OTHER)}
    for key, words, draw in (
        ("expert_load", "Tokens per expert, share of the mean", plots.load_heat_maps),
        ("busiest", "Busiest expert of each layer over time", plots.busiest_expert_over_time),
    ):
        for number, run in enumerate(runs, start=1):
            found = plots.picture(f"{key}_run{number}", _of_run(words, run, runs), partial(draw, run))
            parts["Balance of experts"].pictures += found
    drawn = {name for name, *_ in _LEARNING} | set(_NOT_DRAWN)
    for family in _ordered(n.split("/")[0] for run in runs for n in run.names("train") if "/" in n):
        for number, run in enumerate(runs, start=1):
            members = [name for name in run.names("train") if name.startswith(f"{family}/")]
            drawn |= set(members)
            title = _of_run(f"{_words(family)} by part of the model", run, runs)
            draw = partial(plots.member_lines, run, members, _words(family).lower())
            parts[_section_of(family)].pictures += plots.picture(f"{family}_parts_run{number}", title, draw)
    for name in _ordered(n for run in runs for n in (*run.names("train"), *run.names("eval"))):
        if name not in drawn:
            part, title = parts[_section_of(name)], _words(name)
            part.pictures += plots.picture(name, title, partial(plots.curves, runs, name, name, evaluation=True))
    for name in _ordered(n for run in runs for n in run.layer_names()):
        for number, run in enumerate(runs, start=1):
            title = _of_run(f"{_words(name)}, per layer", run, runs)
            found = plots.picture(f"{name}_per_layer_run{number}", title, partial(plots.layer_lines, run, name, name))
            parts[_section_of(name)].pictures += found
    return _named_apart([part for part in (learning, *parts.values()) if part.pictures])


def _named_apart(parts: list[Part]) -> list[Part]:
    """The parts with keys that are file names, each of one picture: metrics may have any name."""
    taken: set[str] = set()
    for part in parts:
        for place, picture in enumerate(part.pictures):
            plain = re.sub(r"[^A-Za-z0-9_-]", "-", picture.key)[:100]
            key = next(k for k in chain([plain], (f"{plain}-{n}" for n in count(2))) if k.lower() not in taken)
            taken.add(key.lower())
            part.pictures[place] = replace(picture, key=key)
    return parts


def _of_run(title: str, run: RunData, runs: Sequence[RunData]) -> str:
    return f"{title} - {run.name}" if len(runs) > 1 else title


def _words(name: str) -> str:
    text = name.replace("_", " ").replace("grad ", "gradient ")
    return text[:1].upper() + text[1:] if not text.startswith("mtp") else "MTP" + text[3:]


def _number(value: float | None, form: str = ",.4g") -> str:
    return "-" if value is None else f"{value:{form}}"


def _last(run: RunData, kind: Kind, name: str) -> float | None:
    values = run.series(kind, name).values
    return float(values[-1]) if len(values) else None


def _state(run: RunData, now: datetime.datetime) -> str:
    if run.num_steps is not None and run.last_step >= run.num_steps:
        return "finished"
    if run.last_time is None:
        return "no step logged yet"
    quiet = now - run.last_time
    minutes = int(quiet.total_seconds() // 60)
    ago = f"{minutes} min" if minutes < 120 else f"{minutes // 60} h" if minutes < 2880 else f"{minutes // 1440} days"
    return f"running (last line {ago} ago)" if quiet < _QUIET else f"stopped, or very slow (last line {ago} ago)"


def _facts(run: RunData, now: datetime.datetime) -> dict[str, str]:
    steps = f"{run.last_step:,}" + (f" of {run.num_steps:,}" if run.num_steps else "")
    facts = {"state": _state(run, now), "steps": steps}
    headline: tuple[tuple[str, Kind, str], ...] = (
        ("training loss", "train", "loss"),
        ("validation loss", "eval", "loss"),
        ("validation bits/byte", "eval", "bits_per_byte"),
    )
    for label, kind, name in headline:
        value = _last(run, kind, name)
        if value is not None:
            facts[label] = _number(value)
    speeds = run.series("train", "tokens_per_second").values
    if np.isfinite(speeds).any():
        facts["tokens/s, median"] = _number(float(np.nanmedian(np.where(np.isfinite(speeds), speeds, np.nan))), ",.0f")
    skipped = run.series("train", "skipped").values
    if len(skipped):
        facts["skipped steps"] = f"{int(np.nansum(skipped))} of {len(skipped)} logged"
    odd = [f"{name} (step {step})" for name, step in _not_finite(run)]
    if odd:
        facts["not finite"] = ", ".join(odd[:4]) + (f" and {len(odd) - 4} more" if len(odd) > 4 else "")
    return facts


def _not_finite(run: RunData) -> list[tuple[str, int]]:
    """Scalars that were NaN or infinite, with the first step where they were."""
    first: dict[str, int] = {}
    for record in run.records:
        for name, value in record.scalars.items():
            if not np.isfinite(value):
                first.setdefault(name, record.step)
    return list(first.items())


def _run_card(run: RunData, now: datetime.datetime) -> str:
    rows = "".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in _facts(run, now).items())
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in run.notes)
    return f'<div class="card"><h3>{escape(run.name)}</h3><dl>{rows}</dl>{notes}</div>'


def _figure(picture: Picture) -> str:
    data = base64.b64encode(picture.svg().encode()).decode()
    title = escape(picture.title)
    return (
        f'<figure id="{escape(picture.key)}"><figcaption>{title}</figcaption>'
        f'<img alt="{title}" src="data:image/svg+xml;base64,{data}"></figure>'
    )


def _cells(runs: Sequence[RunData], values: Sequence[str]) -> str:
    cells = zip(runs, values, strict=True)
    return "".join(f'<td data-run="{escape(run.name)}">{escape(value)}</td>' for run, value in cells)


def _config_part(runs: Sequence[RunData]) -> str:
    out = []
    if len(runs) > 1:
        table = config_differences(runs)
        if table:
            head = "".join(f"<th>{escape(run.name)}</th>" for run in runs)
            body = "".join(f"<tr><th>{escape(path)}</th>{_cells(runs, values)}</tr>" for path, values in table.items())
            out.append(f'<div class="card"><table><tr><th>setting</th>{head}</tr>{body}</table></div>')
        else:
            out.append('<div class="card">No setting differs between the runs.</div>')
    for run in runs:
        if run.config is not None:
            text = escape(dump_yaml(run.config))
            out.append(f"<details><summary>{escape(run.name)}: whole configuration</summary>")
            out.append(f'<div class="card"><pre>{text}</pre></div></details>')
    return f"<h2>{'Configuration: what differs' if len(runs) > 1 else 'Configuration'}</h2>" + "".join(out)


def _log_part(runs: Sequence[RunData]) -> str:
    cards = []
    for run in runs:
        lines = [console_line(r.step, run.num_steps, r.scalars, r.kind) for r in run.records[-_LAST_LINES:]]
        if lines:
            text = "".join(f"<div>{escape(line)}</div>" for line in lines)
            cards.append(f'<div class="card log"><h3>{escape(run.name)}</h3>{text}</div>')
    return f'<h2>Last log lines</h2><div class="cards">{"".join(cards)}</div>' if cards else ""


def render_page(runs: Sequence[RunData], parts: Sequence[Part], now: datetime.datetime) -> str:
    """The whole page."""
    names = ", ".join(run.name for run in runs)
    sections = "".join(
        f'<h2>{escape(part.title)}</h2><div class="grid">{"".join(map(_figure, part.pictures))}</div>' for part in parts
    )
    cards = "".join(_run_card(run, now) for run in runs)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(names)}</title><style>{_STYLE}</style></head><body><main>"
        f'<h1>{escape(names)}</h1><div class="grid">{cards}</div>{sections}{_config_part(runs)}{_log_part(runs)}'
        f"<p>Made {now:%Y-%m-%d %H:%M} UTC from metrics.jsonl and config.yaml.</p></main></body></html>\n"
    )
