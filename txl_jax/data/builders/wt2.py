"""TFDS builder of ``wt2``."""

from txl_jax.data.builders.source_builder import SourceBuilder


class Wt2(SourceBuilder):
    """WikiText-2: good and featured articles of Wikipedia, as words."""

    HOMEPAGE = "https://arxiv.org/abs/1609.07843"
    CITATION = """
    @article{merity2016pointer,
      title={Pointer Sentinel Mixture Models},
      author={Merity, Stephen and Xiong, Caiming and Bradbury, James and Socher, Richard},
      journal={arXiv:1609.07843}, year={2016}
    }"""
