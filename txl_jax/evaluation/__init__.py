"""Evaluation: scores a split under an evaluation protocol, any text, and simple baselines."""
