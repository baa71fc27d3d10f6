"""Generating and scoring refuse bad input with exit code 2 and one line that says what to do."""

import io
import json
import shutil

import jax
import numpy as np
import pytest
import tiny_models
from absl.testing import flagsaver

import txl_jax
from txl_jax import main
from txl_jax.config import ExperimentConfig
from txl_jax.convert import Request, to_workdir
from txl_jax.data.vocab import Vocab
from txl_jax.generation import prompts
from txl_jax.model.transformer_xl import TransformerXL

NEWER = 99
"""The number of a checkpoint format that this version cannot read."""


@pytest.fixture
def command(capsys, monkeypatch):
    """Runs the command in this process; returns exit code, standard output, standard error."""

    def run(*arguments, stdin=b""):
        monkeypatch.setattr(main, "_overrides", {})
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capsys.readouterr()
        with flagsaver.flagsaver():
            code = main.main(main.parse_flags(["main", *map(str, arguments)]))
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def refused(command):
    """Checks that a call is refused, and returns the one line that is printed."""

    def run(*arguments, **given):
        code, out, told = command(*arguments, **given)
        assert (code, out) == (2, ""), told
        assert told.startswith("error: ")
        assert told.count("\n") == 1
        return told.removeprefix("error: ").removesuffix("\n")

    return run


def exported(folder, vocab):
    """Saves a model with this vocabulary and random parameters as a folder of plain files."""
    cfg = tiny_models.config(vocab_size=len(vocab))
    params = jax.tree.map(np.asarray, tiny_models.variables(cfg)["params"])
    exp = txl_jax.config.override(
        ExperimentConfig(model=cfg, name="tiny"), {"generate.length": 4, "generate.mem_len": 8}
    )
    model = txl_jax.LanguageModel(TransformerXL(cfg), params, vocab, exp, 0)
    txl_jax.save(model, str(folder))
    return folder


