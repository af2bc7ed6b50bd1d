"""The gated MLP of dense layers and shared experts."""

import jax
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxmoe.kernels.expert_mlp import Activation, gated
from jaxmoe.kernels.linear import linear
from jaxmoe.model.params import Init
from jaxmoe.spmd.axes import TP
from jaxmoe.spmd.collectives import gather, scatter_sum


class Mlp(nnx.Module):
    """act(x W_gate) * (x W_up), projected back: split by column over tp on the way in, by row on the way out.

    Layout: x_BSD holds this (sp, tp) rank's positions, in and out.
    Source: Shazeer 2020, arXiv:2002.05202.
    """

    def __init__(self, hidden_dim: int, activation: Activation, init: Init):
        width = init.model.d_model
        self.gate_up_D2F = init.normal((width, 2, hidden_dim), P(None, None, TP))
        self.down_FD = init.normal((hidden_dim, width), P(TP, None), to_residual=True)
        self.activation: Activation = activation

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        x = gather(x_BSD, TP, dim=1)
        weight_D2F = self.gate_up_D2F[...].astype(x.dtype)
        gate_up = linear(x, weight_D2F.reshape(weight_D2F.shape[0], -1))
        gate, up = jax.numpy.split(gate_up, 2, axis=-1)
        hidden = gated(self.activation, gate, up)
        return scatter_sum(linear(hidden, self.down_FD[...].astype(x.dtype)), TP, dim=1)
