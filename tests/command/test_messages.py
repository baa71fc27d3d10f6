"""A refused command prints one line that names the fault, its place and the fix."""

import ast
import errno
import io
import operator
import os
import pathlib
import pwd
import re

import pytest
from absl.testing import flagsaver
from tiny_runs import write_config

from txl_jax import main
from txl_jax.checkpoint.checkpoints import Checkpoints
from txl_jax.checkpoint.errors import CheckpointError, WorkdirError
from txl_jax.checkpoint.loading import load
from txl_jax.config import ConfigError, DataConfig, ExperimentConfig, load_config, override
from txl_jax.convert.__main__ import main as convert
from txl_jax.data.corpus import corpus_from_config
from txl_jax.data.errors import DataError
from txl_jax.data.sources.benchmarks import decode_numbers
from txl_jax.messages import argument, describe_os_error, one_line, short_repr
from txl_jax.parallel import processes

QUICKSTART = "--config=configs/quickstart.py"
NOBODY = "~no_such_user_here"


@pytest.fixture
def refused(capsys, monkeypatch):
    """A function that runs a command here, asserts that it fails, and returns its error line."""

    def run(*arguments, call=None):
        monkeypatch.setattr(main, "_overrides", {})
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"")))
        capsys.readouterr()
        try:
            with flagsaver.flagsaver():
                code = call(list(arguments)) if call else _main(*arguments)
        except SystemExit as end:
            code = end.code
        out, told = capsys.readouterr()
        assert (code, out) == (2, ""), told
        assert told.startswith("error: ")
        assert told.count("\n") == 1
        return told.removeprefix("error: ").removesuffix("\n")

    return run


def _main(*arguments):
    return main.main(main.parse_flags(["main", *arguments]))


# --------------------------------------------------------------------------------------
# Flags.


@pytest.mark.parametrize("name", ["config", "workdir", "step", "topology", "coordinator"])
def test_a_flag_without_a_value_is_refused(name, refused):
    message = f"--{name}=: a value is missing; give one, or leave the flag out"
    for empty in ("", " "):
        assert refused(QUICKSTART, "--mode=evaluate", f"--{name}={empty}") == message


def test_a_setting_without_a_value_is_refused(refused):
    expected = "config key train.steps = '': must be of type int"
    assert refused(QUICKSTART, "--config.train.steps=") == expected
    assert refused(QUICKSTART, "--config.train.steps") == expected
    assert refused(QUICKSTART, "--config.data.path=") == (
        "config key data.path = '': a value is missing; give one, or the word none"
    )


@pytest.mark.parametrize(
    ("flag", "rule"),
    [
        ("--heartbeat_seconds=-5", "[1, 86400]"),
        ("--heartbeat_seconds=0", "[1, 86400]"),
        (f"--heartbeat_seconds={2**31}", "[1, 86400]"),
        ("--num_processes=0", "[1, 1048576]"),
        ("--num_processes=-1", "[1, 1048576]"),
        (f"--num_processes={2**64}", "[1, 1048576]"),
    ],
)
def test_numbers_of_processes_and_seconds_have_a_range(flag, rule, refused, tmp_path):
    many = ("--coordinator=localhost:1", "--num_processes=2", "--process_id=0")
    workdir = f"--workdir={tmp_path}"
    refusal = f"flag {flag}: {flag.partition('=')[2]} is not an integer in the range {rule}"
    assert refused(QUICKSTART, workdir, *many, flag) == refusal


@pytest.mark.parametrize("port", ["²", "٣", "1_0", "9" * 5000])
def test_a_port_is_a_decimal_number_in_ascii(port):
    with pytest.raises(ConfigError, match="must be HOST:PORT, such as node0:12345") as error:
        processes.check_flags(f"localhost:{port}", 2, 0)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize("step", ["²", "٣", "07", "-1", "9" * 5000])
