"""The routed experts' MLP of one device: dropless, exact for every routing, one function on every platform.

    y_t = sum over k of weight_tk * (act(x_t gate[e]) * (x_t up[e])) down[e],   e = expert_tk

Letters beside the glossary: A assignments (token, slot) sorted by expert, P the same plus a few spare rows.

Layout: all arrays are local; nothing is reduced over any mesh axis here. Under expert parallelism E counts the
experts held here and the id E means "held elsewhere": such an assignment adds nothing and enters no product.

How: sort the assignments by expert, gather tokens in that order, two grouped products, gather back and sum over
the slots. Gathers go by the permutation forward and by its inverse backward, so there is no scatter-add. The
routing weight is applied to the hidden width, before the second product. One custom VJP saves the tokens, the
first product and the routing, and recomputes what is cheap.

`implementation="loops"` (CPU) is `grouped_matmul.py`. `"ragged"` (GPU) uses `lax.ragged_dot_general`, NOT
MEASURED by us: no GPU was at hand. Known from reports only: without help XLA:GPU expands it to a masked dense
product of E times the FLOPs (openxla/xla PR 45995, 2026-07); XLA's cuDNN fusion
(`--xla_gpu_experimental_use_ragged_dot_fusion=true`) avoids that where it supports the shapes; the flag
`jax_ragged_dot_use_gpu_pallas_triton_lowering` fails to import on released wheels (jax-ml/jax issue 40888).
`"auto"` lets `lax.platform_dependent` choose, which leaves one branch in the compiled program.

Source: the layer is Shazeer et al. 2017, arXiv:1701.06538, with gated experts; dropless as in MegaBlocks,
arXiv:2211.15841.
"""

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxmoe.kernels.grouped_matmul import accumulate_groups, accumulation_dtype, multiply_groups, row_chunks
from jaxmoe.kernels.one_by_one import not_before
from jaxmoe.spmd.collectives import vary_like


class ClampedSwiglu(NamedTuple):
    """(up + 1) * gate * sigmoid(alpha * gate), gate at most `limit`, up within [-limit, limit].

    Source: gpt-oss model card, 2025-08.
    """

    limit: float
    alpha: float


Activation = Literal["silu", "gelu"] | ClampedSwiglu
Implementation = Literal["auto", "loops", "ragged"]

#: "gelu" is the tanh form.
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=True),
}


def gated(activation: Activation, gate: jax.Array, up: jax.Array) -> jax.Array:
    """act(gate) * up, or what `ClampedSwiglu` says."""
    if isinstance(activation, ClampedSwiglu):
        gate, up = jnp.minimum(gate, activation.limit), jnp.clip(up, -activation.limit, activation.limit)
        return gate * jax.nn.sigmoid(activation.alpha * gate) * (up + 1)
    return ACTIVATIONS[activation](gate) * up


class Routing(NamedTuple):
    """Where every assignment stands after sorting by expert, stable."""

    token_P: jax.Array  # token of a sorted row; 0 in spare rows
    slot_P: jax.Array  # index into the flat [T * K]; 0 in spare rows
    row_TK: jax.Array  # sorted row of an assignment
    held_P: jax.Array  # False for experts held elsewhere and for spare rows
    start_E: jax.Array
    count_E: jax.Array


def sort_by_expert(expert_TK: Int[Array, "T K"], num_experts: int) -> Routing:
    """The routing's permutation. Ids equal to `num_experts` sort last and belong to no group."""
    num_slots = expert_TK.shape[1]
    num_assignments = expert_TK.size
    slot_A = vary_like(jnp.arange(num_assignments, dtype=jnp.int32), expert_TK)
    expert_A, order_A = lax.sort((expert_TK.reshape(-1), slot_A), num_keys=1, is_stable=True)
    row_A = jnp.zeros_like(slot_A).at[order_A].set(slot_A, unique_indices=True)
    bound_E = jnp.searchsorted(expert_A, jnp.arange(num_experts + 1, dtype=jnp.int32)).astype(jnp.int32)
    slot_P = jnp.pad(order_A, (0, row_chunks(num_assignments, num_experts)[-1]))
    return Routing(
        token_P=slot_P // num_slots,
        slot_P=slot_P,
        row_TK=row_A.reshape(expert_TK.shape),
        held_P=vary_like(jnp.arange(slot_P.shape[0], dtype=jnp.int32), bound_E) < bound_E[-1],
        start_E=bound_E[:-1],
        count_E=bound_E[1:] - bound_E[:-1],
    )


