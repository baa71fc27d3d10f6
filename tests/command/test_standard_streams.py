"""A run does not end because a standard stream is closed, full, slow, or read by nobody."""

import io
import itertools
import os
import re
import shutil
import subprocess
import sys

import pytest
import tiny_runs
from places import ROOT
from tiers import rest_slow
from tiny_runs import command

import txl_jax
from txl_jax import standard_streams

SMALL = {"train.steps": 6, "train.log_every": 1, "train.eval_every": 3, "checkpoint.every": 3}


@pytest.fixture(scope="module")
def trained(trained_run, tmp_path_factory):
    """A folder with a text and ``run``, the workdir of an uninterrupted run; and its config."""
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


def test_no_file_gets_the_numbers_of_closed_streams_and_only_output_is_refused(tmp_path):
    program = f"""
import sys
sys.argv[0] = "txl"
import txl_jax
refused = False
numbers = [open(r"{tmp_path}/file", "w").fileno() for _ in range(1)]
assert min(numbers) > 2
assert sys.stdin is None or sys.stdin.fileno() == 0
for stream in (sys.stdout, sys.stderr):
    try:
        print("text \\u2713", file=stream, flush=True)
    except OSError as error:
        assert stream is sys.stdout and error.strerror == "closed"
        refused = True
    stream.isatty(), stream.encoding
assert refused == (sys.argv[1] == "True")
"""
    for closed in COMBINATIONS:
        refused = " >&-" in f" {closed}"
        done = shell(f'"$@" {closed}', sys.executable, "-c", program, refused)
        assert done.returncode == 0, (closed, done.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("closed", rest_slow(1, ["<&- >&- 2>&-", "2>&-", ">&-"]))
def test_a_run_without_streams_is_that_with_streams(trained, tmp_path, closed):
    folder, config = trained
    script = f'"$@" {closed}'
    lost = 2 * (" >&-" in f" {closed}")  # exit code: without stdout an evaluation loses its table
    done = shell(script, *command(f"--config={config}", f"--workdir={tmp_path / 'run'}"))
    assert done.returncode == 0, done.stderr
    without_time = lambda path: re.sub(
        r'"timing": {[^}]*}', "", (path / "metrics.jsonl").read_text()
    )
    assert without_time(tmp_path / "run") == without_time(folder / "run")
    for name in ("sample.txt", "vocab.json"):
        assert (tmp_path / "run" / name).read_bytes() == (folder / "run" / name).read_bytes()
    done = shell(script, *command(f"--workdir={tmp_path / 'run'}", "--mode=evaluate"))
    assert done.returncode == lost


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
    for script, reason in (('"$@" >&-', "closed"), ('"$@" >/dev/full', "No space left on device")):
        done = shell(script, *command(*arguments))
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert done.returncode == 2, (script, done.stderr)
        assert len(errors) == 1, (script, done.stderr)
        assert reason in errors[0]
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
def test_a_mode_that_reads_a_closed_standard_input_says_so_in_one_line(trained):
    folder, _ = trained
    for mode, more in {
        "interactive": [],
        "score": ["--config.score.path=-"],
        "generate": ["--config.generate.prompt_file=-"],
    }.items():
        done = shell('"$@" <&-', *command(f"--workdir={folder / 'run'}", f"--mode={mode}", *more))
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), mode
        assert done.stderr.startswith("error: "), mode
        assert "standard input is closed" in done.stderr, mode


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


class Broken(io.StringIO):
    """A stream of a user's program to which nothing can be written."""

    def write(self, text):
        raise BrokenPipeError

    def flush(self):
        raise BrokenPipeError

    def isatty(self):
        return True


@pytest.mark.integration
@pytest.mark.parametrize("kind", rest_slow(1, ["closed", "none", "broken"]))
def test_training_from_python_ends_well_and_keeps_the_users_streams(tmp_path, monkeypatch, kind):
    closed = io.StringIO()
    closed.close()
    streams = {"none": (None, None), "broken": (Broken(), Broken()), "closed": (closed, closed)}
    monkeypatch.setattr(sys, "stdout", streams[kind][0])
    monkeypatch.setattr(sys, "stderr", streams[kind][1])
    seen = []

    class Watch(txl_jax.Logger):
        def metrics(self, step, values):
            seen.append((sys.stdout, sys.stderr))

    exp = tiny_runs.experiment(tmp_path, **SMALL)
    trained = txl_jax.train(exp, tmp_path / "run", loggers=[Watch()])
    trained.evaluate()
    assert trained.step == 6
    assert is_finished(tmp_path / "run")
    assert all(a is streams[kind][0] and b is streams[kind][1] for a, b in seen)
    assert seen


def test_a_descriptor_writes_everything_to_a_slow_reader_that_does_not_block():
    read, write = os.pipe()
    os.set_blocking(write, False)
    text = b"0123456789" * 100_000
    program = "import sys, time; time.sleep(0.3); print(len(sys.stdin.buffer.read()))"
    reader = subprocess.Popen([sys.executable, "-c", program], stdin=read, stdout=subprocess.PIPE)
    os.close(read)
    with io.BufferedWriter(standard_streams._Descriptor(write, drops=False)) as stream:
        stream.write(text)
    os.close(write)
    assert int(reader.communicate()[0]) == len(text)


def test_output_to_a_terminal_that_was_closed_is_dropped_and_is_no_error():
    program = """
import os, pty, sys
terminal, ours = pty.openpty()
os.dup2(ours, 1), os.dup2(ours, 2)
sys.argv[0] = "txl"
from txl_jax import standard_streams
standard_streams.drop_unwritten_output()
os.close(terminal)
def command():
    print("text", flush=True)
    print("text", file=sys.stderr, flush=True)
    return 0
standard_streams.run_command(command)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=60, check=False)
    assert done.returncode == 0
