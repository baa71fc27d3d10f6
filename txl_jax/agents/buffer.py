"""The states that acting stored, and the memory before any of the stored steps.

Slot s holds step s of the newest S steps, oldest first. An example with M = 3, S = 7 and one row:

    slot      0  1  2  3  4  5  6
    begins    .  .  .  .  x  .  .       an episode begins at slot 4
    memory before slot 4:    slots 1 2 3, all of the previous episode, so filled = 3
    memory before slot 6:    slots 3 4 5, but 3 is of the previous episode, so filled = 2
    memory after slot 6:     slots 4 5 6, so filled = 3; memory(3) returns it for the next rollout
"""

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from txl_jax.messages import fields_repr
from txl_jax.model.inputs import any_memory, check_array, int32_array, size
from txl_jax.model.memory import Memory


class StateBuffer(flax.struct.PyTreeNode):
    """The stored states of the newest S steps of B environments.

    With S = M + T, the buffer holds a rollout of T steps and the memory before the rollout. Step t
    is then in slot M + t.

    Attributes:
      hidden: [L,B,S,D] in the compute dtype, the input of every layer.
      begins: bool [B,S], where an episode begins.
      stored: int32 [B], how many of the newest slots hold real states, 0 to S.
    """

    __repr__ = fields_repr

    hidden: jax.Array
    begins: jax.Array
    stored: jax.Array

    @classmethod
    def start(cls, mems: Memory, steps: int | np.integer) -> "StateBuffer":
        """Returns a buffer of M + ``steps`` slots, the newest M with the states of a memory.

        ``mems`` is the memory where the first rollout starts, for example from ``init_mems``.
        """
        mems, steps = any_memory(mems), size("steps", steps, 1)
        hidden = jnp.pad(mems.hidden, [(0, 0), (0, 0), (steps, 0), (0, 0)])
        return cls(hidden, jnp.zeros(hidden.shape[1:3], bool), mems.filled)

    @property
    def steps(self) -> int:
        """S, the number of slots."""
        return self.hidden.shape[2]

    def add(self, states: jax.Array, begins: jax.Array) -> "StateBuffer":
        """Returns the buffer after T more steps; the oldest steps leave it.

        Args:
          states: [L,B,T,D], from T calls of ``Actor.step``. ``jax.lax.scan`` stacks them as
            [T,L,B,D]; ``jnp.moveaxis(states, 0, 2)`` changes the order.
          begins: bool [B,T], the ``begins`` of each of these calls.
        """
        layers, rows, _, width = self.hidden.shape
        check_array("states", states, "floats", (layers, rows, "T", width))
        check_array("begins", begins, "bool", (rows, states.shape[2]))
        newest = lambda old, new, axis: jax.lax.slice_in_dim(
            jnp.concatenate([old, new.astype(old.dtype)], axis), new.shape[axis], None, axis=axis
        )
        stored = int32_array("stored", self.stored, (rows,))
        stored = jnp.minimum(stored + states.shape[2], self.steps)
        hidden, begun = newest(self.hidden, states, 2), newest(self.begins, begins, 1)
        return StateBuffer(jax.lax.stop_gradient(hidden), begun, stored)

    def memory(self, mem_len: int | np.integer, before=None, rows=None) -> Memory:
        """Returns the memory of M slots before a step; only slots of the step's episode are real.

        If the step begins an episode, the memory is that of the episode before. Then give ``core``
        a ``reset`` that is True at this step, so that the model does not use this memory.

        Args:
          mem_len: M.
          before: the slot of the step, from M to S; ``None`` means S, after the newest step. It is
            an int, or an array int32 [] or [R] with a slot for each row.
          rows: int32 [R], the environments, from 0 to B-1; ``None`` means all B.

        Raises:
          ValueError: M is greater than S, or ``before`` is not from M to S (a slot below M has
            fewer than M slots before it), or a row does not exist. Under ``jit``, ``before`` and
            ``rows`` are clipped instead.
        """
        mem_len, n_rows = size("mem_len", mem_len, 0), self.hidden.shape[1]
        if mem_len > self.steps:
            raise ValueError(
                f"mem_len = {mem_len}: must be at most {self.steps}, the slots of this buffer"
            )
        hidden, begins = jnp.asarray(self.hidden), jnp.asarray(self.begins)
        stored = int32_array("stored", self.stored, (n_rows,))
        if rows is not None:
            allowed, why = range(n_rows), f"must be from 0 to {n_rows - 1}, a row of this buffer"
            rows = int32_array("rows", rows, ("R",), allowed=allowed, why=why)
            rows = jnp.clip(rows, 0, n_rows - 1)
            hidden, begins, stored = hidden[:, rows], begins[rows], stored[rows]
        before, shape = self.steps if before is None else before, begins.shape[:1]
        why = f"must be from {mem_len} (mem_len) to {self.steps} (the slots of this buffer)"
        allowed = range(mem_len, self.steps + 1)
        before = int32_array("before", before, (), shape, allowed=allowed, why=why)
        before = jnp.broadcast_to(jnp.clip(before, mem_len, self.steps), shape)
        part = lambda row, stop: jax.lax.dynamic_slice_in_dim(row, stop - mem_len, mem_len, axis=1)
        slot = jnp.arange(self.steps)
        begun = jnp.where(begins & (slot < before[:, None]), slot, self.steps - stored[:, None])
        filled = jnp.clip(before - begun.max(axis=1), 0, mem_len).astype(jnp.int32)
        return Memory(jax.vmap(part, in_axes=(1, 0), out_axes=1)(hidden, before), filled)
