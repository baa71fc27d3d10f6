"""A tokenizer.json of Hugging Face tokenizers can be the vocabulary of a text."""

import json
import pathlib
import shutil

import numpy as np
import pytest
from tiny_runs import corpus_and_experiment, text

import txl_jax
from txl_jax.checkpoint.errors import WorkdirError
from txl_jax.checkpoint.workdir import init_workdir
from txl_jax.config import ConfigError
from txl_jax.data.corpus import load_corpus
from txl_jax.data.errors import DataError
from txl_jax.data.vocab import Vocab
from txl_jax.generation.text import Decoder

tokenizers = pytest.importorskip("tokenizers")


def word_pieces():
    """Returns a tokenizer that lower-cases text, adds [CLS], cuts to 3 tokens and pads to 20."""
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    made.normalizer = tokenizers.normalizers.Lowercase()
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.decoder = tokenizers.decoders.WordPiece()
    special = ["[UNK]", "[CLS]", "<end>"]
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=60, special_tokens=special, show_progress=False
    )
    made.train_from_iterator(text(40).splitlines(), trainer)
    made.post_processor = tokenizers.processors.TemplateProcessing("[CLS] $A", None, [("[CLS]", 1)])
    made.enable_truncation(3)
    made.enable_padding(length=20)
    return made


