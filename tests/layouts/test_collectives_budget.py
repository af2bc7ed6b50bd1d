"""Communication as a budget: all collectives of a step on abstract meshes of 256 and 2048 devices, and where they are.

`python -m tests.layouts.test_collectives_budget` writes the golden file anew; look at its diff before committing it.
"""

import difflib
import json
import math
import re
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jaxmoe
import jaxmoe.step.train
from jaxmoe.config.check import check, mesh_shape
from jaxmoe.config.load import config_from_dict, config_to_dict
from jaxmoe.config.schema import Config
from jaxmoe.plan import main
from jaxmoe.runtime.planning import LAYER_LOOP, Plan, as_tree, make_plan, trace_step
from jaxmoe.spmd.axes import AXES
from jaxmoe.spmd.collectives import sum_partial, to_varying
from jaxmoe.spmd.inventory import Collective, collectives, count
from tests.reference import cases

GOLDEN = Path(__file__).parent / "golden_collectives.json"
#: Devices, micro-batches, `parallel`.
LAYOUTS: dict[str, tuple[int, int, dict]] = {
    "256: dp=256 zero=0": (256, 2, {"zero": 0}),
    "256: dp=4 ep=8 tp=8": (256, 4, {"ep": 8, "tp": 8}),
    "256: dp=8 ep=8 sp=2 tp=2 zero=3": (256, 2, {"ep": 8, "sp": 2, "tp": 2, "zero": 3}),
    "256: dp=2 ep=16 sp=8 zigzag": (256, 2, {"ep": 16, "sp": 8, "sp_placement": "zigzag"}),
    "2048: pp=16 dp=4 ep=16 tp=2": (2048, 32, {"pp": 16, "ep": 16, "tp": 2}),
    "2048: pp=8 dp=2 ep=32 sp=2 tp=2 circular zero=3": (
        2048,
        16,
        {"pp": 8, "ep": 32, "sp": 2, "tp": 2, "zero": 3, "pipeline_schedule": "circular", "pipeline_chunks": 2},
    ),
}
SECONDS = 60
#: Loops over micro-batches without and with a pipeline.
STEP_LOOPS = ("_by_microbatch", "add_step", "_run_trunk", "run_pipeline", "add_losses")
IN_HLO = re.compile(
    r"\b(all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute|collective-broadcast)"
    r"(-start)?\("
)


def deepseek_v3(devices: int, num_microbatches: int, **parallel: Any) -> Config:
    """Sizes of DeepSeek-V3, without its prediction of further tokens."""
    config = config_from_dict(
        {
            "run": {"dir": "runs/plan", "steps": 1000},
            "data": {"train": {"kind": "sotu"}},
            "batch": {"global_batch_size": 4096, "seq_len": 4096, "num_microbatches": num_microbatches},
            "model": {
                "vocab_size": 129280,
                "d_model": 7168,
                "num_layers": 61,
                "attention": {
                    "num_heads": 128,
                    "num_kv_heads": 128,
                    "head_dim": 192,
                    "mla": {
                        "q_lora_rank": 1536,
                        "kv_lora_rank": 512,
                        "qk_nope_head_dim": 128,
                        "qk_rope_head_dim": 64,
                        "v_head_dim": 128,
                    },
                },
                "mlp": {"hidden_dim": 18432},
                "moe": {
                    "num_experts": 256,
                    "experts_per_token": 8,
                    "expert_hidden_dim": 2048,
                    "num_shared_experts": 1,
                    "num_dense_layers": 3,
                    "router": {
                        "score_function": "sigmoid",
                        "num_groups": 8,
                        "topk_groups": 4,
                        "scaling_factor": 2.5,
                        "selection_bias": True,
                        "seq_aux_loss_coeff": 1e-4,
                    },
                },
                "compute_dtype": "bfloat16",
            },
            "parallel": parallel,
        }
    )
    assert not check(config)
    assert mesh_shape(config, devices)
    return config


@lru_cache
def planned(name: str) -> tuple[Plan, float]:
    """The plan of a layout, and the seconds of CPU that it took."""
    devices, num_microbatches, parallel = LAYOUTS[name]
    config = deepseek_v3(devices, num_microbatches, **parallel)
    start = time.process_time()
    plan = make_plan(config, devices)
    return plan, time.process_time() - start


