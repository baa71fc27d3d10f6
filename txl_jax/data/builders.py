"""Importing this module registers ``txl_text``, a TFDS dataset of the corpora.

docs/own_data.md has an example. TensorFlow is not imported.
"""

import dataclasses

import tensorflow_datasets as tfds

from txl_jax.config import DataConfig
from txl_jax.data.corpus import find_source
from txl_jax.data.sources.source import SPLITS
from txl_jax.progress import watched

# The descriptions of the corpora that need no path.
DESCRIPTIONS = {
    "enwik8": "The first 100 million bytes of a Wikipedia dump of 2006.",
    "lm1b": "One Billion Word (Chelba et al. 2013): shuffled sentences of news.",
    "ptb": "Penn Treebank (Marcus et al. 1993): words of news, prepared by Mikolov.",
    "stdlib": "Source code of the running Python's standard library, split by file.",
    "text8": "The first 100 million characters of cleaned Wikipedia text: a to z and space.",
    "wt103": "WikiText-103 (Merity et al. 2016): articles of Wikipedia, as words.",
    "wt2": "WikiText-2 (Merity et al. 2016): articles of Wikipedia, as words.",
}


@dataclasses.dataclass(eq=False)
class TextConfig(tfds.core.BuilderConfig):
    """The settings of one corpus: ``data`` is the section ``data`` of an experiment's config."""

    data: DataConfig = dataclasses.field(default_factory=DataConfig)


class TxlText(tfds.core.GeneratorBasedBuilder):
    """The text of language-modelling corpora, in order.

    An example is ``{"text": bytes}``, a block of about 256 KB that may end inside a word. The
    concatenated examples of a split are the text of the split, byte for byte.
    """

    VERSION = tfds.core.Version("1.0.0")
    BUILDER_CONFIGS = [  # noqa: RUF012 TFDS's own way
        TextConfig(name=name, description=text, data=DataConfig(name=name))  # type: ignore[arg-type]
        for name, text in DESCRIPTIONS.items()
    ]

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description=self.builder_config.description or self.__doc__,
            features=tfds.features.FeaturesDict({"text": tfds.features.Text()}),
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager):
        del dl_manager  # the source downloads and checks its files itself
        source = find_source(self.builder_config.data)
        return {split: self._generate_examples(source, split) for split in SPLITS}

    def _generate_examples(self, source, split):
        what = f"{source.name}: storing {split}"
        for index, block in enumerate(watched(source.blocks(split), what, source.size(split))):
            yield index, {"text": block}
