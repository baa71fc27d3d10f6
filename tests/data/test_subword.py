"""Subwords encode and decode any text exactly, in blocks of any size and in every process."""

import hashlib
import itertools
import json
import os
import re
import subprocess
import sys

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import txl_jax
from txl_jax.config import ConfigError
from txl_jax.data import tokenizer
from txl_jax.data.corpus import corpus_from_config
from txl_jax.data.errors import DataError
from txl_jax.data.vocab import Vocab
from txl_jax.evaluation.split import conversions

TEXT = "the cat sat on the mat, the naïve cat; 猫が座った — don't!\n\n  indented  twice\r\n" * 30
SIZE = 290


@pytest.fixture(scope="module")
def vocab():
    return Vocab.from_subwords([TEXT], vocab_size=SIZE)


# Any text is encoded and decoded.


@hypothesis.given(st.text())
@hypothesis.settings(deadline=None)
def test_any_text_is_encoded_and_comes_back_exactly(vocab, text):
    for given in (text, text.encode()):
        ids = vocab.encode(given)
        assert vocab.decode(ids) == text
        assert vocab.decode_bytes(ids.tolist()) == text.encode()


@hypothesis.given(st.binary())
@hypothesis.settings(deadline=None)
def test_any_bytes_come_back_or_are_refused_where_they_are_no_text(vocab, raw):
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        with pytest.raises(DataError, match=f"^text, byte {error.start}: not UTF-8"):
            vocab.encode(raw)
    else:
        assert vocab.decode_bytes(vocab.encode(raw)) == raw


def test_what_is_no_character_is_refused(vocab):
    """Python represents bytes of a command line that are not UTF-8 as characters such as U+DCFF."""
    with pytest.raises(
        DataError, match=r"^text, character 2: '\\udcff' is not a character; give text"
    ):
        vocab.encode("a\n\udcff")


@hypothesis.given(st.lists(st.integers(0, SIZE - 1)))
@hypothesis.settings(deadline=None)
def test_any_ids_have_bytes_and_those_inside_of_a_character_show_as_such(vocab, ids):
    raw = b"".join(vocab.decode_bytes([i]) for i in ids)
    assert vocab.decode_bytes(ids) == raw
    assert vocab.decode(ids) == raw.decode("utf-8", errors="replace")


def test_the_256_bytes_are_symbols_so_nothing_is_unknown(vocab):
    assert {vocab.decode_bytes([i]) for i in range(256)} == {bytes([b]) for b in range(256)}
    assert vocab.unknown is None
    assert vocab.dtype == np.uint16
    assert vocab.unit == "ppl"


# Ids do not depend on where a text is cut into blocks.


@hypothesis.given(st.text(alphabet="a the\nnt'\r é猫", max_size=60), st.data())
@hypothesis.settings(deadline=None)
def test_where_blocks_end_changes_no_token(vocab, text, data):
    raw = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=6)))
    edges = [0, *cuts, len(raw)]
    blocks = [raw[a:b] for a, b in itertools.pairwise(edges)]
    got = [i for part in vocab.encode_blocks(blocks) for i in part.tolist()]
    assert got == vocab.encode(text).tolist()


def test_a_text_is_its_lines_one_after_another(vocab):
    """A line has the same ids in a prepared text, in a prompt and when scored alone."""
    lines = re.findall(r"[^\n]*\n|[^\n]+$", TEXT)
    alone = [i for line in lines for i in vocab.encode(line).tolist()]
    assert vocab.encode(TEXT).tolist() == alone


@pytest.mark.parametrize("length", [7, 8, 9, 16, 17, 100])
@pytest.mark.parametrize("end", ["", "\n", "\nab"])
def test_a_line_too_long_for_memory_is_cut_by_its_own_length_alone(monkeypatch, length, end):
    monkeypatch.setattr(tokenizer, "LONGEST", 8)
    text = "x" * length + end
    by_hand = [("x" * length + end[:1])[at : at + 8] for at in range(0, length + len(end[:1]), 8)]
    by_hand += [end[1:]] if end[1:] else []
    for n in (1, 3, 8, 1000):
        blocks = [text[at : at + n] for at in range(0, len(text), n)]
        assert [p for pieces in tokenizer.whole_lines(blocks) for p in pieces] == by_hand


