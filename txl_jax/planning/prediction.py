"""How long an update should take, from operations, bytes and a chip's figures. A prediction.

    products    operations of a chip's rows (products.py) / (EFFICIENCY x the chip's rate)
    traffic     bytes that each chip moves to and from its memory / bandwidth
    exchange    bytes that each chip sends to others / its links

An update takes from max(products, traffic, exchange), all overlapping, to their sum. No run on
these machines stands behind it: rather a bound to plan by than a time to expect.
"""

import dataclasses

from txl_jax.config import ExperimentConfig
from txl_jax.planning import products
from txl_jax.planning.chips import TPUS, Chip

EFFICIENCY = 0.5
"""Of a chip's rate, what products of matrices of these sizes are taken to reach."""

_STATE_BYTES = 32
"""Of a parameter in an update: the gradient written and read, the parameter and both means of
Adam or LAMB read and written, float32."""


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Seconds of one update, *predicted*."""

    products: float
    traffic: float
    exchange: float

    @property
    def at_best(self) -> float:
        """If all of it overlaps."""
        return max(self.products, self.traffic, self.exchange)

    @property
    def at_worst(self) -> float:
        """If nothing does."""
        return self.products + self.traffic + self.exchange


def predicted(
    exp: ExperimentConfig, parameters: int, chip: Chip, data: int, fsdp: int = 1
) -> Prediction:
    """Of one update on ``data`` x ``fsdp`` chips.

    Args:
      exp: with ``model.vocab_size``.
      parameters: how many the model has.
      chip: see chips.py.
      data, fsdp: the mesh; ``tensor`` is not predicted.
    """
    chips = data * fsdp
    own = products.on_a_device(products.cut_of_training(exp), chips)
    model, again = products.of_update(exp, own)
    rate = EFFICIENCY * chip.products
    if exp.model.dtype == "float32" and chip.name not in {f"TPU {kind}" for kind in TPUS}:
        rate /= 2  # TF32
    weights_read = 2 * 4 * parameters * exp.train.micro_batches
    moved = _STATE_BYTES * parameters / fsdp + weights_read + _activations(exp) / chips
    # Rings: an all-reduce of the gradient sends it twice; a gradient that is cut over fsdp is
    # scattered once, and weights are gathered forwards and backwards.
    sent = 4 * parameters * ((0 if data == 1 else 2 / fsdp) + (0 if fsdp == 1 else 3))
    return Prediction((model + again) / rate, moved / chip.bandwidth, sent / chip.link)


def _activations(exp: ExperimentConfig) -> float:
    """Bytes of layers' values that are moved in an update, all chips together; a rough count.

    With a bytes a value: of each of the L B N T K scores forwards 16 + 4a (two float32 products
    written and read; weights written, dropped out and read), of each of the L B T D states
    14a (projections, residuals, normalisation), of each of the L B T F inner ones 4a; backwards
    twice that; forwards once more with ``remat`` "layer".
    """
    c, cut = exp.model, products.cut_of_training(exp)
    a = 4 if c.dtype == "float32" else 2
    positions = c.n_layer * cut.batch_size * cut.positions
    scores = positions * c.n_head * (cut.mem_len + cut.positions) * (16 + 4 * a)
    states = positions * (14 * a * c.d_model + 4 * a * c.d_inner)
    return (4 if c.remat == "layer" else 3) * (scores + states)
