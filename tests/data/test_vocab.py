"""A vocabulary gives the ids of the authors' code, and decodes them.

Its errors name the symbol and the place in the text.
"""

import itertools
import json
import pathlib

import numpy as np
import pytest
import shared_files

from txl_jax.data.errors import DataError
from txl_jax.data.vocab import Vocab

TEXT = "the cat — naïve\n\nthe 猫 😀 sat\n"


def vocab_of(kind, *blocks):
    if kind == "byte":
        return Vocab.all_bytes()
    return (Vocab.from_chars if kind == "char" else Vocab.from_words)(blocks or [TEXT])


def test_word_ids_are_by_frequency_with_ties_as_first_seen():
    vocab = Vocab.from_words(["b a\nc a <eos> d\n", "d e b\n"], ["f e\n"])
    assert vocab.symbols == ["<eos>", "b", "a", "d", "e", "c", "f"]
    assert vocab.encode("a b\n\nf\n").tolist() == [2, 1, 0, 0, 6, 0]


def test_char_ids_are_in_order_of_code_points():
    assert Vocab.from_chars(["bé a", "😀\nB"]).symbols == ["\n", " ", "B", "a", "b", "é", "😀"]


def test_a_stored_vocabulary_of_every_kind_is_the_same():
    for vocab in (SENTENCES, Vocab("letter", ["_", "a"]), Vocab("byte", ["9", "3"])):
        assert Vocab.from_json(json.loads(json.dumps(vocab.to_json()))) == vocab


@pytest.mark.parametrize("name", ["wt103"])
def test_word_vocabulary_and_encodings_are_the_authors(name):
    recorded = shared_files.json_of(f"fixtures/data/{name}.json")
    folder = shared_files.path(f"fixtures/data/{name}")
    vocab = Vocab.from_words([(folder / "train.txt").read_bytes()])
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
    vocab = Vocab.from_words(["a"])
    ids = [i for block in vocab.encode_blocks([text], end_last_line=True) for i in block]
    assert ids.count(0) == ended


def test_word_line_ends_are_universal():
    vocab = Vocab.from_words(["a b"])
    assert vocab.encode("a\r\nb\ra\n").tolist() == [1, 0, 2, 0, 1, 0]


def test_bytes_are_their_own_ids_and_wrong_utf8_is_shown():
    vocab = Vocab.all_bytes()
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
    assert [vocab_of(kind).unit for kind in ("byte", "char", "word")] == ["bpb", "bpc", "ppl"]


def test_an_unknown_word_is_unk_where_the_vocabulary_has_it():
    assert Vocab.from_words(["a <unk>\n"]).encode("zebra a").tolist() == [2, 1]


def refused(call) -> str:
    with pytest.raises(DataError) as error:
        call()
    return str(error.value)


def test_words_are_put_in_lower_case_where_no_symbol_has_a_capital():
    lower = Vocab.from_words(["The N a\n", "the\n"], lower_case=True)
    assert lower.symbols == ["<eos>", "the", "n", "a"]
    assert lower.encode("THE A\n").tolist() == [1, 3, 0]
    kept = Vocab.from_words(["The N a the\n"])
    assert kept.symbols == ["<eos>", "The", "N", "a", "the"]
    assert kept.encode("The the").tolist() == [1, 4]


def slow_order(symbols, *first):
    counts = dict.fromkeys(symbols, 0)
    for symbol in symbols:
        counts[symbol] += 1
    return [*first, *sorted(counts, key=lambda symbol: -counts[symbol])]


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_bytes_and_letters_are_by_frequency_with_ties_as_first_seen(size):
    texts = [b"zebra\nzoo ", b"arc  a\n\n", bytes([200, 3, 200, 3])]
    blocks = [[text[i : i + size] for i in range(0, len(text), size)] for text in texts]
    whole = b"".join(texts)
    counted = Vocab.from_counted_bytes(*blocks)
    assert counted.symbols == slow_order([str(value) for value in whole])
    assert (counted.kind, counted.unit) == ("byte", "bpb")
    dropped = Vocab.from_counted_bytes(*blocks, newline=False)
    assert dropped.symbols == slow_order([str(value) for value in whole if value != 10])
    assert dropped.unit == "bpc"  # newline bytes are not encoded
    letters = Vocab.from_letters(*blocks[:2])
    assert letters.symbols == slow_order("zebra_zoo_arc__a__")