def test_no_more_than_a_block_and_a_piece_is_held():
    longest = 0
    blocks = ("x" * 1000 for _ in range(1000))
    for pieces in tokenizer.whole_lines(blocks):
        longest = max(longest, sum(map(len, pieces)))
    assert longest <= tokenizer.LONGEST


# The learnt symbols.


def test_merges_are_the_pairs_that_stand_together_most_often():
    """By hand: x+y occurs 14 times, and then xy+z 9 times, xy+w 5 times and q+w 3 times.

    No merge includes a line end.
    """
    text = "xyz\n" * 9 + "xyw\n" * 5 + "qw\n" * 3
    learnt = Vocab.from_subwords([text], vocab_size=260)
    assert learnt.symbols[256:] == ["xy", "xyz", "xyw", "qw"]
    assert [learnt.symbols[i] for i in learnt.encode("xyzxy\nqwx")] == [
        "xyz",
        "xy",
        "\n",
        "qw",
        "x",
    ]


PROGRAM = """
import hashlib, json, random
from txl_jax.data.vocab import Vocab

rng = random.Random(0)
words = ["".join(rng.choices("abcdefgh é", k=rng.randint(1, 9))) for _ in range(400)]
text = "".join(" ".join(rng.choices(words, k=8)) + "\\n" for _ in range(400))
stored = json.dumps(Vocab.from_subwords([text], vocab_size=600).to_json())
print(hashlib.sha256(stored.encode()).hexdigest())
"""


@pytest.mark.integration
def test_the_same_text_gives_the_same_subwords_in_every_process():
    said = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            capture_output=True,
            text=True,
            check=True,
            env={
                **os.environ,
                "RAYON_NUM_THREADS": threads,
                "PYTHONHASHSEED": threads,
            },
        ).stdout
        for threads in ("1", "3")
    ]
    assert said[0] == said[1]
    assert len(said[0]) == 65


def test_what_is_learnt_does_not_depend_on_blocks(vocab):
    raw = TEXT.encode()
    blocks = [raw[at : at + 7] for at in range(0, len(raw), 7)]
    assert Vocab.from_subwords(blocks, vocab_size=SIZE) == vocab


def test_a_short_text_gives_fewer_symbols_than_asked_for():
    assert len(Vocab.from_subwords(["ab ab\n"], vocab_size=8000)) < 270


# How a vocabulary is stored.


def test_stored_as_json_it_is_the_same(vocab):
    stored = json.dumps(vocab.to_json())
    again = Vocab.from_json(json.loads(stored))
    assert again == vocab
    assert again.encode(TEXT).tolist() == vocab.encode(TEXT).tolist()


def test_symbols_can_be_read_and_no_two_are_the_same(vocab):
    assert " the" in vocab.symbols
    assert "猫" in Vocab.from_subwords(["猫 猫 猫\n"], vocab_size=300).symbols
    assert tokenizer.bytes_to_symbol(b" the") == " the"
    assert tokenizer.bytes_to_symbol(b"\xe7\x8c") == "<0xE7><0x8C>"
    assert tokenizer.bytes_to_symbol(b"<0xE7>") == "<0x3C><0x30><0x78><0x45><0x37><0x3E>"


@hypothesis.given(st.one_of(st.binary(min_size=1), st.from_regex(r"(<0x[0-9A-F]{2}>){1,2}")))
def test_every_symbol_gives_its_bytes_back(raw):
    raw = raw.encode() if isinstance(raw, str) else raw
    assert tokenizer.symbol_to_bytes(tokenizer.bytes_to_symbol(raw)) == raw


def test_a_tokenizer_that_is_not_of_these_symbols_is_refused(vocab):
    with pytest.raises(DataError, match="must be those of its tokenizer"):
        Vocab("subword", vocab.symbols[::-1], vocab.tokenizer)
    with pytest.raises(DataError, match="needs a byte-level tokenizer"):
        Vocab("subword", ["a"], {"model": {"vocab": {"猫": 0}}})
    with pytest.raises(DataError, match="needs a byte-level tokenizer"):
        Vocab("subword", ["a"])
    lacking = [c for c in tokenizer._BYTE_OF_CHARACTER if c != "a"]
    other = {"model": {"vocab": {c: n for n, c in enumerate(lacking)}}}
    with pytest.raises(DataError, match="255 symbols are single bytes, not 256"):
        Vocab("subword", ["b"], other)