def test_a_step_is_a_decimal_number_in_ascii(step, tmp_path):
    for name in ("7", "²", "٣"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    with Checkpoints(str(tmp_path)) as checkpoints:
        assert checkpoints.steps() == [7]
        assert checkpoints.choose("7") == 7
        with pytest.raises(CheckpointError, match=r"there is no checkpoint .*, only 7$") as error:
            checkpoints.choose(step)
    assert len(str(error.value)) < 600


def test_a_number_of_too_many_digits_in_a_prepared_text_is_refused():
    with pytest.raises(DataError, match="not only decimal numbers of bytes"):
        list(decode_numbers([b"60 112 " + b"9" * 5000]))


# --------------------------------------------------------------------------------------
# Home folders.


def test_a_home_folder_that_does_not_exist_is_refused(refused, tmp_path, monkeypatch):
    rule = f"there is no home folder '{NOBODY}'; write the whole path"
    workdir = f"--workdir={tmp_path}/run"
    assert refused(f"--config={NOBODY}/c.py", workdir) == f"--config = '{NOBODY}/c.py': {rule}"
    assert refused(QUICKSTART, f"--workdir={NOBODY}/w") == f"--workdir = '{NOBODY}/w': {rule}"
    config = f"--config={write_config(tmp_path)}"
    for key in ("data.path", "data.cache_dir"):
        assert refused(config, workdir, f"--config.{key}={NOBODY}/x") == (
            f"config key {key} = '{NOBODY}/x': {rule}"
        )
    converting = ("source", f"--workdir={NOBODY}/w")
    assert refused(*converting, call=convert) == f"--workdir = '{NOBODY}/w': {rule}"
    monkeypatch.setenv("TXL_DATA_DIR", f"{NOBODY}/data")
    with pytest.raises(ConfigError, match=r"^environment variable TXL_DATA_DIR = "):
        corpus_from_config(DataConfig(path=str(tmp_path / "text.txt")))
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_home_folder_in_a_path_setting_is_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    keys = ("train.start_from", "generate.prompt_file", "generate.json", "score.path", "score.json")
    lists = ("distil.teachers", "report.workdirs")
    named = {key: "~/x" for key in (*keys, *lists)}
    others = {"recl.models": "a=~/x,b=y", "data.path": "~/x", "train.text_on_device": True}
    exp = override(ExperimentConfig(), {**named, **others})
    found = {key: operator.attrgetter(key)(exp) for key in (*named, "recl.models", "data.path")}
    assert found == {
        **dict.fromkeys(keys, "/home/me/x"),
        **dict.fromkeys(lists, ("/home/me/x",)),
        "recl.models": ("a=/home/me/x", "b=y"),
        "data.path": "~/x",  # kept for the label of the corpus; expanded where the text is read
    }
    with pytest.raises(ConfigError, match=r"^config key score\.path = '~nobody-here/x': there is"):
        override(ExperimentConfig(), {"score.path": "~nobody-here/x"})


def test_a_home_folder_in_a_flag_is_expanded(refused, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    at_home = refused("--mode=evaluate", "--workdir=~/run")
    assert at_home.startswith(f"--workdir={tmp_path}/run: there is no such folder")
    assert refused("--config=~/none.py") == (
        f"--config={tmp_path}/none.py: there is no file '{tmp_path}/none.py'"
    )
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: (_ for _ in ()).throw(KeyError(uid)))
    assert refused("--config=~/none.py").startswith("--config = '~/none.py': there is no home ")


# --------------------------------------------------------------------------------------
# Errors of the operating system, and long texts.


def test_an_error_of_the_system_says_what_was_done_to_which_file(refused, tmp_path, monkeypatch):
    missing = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{tmp_path}/x")
    monkeypatch.setattr(main, "load_config", lambda *_: (_ for _ in ()).throw(missing))
    assert refused(QUICKSTART, "--mode=evaluate") == (
        f"--mode=evaluate: '{tmp_path}/x': No such file or directory; check the path"
    )
    args = ("source", f"--workdir={tmp_path}/run", f"--args={tmp_path}/none.json")
    assert refused(*args, call=convert) == (
        f"{tmp_path}/none.json: cannot be read (No such file or directory)"
    )


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(errno.ENOSPC, "full", "a"), "m: 'a': full; free some space, or name a path on"),
        (PermissionError(errno.EACCES, "no", "a"), "m: 'a': no; check its permissions"),
        (OSError("only words"), "m: only words"),
        (TimeoutError(), "m: TimeoutError"),
    ],
)
def test_every_form_of_a_system_error_has_a_text(error, text):
    assert describe_os_error(error, "m").startswith(text)