def as_lines(tree: dict) -> list[str]:
    return json.dumps(tree, indent=1).splitlines()


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_collectives_of_a_step_are_those_of_the_golden_file(name):
    plan, seconds = planned(name)
    want, got = as_lines(json.loads(GOLDEN.read_text())[name]), as_lines(as_tree(plan))
    diff = "\n".join(difflib.unified_diff(want, got, "golden", "traced", lineterm="", n=4))
    assert not diff, f"{name}; if it is meant: python -m tests.layouts.test_collectives_budget\n{diff}"
    # Of this process, so that other work on the machine does not count.
    assert seconds < SECONDS


def test_sizes_of_deepseek_v3():
    plan, _ = planned("256: dp=4 ep=8 tp=8")
    assert round(plan.parameters / 1e9) == 671  # of the model card
    assert round(plan.active_parameters / 1e9, 1) == 37.6  # 37 on the card, which leaves out the embedding
    # Master weights and two moments in float32, spread over all devices but for the few weights that do not divide.
    state = plan.device_bytes["weights"] + plan.device_bytes["optimizer state"]
    assert 1 <= state / (plan.parameters * 12 / 256) < 1.02


# ---------------------------------------------------------------- where they stand, on small models


def small(devices: int, **options: Any) -> list[Collective]:
    """The collectives of a small model's step; `options` of `cases.make_config`."""
    with cases.float64():
        config = cases.make_config(rows=16, **options)
        sizes = mesh_shape(config, devices)
        return collectives(trace_step(config, sizes).jaxpr, sizes)


TOKENS = {"dp": 2, "ep": 2, "sp": 2, "tp": 2}
#: No term that needs the whole step, so micro-batches are differentiated one by one.
BY_MICROBATCH = {"global_aux_loss_coeff": 0.0}


def sums_over_replicas(found: list[Collective]) -> list[Collective]:
    return [one for one in found if one.verb in ("all_reduce", "reduce_scatter") and "dp" in one.axes]


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("router", [BY_MICROBATCH, {}], ids=["by micro-batch", "whole step"])
def test_without_fsdp_gradients_are_reduced_once_after_the_microbatches(zero, router):
    found = small(16, microbatches=4, router=router, zero=zero, **TOKENS)
    assert any(loop.length == 4 for one in found for loop in one.loops), "no loop over micro-batches"
    assert not [one for one in sums_over_replicas(found) if one.loops]
    gradients = [one for one in found if one.where == "step/layout.py:reduce"]
    verb = "all_reduce" if zero == 0 else "reduce_scatter"
    weights = [one for one in gradients if one.verb == verb and {"dp", "sp"} <= set(one.axes)]
    assert len(weights) >= 20, "every weight of lead and trunk, once"


def test_without_fsdp_a_pipeline_reduces_gradients_once_too():
    found = small(16, microbatches=4, pp=2, dp=2, ep=2, tp=2, layers=5)
    assert [one for one in found if one.verb == "permute" and one.loops]
    assert not [one for one in sums_over_replicas(found) if one.loops]


def test_with_fsdp_weights_are_gathered_and_gradients_scattered_in_the_loop_over_layers():
    found = small(16, microbatches=4, router=BY_MICROBATCH, zero=3, layers=5, **TOKENS)
    in_layers = [one for one in found if one.inside(LAYER_LOOP) and "dp" in one.axes]
    verbs = [one.verb for one in in_layers]
    assert verbs.count("reduce_scatter") >= 10, "one for each weight of a layer"
    assert verbs.count("all_gather") >= 2 * verbs.count("reduce_scatter"), "forward, and again while recomputing"
    assert "all_reduce" not in verbs
    assert {one.times for one in in_layers} == {4 * 4}, "micro-batches times layers"


def test_axes_of_size_one_are_in_no_collective():
    for axis in AXES:
        extra = {"microbatches": 2} if axis == "pp" else {}
        assert {one.axes for one in small(2, **({"dp": 1} | {axis: 2} | extra))} == {(axis,)}, axis


