"""Multi-token prediction: modules after the decoder, each of which predicts one token further."""

import jax
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxmoe.config.layer_plan import LayerKind
from jaxmoe.config.schema import Config
from jaxmoe.kernels.linear import linear
from jaxmoe.model.layer import Layer, LayerStats
from jaxmoe.model.norm import RmsNorm
from jaxmoe.model.params import Init
from jaxmoe.model.tokens import Tokens


class MtpModule(nnx.Module):
    """norm(layer([norm_e(e); norm_h(h)] W)): hidden states of depth d from those of depth d - 1 and the next token.

    Layout: e_BSD, the vectors of the tokens d further on, and h_BSD hold this (sp, tp) rank's positions, as the output.
    h_BSD went through its own final norm, that of the decoder at depth 1. Embedding and head are the model's.
    Source: DeepSeek-V3, arXiv:2412.19437, section 2.2.
    """

    def __init__(self, config: Config, kind: LayerKind, init: Init):
        width = config.model.d_model
        self.token_norm = RmsNorm(width, init)
        self.hidden_norm = RmsNorm(width, init)
        self.join_2DF = init.normal((2, width, width), P())
        self.layer = Layer(config, kind, init.split())
        self.final_norm = RmsNorm(width, init)

    def __call__(
        self, e_BSD: jax.Array, h_BSD: jax.Array, tokens: Tokens, noise_key: jax.Array | None
    ) -> tuple[jax.Array, LayerStats]:
        token_DF, hidden_DF = self.join_2DF[...].astype(h_BSD.dtype)
        joined_BSD = linear(self.token_norm(e_BSD), token_DF) + linear(self.hidden_norm(h_BSD), hidden_DF)
        x_BSD, _, stats = self.layer(joined_BSD, None, tokens, noise_key)
        return self.final_norm(x_BSD), stats
