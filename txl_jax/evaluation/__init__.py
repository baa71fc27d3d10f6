"""Evaluation: scoring a split under a named protocol, and simple models to hold it against."""