def _take_rows(value: jax.Array, index: jax.Array) -> jax.Array:
    return value.at[index].get(mode="promise_in_bounds")


def _sum_slots(value_PD: jax.Array, row_TK: jax.Array) -> jax.Array:
    """Sum over the slots k of the sorted rows of (t, k), in at least fp32: the gather's own transpose."""
    acc = accumulation_dtype(value_PD.dtype)
    # One fused pass; a sum over a gathered [T, K, D] would write it first.
    return functools.reduce(jnp.add, (_take_rows(value_PD, row_TK[:, k]).astype(acc) for k in range(row_TK.shape[1])))


class _Products(NamedTuple):
    """The two grouped products of a platform: rows by matrices, and the sum of outer products per group."""

    multiply: Callable[..., jax.Array]
    accumulate: Callable[..., jax.Array]

    def of(self, routing: Routing) -> "_Products":
        """The same with the groups of `routing` filled in."""
        chunks = row_chunks(routing.row_TK.size, routing.count_E.shape[0])
        return _Products(*(partial(_call_grouped, f, routing, chunks) for f in self))


def _call_grouped(
    product: Callable, routing: Routing, chunks: tuple[int, ...], *arrays: jax.Array, **options: Any
) -> jax.Array:
    return product(*arrays, routing.start_E, routing.count_E, chunks=chunks, **options)


def _ragged_multiply(
    rows_PI: jax.Array,
    matrix_EIJ: jax.Array,
    start_E: jax.Array,
    count_E: jax.Array,
    *,
    chunks: tuple[int, ...],
    transposed: bool = False,
) -> jax.Array:
    del chunks
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2 if transposed else 1,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )
    out = lax.ragged_dot_general(
        rows_PI, matrix_EIJ, count_E, numbers, preferred_element_type=accumulation_dtype(rows_PI.dtype)
    )
    # Kernels may leave rows outside of all groups unwritten.
    in_group_P = jnp.arange(rows_PI.shape[0], dtype=jnp.int32) < start_E[-1] + count_E[-1]
    return jnp.where(in_group_P[:, None], out, 0).astype(rows_PI.dtype)


def _ragged_accumulate(
    left_PI: jax.Array, right_PJ: jax.Array, start_E: jax.Array, count_E: jax.Array, *, chunks: tuple[int, ...]
) -> jax.Array:
    del start_E, chunks
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
    )
    return lax.ragged_dot_general(
        left_PI, right_PJ, count_E, numbers, preferred_element_type=accumulation_dtype(left_PI.dtype)
    )


