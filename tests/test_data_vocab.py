"""A vocabulary gives the authors' ids, gives the text back, and says where it cannot."""

import json

import numpy as np
import pytest
import shared_files

from txl_jax.data.errors import DataError
from txl_jax.data.vocab import Vocab

TEXT = "the cat — naïve\n\nthe 猫 😀 sat\n"


def vocab_of(kind, *blocks):
    if kind == "byte":
        return Vocab.of_bytes()
    return (Vocab.of_chars if kind == "char" else Vocab.of_words)(blocks or [TEXT])


def test_word_ids_are_by_frequency_with_ties_as_first_seen():
    vocab = Vocab.of_words(["b a\nc a <eos> d\n", "d e b\n"], ["f e\n"])
    assert vocab.symbols == ["<eos>", "b", "a", "d", "e", "c", "f"]
    assert vocab.encode("a b\n\nf\n").tolist() == [2, 1, 0, 0, 6, 0]


def test_char_ids_are_in_order_of_code_points():
    assert Vocab.of_chars(["bé a", "😀\nB"]).symbols == ["\n", " ", "B", "a", "b", "é", "😀"]


@pytest.mark.parametrize("name", ["wt103"])
def test_word_vocabulary_and_encodings_are_the_authors(name):
    recorded = shared_files.json_of(f"fixtures/data/{name}.json")
    folder = shared_files.path(f"fixtures/data/{name}")
    vocab = Vocab.of_words([(folder / "train.txt").read_bytes()])
    assert vocab.symbols == recorded["idx2sym"]
    for split in ("train", "valid", "test"):
        assert vocab.encode((folder / f"{split}.txt").read_bytes()).tolist() == recorded[split]


@pytest.mark.parametrize("kind", ["byte", "char", "word"])
def test_decode_gives_the_text_back(kind):
    vocab = vocab_of(kind)
    for text in (TEXT, "", "the cat", "the\n", "\n\n"):
        assert vocab.decode(vocab.encode(text)) == text
        assert vocab.decode(vocab.encode(text.encode()).tolist()) == text


@pytest.mark.parametrize("kind", ["byte", "char", "word"])
def test_a_stored_vocabulary_is_the_same(kind):
    vocab = vocab_of(kind)
    assert Vocab.from_json(json.loads(json.dumps(vocab.to_json()))) == vocab


@pytest.mark.parametrize("kind", ["byte", "char", "word"])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_ids_do_not_depend_on_how_the_text_is_cut_into_blocks(kind, size):
    text = (TEXT + "x\r\ny\rthe end of\tit ").encode()
    blocks = [text[i : i + size] for i in range(0, len(text), size)]
    vocab = vocab_of(kind, *blocks)
    assert vocab == vocab_of(kind, text)
    got = np.concatenate(list(vocab.encode_blocks(blocks, end_last_line=True)))
    ended = text + b"\n" if kind == "word" else text
    np.testing.assert_array_equal(got, vocab.encode(ended))


@pytest.mark.parametrize(
    ("text", "ended"), [("", 0), ("a", 1), ("a ", 1), ("a\n", 1), ("a\r", 1), ("a\n\n", 2)]
)
def test_the_last_line_of_a_file_is_ended_once(text, ended):
    vocab = Vocab.of_words(["a"])
    ids = [i for block in vocab.encode_blocks([text], end_last_line=True) for i in block]
    assert ids.count(0) == ended


def test_word_line_ends_are_universal():
    vocab = Vocab.of_words(["a b"])
    assert vocab.encode("a\r\nb\ra\n").tolist() == [1, 0, 2, 0, 1, 0]


def test_bytes_are_their_own_ids_and_wrong_utf8_is_shown():
    vocab = Vocab.of_bytes()
    ids = vocab.encode(bytes(range(256)))
    assert ids.tolist() == list(range(256))
    assert vocab.decode([104, 105, 255]) == "hi�"
    assert len(vocab) == 256


@pytest.mark.parametrize(
    ("n", "dtype"),
    [(2, "uint8"), (256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "i4")],
)
def test_ids_have_the_smallest_type_that_fits(n, dtype):
    vocab = Vocab("word", ["<eos>", *(f"w{i}" for i in range(1, n))])
    assert vocab.dtype == vocab.encode("w1").dtype == np.dtype(dtype)
    assert vocab.encode(f"w{n - 1}").tolist() == [n - 1]


def test_units():
    assert [vocab_of(kind).unit for kind in ("byte", "char", "word")] == ["bpc", "bpc", "ppl"]


def test_an_unknown_word_is_unk_where_the_vocabulary_has_it():
    assert Vocab.of_words(["a <unk>\n"]).encode("zebra a").tolist() == [2, 1]


def refused(call) -> str:
    with pytest.raises(DataError) as error:
        call()
    return str(error.value)


def test_errors_name_the_symbol_and_the_place():
    words = Vocab.of_words(["a b\n"])
    blocks = ["a b\nb a\n", "a ", "zebra b\n"]
    assert refused(lambda: list(words.encode_blocks(blocks, "book, test split"))) == (
        "book, test split, line 3: the word 'zebra' is not among the 3 of the vocabulary, and"
        " <unk> is not one of them either; write <unk> for rare words in the training text, or"
        " use vocab='byte', which takes any text"
    )
    chars = Vocab.of_chars(["ab\n"])
    assert refused(lambda: list(chars.encode_blocks(["ab\n", "b\naéa"], "book"))) == (
        "book, line 3, character 6: 'é' (U+00E9) is not among the 3 characters of the vocabulary,"
        " which are those of the training text; remove it, or use vocab='byte', which takes any"
        " text"
    )
    latin = ["ab é".encode(), "b é".encode("latin-1"), b"a"]
    assert refused(lambda: Vocab.of_words(latin)) == (
        "text, byte 7: not UTF-8 (invalid continuation byte); convert the text to UTF-8, or use"
        " vocab='byte', which takes any bytes"
    )
    assert refused(lambda: chars.encode(b"ab\xc3")).startswith("text, byte 2: not UTF-8")
    assert refused(lambda: chars.decode([0, 3])) == (
        "ids[1] = 3: a token id must be from 0 to 2, the vocabulary has 3 symbols"
    )


@pytest.mark.parametrize(
    ("kind", "symbols", "message"),
    [
        ("subword", ["a"], "vocabulary kind 'subword': must be 'byte', 'char' or 'word'"),
        ("byte", ["a"], "a byte vocabulary has 256 symbols, not 1"),
        ("word", ["<eos>", "a", "a"], "word vocabulary: the symbol 'a' stands in it twice"),
        ("word", ["a"], "a word vocabulary must have the symbol <eos>"),
        ("char", ["ab"], "a char vocabulary's symbols must be single characters"),
    ],
)
def test_a_vocabulary_that_cannot_be_is_refused(kind, symbols, message):
    assert refused(lambda: Vocab(kind, symbols)) == message
