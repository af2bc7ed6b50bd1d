"""Commands in processes of their own, on a model so small that a run takes seconds."""

import os
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
SPEECHES = ROOT / "tests" / "data" / "fixtures" / "speeches"
STEPS = 8


def tiny_tree(folder: Path, run: Path) -> dict:
    """The config of a run in `run`, caches in `folder`."""
    return {
        "run": {"dir": str(run), "steps": STEPS, "eval_every": 4},
        "model": {
            "vocab_size": 300,
            "d_model": 8,
            "num_layers": 2,
            "attention": {"num_heads": 2, "num_kv_heads": 1, "head_dim": 4},
            "moe": {
                "num_experts": 4,
                "experts_per_token": 2,
                "expert_hidden_dim": 8,
                "router": {"score_function": "sigmoid", "selection_bias": True, "seq_aux_loss_coeff": 0.01},
            },
        },
        "batch": {"global_batch_size": 4, "seq_len": 64, "num_microbatches": 2},
        "optimizer": {"learning_rate": 0.01, "schedule": {"warmup_steps": 2}},
        "data": {
            "train": {"kind": "txt", "path": str(SPEECHES / "train")},
            "validation": {"kind": "txt", "path": str(SPEECHES / "validation")},
            "tokenizer": {"kind": "bpe"},
            "cache_dir": str(folder / "cache"),
        },
        "checkpoint": {"every": 3},
        "logging": {"every": 1},
    }


def write_config(path: Path, tree: dict) -> Path:
    path.write_text(yaml.safe_dump(tree))
    return path


def start(module: str, *words: str, may_use_jax: bool = True) -> subprocess.Popen:
    """The command in a process of its own, with one device; output in one stream.

    What JAX may have no part in takes well under 3 seconds: that is tested by a `jax` that cannot be imported, not by
    a clock, which depends on who else uses the machine.
    """
    path = [str(ROOT)] if may_use_jax else [str(ROOT / "tests" / "e2e" / "without_jax"), str(ROOT)]
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": "1",
    }
    return subprocess.Popen(
        [sys.executable, "-m", f"jaxmoe.{module}", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


def finish(process: subprocess.Popen, *, expect: int = 0) -> str:
    """The output, after checking the exit code."""
    output, _ = process.communicate(timeout=600)
    assert process.returncode == expect, output
    return output


def read_until(process: subprocess.Popen, text: str) -> str:
    """Output up to the first line with this text."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return "".join(lines)
    raise AssertionError(f"{text!r} never came:\n{''.join(lines)}")