def _by_platform(loops: Callable[..., jax.Array], ragged: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    # Around single products inside the VJP rules, never around the differentiated whole: the gradient of a
    # platform choice would keep the saved values of both branches.
    def choose(*arrays: jax.Array, **options: Any) -> jax.Array:
        return lax.platform_dependent(*arrays, cpu=partial(loops, **options), default=partial(ragged, **options))

    return choose


_PRODUCTS: dict[Implementation, _Products] = {
    "loops": _Products(multiply_groups, accumulate_groups),
    "ragged": _Products(_ragged_multiply, _ragged_accumulate),
    "auto": _Products(
        _by_platform(multiply_groups, _ragged_multiply), _by_platform(accumulate_groups, _ragged_accumulate)
    ),
}


def _gated(
    gate_PF: jax.Array, up_PF: jax.Array, weight_P: jax.Array, held_P: jax.Array, activation: Activation
) -> jax.Array:
    """weight * act(gate) * up in at least fp32; exactly 0 in rows that are not held here."""
    wide = accumulation_dtype(gate_PF.dtype)
    gated_PF = gated(activation, gate_PF.astype(wide), up_PF.astype(wide))
    return jnp.where(held_P[:, None], gated_PF * weight_P[:, None], 0)


def _halves(hidden_P2F: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Gate and up. Cut outside of what is differentiated: the gradient of a cut is a padded sum, twice the traffic."""
    width = hidden_P2F.shape[1] // 2
    return hidden_P2F[:, :width], hidden_P2F[:, width:]


def _sorted_weight(weight_TK: jax.Array, routing: Routing) -> jax.Array:
    return _take_rows(weight_TK.reshape(-1), routing.slot_P).astype(accumulation_dtype(weight_TK.dtype))


def _joined(gate_up_ED2F: jax.Array) -> jax.Array:
    """[E, D, 2F]. Made where it is used: a reshaped weight among the saved values would be stacked by a scan
    over layers, while the weight as it came in is known to be the scan's own input and is not copied.
    """
    return gate_up_ED2F.reshape(*gate_up_ED2F.shape[:2], -1)


def _forward(
    products: _Products,
    activation: Activation,
    x_TD: jax.Array,
    expert_TK: jax.Array,
    weight_TK: jax.Array,
    gate_up_ED2F: jax.Array,
    down_EFD: jax.Array,
    bias_E2F: jax.Array | None,
) -> tuple[jax.Array, tuple]:
    routing = sort_by_expert(expert_TK, down_EFD.shape[0])
    products = products.of(routing)
    hidden_P2F = products.multiply(_take_rows(x_TD, routing.token_P), _joined(gate_up_ED2F))
    if bias_E2F is not None:
        # Rows that are not held take the last expert's; they are zeroed further on.
        expert_P = jnp.minimum(_take_rows(expert_TK.reshape(-1), routing.slot_P), bias_E2F.shape[0] - 1)
        hidden_P2F = hidden_P2F + _take_rows(bias_E2F.reshape(bias_E2F.shape[0], -1), expert_P)
    hidden_P2F = checkpoint_name(hidden_P2F, "expert_hidden")
    gated_PF = _gated(*_halves(hidden_P2F), _sorted_weight(weight_TK, routing), routing.held_P, activation)
    out_PD = products.multiply(gated_PF.astype(x_TD.dtype), down_EFD)
    saved = (x_TD, weight_TK, hidden_P2F, routing, gate_up_ED2F, down_EFD, bias_E2F)
    return _sum_slots(out_PD, routing.row_TK).astype(x_TD.dtype), saved


def _backward(products: _Products, activation: Activation, saved: tuple, dy_TD: jax.Array) -> tuple:
    x_TD, weight_TK, hidden_P2F, routing, gate_up_ED2F, down_EFD, bias_E2F = saved
    # Else XLA finds what is made again here in the forward pass and keeps it from there, or makes it long before.
    x_TD, weight_TK, hidden_P2F, dy_TD = lax.optimization_barrier((x_TD, weight_TK, hidden_P2F, dy_TD))
    hidden_P2F, token_P = (not_before(a, dy_TD) for a in (hidden_P2F, routing.token_P))
    products = products.of(routing)
    weight_P = _sorted_weight(weight_TK, routing)
    gated_PF, gated_vjp = jax.vjp(
        lambda gate, up, weight: _gated(gate, up, weight, routing.held_P, activation), *_halves(hidden_P2F), weight_P
    )
    dy_PD = _take_rows(dy_TD, token_P)
    ddown_EFD = products.accumulate(gated_PF.astype(x_TD.dtype), dy_PD)
    dgated_PF = products.multiply(dy_PD, down_EFD, transposed=True)
    dgate_PF, dup_PF, dweight_P = gated_vjp(dgated_PF.astype(gated_PF.dtype))
    dhidden_P2F = jnp.concatenate([dgate_PF, dup_PF], axis=1)
    dgate_up_EDC = products.accumulate(_take_rows(x_TD, token_P), dhidden_P2F)
    dbias_E2F = None
    if bias_E2F is not None:
        one_P1 = vary_like(jnp.ones((dhidden_P2F.shape[0], 1), dhidden_P2F.dtype), dhidden_P2F)
        dbias_E2F = products.accumulate(one_P1, dhidden_P2F).reshape(bias_E2F.shape).astype(bias_E2F.dtype)
    dx_PD = products.multiply(dhidden_P2F, _joined(gate_up_ED2F), transposed=True)
    return (
        _sum_slots(dx_PD, routing.row_TK).astype(x_TD.dtype),
        None,
        _take_rows(dweight_P, routing.row_TK).astype(weight_TK.dtype),
        dgate_up_EDC.reshape(gate_up_ED2F.shape).astype(gate_up_ED2F.dtype),
        ddown_EFD.astype(down_EFD.dtype),
        dbias_E2F,
    )


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _expert_mlp(implementation: Implementation, activation: Activation, *arrays: Any) -> jax.Array:
    return _forward(_PRODUCTS[implementation], activation, *arrays)[0]


def _expert_mlp_forward(implementation: Implementation, activation: Activation, *arrays: Any) -> tuple:
    return _forward(_PRODUCTS[implementation], activation, *arrays)


def _expert_mlp_backward(
    implementation: Implementation, activation: Activation, saved: tuple, dy_TD: jax.Array
) -> tuple:
    return _backward(_PRODUCTS[implementation], activation, saved, dy_TD)


_expert_mlp.defvjp(_expert_mlp_forward, _expert_mlp_backward)


def expert_mlp(
    x_TD: Float[Array, "T D"],
    expert_TK: Int[Array, "T K"],
    weight_TK: Float[Array, "T K"],
    gate_up_ED2F: Float[Array, "E D 2 F"],
    down_EFD: Float[Array, "E F D"],
    bias_E2F: Float[Array, "E 2 F"] | None = None,
    *,
    activation: Activation = "silu",
    implementation: Implementation = "auto",
) -> Float[Array, "T D"]:
    """The weighted sum over each token's experts. Index 0 of the `2` in `gate_up_ED2F` is the gate, 1 is up;
    `bias_E2F` is added to both.

    Layout: everything local, varying over the union of the inputs' axes; no axis is reduced.
    Ids in `expert_TK` are 0 to E, E = not held here. Sums are at least fp32; the result has x's dtype.
    """
    inputs = (x_TD, expert_TK.astype(jnp.int32), weight_TK, gate_up_ED2F, down_EFD)
    # One type for all: an input that is equal over an axis where others vary gets its gradient summed by the cast.
    arrays = [vary_like(a, *inputs) for a in inputs]
    bias = None if bias_E2F is None else vary_like(bias_E2F, *inputs)
    return _expert_mlp(implementation, activation, *arrays, bias)


def expert_mlp_reference(
    x_TD: Float[Array, "T D"],
    expert_TK: Int[Array, "T K"],
    weight_TK: Float[Array, "T K"],
    gate_up_ED2F: Float[Array, "E D 2 F"],
    down_EFD: Float[Array, "E F D"],
    bias_E2F: Float[Array, "E 2 F"] | None = None,
    *,
    activation: Activation = "silu",
) -> Float[Array, "T D"]:
    """The formula of `expert_mlp` with every expert computed for every token: slow, for tests."""
    chosen_TKE = jax.nn.one_hot(expert_TK, down_EFD.shape[0], dtype=weight_TK.dtype)  # the id E is all zeros
    weight_TE = jnp.einsum("tk,tke->te", weight_TK, chosen_TKE)
    hidden_TE2F = jnp.einsum("td,edcf->tecf", x_TD, gate_up_ED2F)
    if bias_E2F is not None:
        hidden_TE2F = hidden_TE2F + bias_E2F
    gated_TEF = gated(activation, hidden_TE2F[:, :, 0], hidden_TE2F[:, :, 1])
    return jnp.einsum("te,tef,efd->td", weight_TE, gated_TEF, down_EFD).astype(x_TD.dtype)