def test_one_device_has_no_collective():
    assert small(1) == []


def hlo(devices: int, **options: Any) -> str:
    """The compiled program of a step."""
    with cases.float64():
        config = cases.make_config(rows=8, layers=2, **options)
        state = cases.make_state(config, devices)
        batch = jaxmoe.Batch.from_numpy(cases.ragged_batch(8), state.mesh)
        return jaxmoe.train_step.lower(state, batch).compile().as_text() or ""


def test_one_device_compiles_to_a_program_without_collectives():
    assert not IN_HLO.search(hlo(1))


def group_sizes(text: str) -> set[int]:
    """Sizes of the groups of all collectives: `{{0,1},{2,3}}`, `[2,2]<=[4]` or (JAX 0.12) `mesh['a'=2,'b'=1] {'a'}`."""
    listed = re.findall(r"replica_groups=\{\{([\d,]+)\}", text)
    shaped = re.findall(r"replica_groups=\[\d+,(\d+)\]", text)
    sizes = {group.count(",") + 1 for group in listed} | {int(size) for size in shaped}
    for mesh, axes in re.findall(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", text):
        by_axis = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh)}
        sizes.add(math.prod(by_axis[axis] for axis in re.findall(r"'(\w+)'", axes)))
    return sizes


def test_axes_of_size_one_leave_no_collective_in_the_compiled_program():
    text = hlo(2, dp=1, tp=2)
    assert IN_HLO.search(text)
    assert group_sizes(text) == {2}


# ---------------------------------------------------------------- proof that it can fail


def test_an_added_collective_is_seen(monkeypatch):
    before = small(4, dp=2, tp=2)
    real = jaxmoe.step.train.grouped_norms

    def with_one_more(*trees: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        norm, by_group = real(*trees)
        return sum_partial(to_varying(norm, "dp"), "dp") / 2, by_group

    monkeypatch.setattr(jaxmoe.step.train, "grouped_norms", with_one_more)
    jax.clear_caches()
    after = small(4, dp=2, tp=2)
    jax.clear_caches()
    assert len(after) == len(before) + 1
    assert count(after)["all_reduce"]["dp"] == count(before)["all_reduce"].get("dp", 0) + 1


def test_bytes_of_known_collectives():
    def body(x):
        x = jax.lax.scan(lambda c, _: (jax.lax.ppermute(c, "a", [(0, 1), (1, 0)]), None), x, length=5)[0]
        return jax.lax.psum(jax.lax.all_gather(x, "a", tiled=True), "a")

    mesh = jax.sharding.AbstractMesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    mapped = jax.shard_map(body, mesh=mesh, in_specs=spec("a"), out_specs=spec(None), check_vma=True)
    found = collectives(jax.make_jaxpr(mapped)(jax.ShapeDtypeStruct((8,), np.float32)), {"a": 2}, package="tests")
    got = [(one.verb, one.times, one.local_bytes, one.sent_bytes) for one in found]
    assert got == [("permute", 5, 16, 16), ("all_gather", 1, 32, 16), ("all_reduce", 1, 32, 32)]
    assert [math.prod(loop.length for loop in one.loops) for one in found] == [5, 1, 1]


# ---------------------------------------------------------------- the command


#: What a tokenizer of bytes needs.
VOCAB = "model.vocab_size=258"


def test_the_command_prints_a_plan(capsys, tmp_path):
    with cases.float64():
        config = cases.make_config(rows=16)
        path = tmp_path / "small.yaml"
        path.write_text(json.dumps(config_to_dict(config)))
        assert main(["--config", str(path), "--devices", "8", "parallel.dp=-1", "parallel.tp=2", VOCAB]) == 0
        text = capsys.readouterr().out
        assert "8 devices, dp=4 tp=2" in text
        assert re.search(r"reduce_scatter +dp +\d+ x", text)
        assert main(["--config", str(path), "--devices", "1", "--json", VOCAB]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["collectives"] == {}
    assert tree["parameters"] > tree["active_parameters"] > 0


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({name: as_tree(planned(name)[0]) for name in LAYOUTS}, indent=1) + "\n")
