"""Keeps a training text on the device, and cuts batches from the text there.

The host then sends only a :class:`BatchPosition` for each step:

    rows     0 1 2 3 4       start 1, n 2, shift 3:   inputs   4 0      row 0
             5 6 7 8 9                     shift 0:            6 7      row 1

The batches are equal to those of :func:`txl_jax.data.feed.training_batch`.
"""

from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from txl_jax.config import ConfigError
from txl_jax.data.batch import Batch, SoftTargets
from txl_jax.data.feed import resets_memory
from txl_jax.data.streams import Streams


class BatchPosition(flax.struct.PyTreeNode):
    """The position of a step's batch in the text."""

    start: jax.Array | np.ndarray  # int32 [], index of the segment's first target in every stream
    n: jax.Array | np.ndarray  # int32 [], the segment's number of targets
    shifts: jax.Array | np.ndarray  # int32 [B], index of each stream's first token in this epoch
    reset_memory: jax.Array | np.ndarray  # bool [], whether memory is emptied first


class DeviceText(flax.struct.PyTreeNode):
    """The streams of a text on the device, from which :meth:`batch` cuts batches.

    ``width`` is T, the length to which shorter segments are padded on the right.
    """

    tokens: jax.Array | np.ndarray  # int32 [B,n], one stream in each row
    soft: SoftTargets | None = None  # [B,n,k], the soft targets of every token
    width: int = flax.struct.field(pytree_node=False, default=0)
    context_len: int = flax.struct.field(pytree_node=False, default=0)
    begins: jax.Array | np.ndarray | None = None  # bool [B,n], where documents begin
    shared: bool = flax.struct.field(pytree_node=False, default=False)  # see Pieces

    def batch(self, at: BatchPosition) -> Batch:
        """Returns the batch at a position; call this function under ``jit``."""
        c, t = self.context_len, self.width
        place = at.start - c + jnp.arange(c + t)
        begun = (place >= 0) & (place < at.start + at.n)
        real = jnp.arange(t) < at.n
        of_target = jnp.where(real, at.start + 1 + jnp.arange(t), 0)
        b, n = self.tokens.shape
        in_row = lambda x: (x[None, :] + at.shifts[:, None]) % n
        read = lambda values, x: jax.vmap(lambda row, i: row[i])(values, in_row(x))
        inputs = jnp.where(begun, read(self.tokens, jnp.where(begun, place, 0)), 0)
        targets = jnp.where(real, read(self.tokens, of_target), 0)
        weights = jnp.broadcast_to(real.astype(jnp.float32), (b, t))
        begins = place == 0
        begins = begins.at[0].set(begins[0] | (at.reset_memory & ~begins.any()))
        reset = jnp.broadcast_to(*((begins, (b, c + t)) if c else (at.reset_memory, (b,))))
        soft = jax.tree.map(lambda values: read(values, of_target), self.soft)
        if self.begins is None:
            return Batch(inputs, targets, weights, reset, soft)
        if not self.shared:
            weights = jnp.where(read(self.begins, of_target), 0.0, weights)
        document = begun & read(self.begins, jnp.where(begun, place, 0))
        reset = (document | begins if c else document).at[:, 0].max(at.reset_memory)
        return Batch(inputs, targets, weights, reset, soft, jnp.full(b, c + at.n, jnp.int32))


def check_single_process(devices: Sequence[jax.Device]) -> None:
    """Raises ConfigError if the devices belong to several processes."""
    if len({device.process_index for device in devices}) > 1:
        raise ConfigError(
            "config key train.text_on_device: needs a single process; leave the key out"
        )


def device_text(streams: Streams, soft: SoftTargets | None = None) -> DeviceText:
    """Returns the text of training streams as host arrays; the streams must not be sentences.

    ``soft`` [N,k] has soft targets for every token of the split. Tokens that are in no stream are
    left out.
    """
    b, n = streams.batch_size, streams.targets_per_stream + 1
    rows, documents = streams.rows, streams.rows.documents
    assert (np.diff(rows.first) == n).all(), "rows of one length, one after another"
    lay_out = lambda x: x[: b * n].reshape(b, n, *x.shape[1:])
    begins = None
    if documents is not None:
        begins = np.zeros(b * n, bool)
        begins[documents.starts[documents.starts < b * n]] = True
        begins[rows.first] = True
        begins = lay_out(begins)
    shared = documents is not None and documents.shared
    tokens = np.asarray(lay_out(rows.ids), np.int32)
    soft = jax.tree.map(lay_out, soft)
    return DeviceText(tokens, soft, streams.width, streams.context_len, begins, shared)


def training_position(
    streams: Streams, step: int, epoch_memory: str, reset_every: int = 0, rows: slice = slice(None)
) -> BatchPosition:
    """Returns the position of a step's batch; arguments are those of :func:`training_batch`."""
    start, n, epoch = streams.span_at(step)
    reset_memory = resets_memory(step, start == 0, epoch_memory, reset_every)
    number = lambda x: np.asarray(x, np.int32)
    which = range(*rows.indices(streams.batch_size))
    shifts = number([streams.order.shift(epoch, row) for row in which])
    return BatchPosition(number(start), number(n), shifts, np.asarray(reset_memory))
