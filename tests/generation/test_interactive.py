"""The interactive prompt continues and scores text, changes settings and survives errors."""

import io

import pytest
import tiny_models

from txl_jax.checkpoint.trained_model import TrainedModel
from txl_jax.config import ExperimentConfig, override
from txl_jax.data.vocab import Vocab
from txl_jax.generation import interactive
from txl_jax.generation.text import continuations
from txl_jax.model.transformer_xl import TransformerXL


@pytest.fixture
def trained():
    vocab = Vocab.from_chars(["abcdefghijkl\n"])
    cfg = tiny_models.config(vocab_size=len(vocab))
    exp = override(ExperimentConfig(model=cfg), {"generate.length": 6, "generate.mem_len": 8})
    return TrainedModel(TransformerXL(cfg), tiny_models.variables(cfg)["params"], vocab, exp, 3)


@pytest.fixture
def ask(trained):
    """A function that returns what is printed for a line, and whether the session goes on."""
    said: list[str] = []
    session = interactive.Session(trained, said.append)

    def answer(line):
        said.clear()
        goes_on = session.answer(line)
        return "".join(said), goes_on

    return answer


def text_of(trained, prompt, **settings):
    c = override(trained.config, {f"generate.{k}": v for k, v in settings.items()}).generate
    *_, (((row, _)),) = continuations(trained, [prompt], c)
    return row.text


def test_a_text_is_continued_and_more_goes_on_from_there(trained, ask):
    first = text_of(trained, "abc")
    assert ask("abc") == (first + "\n", True)
    assert ask(":more") == (text_of(trained, "abc" + first) + "\n", True)


def test_settings_are_those_of_generation(trained, ask):
    assert ask(":set temperature 0") == ("", True)
    assert ask("abc")[0] == text_of(trained, "abc", temperature=0) + "\n"
    assert "  temperature = 0.0\n" in ask(":settings")[0]


def test_a_score_has_a_line_for_each_token(ask):
    lines = ask(":score abc")[0].splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["'a'", "'b'", "'c'"]
    nats = [float(line.split()[1]) for line in lines[:3]]
    assert lines[3] == f"  {sum(nats) / 3 / 0.6931472:.3f} bits per character"


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (":nope", "error: there is no command :nope; :help lists the commands"),
        ("xyz", "error: generate.prompt: text, line 1, character 0: 'x'"),
        (":more", "error: there is nothing to continue; type a text first"),
        (":score", "error: :score needs a text"),
        (":set", "error: :set needs a setting and a value"),
        (":set temprature 1", "error: unknown config key 'generate.temprature'; the nearest key"),
        (
            ":set temperature -1",
            "error: config key generate.temperature = -1.0: must be 0 (greedy)",
        ),
    ],
)
def test_an_error_is_printed_and_the_session_continues(ask, line, text):
    said, goes_on = ask(line)
    assert said.startswith(text)
    assert said.count("\n") == 1
    assert goes_on


def test_it_ends_when_told_and_an_empty_line_is_nothing(ask):
    assert ask("") == ("", True)
    assert ":score" in ask(":help")[0]
    assert ask(":quit") == ("", False)


