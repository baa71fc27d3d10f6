"""The prompt: text is continued and scored, settings change, errors are told and survived."""

import pytest
import tiny_models

from txl_jax.config import ExperimentConfig, override
from txl_jax.data.vocab import Vocab
from txl_jax.generation import interactive
from txl_jax.generation.text import continuations
from txl_jax.model.transformer_xl import TransformerXL
from txl_jax.workdir import Trained


@pytest.fixture
def trained():
    vocab = Vocab.of_chars(["abcdefghijkl\n"])
    cfg = tiny_models.config(vocab_size=len(vocab))
    exp = override(ExperimentConfig(model=cfg), {"generate.length": 6, "generate.mem_len": 8})
    return Trained(TransformerXL(cfg), tiny_models.variables(cfg)["params"], vocab, exp, 3)


@pytest.fixture
def ask(trained):
    """A function: what is printed for a line, and whether the session goes on."""
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
        (":nope", "error: there is no :nope; :help says what there is"),
        ("xyz", "error: generate.prompt: text, line 1, character 0: 'x'"),
        (":more", "error: there is nothing to go on from; type a text first"),
        (":score", "error: :score needs a text"),
        (":set", "error: :set needs a setting and a value"),
        (":set temprature 1", "error: unknown config key 'generate.temprature'; the nearest key"),
        (":set temperature -1", "error: config key generate.temperature = -1.0: must be from 0"),
    ],
)
def test_what_goes_wrong_is_told_and_survived(ask, line, text):
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
