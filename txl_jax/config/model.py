"""The shape of a model: every setting of it, its default, its type and its rule.

Letters as everywhere: B batch, T segment length, M memory length, D ``d_model``, N heads,
H ``d_head``, F ``d_inner``, V vocabulary, L layers.
"""

import dataclasses
from typing import Literal

from txl_jax.config import bounds
from txl_jax.config.checks import check_model
from txl_jax.config.fields import (
    above,
    at_least,
    check_fields,
    optional_count,
    optional_probability,
    probability,
    rule,
)

Window = Literal[False, "pytorch", "tf"]
"""``same_length``: no window, distance < M (the authors' PyTorch), distance <= M (TF, NVIDIA)."""


AttentionForm = Literal["relative", "shaw", "absolute", "absolute_per_layer", "shared_projection"]
"""``attention``: how positions enter the scores, see :class:`TransformerXLConfig`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerXLConfig:
    """The shape of a model (section 3 of the paper); it fixes the parameters, not how it is run.

    Memory length, segment length and batch size are not here: they are the shapes of what
    the model is given, and the same parameters run with any of them.

    Example:
      >>> import txl_jax
      >>> cfg = txl_jax.TransformerXLConfig(
      ...     vocab_size=1000, n_layer=4, d_model=64, n_head=4, d_head=16, d_inner=128,
      ...     cutoffs=(100, 400), div_val=2, same_length="pytorch")
      >>> cfg.attention, cfg.memory_free
      ('relative', False)

    Attributes:
      vocab_size: V, number of token ids. ``None`` in an experiment: taken from the corpus.
      n_layer, d_model, n_head, d_head, d_inner: L, D, N, H, F. N*H may differ from D.
      d_embed: width of the embedding of the most frequent words. ``None``: D.
      dropout: rate at every site that has none of its own: attention output, inside and after
        the feed-forward layer, and where the next two are ``None``.
      dropout_input: rate on the embeddings, of words and of positions. ``None``: ``dropout``.
      dropout_output: rate on the final hidden state. ``None``: ``dropout``.
      dropout_qkv: rate on projected queries, keys, values and positions, one mask for a segment.
      dropout_embedding: rate at which whole words are dropped from the input embedding.
      dropout_mask: ``independent`` at every position, or ``locked``: one mask for all positions
        of a row ("variational", Gal and Ghahramani 2016), at every site but the next.
      dropatt: rate on the attention probabilities, always independent.
      attention: form of attention by name. ``relative`` is the paper's; ``shaw``, ``absolute``
        and ``absolute_per_layer`` are those of its table 6, the last two without memory;
        ``shared_projection`` is that of the authors' later Penn Treebank release.
      pre_lnorm: normalise the input of each sub-layer instead of its output.
      untie_r: ``relative`` only: u and v per layer instead of shared by all layers.
      same_length: attention window by distance, see :data:`Window`.
      clamp_len: c > 0: distances above c use the position encoding of c (``shaw``: the c nearest
        rows of the table are used, so distances from c-1 on share one). -1: never.
      n_positions: rows of the learnt position table of ``shaw`` (training T+M) and of
        ``absolute_per_layer`` (training T).
      cutoffs: first word ids of the tail clusters of an adaptive softmax (Grave et al. 2017); ():
        none. Words are sorted by frequency.
      div_val: d > 1: embeddings of cluster i are d^i times narrower, and each cluster has a
        projection to D (Baevski and Auli 2019). 1: one width, and one projection if it is not D.
      tie_weight: output weights are the input embedding.
      tie_projs: for each cluster whether its output projection is the input's; False where it is
        too short. TF's ``proj_share_all_but_first`` is (False, True, True, ..).
      proj_same_dim: with ``div_val`` > 1, a projection also for the cluster whose width is D
        already (PT always; TF's option).
      sample_softmax: n > 0: training scores against the distinct ones of 2n words drawn
        log-uniformly instead of all V (TF 1.10's candidate sampling, as in PT); scoring is exact.
      mixtures: K > 1: the mean of K softmaxes, weighed anew at every position, each over states of
        its own (mixture.py; Yang et al. 2018); with it no ``cutoffs``. 1: one softmax.
      dropout_latent: rate on the states of the K softmaxes.
      past_decode: parameters for ``loss.past_decode``, which training may add; no part of scoring.
      init_std: standard deviation of every weight's initial values.
      proj_init_std: the same of the projections of embedding and softmax.
      norm_epsilon: of LayerNorm; PT 1e-5, TF 1e-12.
      dtype: compute type. Parameters, softmax and loss are float32 always.
      scan_layers: layers are one loop with stacked parameters, compiled once for all of them.
        False: one after the other, quicker on CPU. Checkpoints are the same.
      remat: what of a layer is computed again for the gradient instead of kept: ``none``;
        ``products``: all but products with weights; ``layer``: all but the layer's input.
      kernel: how attention is computed, by name (model/kernels). ``auto``: the best one here.
    """

    vocab_size: int | None = optional_count(bounds.WORDS)
    n_layer: int = at_least(1, 12, bounds.LAYERS)
    d_model: int = at_least(2, 512, bounds.WIDTH)
    n_head: int = at_least(1, 8, bounds.HEADS)
    d_head: int = at_least(1, 64, bounds.WIDTH)
    d_inner: int = at_least(1, 2048, bounds.INNER_WIDTH)
    d_embed: int | None = optional_count(bounds.WIDTH)
    dropout: float = probability(0.0)
    dropout_input: float | None = optional_probability()
    dropout_output: float | None = optional_probability()
    dropout_qkv: float = probability(0.0)
    dropout_embedding: float = probability(0.0)
    dropout_mask: Literal["independent", "locked"] = "independent"
    dropatt: float = probability(0.0)
    attention: AttentionForm = "relative"
    pre_lnorm: bool = False
    untie_r: bool = False
    same_length: Window = False
    clamp_len: int = rule(
        -1, "must be -1 (never) or at least 1", lambda v: v == -1 or v >= 1, bounds.LENGTH
    )
    n_positions: int | None = optional_count(2 * bounds.LENGTH)
    cutoffs: tuple[int, ...] = rule(
        (),
        "must rise from at least 1",
        lambda v: all(a < b for a, b in zip((0, *v), v, strict=False)),
        bounds.WORDS,
    )
    div_val: int = at_least(1, 1, bounds.CLUSTERS)
    tie_weight: bool = True
    tie_projs: tuple[bool, ...] = (False,)
    proj_same_dim: bool = True
    sample_softmax: int = at_least(0, 0, bounds.WORDS)
    mixtures: int = at_least(1, 1, bounds.ITEMS)
    dropout_latent: float = probability(0.0)
    past_decode: bool = False
    init_std: float = above(0, 0.02)
    proj_init_std: float = above(0, 0.01)
    norm_epsilon: float = above(0, 1e-5)
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    scan_layers: bool = False
    remat: Literal["none", "products", "layer"] = "none"
    kernel: Literal["auto", "reference", "xla", "cudnn", "triton", "pallas_tpu"] = "auto"

    def __post_init__(self):
        check_fields(self, "model")
        check_model(self)

    @property
    def memory_free(self) -> bool:
        """Whether the form of attention can only run with M = 0."""
        return self.attention in ("absolute", "absolute_per_layer")
