"""Which tensor of a Hugging Face folder holds which part of which parameter: one table of rows per family.

A row ties a parameter of ours to tensors of theirs by the letters of its name:

    Row("attention.q_DNH", "self_attn.q_proj.weight", "NH D")         theirs is [N * H, D]
    Row("mlp.gate_up_D2F", "mlp.up_proj.weight", "F D", "2=1")        theirs holds index 1 of our dim "2"
    Row("moe.experts.down_EFD", "mlp.experts.{E}.down_proj.weight", "D F")   one tensor for each index of our dim E
    Row("moe.shared_gate_D", "mlp.shared_expert_gate.weight", "1 D")  a dim of size 1

Each word of the layout is a dim of theirs; the letters in it are dims of ours, merged first letter slowest.
Letters are those after the last underscore of the parameter's name.
"""

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Row:
    """One line of a table; see the module."""

    leaf: str
    """Dotted path of the parameter, below its layer for parameters of layers."""
    name: str
    """Name of the tensor, below the layer's prefix for parameters of layers."""
    layout: str
    index: str = ""

    @cached_property
    def letters(self) -> str:
        """One for each dim of the parameter, without the stacked one."""
        return self.leaf.rpartition("_")[2]

    @cached_property
    def words(self) -> tuple[str, ...]:
        """For each dim of the tensor the letters in it; empty for a dim of size 1."""
        return tuple("" if word == "1" else word for word in self.layout.split())

    @cached_property
    def fixed(self) -> dict[str, int]:
        """Dims of ours of which the tensor holds one index."""
        return {letter: int(place) for letter, place in (pair.split("=") for pair in self.index.split())}

    @cached_property
    def spread(self) -> str:
        """The letter of the dim that has a tensor for every index; empty where there is none."""
        return next((letter for letter in self.letters if "{" + letter + "}" in self.name), "")


@dataclass(frozen=True)
class Names:
    """The tables of a family."""

    top: tuple[Row, ...]
    layer: tuple[Row, ...]
    mtp: tuple[Row, ...] = ()
    """Of a multi-token-prediction module beside its layer; modules are numbered on from the last layer."""
    copies: tuple[Row, ...] = ()
    """Tensors of such a module that repeat a parameter of the top: may be missing, must be equal, are written."""
    prefix: str = "model.layers.{layer}."


TOP = (
    Row("embedding.table_VD", "model.embed_tokens.weight", "V D"),
    Row("final_norm.scale_D", "model.norm.weight", "D"),
    Row("head.weight_DV", "lm_head.weight", "V D"),
)

NORMS = (
    Row("attention_norm.scale_D", "input_layernorm.weight", "D"),
    Row("mlp_norm.scale_D", "post_attention_layernorm.weight", "D"),
)

ATTENTION = (
    Row("attention.q_DNH", "self_attn.q_proj.weight", "NH D"),
    Row("attention.k_DKH", "self_attn.k_proj.weight", "KH D"),
    Row("attention.v_DKH", "self_attn.v_proj.weight", "KH D"),
    Row("attention.o_NHD", "self_attn.o_proj.weight", "D NH"),
    Row("attention.q_bias_NH", "self_attn.q_proj.bias", "NH"),
    Row("attention.k_bias_KH", "self_attn.k_proj.bias", "KH"),
    Row("attention.v_bias_KH", "self_attn.v_proj.bias", "KH"),
    Row("attention.o_bias_D", "self_attn.o_proj.bias", "D"),
    Row("attention.q_norm.scale_D", "self_attn.q_norm.weight", "D"),
    Row("attention.k_norm.scale_D", "self_attn.k_norm.weight", "D"),
    Row("attention.q_norm.scale_NH", "self_attn.q_norm.weight", "NH"),
    Row("attention.k_norm.scale_NH", "self_attn.k_norm.weight", "NH"),
)


def gated(leaf: str, prefix: str) -> tuple[Row, ...]:
    """A gated MLP of three tensors."""
    return (
        Row(f"{leaf}.gate_up_D2F", f"{prefix}.gate_proj.weight", "F D", "2=0"),
        Row(f"{leaf}.gate_up_D2F", f"{prefix}.up_proj.weight", "F D", "2=1"),
        Row(f"{leaf}.down_FD", f"{prefix}.down_proj.weight", "D F"),
    )


