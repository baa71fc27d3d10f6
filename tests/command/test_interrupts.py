"""Ctrl-C while a command starts ends it at once, without a traceback."""

import os
import signal
import socket
import subprocess
import sys

import pytest
from places import ROOT
from tiny_runs import command

LOSES_IT = """
import os, signal, time
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(20)
except BaseException:
    pass
raise SystemExit(7)
"""
"""A module that gets Ctrl-C while Python runs it and ignores it, as parts of NumPy and JAX can."""


@pytest.fixture(autouse=True)
def ctrl_c_as_in_a_terminal():
    """Enables Ctrl-C, which a shell disables for background jobs and the programs they start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("module", "word"), [("txl_jax.main", "--config=quickstart"), ("txl_jax.convert", "source")]
)
@pytest.mark.parametrize("library", ["jax", "absl"])
def test_while_a_library_is_imported(module, word, library, tmp_path):
    (tmp_path / library).mkdir()
    (tmp_path / library / "__init__.py").write_text(LOSES_IT)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", module, word, f"--workdir={tmp_path / 'run'}"],
        env={**os.environ, "PYTHONPATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_after_the_flags_while_the_config_is_read(tmp_path):
    (tmp_path / "config.py").write_text(LOSES_IT)
    done = subprocess.run(
        command(f"--config={tmp_path}/config.py", f"--workdir={tmp_path}/run"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")
    assert not (tmp_path / "run").exists()


def test_while_native_code_waits_for_other_processes(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as coordinator:
        coordinator.settimeout(60)
        process = subprocess.Popen(
            command(
                "--config=configs/quickstart.py",
                f"--workdir={tmp_path}/run",
                f"--coordinator=127.0.0.1:{coordinator.getsockname()[1]}",
                "--num_processes=2",
                "--process_id=1",
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        try:
            connection, _ = coordinator.accept()
            process.send_signal(signal.SIGINT)
            out, told = process.communicate(timeout=30)
        finally:
            process.kill()
            process.wait()
        connection.close()
    assert (process.returncode, out, told) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize(
    ("before", "after"),
    [("default_int_handler", "default_int_handler"), ("SIG_IGN", "SIG_IGN")],
)
def test_signals_are_as_before_once_the_start_is_over(before, after):
    """An ignored Ctrl-C stays ignored, and importing the package changes no handler."""
    program = f"""
import signal
signal.signal(signal.SIGINT, signal.{before})
from txl_jax import interrupts
assert not interrupts.is_command()
assert signal.getsignal(signal.SIGINT) is signal.{before}
interrupts.exit_on_interrupt()
changed = signal.getsignal(signal.SIGINT) is not signal.{before}
assert changed == (signal.{before} is not signal.SIG_IGN)
interrupts.restore_keyboard_interrupt()
assert signal.getsignal(signal.SIGINT) is signal.{after}
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
