"""Two runs never train in one folder at once; a lock ends with the process that holds it."""

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from txl_jax.checkpoint.lock import LockedError, training_lock

HOLD = """
import sys
from txl_jax.checkpoint.lock import training_lock
with training_lock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def other(tmp_path):
    """Starts another process, which holds the lock of ``tmp_path``."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def refusal(workdir):
    with pytest.raises(LockedError) as caught, training_lock(str(workdir)):
        pass
    return str(caught.value)


def test_the_second_refuses_with_the_others_process_and_what_to_do(tmp_path, other):
    since = json.loads((tmp_path / ".lock").read_text())["since"]
    assert refusal(tmp_path) == (
        f"workdir={tmp_path}: process {other.pid} on {socket.gethostname()}, since {since},"
        " trains in this folder. Wait for it, stop it (it saves its state, and a new start then"
        " resumes from there), or name another workdir"
    )
    assert json.loads((tmp_path / ".lock").read_text())["pid"] == other.pid


@pytest.mark.integration
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM, None])
def test_the_lock_goes_with_the_process_however_it_ends(tmp_path, other, sent):
    if sent is not None:
        os.kill(other.pid, sent)
    other.communicate()
    with training_lock(str(tmp_path)):
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()
        refusal(tmp_path)


def test_the_lock_goes_with_an_error(tmp_path):
    with pytest.raises(ZeroDivisionError), training_lock(str(tmp_path)):
        raise ZeroDivisionError
    with training_lock(str(tmp_path)):
        pass


def test_a_lock_that_names_nobody_is_held_all_the_same(tmp_path, other):
    (tmp_path / ".lock").write_text("")
    assert "another process, trains" not in refusal(tmp_path)
    assert refusal(tmp_path).startswith(f"workdir={tmp_path}: another process trains in this")


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_without_flock_support_a_warning_is_printed(tmp_path, monkeypatch, capsys, number):
    def no_locks(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with training_lock(str(tmp_path)), training_lock(str(tmp_path)):
        pass
    (warning,) = set(capsys.readouterr().err.splitlines())
    assert warning == (
        f"warning: workdir={tmp_path}: the file system does not support locks"
        f" ({os.strerror(number)}), so the run is not protected; make sure that no second run"
        " trains in this folder"
    )


def test_a_lock_file_that_cannot_be_opened_is_an_error(tmp_path):
    (tmp_path / ".lock").mkdir()
    with pytest.raises(OSError, match="directory"), training_lock(str(tmp_path)):
        pass