def test_long_flags_are_shortened_and_lines_joined(refused, tmp_path):
    long = "x" * 5000
    workdir = f"--workdir={tmp_path}/run"
    for arguments in (
        (QUICKSTART, long),
        (QUICKSTART, f"--topology={long}"),
        (QUICKSTART, f"--mode={long}"),
        (QUICKSTART, f"--num_processes={long}"),
        (f"--config={long}", workdir),
        (QUICKSTART, workdir, f"--coordinator={long}", "--num_processes=1", "--process_id=0"),
        ("--mode=evaluate", f"--workdir={tmp_path}/{long}"),
        (QUICKSTART, workdir, f"--config.data.name={'a b ' * 1250}"),
        (QUICKSTART, workdir, "--config.data.name=text", f"--config.data.path={long}"),
    ):
        assert len(refused(*arguments)) < 1200, arguments


def test_values_and_messages_are_shortened_in_the_middle():
    assert short_repr("x" * 100) == repr("x" * 100)
    assert short_repr("ab" * 5000) == "'" + "ab" * 49 + "a... [9,802 characters left out] ...b" + (
        "ab" * 49 + "'"
    )
    assert one_line("two\n  lines\r\n") == "two lines"
    assert one_line("a  b") == "a  b"
    assert one_line(f"x: {'y' * 300}: fix").endswith("y: fix")
    assert len(one_line("many words " * 1000)) < 2100


# --------------------------------------------------------------------------------------
# Names of arguments: flags in the command, arguments in Python.


def test_python_reads_the_names_of_arguments_and_the_command_those_of_flags(refused, tmp_path):
    overrides = {"optimizer.warmup_steps": 70, "train.steps": 60}
    with pytest.raises(ConfigError) as caught:
        load_config("quickstart", overrides)
    assert str(caught.value).endswith("use fewer, for example optimizer.warmup_steps=6")
    flags = [f"--config.{key}={value}" for key, value in overrides.items()]
    assert refused(QUICKSTART, *flags).endswith("example --config.optimizer.warmup_steps=6")
    with pytest.raises(WorkdirError) as unknown:
        load(str(tmp_path))
    rule = f"workdir={tmp_path}: there is no run in it; start one with "
    assert str(unknown.value) == f"{rule}config=NAME"
    assert refused("--mode=evaluate", f"--workdir={tmp_path}") == f"--{rule}--config=NAME"
    (tmp_path / "seeds" / "seed_1").mkdir(parents=True)
    (tmp_path / "seeds" / "seed_1" / "config.json").touch()
    rule = f"--workdir={tmp_path}/seeds: has runs of seeds; name one: --workdir={tmp_path}/seeds/"
    assert refused("--mode=evaluate", f"--workdir={tmp_path}/seeds") == f"{rule}seed_1"
    assert argument("config.mesh.data", 1) == "mesh.data=1", "the command names flags while it runs"
    spaced = tmp_path / "a b"
    spaced.mkdir()
    assert f"'--workdir={spaced}': " in refused("--mode=evaluate", f"--workdir={spaced}")
    (tmp_path / "gone").symlink_to("nowhere")
    linked = refused(QUICKSTART, f"--workdir={tmp_path}/gone")
    assert "cannot be written (No such file or directory); name a" in linked


def test_no_message_of_the_library_spells_a_flag():
    """Messages get a flag's spelling from ``argument``; only the command's modules spell flags."""
    commands = ("main", "modes", "usage", "command_line", "__main__", "machines", "processes")
    package = pathlib.Path(main.__file__).parent
    for path in sorted(package.rglob("*.py")):
        if path.stem in commands:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and "``--" not in text and "\n" not in text:
                assert not re.search(r"(^|[ (])--(config|workdir|mode)\b", text), (path, text)
