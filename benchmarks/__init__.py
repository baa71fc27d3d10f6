"""Benchmarks; their results are in ``results/``, with the machine and the versions."""
