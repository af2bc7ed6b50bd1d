"""What reading a checkpoint takes beside the parameters themselves: the pieces of one parameter, and a little.

A test in a process of its own, which Linux tells the most that it ever held. On a CPU the parameters lie in the same
memory and are taken off.
"""

import json
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

MEGABYTE = 2**20
#: Windows on every other layer: two places per period, so that no parameter is much of the whole.
FIELDS = {
    "model_type": "qwen3",
    "vocab_size": 1000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "use_sliding_window": True,
    "sliding_window": 64,
    "layer_types": ["full_attention", "sliding_attention"] * 8,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "dtype": "bfloat16",
}


def write_checkpoint(folder: Path) -> None:
    """Half a gigabyte of bfloat16 in four files."""
    width, hidden = FIELDS["hidden_size"], FIELDS["intermediate_size"]
    shapes = {
        "model.embed_tokens.weight": (1000, width),
        "lm_head.weight": (1000, width),
        "model.norm.weight": (width,),
    }
    for layer in range(FIELDS["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        shapes |= {f"{p}mlp.{part}_proj.weight": (hidden, width) for part in ("gate", "up")}
        shapes |= {f"{p}mlp.down_proj.weight": (width, hidden)}
        shapes |= {f"{p}self_attn.{part}_proj.weight": (width, width) for part in "qo"}
        shapes |= {f"{p}self_attn.{part}_proj.weight": (256, width) for part in "kv"}
        shapes |= {f"{p}self_attn.{part}_norm.weight": (64,) for part in "qk"}
        shapes |= {f"{p}{part}_layernorm.weight": (width,) for part in ("input", "post_attention")}
    names, files = sorted(shapes), {}
    for number in range(4):
        own = names[number::4]
        file = f"model-{number + 1:05d}-of-00004.safetensors"
        save_file({name: np.full(shapes[name], 0.01, ml_dtypes.bfloat16) for name in own}, folder / file)
        files |= dict.fromkeys(own, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    (folder / "config.json").write_text(json.dumps(FIELDS))


def _held(what: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what))


def measure(folder: str) -> dict[str, int]:
    """Bytes: of all parameters, of the largest one, and the most that was held beside them while reading."""
    import jax

    import jaxmoe
    from tests.interop import golden_cases as goldens

    goldens.load("llama", {}, (1, 16), "optimizer.kind=sgd")  # what is imported and started once
    overrides = ["parallel.dp=1", "optimizer.kind=sgd", "model.compute_dtype=float32"]
    mesh = jaxmoe.make_mesh(jaxmoe.load_hf_config(folder, overrides), jax.devices()[:1])
    before = _held("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    state = jaxmoe.load_hf(folder, mesh, overrides)
    sizes = [leaf.nbytes for leaf in jax.tree.leaves(state.params)]
    return {"all": sum(sizes), "largest": max(sizes), "beside": _held("VmHWM") - before - sum(sizes)}


@pytest.mark.slow  # writes and reads half a gigabyte
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell what a process held")
def test_reading_takes_little_more_than_the_largest_parameter(tmp_path):
    write_checkpoint(tmp_path)
    command = [
        sys.executable,
        "-c",
        f"from tests.interop.test_load_memory import *; print(json.dumps(measure({str(tmp_path)!r})))",
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    bound = found["largest"] + 300 * MEGABYTE
    assert found["beside"] <= bound < found["all"], found
