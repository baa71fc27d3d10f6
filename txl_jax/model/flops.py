"""Formulas for the floating-point operations of matrix products; a multiply-add counts as two.

Softmax, normalisation, dropout and the optimizer are left out: they are few operations, though
they take time. The letters of axes are those of txl_jax.model, and K = M + T.
"""

import math

from txl_jax.config import ExperimentConfig, ProtocolConfig, TrainConfig, TransformerXLConfig
from txl_jax.model.adaptive import clusters
from txl_jax.model.attention import FORMS, projection_flops
from txl_jax.model.block import feed_forward_flops
from txl_jax.model.ring import SINGLE_RING_MAX_TOKENS

Sizes = TrainConfig | ProtocolConfig
"""The settings that give the sizes of a segment: its tokens T, its context and its memory M."""


def layer_flops(c: TransformerXLConfig, p: Sizes, rows: int, cached: bool = False) -> float:
    """Returns the operations of all layers in a forward pass of ``rows`` rows.

    ``cached`` means that memory is a cache, which stores projected keys and values.

    Each row needs 2 T D NH each for queries and output, 2 K D NH each for keys and values, 2 T K NH
    each for content scores, position scores and the weighted sum, and
    :func:`feed_forward_flops` for each token. With a cache, only T keys and values are projected.
    Masked scores count. Only forms of attention with a vector r for each distance have position
    scores. With a cache and a long segment, only ``clamp_len`` + T distances have position scores,
    unless a fused kernel reads the cache. For a fused kernel, give ``clamp_len`` -1.

    Without a cache, some operations do not depend on the number of rows. To project sinusoids,
    ``relative`` needs 2 K D NH, and ``shared_projection`` 2 D NH more, for distance 0.
    ``pre_lnorm`` needs 4 D NH, for the product of the LayerNorm's bias with the matrices of keys
    and values.
    """
    t, width, form = p.context_len + p.seg_len, c.n_head * c.d_head, FORMS[c.attention]
    k = p.mem_len + t
    clamped = cached and t > SINGLE_RING_MAX_TOKENS and c.clamp_len > 0
    distances = min(k, c.clamp_len + t) if clamped else k
    scores = (4 * k + 2 * distances * form.position_vectors) * t * width
    row = projection_flops(c, t, t if cached else k) + scores + t * feed_forward_flops(c)
    sinusoids = 2 * form.projected_sinusoids(k) * c.d_model * width
    shared = 0 if cached else sinusoids + projection_flops(c, 0, c.pre_lnorm)
    return float(c.n_layer * (rows * row + shared))


def vocabulary_flops(c: TransformerXLConfig, p: Sizes, rows: int, sampled: bool = False) -> float:
    """Returns the operations of embedding and softmax in a forward pass of ``rows`` rows.

    ``c.vocab_size`` must not be ``None``. The result is :func:`score_flops`, plus the projections
    of each cluster i, which need 2 d_i D for each input and each target. In a mixture of K
    softmaxes, a target needs 2 K D (d + 1) for latents and prior instead of a projection.
    ``sampled`` means training, where ``sample_softmax`` scores fewer words.
    """
    scored, positions = rows * p.seg_len, rows * (p.context_len + p.seg_len)
    if sampled and c.sample_softmax:  # one table of width D: 2n drawn words, and the target
        return 2.0 * scored * (2 * c.sample_softmax + 1) * c.d_model
    total = score_flops(c, p, rows)
    for i, part in enumerate(clusters(c)):
        if c.mixtures > 1:
            total += 2 * scored * c.mixtures * c.d_model * (part.width + 1)
        if part.projected:
            total += 2 * scored * part.width * c.d_model * (c.mixtures == 1)
            if c.div_val > 1 or i == 0:
                total += 2 * positions * part.width * c.d_model
    return total


def score_flops(c: TransformerXLConfig, p: Sizes, rows: int) -> float:
    """Returns the operations that compute the logits of words in a forward pass of ``rows`` rows.

    A target needs 2 d_i for each word of cluster i that is scored. Every target scores the words of
    the head. The share of targets that also score a tail's words is the tail's probability by
    Zipf's law. A mixture of K softmaxes needs K times as many operations.
    """
    total, parts = 0.0, clusters(c)
    for i, part in enumerate(parts):
        size = part.size + (len(parts) - 1 if i == 0 else 0)
        share = 1.0 if i == 0 else zipf_share(part.start, part.stop, parts[-1].stop)
        total += 2 * rows * p.seg_len * share * size * part.width * c.mixtures
    return total


def zipf_share(start: int, stop: int, size: int) -> float:
    """Returns the probability, by Zipf's law, that a word has a rank ``start`` .. ``stop`` - 1.

    Rank r of 0 .. ``size`` - 1 has the probability 1 / ((r + 1) H), where H is the harmonic number
    1 + 1/2 + .. + 1/``size``.
    """
    harmonic = lambda n: math.log(n) + 0.5772156649 + 0.5 / n if n else 0.0
    return (harmonic(stop) - harmonic(start)) / harmonic(size)


def update_flops(exp: ExperimentConfig, rows: int | None = None) -> tuple[float, float]:
    """Returns two numbers of operations in an update: those of the model, and the recomputed ones.

    Those of the model are 3 times those of a forward pass, since the gradient needs twice as many.
    ``remat`` "layer" recomputes each layer's forward pass, and ``remat`` "products" recomputes its
    scores and weighted sum. The scores of words are recomputed for their gradient
    (model/cross_entropy.py). ``loss.r_drop`` doubles all operations. ``loss.past_decode`` adds
    4 V d + 2 d d per target to a forward pass. ``rows`` ``None`` means the complete batch.
    """
    c, p, rows = exp.model, exp.train, rows or exp.train.batch_size
    layers, words = layer_flops(c, p, rows), vocabulary_flops(c, p, rows, sampled=True)
    again = 0.0 if c.sample_softmax else score_flops(c, p, rows)
    if exp.loss.past_decode:
        width, decoded = c.d_embed or c.d_model, score_flops(c, p, rows) / c.mixtures
        words += 2 * decoded + 2 * rows * p.seg_len * width**2
        again += decoded
    t = p.context_len + p.seg_len
    per_row = (4 + 2 * FORMS[c.attention].position_vectors) * t * (p.mem_len + t)
    scores = c.n_layer * rows * per_row * c.n_head * c.d_head
    recomputed = {"none": 0.0, "products": float(scores), "layer": layers}[c.remat]
    passes = 2 if exp.loss.r_drop else 1
    return passes * 3 * (layers + words), passes * (recomputed + again)
