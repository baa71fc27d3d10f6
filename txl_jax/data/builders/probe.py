"""TFDS builder of ``probe``."""

from txl_jax.data.builders.source_builder import SourceBuilder


class Probe(SourceBuilder):
    """Symbols that are asked for again a known number of tokens later, drawn from a seed."""
