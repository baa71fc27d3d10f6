"""The error of this package."""

from txl_jax.messages import UserError


class DataError(UserError, ValueError):
    """Text that cannot be used; the message says what is wrong, where, and what to do.

    Example:
      >>> import txl_jax
      >>> txl_jax.load_corpus("text", path="nowhere.txt")
      Traceback (most recent call last):
      ...
      txl_jax.data.errors.DataError: data.path = 'nowhere.txt': there is no such file or folder
    """
