"""A run does not end because a standard stream is closed, full, or read by nobody."""

import itertools
import os
import re
import shutil
import subprocess
import sys
import threading

import pytest
from places import ROOT
from tiers import rest_slow
from tiny_runs import command

from txl_jax import standard_streams


@pytest.fixture(scope="module")
def trained(trained_run, tmp_path_factory):
    """A folder with a text and ``run``, the workdir of a finished run; and that run's config."""
    folder = tmp_path_factory.mktemp("streams")
    shutil.copy(trained_run.folder / "text.txt", folder)
    trained_run.copied(folder / "run")
    return folder, trained_run.config


def shell(script, *arguments, **more):
    """Runs a line of bash in which ``"$@"`` is a command; returns the finished process."""
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", script, "bash", *map(str, arguments)],
        cwd=ROOT,
        text=True,
        timeout=300,
        check=False,
        **{"capture_output": True, "stdin": subprocess.DEVNULL, **more},
    )


def is_finished(workdir):
    return {"evaluation.json", "sample.txt"} <= set(os.listdir(workdir))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "script"),
    [
        ("head", '{ "$@"; echo $? >&3; } 2>&1 | head -n 2 >/dev/null'),
        ("nobody", '{ sleep 1; "$@"; echo $? >&3; } 2>&1 | :'),
        ("full", '"$@" >/dev/full 2>/dev/full; echo $? >&3'),
    ],
)
def test_training_goes_on_to_its_end_without_output(trained, tmp_path, name, script):
    _, config = trained
    workdir = tmp_path / name
    done = shell(f"exec 3>&1; {script}", *command(f"--config={config}", f"--workdir={workdir}"))
    # A full disk loses the last lines, so the exit code is 2; a closed pipe is no error.
    assert (done.stdout, done.stderr) == (f"{2 if name == 'full' else 0}\n", "")
    assert is_finished(workdir)


@pytest.mark.slow
def test_a_result_that_nobody_reads_ends_quietly_as_other_programs_do(trained):
    folder, _ = trained
    workdir = f"--workdir={folder / 'run'}"
    program = "import os, sys; r, w = os.pipe(); os.close(r); os.dup2(w, 1); os.execv(sys.argv[1],"
    modes = {
        "settings": [],
        "generate": ["--config.generate.length=100000"],
        "score": [f"--config.score.path={folder / 'text.txt'}"],
    }
    for mode, more in modes.items():
        arguments = command(workdir, f"--mode={mode}", *more)
        if mode == "settings":
            del arguments[3]
        done = subprocess.run(
            [sys.executable, "-c", f"{program} sys.argv[1:])", *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == standard_streams.READER_ENDED, (mode, done.stderr)
        assert "rror" not in done.stderr, mode
    done = shell('"$@" >/dev/full', *command("--mode=settings"))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr == "error: --mode=settings: No space left on device; " + (
        "free some space, or name a path on another disk\n"
    )


CLOSED = ["<&-", ">&-", "2>&-"]
COMBINATIONS = [" ".join(c) for n in (1, 2, 3) for c in itertools.combinations(CLOSED, n)]


def test_no_file_gets_the_numbers_of_closed_streams(tmp_path):
    program = f"""
import sys
sys.argv[0] = "txl"
import txl_jax
assert open(r"{tmp_path}/file", "w").fileno() > 2
assert sys.stdin.fileno() == 0
for stream in (sys.stdout, sys.stderr):
    print("text \\u2713", file=stream, flush=True)
    stream.isatty(), stream.encoding
"""
    for closed in COMBINATIONS:
        done = shell(f'"$@" {closed}', sys.executable, "-c", program)
        assert done.returncode == 0, (closed, done.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("closed", rest_slow(1, ["<&- >&- 2>&-", "2>&-", ">&-"]))
def test_a_run_without_streams_is_that_with_streams(trained, tmp_path, closed):
    folder, config = trained
    script = f'"$@" {closed}'
    done = shell(script, *command(f"--config={config}", f"--workdir={tmp_path / 'run'}"))
    assert done.returncode == 0, done.stderr
    without_time = lambda path: re.sub(
        r'"timing": {[^}]*}', "", (path / "metrics.jsonl").read_text()
    )
    assert without_time(tmp_path / "run") == without_time(folder / "run")
    for name in ("sample.txt", "vocab.json"):
        assert (tmp_path / "run" / name).read_bytes() == (folder / "run" / name).read_bytes()
    done = shell(script, *command(f"--workdir={tmp_path / 'run'}", "--mode=evaluate"))
    assert done.returncode == 0


def test_output_waits_for_the_reader_of_a_full_pipe_that_does_not_block():
    read, write = os.pipe()
    os.set_blocking(write, False)
    filled = os.write(write, bytes(2**20))
    reader = threading.Timer(0.2, os.read, (read, filled))
    reader.start()
    assert standard_streams._Descriptor(write, drops=False).write(b"text") == 4
    reader.join()
    assert os.read(read, 100) == b"text"
    os.close(read)
    os.close(write)


@pytest.mark.integration
@pytest.mark.parametrize(
    "mode", rest_slow(3, ["help", "settings", "generate", "score", "evaluate", "compile"])
)
def test_a_result_that_cannot_be_printed_is_an_error_of_one_line(trained, mode):
    folder, config = trained
    flags = {
        "score": [f"--config.score.path={folder / 'text.txt'}"],
        "compile": [f"--config={config}", "--config.model.vocab_size=256"],
    }.get(mode, [])
    arguments = ["--help"] if mode == "help" else [f"--mode={mode}", *flags]
    if mode not in ("settings", "help"):
        arguments.append(f"--workdir={folder / 'run'}")
    done = shell('"$@" >/dev/full', *command(*arguments))
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2, done.stderr
    assert "No space left on device" in error
    assert "Traceback" not in done.stderr


@pytest.mark.integration
def test_a_result_in_a_file_needs_no_standard_output(trained, tmp_path):
    folder, _ = trained
    out = tmp_path / "score.jsonl"
    flags = [f"--config.score.path={folder / 'text.txt'}", f"--config.score.json={out}"]
    done = shell('"$@" >&-', *command(f"--workdir={folder / 'run'}", "--mode=score", *flags))
    assert done.returncode == 0, done.stderr
    assert out.read_text()


@pytest.mark.slow
def test_conversion_and_flags_need_no_streams_and_no_reader(tmp_path):
    convert = [sys.executable, "-m", "txl_jax.convert"]
    workdir = ["--workdir", tmp_path / "none"]
    errors = tmp_path / "errors"
    for closed in ("", "<&-", ">&-", "<&- >&-"):
        done = shell(f'"$@" {closed} 2>{errors}', *convert, "no_such_file", *workdir)
        assert (done.returncode, errors.read_text().count("\n")) == (2, 1), closed
    assert shell('"$@" 2>&-', *convert, "no_such_file", *workdir).returncode == 2
    for wordy in ([*convert, "--help"], command("--help")):
        done = shell('{ sleep 1; "$@"; } | :', *wordy)
        assert (done.returncode, done.stderr) == (standard_streams.READER_ENDED, "")
