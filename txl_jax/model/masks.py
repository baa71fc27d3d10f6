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


def allowed(
    seg_len: int,
    filled: jax.Array,
    mem_len: int,
    same_length: bool | str = False,
    reset: jax.Array | None = None,
) -> jax.Array:
    """Which keys each query may attend to: bool [B,T,K].

    Args:
      seg_len: T.
      filled: int32 [B], real slots of the memory.
      mem_len: M.
      same_length: the window, see :func:`window_reach`.
      reset: bool [B,T], true where a new episode starts; nothing attends across it.
    """
    n_keys = mem_len + seg_len
    query = mem_len + jnp.arange(seg_len)[:, None]
    key = jnp.arange(n_keys)[None, :]
    distance = query - key
    visible = (distance >= 0) & (distance <= window_reach(same_length, mem_len, n_keys))
    visible = visible & (key >= mem_len - filled[:, None, None])
    if reset is None:
        return visible
    episode = jnp.cumsum(reset.astype(jnp.int32), axis=1)
    of_keys = jnp.pad(episode, [(0, 0), (mem_len, 0)])
    return visible & (episode[:, :, None] == of_keys[:, None, :])


def since_reset(reset: jax.Array, lengths: jax.Array | None = None) -> jax.Array:
    """Real tokens from each row's last reset to its end: int32 [B], -1 where it had none.

    Args:
      reset: bool [B,T].
      lengths: int32 [B], real tokens; resets in the padding do not count. ``None``: T.
    """
    seg_len = reset.shape[1]
    ends = jnp.full(reset.shape[:1], seg_len) if lengths is None else lengths
    position = jnp.arange(seg_len)
    last = jnp.max(jnp.where(reset & (position < ends[:, None]), position, -1), axis=1)
    return jnp.where(last >= 0, ends - last, -1).astype(jnp.int32)
