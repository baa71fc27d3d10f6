"""Floating-point operations of a model by formula: matrix products, a multiply-add counts as two.

Softmax, normalisation, dropout and the optimizer are left out: they are few operations, though
they take time (prediction.py). Letters as everywhere, K = M + T.
"""

import dataclasses
import math

from txl_jax.config import ExperimentConfig, ProtocolConfig, TrainConfig, TransformerXLConfig
from txl_jax.model.adaptive import clusters
from txl_jax.model.ring import SINGLE_RING_MAX_TOKENS


@dataclasses.dataclass(frozen=True)
class BatchShape:
    """One segment of B streams: T positions with any context, M of memory, and the scored ones."""

    batch_size: int
    positions: int
    mem_len: int
    scored: int

    def per_device(self, row_devices: int) -> "BatchShape":
        """The share of one of the devices that split the rows; rows are padded to divide."""
        return dataclasses.replace(self, batch_size=-(-self.batch_size // row_devices))


def batch_shape(c: TrainConfig | ProtocolConfig) -> BatchShape:
    """The batch of one update, or of one scored segment."""
    return BatchShape(c.batch_size, c.context_len + c.seg_len, c.mem_len, c.seg_len)


def layer_flops(c: TransformerXLConfig, shape: BatchShape, cached: bool = False) -> float:
    """Operations of all layers, forward; ``cached``: memory and positions are projected already.

    For each row: queries and output 2 T D NH each, keys and values 2 K D NH each; content scores,
    position scores and the weighted sum 2 T K NH each; feed-forward 4 T D F. Masked scores count.
    Position scores are of relative positions only; with a cache and a large T they cover
    ``clamp_len`` + T distances. Once for all rows: 2 K D NH for the positions of ``relative``.
    """
    t, k, width = shape.positions, shape.mem_len + shape.positions, c.n_head * c.d_head
    projections = 4 * (t + (t if cached else k)) * c.d_model * width
    clamped = cached and t > SINGLE_RING_MAX_TOKENS and c.clamp_len > 0
    distances = min(k, c.clamp_len + t) if clamped else k
    scores = (4 * k + (0 if c.memory_free else 2 * distances)) * t * width
    row = projections + scores + 4 * t * c.d_model * c.d_inner
    projects = c.attention == "relative" and not cached
    positions = 2 * k * c.d_model * width if projects else 0
    return float(c.n_layer * (shape.batch_size * row + positions))


def vocabulary_flops(c: TransformerXLConfig, shape: BatchShape) -> float:
    """Operations of embedding and softmax, forward; ``vocab_size`` must be known.

    2 d_i for each word of a cluster that a row is compared with: every row for the head, the share
    of its words by Zipf's law for a tail. A mixture takes that K times, and 2 K D (d + 1) per row
    for latents and prior.
    """
    rows, positions = shape.batch_size * shape.scored, shape.batch_size * shape.positions
    total, parts = 0.0, clusters(c)
    for i, part in enumerate(parts):
        size = part.size + (len(parts) - 1 if i == 0 else 0)
        share = 1.0 if i == 0 else zipf_share(part.start, part.stop, parts[-1].stop)
        total += 2 * rows * share * size * part.width * c.mixtures
        if c.mixtures > 1:
            total += 2 * rows * c.mixtures * c.d_model * (part.width + 1)
        if part.projected:
            total += 2 * rows * part.width * c.d_model * (c.mixtures == 1)
            if c.div_val > 1 or i == 0:
                total += 2 * positions * part.width * c.d_model
    return total


def zipf_share(start: int, stop: int, size: int) -> float:
    """Share of the words of ranks ``start`` to ``stop`` - 1; rank r has p 1 / ((r + 1) H(size))."""
    harmonic = lambda n: math.log(n) + 0.5772156649 + 0.5 / n if n else 0.0
    return (harmonic(stop) - harmonic(start)) / harmonic(size)


def update_flops(exp: ExperimentConfig, shape: BatchShape | None = None) -> tuple[float, float]:
    """Operations of one update: the model's (3 forward passes), and those of recomputation.

    Recomputed are a layer's forward pass with ``remat`` "layer", its scores and weighted sum with
    "products", and the softmax over words for its gradient (model/cross_entropy.py).
    ``shape``: the rows to count; ``None``: the whole batch.
    """
    c, shape = exp.model, shape or batch_shape(exp.train)
    layers, words = layer_flops(c, shape), vocabulary_flops(c, shape)
    per_row = (4 if c.memory_free else 6) * shape.positions * (shape.mem_len + shape.positions)
    scores = c.n_layer * shape.batch_size * per_row * c.n_head * c.d_head
    recomputed = {"none": 0.0, "products": float(scores), "layer": layers}[c.remat]
    return 3 * (layers + words), recomputed + words
