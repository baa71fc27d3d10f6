"""Tokens become text piece by piece. Where a piece ends changes neither the text nor its stop."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import tiny_models

from txl_jax.checkpoint.trained_model import TrainedModel
from txl_jax.config import DataConfig, ExperimentConfig, GenerateConfig
from txl_jax.data.vocab import Vocab
from txl_jax.generation.generate import TokenChunk
from txl_jax.generation.text import Continuation, continuations
from txl_jax.model.transformer_xl import TransformerXL

VOCABS = {
    "byte": Vocab.all_bytes(),
    "char": Vocab.from_chars(["ab é\ufffd\n"]),
    "letter": Vocab("letter", ["a", "b", "_"]),
    "word": Vocab.from_words(["a ab b aba\n"]),
    "sentence": Vocab("sentence", ["a", "ab", "ba", "<UNK>", "<S>"]),
    "subword": Vocab.from_subwords([b"abab abba \xc3\xa9 ab " * 9], vocab_size=262),
}
BYTES = [*b"ab \n", *"é€\ufffd".encode(), 0xFF]
"""ASCII bytes, the bytes of characters of two and three bytes, and an invalid byte."""


def in_pieces(vocab, prompt, made, sizes, **settings):
    """Adds the tokens ``made`` to a ``Continuation`` in pieces; returns it and the shown texts.

    ``sizes`` has the number of tokens of each piece; one more piece has all tokens that are left.
    """
    c = GenerateConfig(length=len(made), **settings)
    row, shown = Continuation("", vocab, c, list(prompt)), []
    ends = np.cumsum(sizes).tolist()
    for start, end in zip([0, *ends], [*ends, len(made)], strict=True):
        shown.append(row.add(made[start:end], [float(n) for n in range(len(made))][start:end]))
    return row, shown


def text_of(vocab, prompt, made, valid_text):
    """The text of the tokens ``made`` after ``prompt``, decoded all at once.

    If the prompt ends inside a character, the text begins with this character. If ``valid_text``,
    an incomplete character at the end of the text is left out.
    """
    before, whole = vocab.decode(prompt), vocab.decode([*prompt, *made])
    if vocab.kind not in ("byte", "subword"):
        return whole[len(before) :]
    raw = [vocab.decode_bytes(ids) for ids in (prompt, [*prompt, *made])]
    known, text = (cut.decode("utf-8", "replace") for cut in map(without_half, raw))
    text = text if valid_text or len(made) == 0 else whole
    return text[len(known) :]


def without_half(raw):
    """The bytes without an incomplete last character, whose start Python's decoder reports."""
    for n in range(1, min(3, len(raw)) + 1):
        try:
            raw[-n:].decode()
        except UnicodeDecodeError as error:
            if error.start == 0 and error.reason == "unexpected end of data":
                return raw[:-n]
    return raw


@st.composite
def cases(draw):
    kind = draw(st.sampled_from(sorted(VOCABS)))
    vocab = VOCABS[kind]
    ids = BYTES if kind == "byte" else range(len(vocab))
    if kind == "subword":  # letters, the two bytes of é, and merged symbols
        ids = [*vocab.encode("ab é\n").tolist(), *range(256, len(vocab))]
    prompt = draw(st.lists(st.sampled_from(ids), min_size=1, max_size=3))
    made = draw(st.lists(st.sampled_from(ids), min_size=1, max_size=12))
    sizes = draw(st.lists(st.integers(0, 5), max_size=len(made)))
    while sum(sizes) > len(made):
        sizes.pop()
    text = vocab.decode(made)
    parts = st.tuples(*[st.integers(0, len(text))] * 2).map(lambda at: text[min(at) : max(at)])
    stops = draw(st.lists(parts.filter(bool) | st.sampled_from(["ab", "b", "\ufffd"]), max_size=3))
    return vocab, prompt, made, sizes, stops, draw(st.booleans())


