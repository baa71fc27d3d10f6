"""TFDS builder of ``text8``."""

from txl_jax.data.builders.source_builder import SourceBuilder


class Text8(SourceBuilder):
    """The first 100 million characters of cleaned Wikipedia text: a to z and space."""

    HOMEPAGE = "http://mattmahoney.net/dc/textdata.html"