@pytest.fixture(scope="module")
def chars(tmp_path_factory):
    return exported(tmp_path_factory.mktemp("chars") / "model", Vocab.from_chars(["abc \n"]))


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A model of words whose vocabulary has no <unk>."""
    return exported(tmp_path_factory.mktemp("words") / "model", Vocab.from_words(["the cat saw\n"]))


def generating(folder, **settings):
    flags = [f"--config.generate.{key}={value}" for key, value in settings.items()]
    return ("--mode=generate", f"--workdir={folder}", *flags)


def test_a_line_of_prompts_that_is_not_json_is_named_by_file_and_line(chars, tmp_path, refused):
    path = tmp_path / "prompts.jsonl"
    where = f"{path}, line 3: "
    for wrong, text in (
        ('{"prompt": "ab', "is not JSON (Unterminated string"),
        ('{"text": "ab"}', 'must be a JSON string, or an object with the string "prompt"'),
        ("[1]", 'must be a JSON string, or an object with the string "prompt"'),
        ("[" * 100_000, "is not JSON (maximum recursion depth"),
        ('"a\\ud800b"', r"'utf-8' codec can't encode character '\ud800' in position 1"),
    ):
        path.write_text(f'"ab"\n\n{wrong}\n"c"\n')
        assert refused(*generating(chars, prompts_file=path)).startswith(where + text)


def test_no_new_tokens_are_refused_and_the_last_sample_stays(chars, tmp_path, refused):
    """For example, the mode ``ablation`` trains models with the setting ``generate.length`` 0."""
    workdir = tmp_path / "model"
    shutil.copytree(chars, workdir)
    (workdir / "sample.txt").write_text("kept")
    assert refused(*generating(workdir, length=0)).startswith(
        "config key generate.length = 0: no token is"
    )
    assert (workdir / "sample.txt").read_text() == "kept"


def test_a_file_without_prompts_is_refused(chars, tmp_path, refused):
    for name, content in (("none.txt", ""), ("none.jsonl", "\n \n")):
        path = tmp_path / name
        path.write_text(content)
        assert refused(*generating(chars, prompts_file=path)) == (
            f"config key generate.prompts_file = '{path}': has no prompt; write one per line"
        )


def test_a_file_that_is_not_there_or_not_text_is_refused(chars, tmp_path, refused):
    for key in ("prompt_file", "prompts_file"):
        nowhere, latin = tmp_path / "nowhere.txt", tmp_path / "latin.txt"
        assert refused(*generating(chars, **{key: nowhere})) == (
            f"config key generate.{key} = '{nowhere}': No such file or directory; name a text"
            " file that can be read"
        )
        latin.write_bytes(b"abc caf\xe9\n")
        not_utf8 = "is not UTF-8 text (byte 7 is 0xe9); save it as UTF-8"
        assert refused(*generating(chars, **{key: latin})) == (
            f"config key generate.{key} = '{latin}': {not_utf8}"
        )
        assert refused(*generating(chars, **{key: "-"}), stdin=b"abc caf\xe9\n") == (
            f"config key generate.{key} = '-': {not_utf8}"
        )
    assert "Is a directory; name a text file" in refused(*generating(chars, prompt_file=tmp_path))


def test_what_the_vocabulary_has_not_is_named_with_its_prompt(chars, words, tmp_path, refused):
    assert refused(*generating(chars, prompt="abz")) == (
        "generate.prompt: text, line 1, character 2: 'z' (U+007A) is not among the 5 characters of"
        " the vocabulary; remove this character, or"
        " train with data.vocab='byte', which takes any text"
    )
    text = refused(*generating(words, prompt="the dog"))
    assert text.startswith("generate.prompt: ")
    assert "the word 'dog' is not among the 4" in text
    for key in ("prompt_file", "prompts_file"):
        (tmp_path / "one.txt").write_text("the dog\n")
        text = refused(*generating(words, **{key: tmp_path / "one.txt"}))
        assert text.startswith(f"generate.{key}: ")
    (tmp_path / "prompts.txt").write_text("the cat\nthe dog\n")
    many = generating(words, prompts_file=tmp_path / "prompts.txt", batch_size=1)
    assert refused(*many).startswith("prompt 2: ")  # and prompt 1 is not continued
    assert not (words / "samples.jsonl").exists()


def test_bytes_of_a_flag_that_are_not_utf8_are_refused(chars, words, refused):
    """Models of characters and words refuse such bytes; a model of bytes continues them."""
    for folder in (chars, words):
        for wrong in ("\udcc3", "\ud800"):
            assert refused(*generating(folder, prompt=f"a {wrong}")) == (
                f"generate.prompt: text, character 2: {wrong!r} is not a character; give text"
                " that is UTF-8"
            )


def test_bytes_of_a_flag_reach_a_model_of_bytes(tmp_path, command):
    """Invalid UTF-8 becomes U+FFFD in printed text and JSON. ``sample.txt`` keeps the bytes."""
    folder = exported(tmp_path / "model", Vocab.all_bytes())
    out = tmp_path / "out.jsonl"
    prompt = b"a\xffb\xe2\x82".decode("utf-8", "surrogateescape")
    code, shown, _ = command(*generating(folder, prompt=prompt, json=out))
    assert code == 0
    record = json.loads(out.read_text(encoding="utf-8"))
    assert record["prompt"] == "a\ufffdb"
    assert record["continuation"]
    assert "\u2080" <= record["continuation"][0] <= "\u20bf"  # E2 82 and one byte more
    assert shown == record["prompt"] + record["continuation"] + "\n"
    assert (folder / "sample.txt").read_bytes().startswith(b"a\xffb\xe2\x82")


def test_a_byte_order_mark_is_no_part_of_a_prompt(chars, words, tmp_path, command):
    """Some editors write a byte-order mark before UTF-8 text; no prompt includes this mark."""
    text, lines = tmp_path / "mark.txt", tmp_path / "mark.jsonl"
    text.write_bytes(b"\xef\xbb\xbfthe cat")
    lines.write_bytes(b'\xef\xbb\xbf{"prompt": "the cat"}\n')
    for given in ({"prompt_file": text}, {"prompts_file": text}, {"prompts_file": lines}):
        code, out, told = command(*generating(words, json="-", **given))
        assert code == 0, told
        assert json.loads(out)["prompt"] == "the cat"


def test_standard_output_that_lacks_a_character_does_not_end_the_run(tmp_path, monkeypatch):
    """On an ASCII terminal, other characters become question marks in text and escapes in JSON."""
    folder = exported(tmp_path / "model", Vocab.from_chars(["é"]))
    for flags, want in (({}, b"?????\n"), ({"json": "-"}, rb'"continuation": "\u00e9')):
        terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        monkeypatch.setattr("sys.stdout", terminal)
        monkeypatch.setattr(main, "_overrides", {})
        with flagsaver.flagsaver():
            code = main.main(main.parse_flags(["main", *generating(folder, prompt="é", **flags)]))
        assert code == 0
        assert want in terminal.buffer.getvalue()


def test_a_flag_with_prompts_replaces_the_prompt_of_the_run(words, tmp_path, command, monkeypatch):
    """The prompt in the run's config does not count as a second prompt."""
    folder = tmp_path / "model"
    shutil.copytree(words, folder)
    config = json.loads((folder / "config.json").read_text())
    config["generate"]["prompt"] = "the cat"
    (folder / "config.json").write_text(json.dumps(config))
    (tmp_path / "prompts.txt").write_text("cat\nsaw\n")
    given = {"prompts_file": tmp_path / "prompts.txt", "json": "-"}
    code, out, _ = command(*generating(folder, **given))
    assert (code, [json.loads(line)["prompt"] for line in out.splitlines()]) == (0, ["cat", "saw"])
    prompts._standard_input.cache_clear()
    code, out, _ = command(*generating(folder, prompt_file="-"), stdin=b"cat the")
    assert (code, out[:7]) == (0, "cat the")
    prompts._standard_input.cache_clear()


