"""The experts' MLP against the dense formula: values and all gradients, for every kind of routing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxmoe.kernels.expert_mlp import expert_mlp, expert_mlp_reference
from jaxmoe.kernels.grouped_matmul import row_chunks
from jaxmoe.spmd.collectives import sum_partial, vary_like
from jaxmoe.spmd.program import build_mesh, manual

WIDTH, HIDDEN = 12, 6


def routings(num_tokens: int, num_slots: int, num_experts: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    shape = (num_tokens, num_slots)
    spread = np.argsort(random.normal(size=(num_tokens, num_experts)), axis=1)[:, :num_slots]
    return {
        "spread": spread,
        "all_on_one": np.full(shape, num_experts - 1),
        "some_experts_empty": random.integers(0, max(1, num_experts // 3), shape),
        "some_held_elsewhere": random.integers(0, num_experts + 1, shape),
        "all_held_elsewhere": np.full(shape, num_experts),
    }


def arrays(num_tokens: int, num_slots: int, num_experts: int, dtype=jnp.float64) -> tuple[jax.Array, ...]:
    random = np.random.default_rng(0)
    shapes = (
        (num_tokens, WIDTH),
        (num_tokens, num_slots),
        (num_experts, WIDTH, 2, HIDDEN),
        (num_experts, HIDDEN, WIDTH),
    )
    return tuple(jnp.asarray(random.normal(size=shape) / 2, dtype) for shape in shapes)


def value_and_grads(function, **options):
    """A compiled function of the routing and the inputs: values and the gradients of the four arrays."""

    def loss(x_TD, weight_TK, gate_up_ED2F, down_EFD, expert_TK):
        y_TD = function(x_TD, expert_TK, weight_TK, gate_up_ED2F, down_EFD, **options)
        return jnp.sum(jnp.sin(y_TD.astype(jnp.promote_types(y_TD.dtype, jnp.float32)))), y_TD

    step = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True))

    def run(expert_TK, inputs):
        (_, y_TD), grads = step(*inputs, jnp.asarray(expert_TK, jnp.int32))
        return y_TD, *grads

    return run


def assert_same(got, want, tolerance: float) -> None:
    for ours, theirs in zip(got, want, strict=True):
        assert ours.shape == theirs.shape
        wide = np.asarray(theirs, np.float64)
        bound = tolerance * max(1.0, np.abs(wide).max())
        np.testing.assert_allclose(np.asarray(ours, np.float64), wide, rtol=0, atol=bound)


@pytest.mark.parametrize(("tokens", "slots", "experts"), [(150, 3, 8), (1, 1, 1), (70, 1, 4)])
def test_values_and_gradients_equal_the_dense_formula_for_every_routing(tokens, slots, experts, x64):
    inputs = arrays(tokens, slots, experts)
    ours, reference = value_and_grads(expert_mlp), value_and_grads(expert_mlp_reference)
    for expert_TK in routings(tokens, slots, experts).values():
        assert_same(ours(expert_TK, inputs), reference(expert_TK, inputs), 1e-12)


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("implementation", ["loops", "ragged"])
def test_every_implementation_and_activation_is_exact(implementation, activation, x64):
    expert_TK, inputs = routings(90, 2, 5)["some_held_elsewhere"], arrays(90, 2, 5)
    want = value_and_grads(expert_mlp_reference, activation=activation)(expert_TK, inputs)
    ours = value_and_grads(expert_mlp, activation=activation, implementation=implementation)
    assert_same(ours(expert_TK, inputs), want, 1e-12)


def test_large_chunks_are_exact(x64):
    # Nearly 3000 rows on one expert use every chunk size; its neighbours' rows are overwritten in order.
    random = np.random.default_rng(2)
    expert_TK = np.where(random.random((1600, 2)) < 0.9, 1, random.integers(0, 4, (1600, 2)))
    inputs = arrays(1600, 2, 4)
    want = value_and_grads(expert_mlp_reference)(expert_TK, inputs)
    assert_same(value_and_grads(expert_mlp)(expert_TK, inputs), want, 1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-5), (jnp.bfloat16, 4e-2)])
def test_narrow_types_keep_their_dtype_and_come_close(dtype, tolerance):
    # bf16 has 8 bits: 2^-8 per rounded intermediate, a handful of them, relative to the largest element.
    expert_TK = routings(150, 3, 8)["some_held_elsewhere"]
    got = value_and_grads(expert_mlp)(expert_TK, arrays(150, 3, 8, dtype))
    assert all(g.dtype == dtype for g in got)
    want = value_and_grads(expert_mlp_reference)(expert_TK, arrays(150, 3, 8, jnp.float32))
    assert_same(got, want, tolerance)


def test_rematerialised_in_a_scan_over_layers_inside_shard_map(x64):
    expert_TK = jnp.asarray(routings(64, 2, 4)["some_held_elsewhere"], jnp.int32)
    x_TD, weight_TK, gate_up, down = arrays(64, 2, 4)
    layers = tuple(jnp.stack([a, 0.5 * a, -a]) for a in (gate_up, down))

    def loss(function, x_TD, weight_TK, layers, expert_TK):
        layer = jax.checkpoint(lambda x, p: (x + function(x, expert_TK, weight_TK, *p), None))
        return jnp.sum(jax.lax.scan(layer, x_TD, layers)[0] ** 2)

    def step(x_TD, weight_TK, layers, expert_TK):
        layers = jax.tree.map(lambda a: vary_like(a, x_TD), layers)
        value, grads = jax.value_and_grad(lambda x, w, p: loss(expert_mlp, x, w, p, expert_TK), (0, 1, 2))(
            x_TD, weight_TK, layers
        )
        return sum_partial(value, "dp"), (grads[0], grads[1], jax.tree.map(lambda g: sum_partial(g, "dp"), grads[2]))

    mesh = build_mesh({"pp": 1, "dp": 8, "ep": 1, "sp": 1, "tp": 1})
    rows = P("dp")
    mapped = manual(step, mesh, in_specs=(rows, rows, P(), rows), out_specs=(P(), (rows, rows, P())))
    got = jax.jit(mapped)(x_TD, weight_TK, layers, expert_TK)
    want = jax.jit(jax.value_and_grad(lambda x, w, p: loss(expert_mlp_reference, x, w, p, expert_TK), (0, 1, 2)))(
        x_TD, weight_TK, layers
    )
    assert_same(jax.tree.leaves(got), jax.tree.leaves(want), 1e-12)


def test_one_platform_is_compiled_without_a_branch():
    expert_TK = jnp.asarray(routings(33, 2, 5)["spread"], jnp.int32)
    x_TD, weight_TK, gate_up, down = arrays(33, 2, 5, jnp.float32)
    text = jax.jit(expert_mlp).lower(x_TD, expert_TK, weight_TK, gate_up, down).compile().as_text()
    assert text
    assert "conditional" not in text


@pytest.mark.parametrize(("rows", "groups"), [(1, 1), (63, 9), (16384, 32), (2048, 32), (16384, 256)])
def test_row_chunks_decrease_and_fit_the_load(rows, groups):
    chunks = row_chunks(rows, groups)
    assert list(chunks) == sorted(set(chunks), reverse=True)
    assert chunks[-1] in (16, 32, 64)
    assert all(size <= rows for size in chunks[:-1])
