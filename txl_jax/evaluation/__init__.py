"""Evaluation: scoring a split under a named protocol, or any text, and simple baselines."""