def byte_pairs():
    """Returns a byte-level tokenizer, in which a character can need several tokens."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.pre_tokenizer, made.decoder = level, tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=280, initial_alphabet=level.alphabet(), show_progress=False
    )
    made.train_from_iterator([text(40)], trainer)
    return made


def saved(folder, made=None) -> str:
    path = folder / "tokenizer.json"
    (made or word_pieces()).save(str(path))
    return str(path)


def test_each_line_has_the_ids_of_the_tokenizer_without_cuts_padding_and_added_tokens(tmp_path):
    path = saved(tmp_path)
    vocab, plain = Vocab.from_tokenizer(path), tokenizers.Tokenizer.from_file(path)
    plain.no_truncation()
    plain.no_padding()
    lines = text(5).splitlines()
    expected = [i for x in lines for i in plain.encode(x, add_special_tokens=False).ids]
    assert vocab.encode("\n".join(lines)).tolist() == expected
    assert len(vocab) == plain.get_vocab_size()
    assert vocab.symbols[expected[0]] == plain.id_to_token(expected[0])
    assert vocab.encode("the <end>").tolist()[-1] == plain.token_to_id("<end>")
    assert vocab.decode(vocab.encode("The CAT <end>")) == "the cat <end>"
    assert (vocab.unit, vocab.dtype) == ("ppl", np.uint8)
    marked = tmp_path / "marked.json"
    marked.write_bytes(b"\xef\xbb\xbf" + pathlib.Path(path).read_bytes())
    assert Vocab.from_tokenizer(marked) == vocab


def test_the_stored_vocabulary_has_the_tokenizer(tmp_path):
    vocab = Vocab.from_tokenizer(saved(tmp_path))
    again = Vocab.from_json(json.loads(json.dumps(vocab.to_json())))
    assert again == vocab
    assert again.encode("the cat").tolist() == vocab.encode("the cat").tolist()


def test_ids_without_a_token_have_a_name(tmp_path):
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 3}, unk_token="a"))
    vocab = Vocab.from_tokenizer(saved(tmp_path, made))
    assert vocab.symbols == ["a", "<unused 1>", "<unused 2>", "b"]


def test_a_character_of_several_tokens_appears_when_it_is_complete(tmp_path):
    vocab = Vocab.from_tokenizer(saved(tmp_path, byte_pairs()))
    ids = vocab.encode("a猫é the cat").tolist()
    decoder = Decoder(vocab, ids[:1])
    parts = [decoder.add(i) for i in ids[1:]]
    assert "".join(parts) == "猫é the cat"
    assert "\ufffd" not in "".join(parts)
    assert decoder.flush() == ""
    assert Decoder(vocab, ids[:1]).add(ids[1]) == ""


def test_a_corpus_has_the_tokens_and_documents_of_a_text(tmp_path):
    (tmp_path / "x.txt").write_text("".join(f"{text(1, n)}<end>" for n in range(60)))
    settings = {"tokenizer": saved(tmp_path), "cache_dir": tmp_path / "cache"}
    corpus = load_corpus("text", tmp_path / "x.txt", document_separator="<end>", **settings)
    vocab = Vocab.from_tokenizer(settings["tokenizer"])
    assert corpus.vocab == vocab
    first = [int(i) for i in corpus.train[0]]
    assert first == vocab.encode(f"{text(1, 0)}<end>").tolist()
    assert len(corpus.train) + len(corpus.valid) + len(corpus.test) == 60
    other = load_corpus("text", tmp_path / "x.txt", vocab="byte", cache_dir=tmp_path / "cache")
    assert other.vocab.kind == "byte"


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (None, r"cannot be read \(No such .*; name a file, such as the tokenizer\.json that save_"),
        (b"{", "is not JSON"),
        (b"{}", "cannot be read"),
        (b"[]", "cannot be read"),
        ("{}".encode("utf-16"), "': is UTF-16 text, not UTF-8 .*; save it as UTF-8"),
        ("{}".encode("utf-16-le"), r"': is UTF-16 \(little-endian\) text .*; save it as UTF-8"),
    ],
)
def test_unusable_tokenizers_are_refused_in_one_line(tmp_path, content, fault):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    (tmp_path / "x.txt").write_text(text(9))
    with pytest.raises(DataError, match=fault) as caught:
        load_corpus("text", tmp_path / "x.txt", tokenizer=path, cache_dir=tmp_path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_is_for_a_text_and_takes_the_place_of_another_vocabulary():
    with pytest.raises(ConfigError, match=r"data\.tokenizer = 't': is only for data.name='text'"):
        txl_jax.ExperimentConfig.from_dict({"data": {"name": "ptb", "tokenizer": "t"}})
    with pytest.raises(ConfigError, match=r"data.vocab = 'byte' is given too; give one of them"):
        txl_jax.ExperimentConfig.from_dict({"data": {"vocab": "byte", "tokenizer": "t"}})
    exp = txl_jax.load_config("my_text", {"data.path": "x", "data.tokenizer": "t"})
    assert (exp.data.vocab, exp.data.tokenizer) == (None, "t")


def test_a_workdir_refuses_another_tokenizer(tmp_path):
    changes = {"data.vocab": None, "data.tokenizer": saved(tmp_path)}
    corpus, exp = corpus_and_experiment(tmp_path, **changes)
    (tmp_path / "run").mkdir()
    for _ in range(2):
        init_workdir(str(tmp_path / "run"), exp, corpus)
    saved(tmp_path, byte_pairs())
    corpus, exp = corpus_and_experiment(tmp_path, **changes)
    with pytest.raises(WorkdirError, match="vocabulary: not that of"):
        init_workdir(str(tmp_path / "run"), exp, corpus)


@pytest.mark.slow
def test_a_run_keeps_its_tokenizer(tmp_path):
    (tmp_path / "x.txt").write_text(text())
    path = saved(tmp_path, byte_pairs())
    config = {
        "data": {"path": str(tmp_path / "x.txt"), "tokenizer": path},
        "model": {"n_layer": 1, "d_model": 16, "n_head": 1, "d_head": 16, "d_inner": 16},
        "train": {"steps": 20, "batch_size": 2, "seg_len": 16, "mem_len": 16},
    }
    settings = {"data.cache_dir": str(tmp_path / "cache"), "generate.length": 5}
    txl_jax.train(config, tmp_path / "run", settings)
    (tmp_path / "tokenizer.json").unlink()
    shutil.rmtree(tmp_path / "cache")
    trained = txl_jax.load(str(tmp_path / "run"))
    made = trained.generate("the cat", length=6)
    assert made.text.startswith("the cat")
    score = trained.score("the cat saw\n")
    assert score.unit == "ppl"
    assert score.bits_per_byte is not None
    assert np.isfinite(trained.evaluate().loss)
