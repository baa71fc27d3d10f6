"""TFDS builder of ``text``."""

from txl_jax.data.builders.source_builder import SourceBuilder


class Text(SourceBuilder):
    """Plain text of the user's own."""
