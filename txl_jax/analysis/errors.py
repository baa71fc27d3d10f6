"""The error that analyses raise."""


class AnalysisError(ValueError):
    """An analysis is impossible. The message has the reason and says what to do."""
