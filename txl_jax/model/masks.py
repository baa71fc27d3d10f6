"""The attention mask, from causality, the window, empty memory slots and episodes.

Query i of a segment has the key position M+i. For M = 3 and T = 3 (1 = allowed):

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


class AttentionMask(flax.struct.PyTreeNode):
    """The attention mask as a few numbers, from which a kernel computes the mask of its tile.

    Query i of a row may attend to key j of the K = M + T keys if all of these hold:

        0 <= M + i - j <= reach                        causal, within the window
        j >= M - filled                                a slot that holds a real state
        episode of i == episode of j                   nothing attends across a reset

    ``episode`` is the number of each position's episode, int32 [B,T]; it increases from 0, the
    episode of the memory. ``None`` means that all positions continue the memory's episode.
    """

    filled: jax.Array  # int32 [B], number of real slots of the memory
    episode: jax.Array | None
    seg_len: int = flax.struct.field(pytree_node=False)  # T
    mem_len: int = flax.struct.field(pytree_node=False)  # M
    reach: int = flax.struct.field(pytree_node=False)  # the largest distance in the window

    @property
    def n_keys(self) -> int:
        """The number of keys, K."""
        return self.mem_len + self.seg_len

    @property
    def n_distances(self) -> int:
        """The number of distances between a query and a key, R."""
        return self.n_keys

    def allowed(self, queries=slice(None), keys: slice | jax.Array = slice(None)) -> jax.Array:
        """Returns the mask, bool [B,T,K], or a part of it; an array of keys can be in any order."""
        query = self.mem_len + jnp.arange(self.seg_len)[queries, None]
        key = jnp.arange(self.n_keys)[keys] if isinstance(keys, slice) else keys
        distance = query - key
        seen = (distance >= 0) & (distance <= self.reach)
        seen = seen & (key >= self.mem_len - self.filled[:, None, None])
        if self.episode is None:
            return seen
        key_episode = jnp.pad(self.episode, [(0, 0), (self.mem_len, 0)])
        return seen & (self.episode[:, queries, None] == key_episode[:, None, keys])

    def interval(self) -> tuple[jax.Array, jax.Array]:
        """Returns the first and the last key that each query sees: int32 [B,T] each.

        A query sees exactly the keys from first to last; neither decreases from query to query.
        """
        place = jnp.arange(self.seg_len, dtype=jnp.int32)
        newest = jnp.broadcast_to(self.mem_len + place, (len(self.filled), self.seg_len))
        oldest = jnp.maximum(newest - self.reach, self.mem_len - self.filled[:, None])
        if self.episode is not None:
            starts = jnp.diff(self.episode, axis=1, prepend=0) != 0
            starts = jnp.where(starts, newest, 0)
            oldest = jnp.maximum(oldest, jax.lax.cummax(starts, axis=1))
        return jnp.maximum(oldest, 0), newest


class BothWaysMask(AttentionMask):
    """The mask of attention in both directions; ``filled`` is the segment's number of real tokens.

    Query i of a row with n real tokens may attend to key j < M + n at a distance M + i - j from
    -reach to reach. A query in the padding sees only its own key.
    """

    @property
    def n_distances(self) -> int:
        """See :attr:`AttentionMask.n_distances`."""
        return self.n_keys + self.seg_len - 1

    def interval(self) -> tuple[jax.Array, jax.Array]:
        """See :meth:`AttentionMask.interval`."""
        own = self.mem_len + jnp.arange(self.seg_len, dtype=jnp.int32)
        end = self.mem_len + self.filled[:, None]
        oldest = jnp.where(own < end, jnp.maximum(own - self.reach, 0), own)
        return oldest, jnp.where(own < end, jnp.minimum(own + self.reach, end - 1), own)

    def allowed(self, queries=slice(None), keys: slice | jax.Array = slice(None)) -> jax.Array:
        """See :meth:`AttentionMask.allowed`."""
        oldest, newest = (x[:, queries, None] for x in self.interval())
        key = jnp.arange(self.n_keys)[keys]
        return (key >= oldest) & (key <= newest)


def attention_mask(
    seg_len: int,
    filled: jax.Array,
    mem_len: int,
    same_length: bool | str = False,
    reset: jax.Array | None = None,
) -> AttentionMask:
    """Returns the attention mask of a segment; ``same_length`` selects the window.

    ``reset``, bool [B,T], is true where a new episode starts; no query sees earlier episodes.
    Raises ValueError if no key is visible.
    """
    if same_length == "pytorch" and mem_len == 0:
        raise ValueError(
            "same_length='pytorch' lets a token see only distances below mem_len, and mem_len is 0:"
            " give mems with mem_len of at least 1, or use same_length='tf' or False"
        )
    reach = {"pytorch": mem_len - 1, "tf": mem_len, False: mem_len + seg_len - 1}[same_length]
    episode = None if reset is None else jnp.cumsum(reset.astype(jnp.int32), axis=1)
    return AttentionMask(filled, episode, seg_len, mem_len, reach)


def since_reset(
    reset: jax.Array, lengths: jax.Array | None = None, context_len: int = 0
) -> jax.Array:
    """Returns the number of real tokens since each row's last reset: int32 [B], -1 without a reset.

    ``reset`` is bool [B,T]. Resets in the padding are ignored. The last ``context_len`` tokens are
    not counted, because they are run again with the next segment.
    """
    seg_len = reset.shape[1]
    ends = jnp.full(reset.shape[:1], seg_len) if lengths is None else lengths
    position = jnp.arange(seg_len)
    last = jnp.max(jnp.where(reset & (position < ends[:, None]), position, -1), axis=1)
    since = jnp.maximum(ends - context_len - last, 0)
    return jnp.where(last >= 0, since, -1).astype(jnp.int32)
