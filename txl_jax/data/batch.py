"""One training step's data, as the compiled step takes it."""

import flax.struct
import jax
import numpy as np

from txl_jax.data.streams import Segment


class Batch(flax.struct.PyTreeNode):
    """A segment of every stream.

    Attributes:
      inputs, targets: int32 [B,T].
      weights: float32 [B,T], 0 where padded.
      reset: bool [B], streams whose memory is emptied before this segment.
    """

    inputs: jax.Array | np.ndarray
    targets: jax.Array | np.ndarray
    weights: jax.Array | np.ndarray
    reset: jax.Array | np.ndarray


def batch_of(segment: Segment, forget: bool) -> Batch:
    """The segment as a batch; ``forget``: every stream starts anew with it."""
    reset = np.full(segment.inputs.shape[0], forget)
    return Batch(segment.inputs, segment.targets, segment.weights, reset)
