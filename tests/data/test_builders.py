"""TensorFlow Datasets (TFDS) stores and reads the text of each corpus, without TensorFlow."""

import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow_datasets as tfds
from corpus_files import PTB, write_folder

from txl_jax.config import DataConfig
from txl_jax.data.builders import TextConfig
from txl_jax.data.corpus import find_source
from txl_jax.data.sources.source import BLOCK, SPLITS


@pytest.fixture
def prepare(tmp_path):
    def prepare(name: str, path: Path):
        data = DataConfig(name=name, path=str(path), cache_dir=str(tmp_path / "cache"))  # type: ignore[arg-type]
        config = TextConfig(name=f"{name}_here", data=data)
        builder = tfds.builder("txl_text", config=config, data_dir=tmp_path / "tfds")
        builder.download_and_prepare(file_format="array_record")
        return builder, find_source(data)

    return prepare


@pytest.mark.parametrize("name", ["ptb", "wt2", "text"])
def test_the_examples_are_the_text_and_tfds_alone_reads_them(tmp_path, prepare, name):
    path = write_folder(tmp_path / "text", "{}.txt", {**PTB, "train": PTB["train"] * 30_000})
    builder, source = prepare(name, path)
    found = tfds.builder_from_directory(builder.data_dir)
    for split in SPLITS:
        examples = [example["text"] for example in found.as_data_source(split)]
        assert b"".join(examples) == b"".join(source.blocks(split))
        assert all(len(example) >= BLOCK for example in examples[:-1])
        assert found.info.splits[split].num_examples == len(examples)
    assert len(found.as_data_source("train")) > 1


def test_every_downloadable_corpus_has_a_name():
    names = {config.name for config in tfds.builder_cls("txl_text").BUILDER_CONFIGS}
    assert names == {"enwik8", "lm1b", "ptb", "stdlib", "text8", "wt103", "wt2"}
    assert "Penn Treebank" in tfds.builder("txl_text/ptb").info.description


PROGRAM = """
import sys
import tensorflow_datasets as tfds
import txl_jax.data.builders
builder = tfds.builder("txl_text/stdlib", data_dir=sys.argv[1])
builder.download_and_prepare(file_format="array_record")
size = len(b"".join(example["text"] for example in builder.as_data_source("test")))
print(size, "tensorflow" in sys.modules)
"""


def test_the_documented_calls_work_and_never_import_tensorflow(tmp_path):
    program = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    run = subprocess.run(program, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    source = find_source(DataConfig(name="stdlib", cache_dir=str(tmp_path)))
    assert run.stdout.splitlines()[-1] == f"{source.size('test')} False"


def test_a_corpus_loads_without_tfds(tmp_path):
    program = """
import sys
sys.modules["tensorflow_datasets"] = sys.modules["array_record"] = None
import txl_jax
print(len(txl_jax.load_corpus("stdlib", cache_dir=sys.argv[1]).vocab))
"""
    run = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert run.stdout == "256\n", run.stderr
