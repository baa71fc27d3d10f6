"""Who may attend to whom: causality with memory, windows, empty slots, episodes.

Query i of a segment sits at key position M+i. For M = 3 and T = 3 (1 = allowed):

                 memory   segment
                 0 1 2    3 4 5
      query 0    1 1 1    1 . .        causal: j <= M+i
      query 1    1 1 1    1 1 .
      query 2    1 1 1    1 1 1

      query 0    . 1 1    1 . .        same_length="pytorch": distance M+i-j < M
      query 1    . . 1    1 1 .        ("tf": distance <= M, one key more)
      query 2    . . .    1 1 1

      query 0    . . 1    1 . .        filled = 1: only the newest slot is real
"""

import flax.struct
import jax
import jax.numpy as jnp


def window_reach(same_length: bool | str, mem_len: int, n_keys: int) -> int:
    """The largest distance that a query may look back.

    Raises:
      ValueError: ``pytorch`` with M = 0, where nothing at all could be seen.
    """
    if same_length == "pytorch":
        if mem_len == 0:
            raise ValueError(
                "same_length='pytorch' lets a query see distances below M, and M is 0: give mems"
                " with mem_len of at least 1, or use same_length='tf' or False"
            )
        return mem_len - 1
    return mem_len if same_length == "tf" else n_keys - 1


class AttentionMask(flax.struct.PyTreeNode):
    """Who may attend to whom, said in few numbers: kernels make their tile of the mask from it.

    Query i of a row sees key j of the K = M + T if all of

        0 <= M + i - j <= reach                        causal, within the window
        j >= M - filled                                a slot that holds a real state
        episode of i == episode of j                   nothing attends across a reset

    Attributes:
      filled: int32 [B], real slots of the memory.
      episode: int32 [B,T], of the segment's positions, rising; the memory's is 0. ``None``: there
        was no reset, all are the memory's.
      seg_len, mem_len: T and M.
      reach: the largest distance that a query may look back.
    """

    filled: jax.Array
    episode: jax.Array | None
    seg_len: int = flax.struct.field(pytree_node=False)
    mem_len: int = flax.struct.field(pytree_node=False)
    reach: int = flax.struct.field(pytree_node=False)

    @property
    def n_keys(self) -> int:
        """K."""
        return self.mem_len + self.seg_len

    def allowed(
        self, queries: slice = slice(None), keys: slice | jax.Array = slice(None)
    ) -> jax.Array:
        """The mask, bool [B,T,K], or a part of it; keys may be named one by one, in any order."""
        query = self.mem_len + jnp.arange(self.seg_len)[queries, None]
        key = jnp.arange(self.n_keys)[keys] if isinstance(keys, slice) else keys
        distance = query - key
        seen = (distance >= 0) & (distance <= self.reach)
        seen = seen & (key >= self.mem_len - self.filled[:, None, None])
        if self.episode is None:
            return seen
        of_keys = jnp.pad(self.episode, [(0, 0), (self.mem_len, 0)])
        return seen & (self.episode[:, queries, None] == of_keys[:, None, keys])


def attention_mask(
    seg_len: int,
    filled: jax.Array,
    mem_len: int,
    same_length: bool | str = False,
    reset: jax.Array | None = None,
) -> AttentionMask:
    """Who may attend to whom in a segment.

    Args:
      seg_len: T.
      filled: int32 [B], real slots of the memory.
      mem_len: M.
      same_length: the window, see :func:`window_reach`.
      reset: bool [B,T], true where a new episode starts; nothing attends across it.
    """
    reach = window_reach(same_length, mem_len, mem_len + seg_len)
    episode = None if reset is None else jnp.cumsum(reset.astype(jnp.int32), axis=1)
    return AttentionMask(filled, episode, seg_len, mem_len, reach)


def since_reset(reset: jax.Array, lengths: jax.Array | None = None, again: int = 0) -> jax.Array:
    """Real tokens from each row's last reset to its end: int32 [B], -1 where it had none.

    Args:
      reset: bool [B,T].
      lengths: int32 [B], real tokens; resets in the padding do not count. ``None``: T.
      again: so many tokens before the end, which will be run again, are not counted.
    """
    seg_len = reset.shape[1]
    ends = jnp.full(reset.shape[:1], seg_len) if lengths is None else lengths
    position = jnp.arange(seg_len)
    last = jnp.max(jnp.where(reset & (position < ends[:, None]), position, -1), axis=1)
    since = jnp.maximum(ends - again - last, 0)
    return jnp.where(last >= 0, since, -1).astype(jnp.int32)