def test_a_byte_vocabulary_without_the_newline_drops_newlines_and_refuses_other_bytes():
    vocab = Vocab.from_counted_bytes([b"ab\xc3\xa9\n"], newline=False)
    ids = vocab.encode("a\né\n")
    assert [vocab.symbols[i] for i in ids] == ["97", "195", "169"]
    assert vocab.decode(ids) == "aé"
    blocks = [b"ab\n", b"\nba\nxy"]
    assert refused(lambda: list(vocab.encode_blocks(blocks, "wiki"))) == (
        "wiki, byte 7: the value 120 is not among the 4 bytes of the vocabulary; remove this"
        " byte, or train on a text that has it"
    )
    kept = Vocab.from_counted_bytes([b"ab\n"])
    assert kept.decode(kept.encode("a\nb")) == "a\nb"


SENTENCES = Vocab("sentence", ["a", "<S>", "<UNK>", "b", "</S>"])


def test_every_line_of_sentences_is_between_boundaries():
    assert SENTENCES.encode("a b\nzebra\n").tolist() == [1, 0, 3, 1, 2, 1]
    assert SENTENCES.encode("b").tolist() == [1, 3]
    assert SENTENCES.encode("").tolist() == [1]
    for text in ("a b\nb\n", "a b", "a\nb", ""):
        assert SENTENCES.decode(SENTENCES.encode(text)) == text
    assert SENTENCES.unit == "ppl"


@pytest.mark.parametrize("size", [1, 3, 7, 100])
def test_the_word_for_a_boundary_does_not_end_a_sentence(size):
    text = "a <S> b\n\nb <UNK>\n <S>\na"
    blocks = [text[i : i + size] for i in range(0, len(text), size)]
    parts = list(SENTENCES.encode_sentences(blocks))
    sizes = np.cumsum([0, *(len(ids) for ids, _ in parts)])
    ends = np.concatenate([places + sizes[i] for i, (_, places) in enumerate(parts)])
    ids = np.concatenate([ids for ids, _ in parts])
    sentences = [ids[a : b + 1].tolist() for a, b in itertools.pairwise(ends)]
    assert sentences == [[1, 0, 1, 3, 1], [1, 1], [1, 3, 2, 1], [1, 1, 1], [1, 0, 1]]
    assert ends[-1] == len(ids) - 1


def test_a_vocabulary_file_gives_the_first_field_of_each_line_once(tmp_path):
    (tmp_path / "v.txt").write_bytes("<S> 5\r\n<UNK>\t1\n é 3\n<S> 2\nb\n".encode())
    vocab = Vocab.from_lines(tmp_path / "v.txt")
    assert (vocab.kind, vocab.symbols) == ("sentence", ["<S>", "<UNK>", "é", "b"])
    (tmp_path / "v.txt").write_bytes(b"<S>\n\xe9\n")
    assert refused(lambda: Vocab.from_lines(tmp_path / "v.txt")) == (
        f"{tmp_path / 'v.txt'}: is not UTF-8 text (byte 4 is 0xe9); save it as UTF-8"
    )
    (tmp_path / "v.txt").write_bytes(b"\xef\xbb\xbf<S>\n<UNK>\nb\n")
    assert Vocab.from_lines(tmp_path / "v.txt").symbols == ["<S>", "<UNK>", "b"]


