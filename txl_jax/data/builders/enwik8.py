"""TFDS builder of ``enwik8``."""

from txl_jax.data.builders.source_builder import SourceBuilder


class Enwik8(SourceBuilder):
    """The first 100 million bytes of a Wikipedia dump of 2006, one of two protocols."""

    HOMEPAGE = "http://mattmahoney.net/dc/textdata.html"