def experts(prefix: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> tuple[Row, ...]:
    """Three tensors for every expert."""
    return (
        Row("moe.experts.gate_up_ED2F", f"{prefix}.{{E}}.{gate}.weight", "F D", "2=0"),
        Row("moe.experts.gate_up_ED2F", f"{prefix}.{{E}}.{up}.weight", "F D", "2=1"),
        Row("moe.experts.down_EFD", f"{prefix}.{{E}}.{down}.weight", "D F"),
    )


MTP = (
    Row("token_norm.scale_D", "enorm.weight", "D"),
    Row("hidden_norm.scale_D", "hnorm.weight", "D"),
    Row("join_2DF", "eh_proj.weight", "F 2D"),
    Row("final_norm.scale_D", "shared_head.norm.weight", "D"),
)
MTP_COPIES = (
    Row("embedding.table_VD", "embed_tokens.weight", "V D"),
    Row("head.weight_DV", "shared_head.head.weight", "V D"),
)

GATE = Row("moe.router.gate_DE", "mlp.gate.weight", "E D")
SELECTION_BIAS = Row("moe.router.bias_E", "mlp.gate.e_score_correction_bias", "E")

_DENSE = Names(TOP, (*NORMS, *ATTENTION, *gated("mlp", "mlp")))
_MIXTURE = Names(TOP, (*_DENSE.layer, GATE, *experts("mlp.experts")))
_DEEPSEEK_MIXTURE = Names(
    TOP, (*_MIXTURE.layer, SELECTION_BIAS, *gated("moe.shared", "mlp.shared_experts")), MTP, MTP_COPIES
)

LATENT_ATTENTION = (
    Row("attention.q_DNH", "self_attn.q_proj.weight", "NH D"),
    Row("attention.q_down_DC", "self_attn.q_a_proj.weight", "C D"),
    Row("attention.q_norm.scale_D", "self_attn.q_a_layernorm.weight", "D"),
    Row("attention.q_up_CNH", "self_attn.q_b_proj.weight", "NH C"),
    Row("attention.kv_down_DC", "self_attn.kv_a_proj_with_mqa.weight", "C D"),
    Row("attention.kv_norm.scale_D", "self_attn.kv_a_layernorm.weight", "D"),
    Row("attention.kv_up_CNH", "self_attn.kv_b_proj.weight", "NH C"),
    Row("attention.o_NHD", "self_attn.o_proj.weight", "D NH"),
)

INDEXER = (
    Row("attention.indexer.q_CJI", "self_attn.indexer.wq_b.weight", "JI C"),
    Row("attention.indexer.k_DI", "self_attn.indexer.wk.weight", "I D"),
    Row("attention.indexer.k_norm.scale_D", "self_attn.indexer.k_norm.weight", "D"),
    Row("attention.indexer.k_norm.bias_D", "self_attn.indexer.k_norm.bias", "D"),
    Row("attention.indexer.weight_DJ", "self_attn.indexer.weights_proj.weight", "J D"),
)

_DEEPSEEK = Names(
    TOP,
    (
        *NORMS,
        *LATENT_ATTENTION,
        *gated("mlp", "mlp"),
        GATE,
        SELECTION_BIAS,
        *experts("mlp.experts"),
        *gated("moe.shared", "mlp.shared_experts"),
    ),
    MTP,
    MTP_COPIES,
)

_DEEPSEEK_SPARSE = Names(TOP, (*_DEEPSEEK.layer, *INDEXER), MTP, MTP_COPIES)

NAMES: dict[str, Names] = {
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": _DEEPSEEK_SPARSE,
    "kimi_k2": _DEEPSEEK,
    "glm_moe_dsa": _DEEPSEEK_SPARSE,
    "llama": _DENSE,
    "qwen3": _DENSE,
    "qwen3_moe": _MIXTURE,
    "olmoe": _MIXTURE,
    "qwen2_moe": Names(
        TOP,
        (
            *_MIXTURE.layer,
            *gated("moe.shared", "mlp.shared_expert"),
            Row("moe.shared_gate_D", "mlp.shared_expert_gate.weight", "1 D"),
        ),
    ),
    "mixtral": Names(
        TOP,
        (
            *NORMS,
            *ATTENTION,
            Row("moe.router.gate_DE", "block_sparse_moe.gate.weight", "E D"),
            *experts("block_sparse_moe.experts", "w1", "w3", "w2"),
        ),
    ),
    "granitemoe": Names(
        TOP,
        (
            *NORMS,
            *ATTENTION,
            Row("moe.router.gate_DE", "block_sparse_moe.router.layer.weight", "E D"),
            Row("moe.experts.gate_up_ED2F", "block_sparse_moe.input_linear.weight", "E 2F D"),
            Row("moe.experts.down_EFD", "block_sparse_moe.output_linear.weight", "E D F"),
        ),
    ),
    "gpt_oss": Names(
        TOP,
        (
            *NORMS,
            *ATTENTION,
            Row("attention.sinks_N", "self_attn.sinks", "N"),
            Row("moe.router.gate_DE", "mlp.router.weight", "E D"),
            Row("moe.router.gate_bias_E", "mlp.router.bias", "E"),
            # Gate and up take turns.
            Row("moe.experts.gate_up_ED2F", "mlp.experts.gate_up_proj", "E D F2"),
            Row("moe.experts.gate_up_bias_E2F", "mlp.experts.gate_up_proj_bias", "E F2"),
            Row("moe.experts.down_EFD", "mlp.experts.down_proj", "E F D"),
            Row("moe.experts.down_bias_ED", "mlp.experts.down_proj_bias", "E D"),
        ),
    ),
    "ernie4_5_moe": Names(
        TOP,
        (
            *_MIXTURE.layer,
            Row("moe.router.bias_E", "mlp.moe_statics.e_score_correction_bias", "1 E"),
            *gated("moe.shared", "mlp.shared_experts"),
        ),
    ),
    "glm4_moe": _DEEPSEEK_MIXTURE,
    "dots1": _DEEPSEEK_MIXTURE,
}
"""By `model_type`."""
