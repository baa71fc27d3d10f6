"""TFDS builder of ``stdlib``."""

from txl_jax.data.builders.source_builder import SourceBuilder


class Stdlib(SourceBuilder):
    """Source code of the running Python's standard library, split by file."""

    HOMEPAGE = "https://docs.python.org/3/library/"
