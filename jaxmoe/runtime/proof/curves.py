"""Training curves of one config on many layouts, in one plot: what the proof means in practice."""

import io
import math
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from rich.console import Console

from jaxmoe.config.errors import ConfigError
from jaxmoe.config.schema import Config
from jaxmoe.config.whole_file import write_whole
from jaxmoe.data import open_data
from jaxmoe.data.dataset import Dataset
from jaxmoe.runtime.proof.layouts import Layout, name_of, variant
from jaxmoe.spmd.axes import AXES
from jaxmoe.step.batch import Batch
from jaxmoe.step.state import init_state, make_mesh
from jaxmoe.step.train import train_step

#: Eight layouts, of one and of eight devices; every axis is above one in some.
CURVE_LAYOUTS: tuple[Layout, ...] = (
    {},
    {"dp": 8, "zero": 1},
    {"dp": 2, "ep": 2, "tp": 2},
    {"dp": 2, "sp": 2, "tp": 2, "zero": 3},
    {"pp": 2, "dp": 2, "ep": 2},
    {"pp": 2, "sp": 2, "tp": 2, "zero": 0},
    {"ep": 4, "sp": 2, "experts_over": "ep"},
    {"sp": 4, "dp": 2, "sp_placement": "zigzag"},
)


def _losses(config: Config, data: Dataset, steps: int) -> list[float]:
    devices = math.prod(getattr(config.parallel, axis) for axis in AXES)
    mesh = make_mesh(config, jax.devices()[:devices])
    state = init_state(config, mesh)
    losses = []
    for step in range(steps):
        state, metrics = train_step(state, Batch.from_numpy(data.batch(step), mesh))
        losses.append(metrics.scalars()["loss"])
    return losses


def _configs(config: Config, layouts: Sequence[Layout]) -> dict[str, Config]:
    configs = {}
    for layout in layouts:
        # Two micro-batches everywhere, as a pipeline of two stages needs them.
        made = variant(config, {"zero": 0, **layout}, num_microbatches=2)
        if not isinstance(made, Config):
            raise ConfigError(made)
        configs[name_of(layout) or "one device"] = made
    return configs


def _plot(curves: dict[str, list[float]], path: Path, dtype: str) -> None:
    from matplotlib.figure import Figure  # part of an extra; the command has looked for it

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    reference = np.asarray(next(iter(curves.values())))
    for width, (name, losses) in zip(np.linspace(7, 1, len(curves)), curves.items(), strict=True):
        steps = np.arange(1, len(losses) + 1)
        left.plot(steps, losses, linewidth=width, alpha=0.7, label=name)
        right.semilogy(steps, np.abs(np.asarray(losses) / reference - 1) + 1e-16, linewidth=1)
    left.set(xlabel="step", ylabel="loss, nats per token", title="training loss, drawn over each other")
    right.set(xlabel="step", ylabel="relative difference", title=f"difference from one device, {dtype}")
    figure.legend(loc="outside right upper", fontsize=8)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    write_whole(path, picture.getvalue())


def draw_curves(
    config: Config, path: Path, *, layouts: Sequence[Layout], steps: int, dtype: str, console: Console
) -> float:
    """Train the whole model on its own data on each layout, the first being one device.

    Returns the largest relative difference of a loss from the first layout's.
    """
    update = {"compute_dtype": dtype, "param_dtype": "float64" if dtype == "float64" else "float32"}
    config = config.model_copy(update={"model": config.model.model_copy(update=update)})
    data, curves = open_data(config).train, {}
    for name, made in _configs(config, layouts).items():
        curves[name] = _losses(made, data, steps)
        console.print(f"{name}: loss {curves[name][0]:.6f} -> {curves[name][-1]:.6f}")
    _plot(curves, path, dtype)
    reference = np.asarray(next(iter(curves.values())))
    worst = max(float(np.max(np.abs(np.asarray(losses) / reference - 1))) for losses in curves.values())
    console.print(f"largest relative difference of a loss from one device in {steps} steps: {worst:.1e}; plot: {path}")
    return worst