@hypothesis.settings(max_examples=250, deadline=None, derandomize=True, database=None)
@hypothesis.given(cases())
def test_a_stop_text_is_found_the_same_whatever_the_pieces(case):
    """The match that ends first counts. If several matches end there, the longest one counts."""
    vocab, prompt, made, sizes, stops, valid_text = case
    row, shown = in_pieces(vocab, prompt, made, sizes, stop=tuple(stops), valid_text=valid_text)
    text = text_of(vocab, prompt, made, valid_text)
    matches = [
        (end, start)
        for end in range(len(text) + 1)
        for start in range(end)
        if text[start:end] in stops
    ]
    count, want = len(made), (text, "length")
    if matches:
        end, start = matches[0]
        want = text[:start], text[start:end]
        whole = lambda n: text_of(vocab, prompt, made[:n], valid_text or n < len(made))
        count = next(n for n in range(1, len(made) + 1) if len(whole(n)) >= end)
    assert (row.text, row.ended) == want
    assert "".join(shown) == row.text
    assert not any(stop in row.text for stop in stops)
    assert (row.ids, row.nll) == ([*prompt, *made[:count]], list(range(count)))


def test_the_stop_text_that_ends_first_counts_and_then_the_longer_one():
    vocab = Vocab.from_chars(["abcdef"])
    made = vocab.encode("abcdef").tolist()
    for stops, text, ended in (
        (("abcd", "b"), "a", "b"),
        (("cd", "bcd", "d"), "a", "bcd"),
        (("abcdef", "de"), "abc", "de"),
    ):
        for size in range(1, 7):
            row, _ = in_pieces(vocab, [0], made, [size] * (len(made) // size), stop=stops)
            assert (row.text, row.ended) == (text, ended)
            assert len(row.nll) == len(text + ended)


def test_a_stop_text_of_ids_is_a_whole_id():
    vocab, made = Vocab.from_ids(200), [12, 170, 7, 3]
    for stops, text, ended in (
        (("7",), " 12 170 ", "7"),
        (("70", "2 1"), " 12 170 7 3", "length"),
        (("170 7",), " 12 ", "170 7"),
    ):
        for size in (1, 2, 4):
            row, shown = in_pieces(vocab, [0], made, [size] * (4 // size), stop=stops)
            assert (row.text, row.ended) == (text, ended)
            assert "".join(shown) == text


def scripted(monkeypatch, vocab, prompts, made, size, separator=None, **settings):
    """The rows of :func:`continuations` if the model makes these tokens, ``size`` at a time."""
    cfg = tiny_models.config(vocab_size=len(vocab))
    exp = ExperimentConfig(model=cfg, data=DataConfig(document_separator=separator))
    trained = TrainedModel(TransformerXL(cfg), None, vocab, exp, 0)
    cuts = range(0, len(made[0]), size)
    pieces = [np.array([row[at : at + size] for row in made]) for at in cuts]
    monkeypatch.setattr(
        "txl_jax.generation.text.generate",
        lambda *_: (TokenChunk(p, np.ones(p.shape, np.float32)) for p in pieces),
    )
    *_, last = continuations(trained, prompts, GenerateConfig(length=len(made[0]), **settings))
    return [row for row, _ in last]


@pytest.mark.parametrize("size", [1, 2, 5, 64])
def test_rows_of_a_batch_stop_as_they_do_alone(monkeypatch, size):
    vocab = Vocab.from_chars(["abcdef "])
    texts = ["abcdefab", "fedcabbb", "aaaaaaaa", "xabcdabc".replace("x", " ")]
    made = [vocab.encode(text).tolist() for text in texts]
    stop = {"stop": ("abcd", "b", "cab")}
    together = scripted(monkeypatch, vocab, texts, made, size, **stop)
    assert [row.text for row in together] == ["a", "fed", "aaaaaaaa", " a"]
    for row, prompt, tokens in zip(together, texts, made, strict=True):
        (alone,) = scripted(monkeypatch, vocab, [prompt], [tokens], 3, **stop)
        assert alone.to_json() == row.to_json()


@pytest.mark.parametrize("size", [1, 2, 9])
@pytest.mark.parametrize(
    ("kind", "separator", "prompt", "made", "text", "ended"),
    [
        ("byte", "\n\n", "a\n", "\nb", "", "\n\n"),  # the prompt has the separator's start
        ("byte", "\n\n", "a\n\n", "\nb", "\nb", "length"),  # the prompt has a whole separator
        ("byte", "\n\n", "", "\nb", "\nb", "length"),
        ("byte", "\n\n", "a\n", "b\n\na", "b", "\n\n"),
        ("byte", "<end>", "a <e", "nd> a", "", "<end>"),
        ("byte", "<end>", "a <e", "ne> a", "ne> a", "length"),
        ("subword", "\n\n", "a\n", "\nb", "", "\n\n"),
        ("word", "\n\n", "a\r\n", "\nb", "", "\n\n"),
        ("word", "\r\n", "a", "b\na", " b", "\n"),
        ("word", "B", "a", "a b a", " a ", "b"),
        ("word", "b", "a", "ab aba b a", " ab aba ", "b"),  # a separator matches only whole words
        ("word", "a b", "aba", "b a", " b a", "length"),
        ("word", "a b", "b a", "b a", "", "a b"),
        ("word", "\t", "a", "b a", " b a", "length"),  # the separator has no token
    ],
)
def test_a_separator_ends_a_continuation_where_it_ends(
    monkeypatch, kind, separator, prompt, made, text, ended, size
):
    vocab = VOCABS[kind]
    ids = vocab.encode(made).tolist()
    (row,) = scripted(monkeypatch, vocab, [prompt], [ids], size, separator)
    assert (row.text, row.ended) == (text, ended)


def test_no_other_stop_text_begins_in_the_prompt(monkeypatch):
    vocab, made = VOCABS["byte"], "b\n\na"
    ids, stop = [vocab.encode(made).tolist()], ("\nb",)
    (row,) = scripted(monkeypatch, vocab, ["a\n"], ids, 1, "\n\n", stop=stop)
    assert (row.text, row.ended) == ("b", "\n\n")


@pytest.mark.parametrize("size", [1, 2, 7])
def test_a_prompt_that_ends_inside_a_character_is_continued_with_that_character(monkeypatch, size):
    """The prompt ends with two of the character's three bytes. The shown prompt leaves them out."""
    euro, rest = "€".encode(), list(b"uro\xc3")
    prompt = (b"a\xff" + euro[:2]).decode("utf-8", "surrogateescape")
    made = [euro[2], *rest]
    (row,) = scripted(monkeypatch, Vocab.all_bytes(), [prompt], [made], size)
    assert (row.text, row.ended) == ("€uro", "length")  # the last character is not complete
    assert row.prompt == "a\udcff"
    assert row.to_json()["prompt"] == "a\ufffd"
    anything = {"valid_text": False}
    (row,) = scripted(monkeypatch, Vocab.all_bytes(), [prompt], [made], size, **anything)
    assert row.text == "€uro\ufffd"
    ids = np.frombuffer(prompt.encode("utf-8", "surrogateescape"), np.uint8)
    (row,) = scripted(monkeypatch, Vocab.all_bytes(), [ids], [made], size)
    assert (row.prompt, row.text) == ("a\ufffd", "€uro")


@pytest.mark.parametrize("kind", ["byte", "char"])
def test_a_replacement_character_that_the_model_made_is_kept(kind, monkeypatch):
    """U+FFFD is a character like any other; only incomplete characters are left out."""
    vocab = VOCABS[kind]
    made = vocab.encode("a\ufffd").tolist()
    for size in (1, len(made)):
        (row,) = scripted(monkeypatch, vocab, ["a"], [made], size)
        assert (row.text, row.ended) == ("a\ufffd", "length")
