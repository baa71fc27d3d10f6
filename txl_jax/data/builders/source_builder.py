"""What the builders of all corpora have in common: a source's text, stored in order."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import tensorflow_datasets as tfds

from txl_jax.data.sources.progress import watched
from txl_jax.data.sources.source import SPLITS, Source


class SourceBuilder(  # type: ignore[call-arg]  # TFDS has the argument, but no types
    tfds.core.GeneratorBasedBuilder, skip_registration=True
):
    """Stores the text of a source as examples ``{"text": bytes}``, in order.

    An example is a block of 256 KB or a little more, cut anywhere; put one after another the
    examples of a split are its text, byte for byte. A line per example would read a hundred
    times slower.
    """

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "First version."}  # noqa: RUF012 TFDS's own way
    HOMEPAGE: str | None = None
    CITATION: str | None = None

    def __init__(self, *, source: Source, **kwargs):
        self.source = source
        super().__init__(**kwargs)

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description=self.__doc__,
            features=tfds.features.FeaturesDict({"text": tfds.features.Text()}),
            homepage=self.HOMEPAGE,
            citation=self.CITATION,
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager):
        del dl_manager  # downloads are the source's: they are needed to find what is prepared
        return {split: self._generate_examples(split) for split in SPLITS}

    def _generate_examples(self, split: str):
        what = f"{self.source.name}: reading {split}"
        total = None if self.source.decoded else self.source.size(split)
        for index, block in enumerate(watched(self.source.blocks(split), what, total)):
            yield index, {"text": block}


class PreparedText:
    """The text of every split of a builder, prepared as ArrayRecord files under ``folder``."""

    def __init__(self, builder: type[SourceBuilder], source: Source, folder: Path):
        """Prepares the text; nothing of the net is touched and TFDS prints nothing."""
        made = builder(source=source, data_dir=folder)
        config = tfds.download.DownloadConfig(try_download_gcs=False)
        with _quiet():
            made.download_and_prepare(file_format="array_record", download_config=config)
        self._splits = {split: made.as_data_source(split) for split in SPLITS}

    def blocks(self, split: str) -> Iterator[bytes]:
        """The text of a split, block by block."""
        examples = self._splits[split]
        for index in range(len(examples)):
            yield examples[index]["text"]


@contextlib.contextmanager
def _quiet():
    """TFDS's announcements and bars are kept off the terminal; errors come through."""
    tfds.disable_progress_bar()
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield
