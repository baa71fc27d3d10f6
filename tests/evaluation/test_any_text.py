"""Scoring a text gives each token the model's loss, for any cut of the text into segments."""

import dataclasses
import functools
import gzip
import io
import itertools
import json
import math

import numpy as np
import pytest
import tiny_models
from tiers import rest_slow

from txl_jax.checkpoint.trained_model import TrainedModel
from txl_jax.config import ConfigError, ExperimentConfig, ScoreConfig, override
from txl_jax.data.errors import DataError
from txl_jax.data.vocab import Vocab
from txl_jax.evaluation import any_text
from txl_jax.model.transformer_xl import TransformerXL

WHY = "the tokens do not determine the bytes of the text"
WHY_NOT = f"no bits per byte: {WHY}"
NO_BITS = f"note: {WHY_NOT}"

FORMS: dict[str, dict] = {
    "relative": {},
    "shaw": {"attention": "shaw", "n_positions": 6},
    "adaptive": {"cutoffs": (4, 9), "div_val": 2},
}
"""Models in which, with a window, the cut into segments does not change a token's loss."""
ABSOLUTE = {"attention": "absolute"}
"""A model that counts positions from the segment's end. It is tested with a single segment."""


def trained_on(vocab, **changes):
    cfg = tiny_models.config(vocab_size=len(vocab), **changes)
    params = tiny_models.variables(cfg)["params"]
    parts = ("train", "validate", "evaluate") if cfg.memory_free else ()
    settings = {"model": dataclasses.asdict(cfg), **{part: {"mem_len": 0} for part in parts}}
    exp = ExperimentConfig.from_dict(settings)
    return TrainedModel(TransformerXL(cfg), params, vocab, exp, 7)


def directly(trained, ids):
    """The loss in nats of every token except the first, with the whole text as one segment."""
    model = trained.model
    ids = np.asarray(ids, np.int32)[None]
    logits, _ = model.apply({"params": trained.params}, ids[:, :-1], model.init_mems(1, 0))
    scores = np.asarray(logits, np.float64)[0]
    return np.log(np.exp(scores).sum(-1)) - scores[np.arange(len(scores)), ids[0, 1:]]


def lines_of(*lengths):
    rng = np.random.default_rng(0)
    return [rng.integers(0, 13, n) for n in lengths]


BEFORE = np.array([3])


@pytest.mark.integration
@pytest.mark.parametrize(
    ("form", "seg_len"), [*itertools.product(FORMS.values(), (4, 64)), (ABSOLUTE, 64)]
)
@pytest.mark.few(2)
def test_carried_memory_scores_a_text_as_one_segment_does(form, seg_len):
    trained = trained_on(Vocab("char", [*"abcdefghijklm"]), **form)
    lines = lines_of(5, 0, 12, 1)
    c = ScoreConfig(mem_len=40, seg_len=seg_len)
    found = any_text.score_lines(trained.config.model, trained.params, lines, BEFORE, c)
    assert [len(nll) for nll in found] == [5, 0, 12, 1]
    expected = directly(trained, np.concatenate([BEFORE, *lines]))
    np.testing.assert_allclose(np.concatenate(found), expected, atol=1e-5)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("form", "seg_len"), rest_slow(1, [(ABSOLUTE, 20), *((form, 5) for form in FORMS.values())])
)
@pytest.mark.parametrize("batch_size", [pytest.param(1, marks=pytest.mark.slow), 3, 16])
def test_a_line_alone_is_scored_as_if_there_were_no_others(form, seg_len, batch_size):
    trained = trained_on(Vocab("char", [*"abcdefghijklm"]), **form)
    lines = lines_of(9, 1, 0, 14, 3)
    c = ScoreConfig(mem_len=40, seg_len=seg_len, batch_size=batch_size, memory="line")
    found = any_text.score_lines(trained.config.model, trained.params, lines, BEFORE, c)
    for line, nll in zip(lines, found, strict=True):
        expected = directly(trained, np.concatenate([BEFORE, line])) if len(line) else []
        np.testing.assert_allclose(nll, expected, atol=1e-5)


def test_texts_without_a_target_have_no_losses():
    cfg = trained_on(Vocab("char", [*"abcdefghijklm"])).model.cfg
    found = any_text.score_texts(cfg, {}, [BEFORE, BEFORE], ScoreConfig(mem_len=8, seg_len=4))
    assert [len(nll) for nll in found] == [0, 0]


