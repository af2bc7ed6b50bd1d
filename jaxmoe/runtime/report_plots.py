"""The pictures of a report: matplotlib figures, drawn for a phone's width so that labels stay readable everywhere."""

import hashlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib import colors
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from jaxmoe.runtime.heat_map import LOAD_SCALE
from jaxmoe.runtime.metrics_file import Kind
from jaxmoe.runtime.report_read import RunData, Series

#: 4.7 in are 338 pt: about the width of a phone's screen, so an 11 pt label is about 11 px there.
_WIDTH, _HEIGHT = 4.7, 3.1
_STYLE: Any = {
    "font.size": 11,
    "axes.labelsize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.5,
    "legend.frameon": False,
    "legend.fontsize": 10,
    "figure.dpi": 144,
    "savefig.dpi": 144,
}
_COLOURS = ("#2166ac", "#d6604d", "#4dac26", "#7b3294", "#b8860b", "#01857a", "#c51b7d", "#555555")
_MOST_POINTS = 400
_LONGEST_LABEL = 30
#: So many lines have names; more have a scale of colours.
_FEW_LINES = 6


@dataclass(frozen=True)
class Picture:
    """A figure with its title; `key` names its file."""

    key: str
    title: str
    figure: Figure

    def svg(self) -> str:
        """The figure without its title, for a page that sets the title as text."""
        stream = io.StringIO()
        # Ids inside an SVG come from the salt: equal reports are equal files.
        salt = hashlib.sha256(self.key.encode()).hexdigest()
        with mpl.rc_context({**_STYLE, "svg.hashsalt": salt}):
            self.figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
        return stream.getvalue()

    def png(self) -> bytes:
        """The figure with its title."""
        stream = io.BytesIO()
        with mpl.rc_context(_STYLE):
            lines = [_shortened(line, 48) for line in self.title.split(" - ", 1)]
            title = self.figure.suptitle("\n".join(lines), fontsize=11)
            FigureCanvasAgg(self.figure).print_png(stream)
            title.remove()
        return stream.getvalue()


def _shortened(text: str, length: int = _LONGEST_LABEL) -> str:
    half = (length - 3) // 2
    return text if len(text) <= length else f"{text[:half]}...{text[-half:]}"


def _new_figure(height: float = _HEIGHT) -> Figure:
    return Figure(figsize=(_WIDTH, height), layout="constrained")


def _short_number(value: float, _position: object = None) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def _finish_axes(axes: Axes, label: str) -> None:
    axes.set_xlabel("step")
    axes.set_ylabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(_short_number))


