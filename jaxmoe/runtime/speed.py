"""Times the training step of a config beside the best matrix product of the machine."""

import json
import resource
import statistics
import time
from dataclasses import asdict, dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.config.schema import Config
from jaxmoe.runtime.flops import model_flops_per_token
from jaxmoe.step.batch import Batch
from jaxmoe.step.state import init_state, make_mesh
from jaxmoe.step.train import train_step


@dataclass(frozen=True)
class Speed:
    """One measurement. Seconds are medians over the measured steps."""

    device: str
    num_devices: int
    jax_version: str
    tokens_per_step: int
    seconds_per_step: float
    seconds_spread: float
    """Largest minus smallest."""
    tokens_per_second: float
    model_gflops_per_second: float
    ceiling_gflops_per_second: float
    """Best of a float32 2048^3 product (bfloat16 8192^3 on a GPU), all devices together."""
    share_of_ceiling: float
    compile_seconds: float
    peak_gigabytes: float
    loss_first: float
    loss_last: float


def matmul_ceiling(dtype: str, repeats: int = 5) -> float:
    """GFLOP/s of the best of several square products on one device."""
    on_cpu = jax.default_backend() == "cpu"
    size = 2048 if on_cpu else 8192
    a = jnp.ones((size, size), jnp.float32 if on_cpu else dtype)
    product = jax.jit(lambda x, y: x @ y)
    product(a, a).block_until_ready()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        product(a, a).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best / 1e9


def _peak_gigabytes() -> float:
    stats = jax.devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"] / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def random_batch(config: Config, seed: int) -> dict[str, np.ndarray]:
    """Full rows of one document each: every position but the last has a target."""
    shape = (config.batch.global_batch_size, config.batch.seq_len)
    tokens = np.random.default_rng(seed).integers(0, config.model.vocab_size, shape, dtype=np.int32)
    mask = np.ones(shape, np.float32)
    mask[:, -1] = 0
    return {
        "inputs": tokens,
        "targets": np.roll(tokens, -1, axis=1),
        "loss_mask": mask,
        "positions": np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape),
        "segment_ids": np.ones(shape, np.int32),
    }


def measure(config: Config, steps: int, warm_up: int = 2) -> Speed:
    """Compile, run `warm_up` steps, then time `steps` of them, the ceiling before and after."""
    mesh = make_mesh(config)
    ceilings = [matmul_ceiling(config.model.compute_dtype)]
    state = init_state(config, mesh)
    batches = [Batch.from_numpy(random_batch(config, seed), mesh) for seed in range(2)]
    start = time.perf_counter()
    step = train_step.lower(state, batches[0]).compile()
    compile_seconds = time.perf_counter() - start
    losses, seconds = [], []
    for number in range(warm_up + steps):
        start = time.perf_counter()
        state, metrics = step(state, batches[number % 2])
        losses.append(metrics.scalars()["loss"])
        jax.block_until_ready(state.params)
        seconds.append(time.perf_counter() - start)
    ceilings.append(matmul_ceiling(config.model.compute_dtype))
    tokens = config.batch.global_batch_size * config.batch.seq_len
    median = statistics.median(seconds[warm_up:])
    # Virtual CPU devices share the cores, so their ceiling is that of one.
    devices = 1 if jax.default_backend() == "cpu" else mesh.size
    ceiling = max(ceilings) * devices
    gflops = tokens * model_flops_per_token(config) / median / 1e9
    return Speed(
        device=jax.devices()[0].device_kind,
        num_devices=mesh.size,
        jax_version=jax.__version__,
        tokens_per_step=tokens,
        seconds_per_step=median,
        seconds_spread=max(seconds[warm_up:]) - min(seconds[warm_up:]),
        tokens_per_second=tokens / median,
        model_gflops_per_second=gflops,
        ceiling_gflops_per_second=ceiling,
        share_of_ceiling=gflops / ceiling,
        compile_seconds=compile_seconds,
        peak_gigabytes=_peak_gigabytes(),
        loss_first=losses[0],
        loss_last=losses[-1],
    )


def show(speed: Speed, *, as_json: bool) -> str:
    """The measurement as text."""
    if as_json:
        return json.dumps(asdict(speed))
    return "\n".join(
        [
            f"{speed.num_devices} x {speed.device}, JAX {speed.jax_version}",
            f"step             {speed.seconds_per_step:.3f} s (spread {speed.seconds_spread:.3f} s)",
            f"tokens a step    {speed.tokens_per_step}",
            f"tokens/s         {speed.tokens_per_second:.1f}",
            f"model            {speed.model_gflops_per_second:.1f} GFLOP/s",
            f"matrix product   {speed.ceiling_gflops_per_second:.1f} GFLOP/s, the ceiling",
            f"share of ceiling {speed.share_of_ceiling:.3f}",
            f"compile          {speed.compile_seconds:.1f} s",
            f"peak memory      {speed.peak_gigabytes:.2f} GB",
            f"loss             {speed.loss_first:.4f} -> {speed.loss_last:.4f}",
        ]
    )