@pytest.mark.parametrize(
    ("symbols", "kind"),
    [
        (["32", "101", "7"], "byte"),
        ([str(value) for value in range(256)], "byte"),
        (["e", "_", "t"], "letter"),
        (["e", "_", "\n"], "char"),
        (["e", "t"], "char"),
        (["<eos>", "the", "7"], "word"),
        (["<eos>", "<S>", "<UNK>"], "word"),
        (["<S>", "</S>", "<UNK>", "the"], "sentence"),
    ],
)
def test_symbols_tell_what_kind_they_are(symbols, kind):
    assert Vocab.from_symbols(symbols) == Vocab(kind, symbols)


def test_errors_name_the_symbol_and_the_place():
    words = Vocab.from_words(["a b\n"])
    blocks = ["a b\nb a\n", "a ", "zebra b\n"]
    assert refused(lambda: list(words.encode_blocks(blocks, "book, test split"))) == (
        "book, test split, line 3: the word 'zebra' is not among the 3 words of the vocabulary,"
        " which does not have <unk>; write <unk> for rare words in the training text, or"
        " train with data.vocab='byte', which takes any text"
    )
    chars = Vocab.from_chars(["ab\n"])
    assert refused(lambda: list(chars.encode_blocks(["ab\n", "b\naéa"], "book"))) == (
        "book, line 3, character 6: 'é' (U+00E9) is not among the 3 characters of the vocabulary;"
        " remove this character, or train with"
        " data.vocab='byte', which takes any text"
    )
    latin = ["ab é".encode(), "b é".encode("latin-1"), b"a"]
    assert refused(lambda: Vocab.from_words(latin)) == (
        "text, byte 7: not UTF-8 (invalid continuation byte); convert the text to UTF-8, for"
        " example by  iconv -f CP1252 -t UTF-8 FILE > NEW, or use data.vocab='byte' for any"
        " bytes"
    )
    assert refused(lambda: chars.encode(b"ab\xc3")).startswith("text, byte 2: not UTF-8")
    assert refused(lambda: chars.decode([0, 3])) == (
        "ids[1] = 3: a token id must be from 0 to 2, because the vocabulary has 3 symbols"
    )


@pytest.mark.parametrize(
    ("kind", "symbols", "message"),
    [
        (
            "phrase",
            ["a"],
            "vocabulary kind 'phrase': must be one of 'byte', 'char', 'letter', 'word',"
            " 'sentence', 'subword', 'tokenizer', 'id'",
        ),
        ("char", [], "a char vocabulary must have at least one symbol"),
        (
            "byte",
            ["1", "256"],
            "a byte vocabulary's symbols must be the numbers 0 to 255, not '256'",
        ),
        ("byte", ["07"], "a byte vocabulary's symbols must be the numbers 0 to 255, not '07'"),
        ("letter", ["ab"], "a letter vocabulary's symbols must be single characters"),
        ("sentence", ["<S>", "a"], "a sentence vocabulary must have the symbol <UNK>"),
        ("word", ["<eos>", "a", "a"], "word vocabulary: the symbol 'a' occurs 2 times"),
        ("word", ["a"], "a word vocabulary must have the symbol <eos>"),
        ("char", ["ab"], "a char vocabulary's symbols must be single characters"),
    ],
)
def test_an_impossible_vocabulary_is_refused(kind, symbols, message):
    assert refused(lambda: Vocab(kind, symbols)) == message


@pytest.mark.parametrize("value", [None, 3, ["a"], np.array([1]), pathlib.Path("a")])
def test_what_is_no_text_is_not_encoded(value):
    with pytest.raises(DataError, match=r": must be a text, not (None|a value of type \w+)$"):
        Vocab.all_bytes().encode(value)


@pytest.mark.parametrize("value", [None, 3, "ab", [1.5], [True], [[1], [2, 3]], [2**70]])
def test_what_are_no_ids_are_not_decoded(value):
    with pytest.raises(DataError, match=r"^ids must be 1-D integers, not "):
        Vocab.all_bytes().decode(value)