@pytest.mark.integration
def test_with_a_window_the_score_does_not_depend_on_the_segments():
    trained = trained_on(Vocab("char", [*"abcdefghijklm"]))
    text = [np.concatenate([BEFORE, *lines_of(60)])]
    by = lambda t: any_text.score_texts(
        trained.config.model, trained.params, text, ScoreConfig(mem_len=7, seg_len=t)
    )[0]
    np.testing.assert_allclose(by(3), by(20), atol=1e-5)
    assert np.abs(by(3) - directly(trained, text[0])).max() > 1e-3  # the window has an effect


def scored(trained, monkeypatch, capsys, text, **settings):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    exp = override(trained.config, {f"score.{k}": v for k, v in settings.items()})
    trained = TrainedModel(trained.model, trained.params, trained.vocab, exp, 7)
    assert any_text.run(trained, "unused") == ""
    out, told = capsys.readouterr()
    return [json.loads(line) for line in out.splitlines()], told


def test_standard_input_gives_a_json_object_for_each_line(monkeypatch, capsys):
    vocab = Vocab.from_words(["a b <unk>\n"])
    trained = trained_on(vocab)
    rows, told = scored(trained, monkeypatch, capsys, "b a zebra\n\na b")
    assert [row["text"] for row in rows] == ["b a zebra", "", "a b"]
    assert rows[0]["symbols"] == ["b", "a", "<unk>", "<eos>"]
    assert [row["tokens"] for row in rows] == [4, 1, 2]
    ids = vocab.encode("\nb a zebra\n\na b")
    expected = directly(trained, ids)
    assert [x for row in rows for x in row["token_nll"]] == pytest.approx(list(expected), abs=1e-5)
    assert rows[0]["ppl"] == pytest.approx(math.exp(expected[:4].mean()), rel=1e-5)
    assert [row["unknown"] for row in rows] == [1, 0, 0]
    assert told.splitlines() == [
        "note: 1 word is not in the vocabulary and scored as <unk>",
        NO_BITS,
        f"3 lines, 7 tokens (14.3% <unk>): {math.exp(expected.mean()):.2f} perplexity",
    ]


def test_bits_per_byte_are_those_of_a_text_that_the_tokens_determine(monkeypatch, capsys):
    text = "b a <unk>\n\na b"
    vocab = Vocab.from_words([text])
    _, told = scored(trained_on(vocab), monkeypatch, capsys, text)
    expected = directly(trained_on(vocab), vocab.encode("\n" + text))
    bits = expected.sum() / math.log(2) / len(text)
    assert told.splitlines() == [
        f"3 lines, 7 tokens (14.3% <unk>): {math.exp(expected.mean()):.2f} perplexity,"
        f" {bits:.4f} bits per byte of the text"
    ]


def notes(vocab, text):
    """The notes before the summary, except ``NO_BITS``, and whether that note is absent.

    Exactly then, the summary has bits per byte.
    """
    lines = io.StringIO(text, newline="\n").readlines()
    ids = any_text.encode_lines(vocab, lines, "text")
    summary = str(any_text.text_score(vocab, lines, ids, [np.ones(len(i)) for i in ids]))
    *found, last = summary.splitlines()
    assert ("bits per byte" in last) == (NO_BITS not in found)
    return [note for note in found if note != NO_BITS], NO_BITS not in found


LOWER = "note: the vocabulary has no capital letters: the text is scored in lower case"


@pytest.mark.parametrize(
    ("vocab", "text", "expected", "has_bits"),
    [
        (Vocab.from_words(["a b <unk>\n"]), "A b\n", [LOWER], False),
        (Vocab.from_words(["a B <unk>\n"]), "a B\n", [], True),
        (Vocab.from_words(["a b <unk>\n"]), "a  b\n", [], False),
        (
            Vocab.from_words(["a b <unk>\n"]),
            "x a <unk> y\n",
            ["note: 2 words are not in the vocabulary and scored as <unk>"],
            False,
        ),
        (
            Vocab("sentence", ["a", "b", "<S>", "<UNK>"]),
            "a x\nb\n",
            ["note: 1 word is not in the vocabulary and scored as <UNK>"],
            False,
        ),
        (Vocab("sentence", ["a", "b", "<S>", "<UNK>"]), "\na b\nb\n", [], True),
        (Vocab("letter", ["a", "b", "_"]), "Ab a", [LOWER], False),
        (Vocab("letter", ["a", "b", "_"]), "ab a", [], True),
        (Vocab.from_chars(["aé\n"]), "é\na", [], True),
        (Vocab.all_bytes(), "\udcff\né", [], True),
        (
            Vocab("byte", [str(n) for n in range(256) if n != 10]),
            "a\nb",
            ["note: the vocabulary has no newline: line ends are left out"],
            False,
        ),
    ],
)
def test_what_encoding_changes_in_a_text_is_noted(vocab, text, expected, has_bits):
    assert notes(vocab, text) == (expected, has_bits)