def test_lines_are_read_until_the_end_and_kept(trained, tmp_path, monkeypatch, capsys):
    lines = iter(["abc", ":quit", "never"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    assert interactive.run(trained, str(tmp_path)) == ""
    assert text_of(trained, "abc") in capsys.readouterr().out
    assert next(lines) == "never"


@pytest.mark.parametrize(
    "line",
    [
        ":set",
        ":set seed",
        ":set seed ",
        ":set seed x",
        ":set seed -1",
        ":set seed 1.5",
        ":set seed 99999999999999999999999",
        ":set seed 1e300",
        ":set seed ²",
        ":set seed None",
        ":set  seed 1",
        ":set temperature nan",
        ":set temperature 1e400",
        ":set temperature \udcff",
        ":set top_p 0",
        ":set length 1e999",
        ":set mem_len 0",
        ":set stop [[[[[[",
        ":set .seed 1",
        ":set seed.x 1",
        ":set \udcff 1",
    ],
)
def test_any_setting_gives_a_line_at_most_and_the_next_text_works(trained, ask, line):
    """A wrong setting is refused when it is set, or at the latest when a text is continued."""
    said = ask(line)[0]
    if not said:
        said = ask("abc")[0]
    assert said.count("\n") == 1
    if ":set stop" not in line:
        assert said.startswith("error: ")
    assert ask(":set seed 0")[0] == ""
    assert ask(":set stop xyz")[0] == ""
    assert ask("abc")[0] == text_of(trained, "abc") + "\n"


def test_an_error_of_the_machine_is_one_line_and_the_session_continues(ask, monkeypatch):
    def no_memory(*_):
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\nallocation of\n8 TiB")
        yield

    monkeypatch.setattr(interactive, "continuations", no_memory)
    said = "error: RESOURCE_EXHAUSTED: out of memory allocation of 8 TiB\n"
    assert ask("abc") == (said, True)


def test_an_error_without_a_text_has_its_name(ask, monkeypatch):
    def no_memory(*_):
        raise MemoryError
        yield

    monkeypatch.setattr(interactive, "continuations", no_memory)
    assert ask("abc") == ("error: MemoryError\n", True)


def test_a_prompt_cut_inside_a_character_is_continued_as_a_whole_one(trained, monkeypatch):
    """The prompt ends inside a UTF-8 character; the continuation completes it."""
    cfg = tiny_models.config(vocab_size=256)
    exp = override(ExperimentConfig(model=cfg), {"generate.length": 6, "generate.mem_len": 8})
    params = tiny_models.variables(cfg)["params"]
    of_bytes = TrainedModel(TransformerXL(cfg), params, Vocab.all_bytes(), exp, 3)
    said: list[str] = []
    session = interactive.Session(of_bytes, said.append)
    assert session.answer("a\udce2\udc82")
    first = "".join(said).removesuffix("\n")
    assert "\u2080" <= first[0] <= "\u20bf"
    said.clear()
    assert session.answer(":more")
    assert "".join(said) == text_of(of_bytes, "a" + first) + "\n"


def test_bytes_and_a_mark_on_standard_input_do_not_end_the_session(trained, tmp_path, monkeypatch):
    """Standard input starts with a byte-order mark, and its second line is not UTF-8."""
    lines = io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbfabc\na\xff\n:quit\n"), encoding="utf-8")
    shown = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", lines)
    monkeypatch.setattr("sys.stdout", shown)
    assert interactive.run(trained, str(tmp_path)) == ""
    out = shown.buffer.getvalue().decode()
    assert f"> {text_of(trained, 'abc')}\n" in out
    assert r"error: generate.prompt: text, character 1: '\udcff' is not a character" in out


def answers(trained, monkeypatch, capsys, tmp_path, data):
    """What is printed for lines from standard input, without the prompts."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), newline="\n"))
    assert interactive.run(trained, str(tmp_path)) == ""
    return capsys.readouterr().out.partition("\n")[2].replace("> ", "")


def test_a_line_has_no_line_end_whichever_it_is(trained, monkeypatch, capsys, tmp_path):
    expected = text_of(trained, "abc") + "\n"
    for data in (b"abc\n", b"abc\r\n", b"\xef\xbb\xbfabc\r\n", b"abc\r\n:quit\r\n:nope\r\n"):
        assert answers(trained, monkeypatch, capsys, tmp_path, data) == expected


def test_a_line_end_is_written_with_a_backslash(ask):
    assert [row.split()[0] for row in ask(r":score a\nb")[0].splitlines()[:2]] == ["'a'", r"'\n'"]
    assert "are CRLF (Windows)" in ask(r":score a\r\nb")[0]


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-16"])
def test_lines_in_another_encoding_are_refused(trained, monkeypatch, capsys, tmp_path, encoding):
    shown = answers(trained, monkeypatch, capsys, tmp_path, "abc abc\nb\n".encode(encoding))
    assert "the text looks like UTF-16 (" in shown.split("\n")[0]
    assert all(line.startswith("error: ") for line in shown.splitlines())