def test_two_prompts_in_flags_are_refused(words, refused):
    assert refused(*generating(words, prompts_file="f", prompt="cat")) == (
        "config key generate.prompts_file = 'f': generate.prompt = 'cat' is given too; give one of"
        " them"
    )


@pytest.mark.parametrize("value", ["1000", "-1", "nan", "1e999", "warm"])
def test_an_invalid_temperature_is_refused(value, chars, refused):
    text = refused(*generating(chars, temperature=value))
    assert text.startswith("config key generate.temperature = ")
    rule = "must be 0 (greedy) or from 1e-06 to 100" if value in ("1000", "-1") else "must be "
    assert rule in text


def test_an_unknown_setting_is_refused_with_the_nearest_one(chars, refused):
    text = refused(*generating(chars, temprature="1"))
    assert text == (
        "unknown config key 'generate.temprature'; the nearest key is 'generate.temperature'"
    )


def test_an_output_that_cannot_be_written_is_refused(chars, tmp_path, refused):
    path = tmp_path / "no" / "out.jsonl"
    text = refused(*generating(chars, json=path))
    assert text.startswith(f"config key generate.json = '{path}': ")


@pytest.fixture
def workdir(chars, tmp_path):
    """A workdir with one checkpoint, of step 0."""
    to_workdir(Request(source=str(chars), workdir=str(tmp_path / "run")))
    return tmp_path / "run"


def test_a_checkpoint_that_is_not_there_is_refused(workdir, tmp_path, refused):
    checkpoints = workdir / "checkpoints"
    assert refused(*generating(workdir), "--step=7") == (
        f"there is no checkpoint 7 in {checkpoints}, only 0"
    )
    (checkpoints / "0").rename(tmp_path / "elsewhere")
    assert refused(*generating(workdir)) == f"there is no checkpoint in {checkpoints}; train first"
    nowhere = tmp_path / "nowhere"
    assert refused(*generating(nowhere)) == (
        f"--workdir={nowhere}: there is no such folder; start one with --config=NAME"
    )


def test_a_checkpoint_of_another_format_is_refused(workdir, refused, command):
    (checkpoint,) = (workdir / "checkpoints").glob("[0-9]*")
    assert command(*generating(workdir))[0] == 0
    meta = checkpoint / "meta" / "metadata"
    meta.write_text(json.dumps({**json.loads(meta.read_text()), "format": NEWER}))
    assert refused(*generating(workdir)) == (
        f"checkpoint 0 has format {NEWER}, and this version of txl_jax reads format 2 only; use the"
        " version that wrote it, or another workdir"
    )


def test_an_exported_model_whose_files_are_not_whole_is_refused(tmp_path, refused):
    folder = exported(tmp_path / "model", Vocab.from_chars(["abc \n"]))
    model = folder / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-50])
    assert "model.safetensors" in refused(*generating(folder))
    (folder / "vocab.json").unlink()
    assert "vocab.json: cannot be read (No such file or directory)" in refused(*generating(folder))


