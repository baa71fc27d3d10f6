"""The one error of this package."""


class DataError(ValueError):
    """Text that cannot be used; the message says what, where and how to mend it.

    Example:
      >>> import txl_jax
      >>> txl_jax.load_corpus("text", path="nowhere.txt")
      Traceback (most recent call last):
      ...
      txl_jax.data.errors.DataError: data.path = 'nowhere.txt': there is no such file or folder
    """
