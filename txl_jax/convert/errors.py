"""The error of everything that cannot be converted."""


class ConvertError(ValueError):
    """A source, an argument or a tensor that cannot be used; the text says which and why."""