def test_nothing_to_score_is_refused(chars, tmp_path, refused):
    flags = ("--mode=score", f"--workdir={chars}")
    more = "has no token to score; name another file with --config.score.path=FILE, or"
    assert refused(*flags) == f"standard input: {more} give a text on standard input"
    (tmp_path / "empty.txt").write_text("")
    text = refused(*flags, f"--config.score.path={tmp_path / 'empty.txt'}")
    assert text.startswith(f"{tmp_path / 'empty.txt'}: has no token to score")
    assert refused(*flags, stdin=b"ab\ncz\n").startswith("standard input, line 2: ")


def test_json_on_standard_output_is_alone_there(chars, tmp_path, command):
    """Only line ends separate lines of input: U+2028 is a character of a prompt."""
    vocab = Vocab.from_chars(["abc\u2028\x0c\n"])
    folder = exported(tmp_path / "model", vocab)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('"a\u2028b"\r\n{"prompt": "c"}\n', encoding="utf-8")
    code, out, told = command(*generating(folder, prompts_file=prompts, samples=2, json="-"))
    assert code == 0
    assert [json.loads(line)["prompt"] for line in out.split("\n")[:-1]] == [
        "a\u2028b",
        "a\u2028b",
        "c",
        "c",
    ]
    assert "[1.1] " in told
    assert "tokens/s" in told
    code, out, told = command(
        "--mode=score", f"--workdir={folder}", stdin="a\u2028b\nc\x0ca\n".encode()
    )
    assert code == 0
    assert [json.loads(line)["text"] for line in out.split("\n")[:-1]] == ["a\u2028b", "c\x0ca"]


CONVERT = r"convert them with  sed -i 's/\r$//' FILE"


@pytest.fixture(scope="module")
def dos_chars(tmp_path_factory):
    """A model with the vocabulary of a text with CRLF line ends."""
    return exported(tmp_path_factory.mktemp("dos") / "model", Vocab.from_chars(["abc \r\n"]))


def test_a_prompt_is_the_text_of_its_file_with_its_line_ends(dos_chars, tmp_path, command):
    path = tmp_path / "prompt.txt"
    for text in ("ab\r\nc\r\n", "ab\nc\n", "\r\n", "a\rb"):
        path.write_bytes(text.encode())
        code, out, told = command(*generating(dos_chars, prompt_file=path, json="-"))
        assert code == 0, told
        assert json.loads(out)["prompt"] == text
        prompts._standard_input.cache_clear()
        _, out, _ = command(*generating(dos_chars, prompt_file="-", json="-"), stdin=text.encode())
        assert json.loads(out)["prompt"] == text
        assert txl_jax.load(dos_chars).generate(text)[0].prompt == text
    prompts._standard_input.cache_clear()


def test_a_prompt_of_a_file_may_have_control_characters(tmp_path, command):
    folder, path = exported(tmp_path / "model", Vocab.all_bytes()), tmp_path / "prompt.txt"
    path.write_bytes(bytes(range(1, 32)))
    code, out, told = command(*generating(folder, prompt_file=path, json="-"))
    assert code == 0, told
    assert json.loads(out)["prompt"] == path.read_bytes().decode()


@pytest.mark.parametrize("name", ["prompts.txt", "prompts.jsonl"])
def test_a_line_of_prompts_ends_before_its_line_end(chars, tmp_path, command, name):
    path, lines = tmp_path / name, ["ab", "a b", "c"]
    for end in ("\n", "\r\n"):
        text = [json.dumps(line) if name.endswith("l") else line for line in lines]
        path.write_bytes("".join(line + end for line in text).encode())
        code, out, told = command(*generating(chars, prompts_file=path, json="-"))
        assert code == 0, told
        assert [json.loads(row)["prompt"] for row in out.splitlines()] == lines


