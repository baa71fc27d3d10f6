"""The one error of this package."""


class DataError(ValueError):
    """Text that cannot be used; the message says what, where and how to mend it."""
