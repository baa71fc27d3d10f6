"""Floating-point operations of a model by formula: products of matrices, a multiply-add is two.

Softmax, normalisation, dropout and the optimizer are left out: few operations, though they take
time (prediction.py). Letters as everywhere, K = M + T.
"""

import dataclasses
import math

from txl_jax.config import ExperimentConfig, ProtocolConfig, TransformerXLConfig
from txl_jax.model.adaptive import clusters
from txl_jax.model.ring import SINGLE_RING_MAX_TOKENS


@dataclasses.dataclass(frozen=True)
class Cut:
    """How text is cut: B streams, T positions with a context among them, M of memory, S scored."""

    batch_size: int
    positions: int
    mem_len: int
    scored: int


def cut_of_training(exp: ExperimentConfig) -> Cut:
    """Of one update."""
    t = exp.train
    return Cut(t.batch_size, t.context_len + t.seg_len, t.mem_len, t.seg_len)


def cut_of_protocol(p: ProtocolConfig) -> Cut:
    """Of one segment that is scored."""
    return Cut(p.batch_size, p.context_len + p.seg_len, p.mem_len, p.seg_len)


def of_layers(c: TransformerXLConfig, cut: Cut, cached: bool = False) -> float:
    """Operations of all layers, forwards; ``cached``: memory and positions are projected already.

    For each row: queries and output 2 T D NH each, keys and values 2 K D NH each; scores by
    content, by position and the weighted sum 2 T K NH each (two of them in forms without relative
    positions; what a mask hides counts all the same; with a cache those by position are of
    ``clamp_len`` + T distances, where T is not small); feed-forward 4 T D F. Once for all rows:
    2 K D NH of position projections (``relative``).
    """
    t, k, width = cut.positions, cut.mem_len + cut.positions, c.n_head * c.d_head
    projections = 4 * (t + (t if cached else k)) * c.d_model * width
    distances = (
        min(k, c.clamp_len + t) if cached and t > SINGLE_RING_MAX_TOKENS and c.clamp_len > 0 else k
    )
    scores = (4 * k + (0 if c.memory_free else 2 * distances)) * t * width
    row = projections + scores + 4 * t * c.d_model * c.d_inner
    projects = c.attention == "relative" and not cached
    positions = 2 * k * c.d_model * width if projects else 0
    return float(c.n_layer * (cut.batch_size * row + positions))


def of_words(c: TransformerXLConfig, cut: Cut) -> float:
    """Operations of embedding and softmax, forwards; ``vocab_size`` is known.

    2 d_i for each word of a cluster that a target's row is compared with: the head's by every
    row, a tail's by the rows whose target is in it. Their share is taken from Zipf's law. Of a
    mixture all that K times, and 2 K D (d + 1) a row for latents and prior.
    """
    rows, c_positions = cut.batch_size * cut.scored, cut.batch_size * cut.positions
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
                total += 2 * c_positions * part.width * c.d_model
    return total


def zipf_share(start: int, stop: int, size: int) -> float:
    """Share of a text's words whose rank is from ``start`` to ``stop`` - 1, by Zipf's law.

    The word of rank r (from 0) has probability 1 / ((r + 1) H(size)).
    """
    harmonic = lambda n: math.log(n) + 0.5772156649 + 0.5 / n if n else 0.0
    return (harmonic(stop) - harmonic(start)) / harmonic(size)


def on_a_device(cut: Cut, row_devices: int) -> Cut:
    """What one of so many devices has of it: rows are padded until they divide."""
    return dataclasses.replace(cut, batch_size=-(-cut.batch_size // row_devices))


def of_update(exp: ExperimentConfig, cut: Cut | None = None) -> tuple[float, float]:
    """Operations of one update: of the model (3 forward passes), and what is computed again.

    ``cut``: of the rows that are meant; ``None``: of the whole batch.

    Again: a layer's forward pass with ``remat`` "layer", its scores and weighted sum with
    "products"; the softmax over words for its gradient (model/cross_entropy.py).
    """
    c, cut = exp.model, cut_of_training(exp) if cut is None else cut
    layers, words = of_layers(c, cut), of_words(c, cut)
    per_row = (4 if c.memory_free else 6) * cut.positions * (cut.mem_len + cut.positions)
    scores = c.n_layer * cut.batch_size * per_row * c.n_head * c.d_head
    again = {"none": 0.0, "products": float(scores), "layer": layers}[c.remat]
    return 3 * (layers + words), again + words