def test_crlf_line_ends_that_the_vocabulary_lacks_are_named_with_the_fix(chars, tmp_path, refused):
    path = tmp_path / "dos.txt"
    path.write_bytes(b"ab\r\nc\r\n")
    for flags in (
        generating(chars, prompt_file=path),
        ("--mode=score", f"--workdir={chars}", f"--config.score.path={path}"),
    ):
        text = refused(*flags)
        assert "'\\r' (U+000D) is not among the 5 characters" in text
        assert "the line ends are CRLF (Windows), and those of the training text are not" in text
        assert text.endswith(CONVERT)
    data = [f"--config.data.{key}" for key in ("name=text", f"path={path}", "vocab=char")]
    path.write_bytes(b"ab\r\nc\r\n" * 50)
    cache = f"--config.data.cache_dir={tmp_path / 'cache'}"
    assert refused("--mode=evaluate", f"--workdir={chars}", *data, cache).endswith(CONVERT)
    path.write_bytes(b"a\rb")
    assert CONVERT not in refused(*generating(chars, prompt_file=path))


def test_rows_of_a_score_are_lines_without_their_line_ends(dos_chars, command):
    text = b"ab\r\nc\n\r\naab"
    code, out, told = command("--mode=score", f"--workdir={dos_chars}", stdin=text)
    assert code == 0, told
    rows = [json.loads(row) for row in out.splitlines()]
    assert [row["text"] for row in rows] == ["ab", "c", "", "aab"]
    assert [row["tokens"] for row in rows] == [4, 2, 2, 3]
    assert rows[0]["symbols"] == ["a", "b", "\r", "\n"]
    score = txl_jax.load(dos_chars).score(text.decode())
    assert [line.text for line in score.lines] == ["ab\r\n", "c\n", "\r\n", "aab"]


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("text", ["abc abc\n", "bc", "Кот сел.\n", "猫坐在垫子上，狗也。\r\n"])
def test_utf_16_and_32_without_a_mark_are_refused_by_name(
    chars, words, tmp_path, refused, encoding, text
):
    path = tmp_path / "wide.txt"
    path.write_bytes(text.encode(encoding))
    name = encoding[:6].upper()
    for folder in (chars, words):
        for key in ("prompt_file", "prompts_file"):
            told = refused(*generating(folder, **{key: path}))
            assert told.startswith(f"config key generate.{key} = '{path}': is {name} (")
            assert "without a byte order mark, not UTF-8" in told
        told = refused("--mode=score", f"--workdir={folder}", f"--config.score.path={path}")
        assert told.startswith(f"config key score.path = '{path}': is {name} (")
        trained = txl_jax.load(folder)
        for call in (trained.generate, trained.score, trained.vocab.encode):
            with pytest.raises(txl_jax.DataError, match=f"the text looks like {name} "):
                call(text.encode(encoding))


def test_a_model_of_bytes_scores_any_bytes_that_are_asked_for(tmp_path, command):
    folder = exported(tmp_path / "model", Vocab.all_bytes())
    path = tmp_path / "bytes"
    for content in (bytes(range(256)), "abc\n".encode("utf-16-le")):
        path.write_bytes(content)
        flags = ("--mode=score", f"--workdir={folder}", f"--config.score.path={path}")
        assert "not text in UTF-8" in command(*flags)[2]
        code, out, told = command(*flags, "--config.data.vocab=byte")
        assert code == 0, told
        assert sum(json.loads(row)["tokens"] for row in out.splitlines()) == len(content)


@pytest.mark.parametrize("name", ["a [1]*?.txt", "naïve 猫.txt", " two  spaces .txt", "line\n"])
def test_a_file_of_prompts_or_of_a_text_to_score_may_have_any_name(chars, tmp_path, command, name):
    path = tmp_path / name
    path.write_text("ab c\n")
    for flags in (
        generating(chars, prompt_file=path, json="-"),
        generating(chars, prompts_file=path, json="-"),
        ("--mode=score", f"--workdir={chars}", f"--config.score.path={path}"),
    ):
        code, out, told = command(*flags)
        assert code == 0, told
        assert json.loads(out).get("prompt", "ab c").strip() == "ab c"


def test_a_prompt_may_have_form_feeds_and_line_separators(tmp_path, command):
    folder = exported(tmp_path / "model", Vocab.from_chars(["abc\u2028\x0b\x0c\x85\n"]))
    path, text = tmp_path / "prompts.txt", "a\u2028b\x0cc\x85\x0b"
    path.write_bytes(f"{text}\r\nb\n".encode())
    code, out, told = command(*generating(folder, prompts_file=path, json="-"))
    assert code == 0, told
    assert [json.loads(row)["prompt"] for row in out.split("\n")[:-1]] == [text, "b"]
