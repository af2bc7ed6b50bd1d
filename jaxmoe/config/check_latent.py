"""Rules of latent attention, of the sparse attention on top of it, and of the modules that predict further tokens."""

from collections.abc import Iterator

from jaxmoe.config.check_model import Rule
from jaxmoe.config.errors import Problem
from jaxmoe.config.numbers import next_multiple
from jaxmoe.config.schema import Config

_ATTENTION = "model.attention"
_MLA = f"{_ATTENTION}.mla"
_DSA = f"{_ATTENTION}.dsa"


def _mla_heads(config: Config) -> Iterator[Problem]:
    attention, mla = config.model.attention, config.model.attention.mla
    if mla is None:
        return
    if attention.num_kv_heads != attention.num_heads:
        rule = f"must equal {_ATTENTION}.num_heads={attention.num_heads}: all heads share one latent ({_MLA})"
        yield Problem(f"{_ATTENTION}.num_kv_heads", attention.num_kv_heads, rule, f"use {attention.num_heads}")
    width = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    if attention.head_dim != width:
        rule = f"must be {width} = {_MLA}.qk_nope_head_dim + qk_rope_head_dim, the width of a query"
        yield Problem(f"{_ATTENTION}.head_dim", attention.head_dim, rule, f"use {width}")
    if mla.qk_rope_head_dim % 2:
        rule, fix = "must be even: RoPE turns pairs of dims", f"use {next_multiple(mla.qk_rope_head_dim, 2)}"
        yield Problem(f"{_MLA}.qk_rope_head_dim", mla.qk_rope_head_dim, rule, fix)


def _mla_excludes(config: Config) -> Iterator[Problem]:
    attention = config.model.attention
    if attention.mla is None:
        return
    for name in ("qk_norm", "qkv_bias", "output_bias", "sinks"):
        if getattr(attention, name):
            yield Problem(f"{_ATTENTION}.{name}", True, f"does not exist with {_MLA}", "use false")
    for name in ("sliding_window", "clip_qkv", "scale"):
        value = getattr(attention, name)
        if value is not None:
            yield Problem(f"{_ATTENTION}.{name}", value, f"does not exist with {_MLA}", "use null")
    if attention.rope.interleaved:
        fix = f"use false, and {_MLA}.rope_interleaved: true"
        yield Problem(f"{_ATTENTION}.rope.interleaved", True, f"does not exist with {_MLA}", fix)
    if attention.rope.fraction != 1.0:
        rule = f"must be 1 with {_MLA}: qk_rope_head_dim says how many dims are rotated"
        yield Problem(f"{_ATTENTION}.rope.fraction", attention.rope.fraction, rule, "use 1.0")
    if config.parallel.sp_attention == "ulysses":
        rule = f"splits key/value heads, and {_MLA} has one latent for all"
        yield Problem("parallel.sp_attention", "ulysses", rule, "use sp_attention: allgather")


def _dsa_needs_mla(config: Config) -> Iterator[Problem]:
    if config.model.attention.dsa is not None and config.model.attention.mla is None:
        rule = f"chooses among latent keys, and {_MLA} is null"
        yield Problem(_DSA, "a section", rule, f"add {_MLA}, or use dsa: null")


def _dsa_sizes(config: Config) -> Iterator[Problem]:
    mla, dsa = config.model.attention.mla, config.model.attention.dsa
    if mla is None or dsa is None:
        return
    width = dsa.index_head_dim
    if width < mla.qk_rope_head_dim:
        rule = f"must be at least {_MLA}.qk_rope_head_dim={mla.qk_rope_head_dim}: its first dims are rotated alike"
        yield Problem(f"{_DSA}.index_head_dim", width, rule, f"use {mla.qk_rope_head_dim} or more")
    if dsa.hadamard and width & (width - 1):
        rule = f"must be a power of two with {_DSA}.hadamard=true"
        yield Problem(f"{_DSA}.index_head_dim", width, rule, f"use {1 << width.bit_length()}, or hadamard: false")


def dsa_pattern(config: Config) -> Iterator[Problem]:
    dsa, num_layers, moe = config.model.attention.dsa, config.model.num_layers, config.model.moe
    if dsa is None or isinstance(dsa.indexer_pattern, int):
        return
    path, flags, dense = f"{_DSA}.indexer_pattern", dsa.indexer_pattern, moe.num_dense_layers if moe else 0
    if len(flags) != num_layers:
        rule = f"must have {num_layers} entries, one for each of model.num_layers, not {len(flags)}"
        yield Problem(path, flags, rule, f"use {[*flags, *[1] * num_layers][:num_layers]}, or 1 for all layers")
    elif flags[0] == 0:
        rule = "leaves the first layer without keys: there is none before it to choose them"
        yield Problem(path, flags, rule, f"use {[1, *flags[1:]]}")
    elif 1 not in flags[dense:]:
        rule = f"must have a 1 after the leading {dense} dense layers: keys are not passed into the scanned layers"
        yield Problem(path, flags, rule, f"use {[*flags[:dense], 1, *flags[dense + 1 :]]}")


def _dsa_stages(config: Config) -> Iterator[Problem]:
    dsa = config.model.attention.dsa
    if dsa is None or dsa.stage == "sparse":
        return
    if dsa.indexer_loss != "dense" and (dsa.indexer_loss_coeff > 0 or dsa.stage == "warmup"):
        rule = f"has no chosen keys to compare on with {_DSA}.stage={dsa.stage}"
        yield Problem(f"{_DSA}.indexer_loss", dsa.indexer_loss, rule, "use dense")
    if dsa.indexer_loss_coeff == 0 and dsa.stage == "warmup":
        rule = f"leaves nothing to train with {_DSA}.stage=warmup"
        yield Problem(f"{_DSA}.indexer_loss_coeff", dsa.indexer_loss_coeff, rule, "use 1.0")


LATENT_RULES: tuple[Rule, ...] = (_mla_heads, _mla_excludes, _dsa_needs_mla, _dsa_sizes, dsa_pattern, _dsa_stages)
