"""TFDS builder of ``lm1b``; TFDS's own needs TensorFlow."""

from txl_jax.data.builders.source_builder import SourceBuilder


class Lm1b(SourceBuilder):
    """One Billion Word: sentences of news, in no order."""

    HOMEPAGE = "http://www.statmt.org/lm-benchmark/"
    CITATION = """
    @article{chelba2013one,
      title={One Billion Word Benchmark for Measuring Progress in Statistical Language Modeling},
      author={Chelba, Ciprian and Mikolov, Tomas and Schuster, Mike and Ge, Qi and Brants, Thorsten
        and Koehn, Phillipp and Robinson, Tony},
      journal={arXiv:1312.3005}, year={2013}
    }"""
