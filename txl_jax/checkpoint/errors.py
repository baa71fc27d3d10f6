"""The errors of models on disk; each message names the file, the reason and what to do."""

from txl_jax.messages import UserError


class WorkdirError(UserError, RuntimeError):
    """A workdir that cannot be used."""


class AnotherRunError(WorkdirError):
    """A workdir whose run has other settings, another text or another vocabulary."""


class CheckpointError(UserError, RuntimeError):
    """A checkpoint that cannot be used or written."""


class ModelFormatError(UserError, ValueError):
    """A file, a tensor or an argument from which no model can be built."""