def test_ids_have_the_bits_per_byte_and_the_notes_of_their_own_text():
    vocab, raw = Vocab.all_bytes(), "é\udcff".encode("utf-8", "surrogateescape")
    halves = [np.frombuffer(part, np.uint8) for part in (raw[:1], raw[1:])]
    score = any_text.text_score(vocab, halves, halves, [np.ones(len(ids)) for ids in halves])
    assert score.bits_per_byte == pytest.approx(1 / math.log(2))
    assert (score.notes, [line.text for line in score.lines]) == ((), ["\ufffd", "\ufffd\ufffd"])
    words = Vocab.from_words(["a b <unk>\n"])
    lines = [words.encode("a <unk>"), words.encode("<unk> b")]
    assert any_text.text_score(words, lines, lines, [np.ones(2)] * 2).notes == (WHY_NOT,)


def test_bytes_are_written_as_characters_or_escaped_and_any_output_can_show_them(monkeypatch):
    vocab = Vocab.all_bytes()
    ids, nll = vocab.encode("a \n\udcff\udcc3"), np.ones(5, np.float32)
    (line,) = any_text.text_score(vocab, ["a \udcff\u00e9"], [ids], [nll]).lines
    row = any_text.line_record(vocab, 1, line, ScoreConfig())
    assert row["symbols"] == ["a", " ", "\\x0a", "\\xff", "\\xc3"]
    assert row["text"] == "a \\xff\u00e9"
    for encoding in ("utf-8", "ascii"):
        raw = io.BytesIO()
        stream = io.TextIOWrapper(raw, encoding=encoding, errors="strict")
        monkeypatch.setattr("sys.stdout", stream)
        any_text._write([row], None)
        assert json.loads(raw.getvalue()) == row


def test_bytes_that_are_not_utf8_are_scored_to_a_strict_standard_output(monkeypatch):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="utf-8", errors="strict")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\xff\n")))
    monkeypatch.setattr("sys.stdout", stream)
    monkeypatch.setattr(any_text, "score_lines", lambda *_: [np.ones(3, np.float32)])
    any_text.run(trained_on(Vocab.all_bytes()), "unused")
    row = json.loads(raw.getvalue())
    assert (row["text"], row["nll"]) == ("a\\xff", 3.0)


def test_results_that_cannot_be_written_are_refused_before_the_text_is_read(tmp_path, monkeypatch):
    trained = trained_on(Vocab.from_chars(["abc\n"]))
    monkeypatch.setattr(any_text, "read_text", None)
    text, link, same = (tmp_path / name for name in ("in.txt", "link.txt", "same.txt"))
    text.write_text("abc\n")
    link.symlink_to(text)
    same.hardlink_to(text)
    also = "is also the file of score.path; name another file"
    for path, told in (
        (tmp_path / "none" / "out.jsonl", "cannot be written (No such file or directory); name"),
        *((path, also) for path in (text, link, same)),
    ):
        flags = {"score.path": str(text), "score.json": str(path)}
        asked = dataclasses.replace(trained, config=override(trained.config, flags))
        with pytest.raises(ConfigError) as caught:
            any_text.run(asked, "unused")
        assert f"config key score.json = {str(path)!r}: {told}" in str(caught.value)
    assert text.read_text() == "abc\n"


