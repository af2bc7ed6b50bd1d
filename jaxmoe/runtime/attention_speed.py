"""Time and memory of one layer's attention against the length of a row: to all keys, and to chosen ones."""

import io
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxmoe.config.errors import ConfigError, Problem
from jaxmoe.config.schema import Config, Model
from jaxmoe.config.whole_file import write_whole
from jaxmoe.model.attention import rope_dim
from jaxmoe.model.mla import LatentAttention
from jaxmoe.model.params import Init
from jaxmoe.model.tokens import make_tokens
from jaxmoe.spmd.axes import AXES
from jaxmoe.spmd.program import build_mesh, manual
from jaxmoe.step.state import make_mesh

#: Changes of `model.attention.dsa`, and what the chart says.
KINDS = {
    "dense": ({"stage": "dense", "indexer_loss_coeff": 0.0}, "to all keys"),
    "sparse": ({"stage": "sparse", "indexer_loss_coeff": 0.0}, "to the chosen keys"),
    "sparse_loss": ({"stage": "sparse", "indexer_loss": "sparse", "indexer_loss_coeff": 1.0}, "and its indexer's loss"),
}
#: Runs that count, of a program that is faster than `LONG_SECONDS`; else one.
REPEATS, LONG_SECONDS = 5, 4.0


@dataclass(frozen=True)
class Point:
    """One measurement: forward and backward of one layer on one row, one document."""

    kind: str
    length: int
    seconds: float
    """Median of the runs that count, after one that does not."""
    megabytes: float
    """Memory that the compiled program needs beside its inputs and outputs, as XLA plans it."""


def _program(model: Model, length: int) -> tuple[jax.stages.Compiled, nnx.State]:
    """Value and gradients of one layer, compiled for a row of `length` tokens on one device; and its weights."""
    sizes: dict[str, int] = dict.fromkeys(AXES, 1)
    layer = LatentAttention(Init(jax.random.key(0), model, sizes), reorders_keys=False, owns_indexer=True)
    graphdef, weights = nnx.split(layer)
    dtype = jnp.dtype(model.compute_dtype)

    def body(weights: nnx.State, x_BSD: jax.Array) -> tuple[jax.Array, tuple[nnx.State, jax.Array]]:
        position = jnp.arange(length, dtype=jnp.int32)[None]
        attention = model.attention
        tokens = make_tokens(position, position, jnp.ones_like(position), attention.rope, rope_dim(attention), dtype)

        def objective(weights: nnx.State, x_BSD: jax.Array) -> jax.Array:
            y_BSD, loss, _ = nnx.merge(graphdef, weights)(x_BSD, None, tokens)
            total = jnp.sum(jnp.square(y_BSD.astype(jnp.float32)))
            return total if loss is None else total + loss

        return jax.value_and_grad(objective, argnums=(0, 1))(weights, x_BSD)

    x = jax.ShapeDtypeStruct((1, length, model.d_model), dtype)
    mesh = build_mesh(sizes, jax.devices()[:1])
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), weights)
    return jax.jit(manual(body, mesh, P(), P())).lower(shapes, x).compile(), weights


def measure_attention(config: Config, lengths: Sequence[int]) -> list[Point]:
    """Every kind at every length, one after the other.

    Raises: ConfigError when the config has no sparse attention.
    """
    dsa = config.model.attention.dsa
    if dsa is None:
        rule = "is what --attention compares with attention to all keys, and it is null"
        raise ConfigError([Problem("model.attention.dsa", None, rule, "take configs/deepseek_mini.yaml")])
    make_mesh(config, jax.devices()[:1])
    points = []
    for length in lengths:
        for kind, (update, _) in KINDS.items():
            attention = config.model.attention.model_copy(update={"dsa": dsa.model_copy(update=update)})
            model = config.model.model_copy(update={"attention": attention})
            points.append(_measure(model, kind, length))
    return points


def _measure(model: Model, kind: str, length: int) -> Point:
    program, weights = _program(model, length)
    dtype = jnp.dtype(model.compute_dtype)
    x = jax.random.normal(jax.random.key(1), (1, length, model.d_model), dtype)

    def run() -> float:
        start = time.perf_counter()
        jax.block_until_ready(program(weights, x))
        return time.perf_counter() - start

    seconds = [run() for _ in range(1 if run() > LONG_SECONDS else REPEATS)]
    memory = program.memory_analysis()
    assert memory is not None, "XLA's CPU and GPU backends plan memory"
    return Point(kind, length, statistics.median(seconds), memory.temp_size_in_bytes / 1e6)


def draw_attention(points: Sequence[Point], config: Config, path: Path) -> None:
    """Both numbers against the length, on logarithmic axes, as PNG."""
    from matplotlib.figure import Figure  # part of an extra; the command has looked for it

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = zip(figure.subplots(1, 2), ("seconds", "megabytes"), strict=True)
    for axes, quantity in panels:
        for kind, (_, label) in KINDS.items():
            own = [point for point in points if point.kind == kind]
            axes.loglog([p.length for p in own], [getattr(p, quantity) for p in own], "-o", markersize=4, label=label)
        lengths = sorted({point.length for point in points})
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [str(length) for length in lengths])
        axes.set(xlabel="tokens of a row", ylabel=quantity)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    dsa = config.model.attention.dsa
    assert dsa is not None
    device = jax.devices()[0].device_kind
    figure.suptitle(f"one attention layer, forward and backward, {dsa.index_topk} chosen keys, {device}", fontsize=11)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    write_whole(path, picture.getvalue())


def show_attention(points: Sequence[Point], *, as_json: bool) -> str:
    """The measurements as text."""
    if as_json:
        return json.dumps([asdict(point) for point in points])
    lines = [f"{'tokens':>8}" + "".join(f"{label:>28}" for _, label in KINDS.values())]
    for length in sorted({point.length for point in points}):
        own = {point.kind: point for point in points if point.length == length}
        cells = (f"{own[kind].seconds:.3f} s {own[kind].megabytes:8.1f} MB" for kind in KINDS)
        lines.append(f"{length:>8}" + "".join(f"{cell:>28}" for cell in cells))
    return "\n".join(lines)
