"""The error that analyses raise."""

from txl_jax.messages import UserError


class AnalysisError(UserError, ValueError):
    """An analysis is impossible. The message has the reason and says what to do."""
