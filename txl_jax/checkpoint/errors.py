"""Errors of models on disk; each text says which file, why, and what to do."""


class WorkdirError(RuntimeError):
    """A workdir that cannot be used."""


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used or written."""


class ModelFormatError(ValueError):
    """A file, a tensor or an argument that does not make a model."""
