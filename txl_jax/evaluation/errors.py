"""What analyses refuse."""


class AnalysisError(ValueError):
    """An analysis that cannot be made; the text says why and what to do."""