def test_the_sum_is_printed_where_the_file_cannot_be_written(tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(any_text, "_write", full)
    with pytest.raises(OSError, match="No space left"):
        scored(trained_on(Vocab.from_chars(["abc\n"])), monkeypatch, capsys, "abc\n")
    assert capsys.readouterr().err.startswith("1 lines, 4 tokens: ")


def test_a_sentence_is_scored_once_with_its_boundaries(monkeypatch, capsys):
    vocab = Vocab("sentence", ["a", "b", "<S>", "<UNK>"])
    trained = trained_on(vocab)
    rows, _ = scored(trained, monkeypatch, capsys, "a b\nb\n", tokens=False)
    assert [row["tokens"] for row in rows] == [3, 2]
    assert "token_nll" not in rows[0]
    expected = directly(trained, [2, 0, 1, 2, 1, 2])
    assert [row["nll"] for row in rows] == pytest.approx(
        [expected[:3].sum(), expected[3:].sum()], abs=1e-5
    )


def test_a_file_is_scored_into_a_file(tmp_path, capsys):
    (tmp_path / "in.txt").write_text("abc\n")
    trained = trained_on(Vocab.from_chars(["abc\n"]))
    exp = override(
        trained.config,
        {"score.path": str(tmp_path / "in.txt"), "score.json": str(tmp_path / "out.jsonl")},
    )
    any_text.run(TrainedModel(trained.model, trained.params, trained.vocab, exp, 7), "unused")
    assert capsys.readouterr().out == ""
    (row,) = (tmp_path / "out.jsonl").read_text().splitlines()
    assert json.loads(row)["symbols"] == ["a", "b", "c", "\n"]


def test_a_byte_order_mark_is_not_scored(monkeypatch, capsys, tmp_path):
    path = tmp_path / "in.txt"
    path.write_bytes(b"\xef\xbb\xbfabc\n")
    trained = trained_on(Vocab.all_bytes())
    assert scored(trained, monkeypatch, capsys, "", path=str(path))[0][0]["tokens"] == 4
    assert scored(trained, monkeypatch, capsys, "\ufeffabc\n")[0][0]["tokens"] == 4
    path.write_bytes("abc\n".encode("utf-16"))
    with pytest.raises(ConfigError, match=r"score.path = .*: is UTF-16 text, .* save it as UTF-8"):
        scored(trained, monkeypatch, capsys, "", path=str(path))


def test_what_is_no_text_is_scored_only_if_bytes_are_asked_for(monkeypatch, capsys, tmp_path):
    trained = trained_on(Vocab.all_bytes())
    texts = {
        "x.pdf": b"%PDF-1.7 \0",
        "x": gzip.compress(b"a"),
        "y.txt": "abc\n".encode("utf-16-le"),
    }
    for name, data in texts.items():
        (tmp_path / name).write_bytes(data)
        read = functools.partial(scored, monkeypatch=monkeypatch, capsys=capsys, text="")
        with pytest.raises(ConfigError, match=r"is .*, not text in UTF-8; name a text file"):
            read(trained, path=str(tmp_path / name))
        asked = dataclasses.replace(
            trained, config=override(trained.config, {"data.vocab": "byte"})
        )
        rows, _ = read(asked, path=str(tmp_path / name))
        assert sum(row["tokens"] for row in rows) == len(data)


@pytest.mark.parametrize("name", ["x.jsonl", "X.CSV", "x.parquet"])
def test_records_are_not_scored_as_lines(monkeypatch, capsys, tmp_path, name):
    (tmp_path / name).write_text('{"text": "abc"}\n')
    with pytest.raises(ConfigError, match=r"has records \(\..*write their texts into a text file"):
        scored(trained_on(Vocab.all_bytes()), monkeypatch, capsys, "", path=str(tmp_path / name))


def test_what_cannot_be_scored_is_named(monkeypatch, capsys, tmp_path):
    trained = trained_on(Vocab.from_chars(["abc\n"]))
    with pytest.raises(DataError, match="standard input: has no token to score"):
        scored(trained, monkeypatch, capsys, "")
    with pytest.raises(DataError, match=r"standard input, line 2: .*'z'"):
        scored(trained, monkeypatch, capsys, "abc\naz\n")
    with pytest.raises(ConfigError, match=r"score.path = .*No such file or .*; name a text file"):
        scored(trained, monkeypatch, capsys, "", path=str(tmp_path / "none.txt"))
    cfg = tiny_models.config(attention="absolute_per_layer", n_positions=9, d_head=4)
    with pytest.raises(ConfigError, match=r"score.seg_len = 64: this model has only 9 positions"):
        any_text.score_texts(cfg, {}, [BEFORE], ScoreConfig())


def test_an_id_outside_the_vocabulary_is_refused():
    trained = trained_on(Vocab.from_chars(["abc\n"]))
    told = r"given, line 1: ids\[1\] = 4: .* 0 to 3, because the vocabulary has 4 symbols"
    with pytest.raises(DataError, match=told):
        any_text.score_any_text(trained, [np.array([0, 4])], "given")
