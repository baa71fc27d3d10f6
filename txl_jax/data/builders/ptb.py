"""TFDS builder of ``ptb``."""

from txl_jax.data.builders.source_builder import SourceBuilder


class Ptb(SourceBuilder):
    """Penn Treebank, words, as prepared by Mikolov: lower case, 10,000 symbols."""

    HOMEPAGE = "http://www.fit.vutbr.cz/~imikolov/rnnlm/"
    CITATION = """
    @article{marcus1993building,
      title={Building a Large Annotated Corpus of {English}: The {Penn} {Treebank}},
      author={Marcus, Mitchell P. and Santorini, Beatrice and Marcinkiewicz, Mary Ann},
      journal={Computational Linguistics}, volume={19}, number={2}, year={1993}
    }"""
