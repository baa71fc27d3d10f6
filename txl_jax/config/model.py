"""The settings of the model: its shape and its computation."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from txl_jax.config import bounds
from txl_jax.config.errors import refusal
from txl_jax.config.fields import (
    Section,
    above_0,
    at_least,
    minus_1_or_count,
    probability,
    rising,
    within,
)

Window = Literal[False, "pytorch", "tf"]
"""Values of ``same_length``: no window, distance < M (authors' PyTorch), distance <= M (TF)."""


AttentionForm = Literal["relative", "shaw", "absolute", "absolute_per_layer", "shared_projection"]
"""Values of ``attention``: how positions enter the scores, see :class:`TransformerXLConfig`."""

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
Precision = Literal["default", "high", "highest", "bfloat16", "tensorfloat32", "float32"]
"""Values of ``matmul_precision``; the last three are other names of the first three."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerXLConfig(Section, key="model"):
    """The shape of a model and of its parameters (section 3 of the paper).

    Memory length, segment length and batch size are not here. They are shapes of the inputs, and
    one set of parameters works with any of them.

    Example:
      >>> import txl_jax
      >>> cfg = txl_jax.TransformerXLConfig(
      ...     vocab_size=1000, n_layer=4, d_model=64, n_head=4, d_head=16, d_inner=128,
      ...     cutoffs=(100, 400), div_val=2, same_length="pytorch")
      >>> cfg.attention, cfg.memory_free
      ('relative', False)
    """

    vocab_size: int | None = at_least(1, None, bounds.WORDS)
    """V, the number of token ids; None takes the number from the corpus."""
    n_layer: int = at_least(1, 12, bounds.LAYERS)
    """L, the number of layers."""
    d_model: int = at_least(2, 512, bounds.WIDTH)
    """D, the width of the hidden states."""
    n_head: int = at_least(1, 8, bounds.HEADS)
    """N, the number of attention heads."""
    d_head: int = at_least(1, 64, bounds.WIDTH)
    """H, the width of a head; N*H may differ from D."""
    d_inner: int = at_least(1, 2048, bounds.INNER_WIDTH)
    """F, the inner width of the feed-forward layer."""
    d_embed: int | None = at_least(1, None, bounds.WIDTH)
    """Width of the embedding of the most frequent words; None takes D."""
    dropout: float = probability(0.0)
    """Dropout rate of attention outputs, feed-forward layers, and where a rate below is None."""
    dropout_input: float | None = probability(None)
    """Dropout rate of word and position embeddings; None takes model.dropout."""
    dropout_output: float | None = probability(None)
    """Dropout rate of the final hidden state; None takes model.dropout."""
    dropout_qkv: float = probability(0.0)
    """Dropout rate of queries, keys, values and positions, with one mask per segment."""
    dropout_embedding: float = probability(0.0)
    """Rate at which whole words are dropped from the input embedding."""
    dropout_mask: Literal["independent", "locked"] = "independent"
    """Whether each position has its own dropout mask (independent), or all positions of a row share
    one (locked; Gal and Ghahramani 2016)."""
    dropatt: float = probability(0.0)
    """Dropout rate of the attention probabilities, with masks that are always independent."""
    attention: AttentionForm = "relative"
    """Form of attention: that of the paper (relative), other forms of its table 6 (shaw, and
    without memory absolute and absolute_per_layer), or that of the authors' later Penn Treebank
    release (shared_projection)."""
    pre_lnorm: bool = False
    """Whether the input of each sub-layer is normalised instead of its output."""
    final_norm: bool = False
    """Whether the output of the last layer is normalised too (with pre_lnorm only)."""
    activation: Literal["relu", "gelu"] = "relu"
    """Activation of the feed-forward layer; gelu is its tanh approximation."""
    attention_bias: bool = False
    """Whether the projections of values and of attention outputs have biases."""
    gate: Literal["gru"] | None = None
    """Residual connection around each sub-layer: a sum (none), or a GRU gate after a relu (gru;
    GTrXL, Parisotto et al. 2019)."""
    gate_bias: float = within(-100, 100, 0.0)
    """Initial bias of the gates; above 0, an untrained layer passes on most of its input."""
    untie_r: bool = False
    """Whether each layer has its own vectors u and v (relative attention only)."""
    same_length: Window = False
    """Attention window by distance: no window, distance < M (pytorch) or distance <= M (tf)."""
    clamp_len: int = minus_1_or_count("never", -1, bounds.LENGTH)
    """Largest distance with its own position encoding, which larger distances share (one less for
    shaw); -1 sets no limit."""
    n_positions: int | None = at_least(1, None, 2 * bounds.LENGTH)
    """Rows of the learnt position table of shaw (T+M in training) and absolute_per_layer (T)."""
    cutoffs: tuple[int, ...] = rising(1, (), bounds.WORDS, count=0)
    """First word ids of the tail clusters of an adaptive softmax (Grave et al. 2017)."""
    div_val: int = at_least(1, 1, bounds.CLUSTERS)
    """Factor by which embeddings of each cluster are narrower than those of the cluster before
    (Baevski and Auli 2019)."""
    tie_weight: bool = True
    """Whether the input embedding is also the output weights."""
    tie_projs: tuple[bool, ...] = (False,)
    """For each cluster, whether input and output share one projection; False for clusters beyond
    the end of the list."""
    proj_same_dim: bool = True
    """Whether div_val above 1 also projects a cluster of width D (PyTorch always projects it)."""
    sample_softmax: int = at_least(0, 0, bounds.WORDS)
    """Half the number of words that are drawn log-uniformly for the softmax in training, which uses
    each drawn word once; 0 uses all V words."""
    mixtures: int = at_least(1, 1, bounds.ITEMS)
    """Number of softmaxes that are mixed at each position (Yang et al. 2018)."""
    dropout_latent: float = probability(0.0)
    """Dropout rate of the states from which mixed softmaxes are computed."""
    past_decode: bool = False
    """Whether the model has the parameters that loss.past_decode needs."""
    init_std: float = above_0(0.02)
    """Standard deviation of the initial weights."""
    proj_init_std: float = above_0(0.01)
    """Standard deviation of the initial projections of embedding and softmax."""
    norm_epsilon: float = above_0(1e-5)
    """Epsilon of LayerNorm, which is 1e-5 in PyTorch and 1e-12 in TF."""
    dtype: DtypeName = "float32"
    """Dtype of the computation; parameters, softmax and loss are always float32. auto is bfloat16
    on TPUs, on NVIDIA GPUs from compute capability 8.0 and on AMD CPUs with AVX512-BF16, else
    float32."""
    matmul_precision: Precision | None = None
    """Precision of float32 matrix products, as in jax.default_matmul_precision: none takes JAX's
    default, one bfloat16 pass on TPUs and TF32 on NVIDIA GPUs; highest is float32 everywhere."""
    scan_layers: Literal["auto", True, False] = False
    """Whether the layers run as a loop with one compiled body; auto is True on TPUs, and False on
    CPUs and GPUs, where that is faster (except on GPUs for some d_model not divisible by 4)."""
    remat: Literal["none", "products", "layer"] = "none"
    """Values that the backward pass recomputes: none, all except products with weights (products),
    or whole layers (layer)."""
    kernel: Literal["auto", "reference", "xla", "triton", "pallas_tpu"] = "auto"
    """Implementation of attention (model/kernels); auto takes the best one for the device."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, why in (*_shape_rules(self), *_softmax_rules(self)):
            raise refusal(f"model.{key}", getattr(self, key), why)

    @property
    def memory_free(self) -> bool:
        """Whether the form of attention has no memory, so that M must be 0."""
        return self.attention in ("absolute", "absolute_per_layer")

    @property
    def kv_heads(self) -> int:
        """The number of heads for which a cache holds the keys and values of the memory."""
        return self.n_head

    @property
    def segment_limit(self) -> int | None:
        """The largest number of tokens of a segment and its context; ``None`` means no limit."""
        return self.n_positions if self.attention == "absolute_per_layer" else None


def _shape_rules(c: TransformerXLConfig) -> Iterator[tuple[str, str]]:
    """Yields settings from which no model can be built, each with the rule that it breaks."""
    clusters, width = len(c.cutoffs) + 1, c.d_embed or c.d_model
    if c.d_model % 2:
        rule = "must be even, because half of a position encoding is sines and half cosines"
        yield "d_model", f"{rule} (paper, section 3.3)"
    if c.n_positions is None and c.attention in ("shaw", "absolute_per_layer"):
        rule = f"must be the number of rows of the position table of attention {c.attention!r}"
        yield "n_positions", rule
    if c.attention == "absolute_per_layer" and c.n_head * c.d_head != c.d_model:
        yield "d_head", f"attention {c.attention!r} needs n_head * d_head = d_model {c.d_model}"
    if c.vocab_size is not None and c.cutoffs and c.cutoffs[-1] >= c.vocab_size:
        yield "cutoffs", f"must be below the vocabulary's size {c.vocab_size}"
    if width // c.div_val ** len(c.cutoffs) < 1:
        rule = f"leaves no width for the last of {clusters} clusters, because the first has {width}"
        yield "div_val", f"{rule}; use a smaller div_val or fewer cutoffs"
    if c.final_norm and not c.pre_lnorm:
        rule = "needs model.pre_lnorm=True"
        yield "final_norm", f"{rule}; with pre_lnorm=False the output is normalised already"
    if len(c.tie_projs) > clusters:
        yield "tie_projs", f"has more entries than there are clusters ({clusters})"


def _softmax_rules(c: TransformerXLConfig) -> Iterator[tuple[str, str]]:
    one_table = not c.cutoffs and c.div_val == 1
    if c.sample_softmax and not (one_table and c.d_embed in (None, c.d_model)):
        rule = "needs one cluster of width d_model (no cutoffs, div_val or d_embed)"
        yield "sample_softmax", rule
    for other in ("sample_softmax", "cutoffs"):
        if c.mixtures > 1 and getattr(c, other):
            rule = f"mixes softmaxes over all words, and model.{other} is {getattr(c, other)!r}"
            yield "mixtures", f"{rule}; leave model.{other} out, or use mixtures 1"
    if c.mixtures > 1 and any(c.tie_projs):
        rule = "mixed softmaxes have no output projection to tie"
        yield "mixtures", f"{rule}; set model.tie_projs to (False,)"
    if c.past_decode and not one_table:
        yield "past_decode", "needs one embedding for all words; use no cutoffs and div_val 1"
