"""The errors of models on disk; each message names the file, the reason and what to do."""


class WorkdirError(RuntimeError):
    """A workdir that cannot be used."""


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used or written."""


class ModelFormatError(ValueError):
    """A file, a tensor or an argument from which no model can be built."""