def thinned(series: Series) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Steps, means, lowest and highest of at most 400 stretches of a series; what is not finite becomes a gap."""
    values = np.where(np.isfinite(series.values), series.values, np.nan)
    size = -(-len(values) // _MOST_POINTS)
    if size <= 1:
        return series.steps, values, values, values
    starts = np.arange(0, len(values), size)
    counts = np.maximum(np.add.reduceat(np.isfinite(values).astype(int), starts), 0)
    means = np.add.reduceat(np.nan_to_num(values), starts) / np.where(counts > 0, counts, np.nan)
    ends = np.minimum(starts + size, len(values)) - 1
    return series.steps[ends], means, np.fmin.reduceat(values, starts), np.fmax.reduceat(values, starts)


def _draw_line(axes: Axes, series: Series, colour: str, label: str | None) -> None:
    steps, means, low, high = thinned(series)
    marker = "o" if len(steps) <= 1 else None
    axes.plot(steps, means, color=colour, label=label, marker=marker, markersize=4)
    if means is not low:
        axes.fill_between(steps, low, high, color=colour, alpha=0.2, linewidth=0)


def curves(
    runs: Sequence[RunData], name: str, label: str, *, train: bool = True, evaluation: bool = False, log: bool = False
) -> Figure | None:
    """One scalar of all runs over steps: lines for training, dots for validation. None if no run has it."""
    with mpl.rc_context(_STYLE):
        figure = _new_figure()
        axes = figure.subplots()
        drawn = False
        for run, colour in zip(runs, _cycle(len(runs)), strict=True):
            who = _shortened(run.name)
            kinds: tuple[tuple[Kind, bool], ...] = (("train", train), ("eval", evaluation))
            for kind, wanted in kinds:
                series = run.series(kind, name)
                if not wanted or not np.isfinite(series.values).any():
                    continue
                drawn = True
                if kind == "train":
                    _draw_line(axes, series, colour, who)
                else:
                    text = f"{who}, validation"
                    axes.plot(series.steps, series.values, "--o", color=_darker(colour), markersize=4, label=text)
        if not drawn:
            return None
        if log and _spans_powers(np.concatenate([run.series("train", name).values for run in runs])):
            _scale_by_powers(axes)
        _finish_axes(axes, label)
        _legend(figure, axes)
        return figure


def _scale_by_powers(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(_short_number))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _spans_powers(values: np.ndarray) -> bool:
    """Whether a logarithmic scale shows more: positive numbers, far apart."""
    finite = values[np.isfinite(values)]
    return bool(finite.size and finite.min() > 0 and finite.max() > 20 * finite.min())


def member_lines(run: RunData, names: Sequence[str], label: str) -> Figure | None:
    """Scalars of one family (`family/member`) of one run, a line each. None without numbers."""
    series = {name.split("/", 1)[1]: run.series("train", name) for name in names}
    series = {member: one for member, one in series.items() if np.isfinite(one.values).any()}
    if not series:
        return None
    with mpl.rc_context(_STYLE):
        figure = _new_figure()
        axes = figure.subplots()
        for (member, one), colour in zip(series.items(), _cycle(len(series)), strict=True):
            _draw_line(axes, one, colour, _shortened(member))
        if _spans_powers(np.concatenate([one.values for one in series.values()])):
            _scale_by_powers(axes)
        _finish_axes(axes, label)
        _legend(figure, axes)
        return figure


def _cycle(count: int) -> list[str]:
    return [_COLOURS[i % len(_COLOURS)] for i in range(count)]


def _darker(colour: str) -> tuple[float, ...]:
    return tuple(0.65 * part for part in colors.to_rgb(colour))


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) > 1:
        columns = 2 if max(map(len, labels)) <= 16 else 1
        rows = -(-len(handles) // columns)
        figure.set_figheight(_HEIGHT + 0.2 * max(0, rows - 2))  # many runs do not squeeze the curves
        figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def _slot_name(run: RunData, slot: int, slots: int) -> str:
    """The layers of the decoder by number, after them those that predict further tokens by depth."""
    depth = slot - (slots - run.num_depths) + 1
    return f"MTP {depth}" if depth >= 1 else f"layer {slot}"


def layer_lines(run: RunData, name: str, label: str) -> Figure | None:
    """One per-layer metric of one run: a line per layer, coloured by depth. None if it is zero everywhere."""
    series = run.layers(name)
    finite = np.where(np.isfinite(series.values), series.values, np.nan)
    owning = np.flatnonzero((np.nan_to_num(finite) != 0).any(axis=0)) if finite.size else np.array([], int)
    if not owning.size:
        return None
    with mpl.rc_context(_STYLE):
        figure = _new_figure()
        axes = figure.subplots()
        few = len(owning) <= _FEW_LINES
        scale = colors.ListedColormap(mpl.colormaps["viridis"](np.linspace(0, 0.85, 256)))  # its yellow is faint
        last = max(int(owning[-1]), 1)
        for place, layer in enumerate(owning.tolist()):
            depth = place / max(len(owning) - 1, 1) if few else layer / last
            line = Series(series.steps, finite[:, layer])
            _draw_line(axes, line, colors.to_hex(scale(depth)), _slot_name(run, layer, finite.shape[1]))
        _finish_axes(axes, label)
        if few:
            figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)
        else:
            shades = ScalarMappable(colors.Normalize(0, last), scale)
            figure.colorbar(shades, ax=axes, label="layer", ticks=MaxNLocator(5, integer=True))
        return figure


def _load(counts_LE: np.ndarray) -> np.ndarray:
    """Load / mean per layer; NaN for layers without tokens."""
    mean_L1 = counts_LE.mean(axis=1, keepdims=True)
    return np.divide(counts_LE, mean_L1, out=np.full(counts_LE.shape, np.nan), where=mean_L1 > 0)


def _load_colours() -> tuple[colors.Colormap, colors.Normalize]:
    top = LOAD_SCALE[-1][0]
    stops = [(value / top, tuple(part / 255 for part in rgb)) for value, rgb in LOAD_SCALE]
    scale = colors.LinearSegmentedColormap.from_list("load", stops).with_extremes(bad="#d9d9d9")
    return scale, colors.Normalize(0, top)


def _draw_load(axes: Axes, load: np.ndarray, x_label: str, extent: tuple[float, float] | None = None) -> object:
    scale, norm = _load_colours()
    axes.grid(visible=False)
    left, right = extent or (-0.5, load.shape[1] - 0.5)
    box = (left, right, load.shape[0] - 0.5, -0.5)
    picture = axes.imshow(load, cmap=scale, norm=norm, aspect="auto", interpolation="nearest", extent=box)
    axes.set_xlabel(x_label)
    axes.set_ylabel("layer")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
    axes.xaxis.set_major_formatter(FuncFormatter(_short_number))
    return picture


def load_heat_maps(run: RunData) -> Figure | None:
    """Layers x experts, load / mean, at up to four moments of the run. None without counts."""
    shape = run.counts[-1][1].shape if run.counts else None
    moments = [(step, counts) for step, counts in run.counts if counts.shape == shape and counts.any()]
    if not moments:
        return None
    chosen = sorted(set(np.rint(np.linspace(0, len(moments) - 1, 4)).astype(int).tolist()))
    with mpl.rc_context(_STYLE):
        rows = len(chosen)
        figure = _new_figure(0.7 + rows * min(1.9, 1.0 + 0.04 * moments[0][1].shape[0]))
        grid = np.atleast_1d(figure.subplots(rows, 1, sharex=True))
        picture = None
        for axes, index in zip(grid, chosen, strict=True):
            step, counts = moments[index]
            picture = _draw_load(axes, _load(counts), "expert" if axes is grid[-1] else "")
            axes.set_title(f"step {step:,}", fontsize=10, loc="left")
        figure.colorbar(picture, ax=list(grid), label="load / mean", extend="max", aspect=30)  # pyright: ignore[reportArgumentType]
        return figure


def busiest_expert_over_time(run: RunData) -> Figure | None:
    """Layers x steps, load / mean of the busiest expert. None without counts at two moments."""
    shape = run.counts[-1][1].shape if run.counts else None
    moments = [(step, counts) for step, counts in run.counts if counts.shape == shape and counts.any()]
    if len(moments) < 2:
        return None
    busiest = np.stack([_load(counts).max(axis=1) for _, counts in moments], axis=1)
    with mpl.rc_context(_STYLE):
        figure = _new_figure()
        axes = figure.subplots()
        picture = _draw_load(axes, busiest, "step", (moments[0][0], moments[-1][0]))
        figure.colorbar(picture, ax=axes, label="busiest / mean", extend="max")  # pyright: ignore[reportArgumentType]
        return figure


def picture(key: str, title: str, draw: Callable[[], Figure | None]) -> list[Picture]:
    """The picture in a list, or an empty list where there is nothing to draw."""
    figure = draw()
    return [] if figure is None else [Picture(key, title, figure)]
