"""The data of one training step, in the form that the compiled step takes."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from txl_jax.data.streams import Segment, Streams
from txl_jax.messages import fields_repr


class SoftTargets(flax.struct.PyTreeNode):
    """The k most likely next words of teacher models, with their probabilities; see distil.py."""

    __repr__ = fields_repr

    words: jax.Array | np.ndarray  # int [...,k]
    probabilities: jax.Array | np.ndarray  # float [...,k]; the sum over k is at most 1


class Batch(flax.struct.PyTreeNode):
    """A segment of every stream.

    ``reset`` is bool [B], true for streams whose memory is emptied before the segment. With a
    context (C > 0) or with documents, ``reset`` is bool [B,C+T]. It is then true where the text of
    a stream or a document begins, and at the first token if the memory is emptied.
    """

    __repr__ = fields_repr

    inputs: jax.Array | np.ndarray  # int32 [B,C+T], C tokens of context, then the segment
    targets: jax.Array | np.ndarray  # int32 [B,T]
    weights: jax.Array | np.ndarray  # float32 [B,T], 0 where padded
    reset: jax.Array | np.ndarray
    soft: SoftTargets | None = None  # [B,T,k], the targets of distillation
    lengths: jax.Array | np.ndarray | None = None  # int32 [B], number of real inputs

    @property
    def context_len(self) -> int:
        """C, the number of tokens that are read again and not scored."""
        return self.inputs.shape[-1] - self.targets.shape[-1]

    def model_kwargs(self, with_lengths: bool) -> dict[str, Any]:
        """Returns the keyword arguments of the model's method ``nll`` that describe the inputs.

        ``with_lengths`` adds ``lengths``, int32 [B], the number of real tokens of each row. The
        model needs them if text follows a padded segment, or if positions are counted from the last
        real token.
        """
        kwargs: dict[str, Any] = {"reset": self.reset, "context_len": self.context_len}
        if with_lengths and self.lengths is not None:
            kwargs["lengths"] = self.lengths
        elif with_lengths:
            ends = self.context_len + 1 + jnp.arange(self.targets.shape[-1], dtype=jnp.int32)
            ends = jnp.where(self.weights > 0, ends, self.context_len)
            kwargs["lengths"] = jnp.max(ends, axis=-1)
        return kwargs


def make_batch(segment: Segment, reset_memory: bool) -> Batch:
    """Returns a segment as a batch; ``reset_memory`` empties the memory of every stream first."""
    reset = np.full(segment.inputs.shape[0], reset_memory)
    if segment.inputs.shape != segment.targets.shape:  # with context
        reset = segment.starts.copy()
        reset[:, 0] |= reset_memory & ~reset.any(axis=1)  # a row with a reset ignores memory anyway
    arrays = (segment.inputs, segment.targets, segment.weights)
    if segment.resets is None:
        return Batch(*arrays, reset)
    per_token = segment.resets.copy()
    per_token[:, 0] |= reset_memory
    if reset.ndim == 2:
        per_token |= reset
    return Batch(*arrays, per_token, lengths=segment.lengths)


def warm_up_batches(streams: Streams, n: int, rows: slice = slice(None)) -> list[Batch]:
    """Returns batches of the n tokens before each stream in ``rows``; all their weights are 0.

    Reading them fills an empty memory as if each stream had begun n tokens earlier. If the text has
    fewer tokens before a stream, the batches are padded there. For n = 5,
    T = 3 and streams that begin at tokens 0, 4 and 8 of a text:

        stream 0   . . .   . . .       nothing is before it
        stream 1   . . 0   1 2 3       a point is padding; reset is true where text begins
        stream 2   . 3 4   5 6 7
    """
    which = range(*rows.indices(streams.batch_size))
    b, t = len(which), streams.seg_len
    n_segments = -(-n // t)
    inputs = np.zeros((b, n_segments * t), np.int32)
    reset = np.zeros(inputs.shape, bool)
    for row, stream in enumerate(which):
        text = streams.preceding_tokens(stream, n)
        if len(text):
            inputs[row, -len(text) :] = text
            reset[row, -len(text)] = True
    unscored = np.zeros((b, t), np.int32), np.zeros((b, t), np.float32)
    spans = [slice(i * t, (i + 1) * t) for i in range(n_segments)]
    return [Batch(inputs[:, span], *unscored, reset[:, span]) for span in spans]