def test_without_the_package_the_error_says_what_to_install(monkeypatch, vocab, tmp_path):
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # importing tokenizers now fails
    fix = r"need the package tokenizers.*run pip install '\.\[subword\]'"
    with pytest.raises(DataError, match=fix):
        Vocab.from_subwords([TEXT], vocab_size=SIZE)
    stored = Vocab.from_json(vocab.to_json())
    with pytest.raises(DataError, match=fix):
        stored.encode("the cat")
    assert stored.decode(vocab.encode("the cat")) == "the cat"  # decoding needs no package
    with pytest.raises(DataError, match=fix):
        corpus(tmp_path)


# A corpus of subwords.


def corpus(folder, vocab_size=400, **data):
    """Writes two text files in ``folder``; returns their corpus of subwords."""
    path = folder / "text"
    path.mkdir(exist_ok=True)
    for n, name in enumerate(("a.txt", "b.txt")):
        (path / name).write_text(TEXT.replace("cat", "dog" if n else "cat"), encoding="utf-8")
    settings = {"name": "text", "path": str(path), "vocab": "subword", "vocab_size": vocab_size}
    settings |= {"cache_dir": str(folder / "cache"), **data}
    return corpus_from_config(txl_jax.ExperimentConfig.from_dict({"data": settings}).data)


def test_a_folder_is_prepared_with_subwords_of_its_training_part(tmp_path):
    prepared = corpus(tmp_path)
    assert prepared.vocab.kind == "subword"
    assert 256 < len(prepared.vocab) <= 400
    parts = [getattr(prepared, split) for split in ("train", "valid", "test")]
    train, valid, test = [prepared.vocab.decode(part) for part in parts]
    assert train + valid + test == (TEXT + TEXT.replace("cat", "dog"))
    assert prepared.vocab == Vocab.from_subwords([train], vocab_size=400)
    assert prepared.info["bytes"]["train"] == len(train.encode())
    assert prepared.info["protocol"]["vocab_size"] == 400
    assert not prepared.info["foreign_vocab"]


def test_other_sizes_are_other_folders_and_the_same_size_is_read_again(tmp_path):
    sizes = [len(corpus(tmp_path, n).vocab) for n in (280, 300, 280)]
    assert sizes == [280, 300, 280]
    cache = tmp_path / "cache"
    prepared = [p for p in cache.iterdir() if p.name.startswith("text-subword-")]
    assert len(prepared) == 2
    hashes = {hashlib.sha256((p / "vocab.json").read_bytes()).hexdigest() for p in prepared}
    assert len(hashes) == 2


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"vocab": "char", "vocab_size": 500},
            "data.vocab_size = 500: is only for data.vocab='subword'",
        ),
        ({"vocab": "subword", "vocab_size": 255}, "data.vocab_size = 255: must be at least 256"),
        (
            {"vocab": "subword", "name": "stdlib"},
            "data.vocab = 'subword': is only for data.name='text'",
        ),
    ],
)
def test_impossible_settings_are_refused(data, message):
    with pytest.raises(ConfigError, match=message):
        txl_jax.ExperimentConfig.from_dict({"data": data})


def test_bits_per_byte_are_of_the_bytes_that_the_scored_subwords_are(tmp_path):
    """The loss is 1 nat per token. The first token is no target, so its bytes do not count."""
    prepared = corpus(tmp_path)
    targets = len(prepared.test) - 1
    first = prepared.vocab.decode(prepared.test[:1])
    n_bytes = len(prepared.vocab.decode(prepared.test).encode()) - len(first.encode())
    protocol = txl_jax.config.ProtocolConfig()
    got = conversions(float(targets), prepared, protocol)
    assert got["bits_per_byte"] == pytest.approx(targets / np.log(2) / n_bytes)
    assert got["word_ppl"] > 1
