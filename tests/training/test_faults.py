"""Checkpoints survive a full disk, a kill while saving and signals, and runs resume from them."""

import contextlib
import errno
import gc
import json
import logging
import os
import pathlib
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from run_records import assert_same_run
from saved_states import at_step, fresh, restore, zeros
from tiers import rest_slow
from tiny_runs import call, corpus_and_experiment, experiment, run, train, write_config

from txl_jax import modes
from txl_jax.checkpoint import checkpoint_folder
from txl_jax.checkpoint.checkpoints import Checkpoints
from txl_jax.checkpoint.errors import CheckpointError, WorkdirError
from txl_jax.checkpoint.lock import LockedError, training_lock
from txl_jax.checkpoint.workdir_files import WRITTEN_IN, check_writable
from txl_jax.evaluation.evaluator import Evaluator
from txl_jax.library_errors import log_library_errors
from txl_jax.messages import UserError
from txl_jax.training import run as run_module
from txl_jax.training import step as step_module
from txl_jax.training.plan import StepSetup
from txl_jax.training.preemption import PreemptionGuard
from txl_jax.training.skipping import NonFiniteError

# --------------------------------------------------------------------------------------
# A full disk.

SMALL = 10_000  # bytes: less than the parameters' file, more than a log


@contextlib.contextmanager
def small_files(limit=SMALL):
    """Limits the size of files that this process writes; a larger write fails with an error."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def save(checkpoints, exp, state, step):
    checkpoints.save(step, at_step(state, step), {"config": exp.to_dict()}, None)


def save_and_wait(checkpoints, exp, state, step):
    """Saves and waits: Orbax writes in a thread, and waiting raises the thread's error."""
    save(checkpoints, exp, state, step)
    checkpoints.wait()


@pytest.mark.integration
def test_a_save_that_fails_is_an_error_and_the_one_before_it_stays(tmp_path):
    exp, state, abstract = fresh(tmp_path)
    folder = tmp_path / "run" / "checkpoints"
    with Checkpoints(str(tmp_path / "run"), exp.checkpoint) as checkpoints:
        for step in (1, 2):
            save_and_wait(checkpoints, exp, state, step)
        with small_files(), pytest.raises(CheckpointError) as caught:
            save_and_wait(checkpoints, exp, state, 3)
        text = str(caught.value)
        assert text.startswith(f"a checkpoint cannot be written in {folder}: ")
        assert "File too large" in text
        assert text.endswith("; checkpoint 2 is intact")
        assert sorted(os.listdir(folder)) == ["1", "2"]  # the incomplete third is removed
        save(checkpoints, exp, state, 4)  # there is space again
    assert sorted(os.listdir(folder)) == ["2", "4"]
    assert int(restore(tmp_path, exp, abstract)[0].step) == 4


FULL = {
    "by its number": OSError(errno.ENOSPC, "Cannot write"),
    "in words": ValueError("INTERNAL: Error writing d/1: No space left on device [OS error 28]"),
    "in tensorstore's words": ValueError("RESOURCE_EXHAUSTED: d/1 " * 99 + "[os_error_code='28']"),
}
"""Errors for a full disk, from Python's own calls and from the libraries that Orbax uses."""


@pytest.mark.integration
@pytest.mark.parametrize("error", FULL)
@pytest.mark.parametrize("when", ["save", "wait_until_finished"])
def test_a_full_disk_is_called_one_at_once_or_later(tmp_path, monkeypatch, when, error):
    exp, state, abstract = fresh(tmp_path)

    def full(*_, **__):
        raise FULL[error]

    with Checkpoints(str(tmp_path / "run"), exp.checkpoint) as checkpoints:
        save_and_wait(checkpoints, exp, state, 1)
        if when == "wait_until_finished":
            save(checkpoints, exp, state, 2)
        act = checkpoints.wait if when != "save" else lambda: save(checkpoints, exp, state, 2)
        with monkeypatch.context() as patch:
            patch.setattr(ocp.CheckpointManager, when, full)
            with pytest.raises(CheckpointError) as caught:
                act()
    what = "checkpoint 2" if when == "save" else "a checkpoint"
    where = tmp_path / "run" / "checkpoints"
    assert re.fullmatch(
        f"{what} cannot be written in {where}: the disk is full; checkpoint [12] is intact",
        str(caught.value),
    )
    assert int(restore(tmp_path, exp, abstract)[0].step) >= 1


@pytest.mark.integration
def test_a_manifest_that_cannot_be_written_fails_the_save(tmp_path, monkeypatch):
    exp, state, abstract = fresh(tmp_path)

    def full(_):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with Checkpoints(str(tmp_path / "run"), exp.checkpoint) as checkpoints:
        save_and_wait(checkpoints, exp, state, 1)
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint_folder, "file_hashes", full)
            with pytest.raises(CheckpointError) as caught:
                save_and_wait(checkpoints, exp, state, 2)
        assert str(caught.value).endswith("the disk is full; checkpoint 1 is intact")
        assert os.listdir(tmp_path / "run" / "checkpoints") == ["1"]
        save_and_wait(checkpoints, exp, state, 3)
    assert int(restore(tmp_path, exp, abstract)[0].step) == 3


def test_a_replacement_that_fails_leaves_the_old_checkpoint(tmp_path):
    exp, state, abstract = fresh(tmp_path)
    with Checkpoints(str(tmp_path / "run"), exp.checkpoint) as checkpoints:
        save_and_wait(checkpoints, exp, state, 1)
        with small_files(), pytest.raises(CheckpointError):
            checkpoints.replace(1, at_step(state, 1), {"config": exp.to_dict()}, 1.0)
        assert os.listdir(tmp_path / "run" / "checkpoints") == ["1"]
    assert restore(tmp_path, exp, abstract)[1].keys() == {"config", "format", "step"}


@contextlib.contextmanager
def full_at(*steps):
    """Makes writes of large files fail while one of these steps is saved."""
    start, wait = Checkpoints._save_items, Checkpoints.wait
    limited = contextlib.ExitStack()

    def limited_start(self, step, *arguments):
        if step in steps:
            limited.enter_context(small_files())
        start(self, step, *arguments)

    def limited_wait(self):
        try:
            wait(self)
        finally:
            limited.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "_save_items", limited_start)
        patch.setattr(Checkpoints, "wait", limited_wait)
        yield
    limited.close()


@pytest.mark.integration
def test_a_run_whose_save_fails_stops_and_goes_on_from_the_one_before(tmp_path):
    changes = {"checkpoint.every": 2}
    corpus, exp = corpus_and_experiment(tmp_path, **changes)
    run(tmp_path, tmp_path / "whole", **changes)
    intact = pytest.raises(CheckpointError, match=r"cannot be written .*; checkpoint 4 is intact")
    with full_at(6), intact:
        train(exp, corpus, str(tmp_path / "cut"), PreemptionGuard())
    assert train(exp, corpus, str(tmp_path / "cut"), PreemptionGuard()).finished
    assert_same_run(tmp_path, tmp_path / "whole", tmp_path / "cut", **changes)


@pytest.mark.slow
def test_a_run_may_tolerate_save_errors_until_there_is_space(tmp_path, capsys):
    changes = {"checkpoint.every": 2, "checkpoint.tolerate_save_errors": True}
    corpus, exp = corpus_and_experiment(tmp_path, **changes)
    run(tmp_path, tmp_path / "whole", **changes)
    capsys.readouterr()
    with full_at(4, 6, 8):
        assert train(exp, corpus, str(tmp_path / "cut"), PreemptionGuard()).finished
    captured = [
        line for line in capsys.readouterr().err.splitlines() if "cannot be written" in line
    ]
    assert len(captured) == 3
    assert all(
        line.endswith("; checkpoint 2 is intact; training continues without this checkpoint")
        for line in captured
    )
    assert_same_run(tmp_path, tmp_path / "whole", tmp_path / "cut", **changes)
    assert sorted(os.listdir(tmp_path / "cut" / "checkpoints")) == ["10", "12"]


@pytest.mark.parametrize("late", ["before the next save", "before the end"])
def test_what_threads_of_a_failed_save_write_late_is_removed(tmp_path, late):
    """Orbax raises the first error of its threads, while other threads might still write."""
    exp, state, _ = fresh(tmp_path)
    folder = tmp_path / "run" / "checkpoints"
    with Checkpoints(str(tmp_path / "run"), exp.checkpoint) as checkpoints:
        with small_files(), pytest.raises(CheckpointError):
            save_and_wait(checkpoints, exp, state, 1)
        (folder / f"1{checkpoint_folder.TEMPORARY}" / "params").mkdir(parents=True)
        if late == "before the next save":
            save_and_wait(checkpoints, exp, state, 2)
            assert os.listdir(folder) == ["2"]
    assert os.listdir(folder) == (["2"] if late == "before the next save" else [])


@contextlib.contextmanager
def refused_at(step):
    """Makes the save of a step fail when it starts."""
    start = Checkpoints._save_items

    def refused(self, number, *arguments):
        if number == step:
            full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise self._save_error(f"checkpoint {step}", full)
        start(self, number, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "_save_items", refused)
        yield


@pytest.mark.integration
def test_a_checkpoint_that_was_lost_is_not_said_to_be_kept(tmp_path, monkeypatch):
    """The save of step 6 fails while writing, the save of step 8 at once; step 9 gives NaN."""
    changes = {"checkpoint.every": 2, "checkpoint.tolerate_save_errors": True}
    corpus, exp = corpus_and_experiment(tmp_path, **changes)
    gradient_of = step_module.accumulate_gradient

    def spoilt(state, *arguments):
        gradient, *rest = gradient_of(state, *arguments)
        return jax.tree.map(lambda g: jnp.where(state.step == 8, jnp.nan, g), gradient), *rest

    monkeypatch.setattr(step_module, "accumulate_gradient", spoilt)
    kept = pytest.raises(
        NonFiniteError, match="at step 9; training stopped, and checkpoint 4 is kept"
    )
    with refused_at(8), full_at(6), kept:
        train(exp, corpus, str(tmp_path / "run"), PreemptionGuard())


@pytest.mark.slow
@pytest.mark.parametrize("failing_at", [full_at, refused_at])
def test_the_last_checkpoint_must_be_written(tmp_path, failing_at):
    changes = {"checkpoint.every": 4, "checkpoint.tolerate_save_errors": True}
    corpus, exp = corpus_and_experiment(tmp_path, **changes)
    with failing_at(12), pytest.raises(CheckpointError, match=r"; checkpoint 8 is intact"):
        train(exp, corpus, str(tmp_path / "run"), PreemptionGuard())
    assert train(exp, corpus, str(tmp_path / "run"), PreemptionGuard()).finished


# --------------------------------------------------------------------------------------
# A run first checks that its folders are writable; an error is one line.


def test_a_step_whose_folder_cannot_be_made_leaves_no_thread_waiting(tmp_path, monkeypatch):
    """A thread that waits for the folder would keep the process alive for minutes."""
    exp, state, _ = fresh(tmp_path)
    mkdir, before = os.mkdir, set(threading.enumerate())

    def read_only(path, *arguments, **more):
        if "orbax-checkpoint-tmp" in os.fspath(path):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), os.fspath(path))
        mkdir(path, *arguments, **more)

    with Checkpoints(str(tmp_path / "run"), exp.checkpoint) as checkpoints:
        monkeypatch.setattr(os, "mkdir", read_only)
        with pytest.raises(CheckpointError) as caught:
            save_and_wait(checkpoints, exp, state, 1)
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive(), thread.name
    assert str(caught.value).endswith(": Read-only file system; there is no other checkpoint")


@pytest.fixture
def own_library_log(tmp_path):
    """The path of ``library.log``, to which libraries' errors go during one test."""
    gc.collect()  # objects left by earlier tests must not be reported in this file
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    before = [(logger.handlers, logger.propagate) for logger in loggers], sys.unraisablehook
    log_library_errors(str(tmp_path))
    yield tmp_path / "library.log"
    for logger, (handlers, propagate) in zip(loggers, before[0], strict=True):
        logger.handlers, logger.propagate = handlers, propagate
    sys.unraisablehook = before[1]


@pytest.mark.slow
def test_library_messages_about_a_failed_save_go_to_a_file(tmp_path, own_library_log, capfd):
    exp, state, _ = fresh(tmp_path)
    with Checkpoints(str(tmp_path / "run"), exp.checkpoint) as checkpoints:
        save_and_wait(checkpoints, exp, state, 1)
        gc.collect()
        assert not own_library_log.exists()
        capfd.readouterr()
        with small_files(), pytest.raises(CheckpointError) as caught:
            save_and_wait(checkpoints, exp, state, 2)
    gc.collect()  # Python reports the error of an unawaited future when it collects the future
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")
    assert str(caught.value).endswith(": File too large; checkpoint 1 is intact")
    log = own_library_log.read_text()
    # A write that fails after the save has ended might report only the closed event loop.
    assert "File too large" in log or "Event loop is closed" in log
    assert "Traceback" in log


def test_errors_of_libraries_go_to_a_file_or_are_dropped_where_it_cannot_be_written(
    tmp_path, own_library_log, capfd
):
    for writable in (True, False):
        if not writable:
            own_library_log.unlink()
            own_library_log.mkdir()  # so that it cannot be opened as a file
        logging.getLogger("asyncio").error("a future")
        error = ValueError("of a thread")
        about = {"exc_type": ValueError, "exc_value": error, "exc_traceback": None, "err_msg": None}
        sys.unraisablehook(types.SimpleNamespace(**about, object=None))
        captured = capfd.readouterr()
        assert (captured.out, captured.err) == ("", "")
        if writable:
            log = own_library_log.read_text()
            assert "a future" in log
            assert "ValueError: of a thread" in log


def test_a_write_that_a_failed_save_never_started_prints_no_warning(tmp_path):
    code = """
import sys
from txl_jax.library_errors import log_library_errors
if sys.argv[1:]:
    log_library_errors(sys.argv[1])
async def write_fragment(): pass
write_fragment()
"""
    for arguments, printed in (([], "write_fragment' was never awaited"), ([tmp_path], "")):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
        )
        assert printed in done.stderr
        assert bool(done.stderr) == bool(printed)


@pytest.mark.parametrize("name", ["", "checkpoints", "tensorboard"])
def test_a_folder_without_space_is_refused_before_the_work(tmp_path, monkeypatch, name):
    folder = tmp_path / name
    folder.mkdir(exist_ok=True)
    temporary_file = tempfile.TemporaryFile

    def full_there(dir):
        if pathlib.Path(dir) == folder:
            limited.enter_context(small_files(100))  # only 100 bytes of a file can be written
        return temporary_file(dir=dir)

    monkeypatch.setattr(tempfile, "TemporaryFile", full_there)
    what = f"its folder {name} cannot" if name else "cannot"
    refused = rf"workdir=.*: {what} be written \(File too large\)"
    with contextlib.ExitStack() as limited, pytest.raises(WorkdirError, match=refused):
        check_writable(str(tmp_path), WRITTEN_IN)
    assert [path for path in folder.iterdir() if path.is_file()] == []


def test_a_file_in_place_of_the_checkpoints_is_refused_before_the_work(tmp_path):
    (tmp_path / "checkpoints").write_text("mine")
    refused = r"its folder checkpoints cannot be written \(Not a directory\)"
    with pytest.raises(WorkdirError, match=refused):
        check_writable(str(tmp_path), WRITTEN_IN)
    assert (tmp_path / "checkpoints").read_text() == "mine"


def test_a_run_is_refused_before_it_compiles_where_checkpoints_cannot_be_written(
    tmp_path, monkeypatch
):
    workdir = tmp_path / "run"
    (workdir / "checkpoints").mkdir(parents=True)
    temporary_file = tempfile.TemporaryFile

    def full_there(dir):
        if pathlib.Path(dir) == workdir / "checkpoints":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return temporary_file(dir=dir)

    monkeypatch.setattr(tempfile, "TemporaryFile", full_there)
    monkeypatch.setattr("txl_jax.training.run.train", None)
    refused = r"its folder checkpoints cannot be written \(the disk is full\); name another workdir"
    with pytest.raises(WorkdirError, match=refused):
        modes.train(experiment(tmp_path), str(workdir))


@contextlib.contextmanager
def mounted(folder, *options):
    """Mounts a file system on ``folder``; skips the test if this process has no right to mount."""
    mount = ["mount", *options, os.fspath(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount a file system here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", os.fspath(folder)], check=True)


def assert_one_line_and_exit_code_2(done, *texts):
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert all(text in last for text in texts), last
    assert len(last) < 500


@pytest.mark.slow
@pytest.mark.parametrize("options", ["size=200k", "nr_inodes=30"])
def test_a_file_system_that_fills_up_ends_a_run_at_once_with_one_line(tmp_path, options):
    config = write_config(tmp_path, **{"checkpoint.every": 4, "generate.length": 0})
    disk = tmp_path / "disk"
    disk.mkdir()
    with mounted(disk, "-t", "tmpfs", "-o", options, "tmpfs"):
        done = call(f"--config={config}", f"--workdir={disk / 'run'}", timeout=120)
        assert_one_line_and_exit_code_2(done, "cannot be written", "the disk is full")


@pytest.mark.slow
def test_read_only_checkpoints_end_a_run_at_once_with_one_line(tmp_path):
    config, workdir = write_config(tmp_path), tmp_path / "run"
    folder = workdir / "checkpoints"
    folder.mkdir(parents=True)
    with mounted(folder, "-t", "tmpfs", "-o", "ro", "tmpfs"):
        done = call(f"--config={config}", f"--workdir={workdir}", timeout=120)
    what = "its folder checkpoints cannot be written (Read-only file system)"
    assert_one_line_and_exit_code_2(done, what)


# --------------------------------------------------------------------------------------
# Killed while saving.

SAVING = """
import sys
from pathlib import Path

sys.path[:0] = sys.argv[2:]
from saved_states import at_step, zeros
from txl_jax.checkpoint.checkpoints import Checkpoints

folder = Path(sys.argv[1])
exp, state, _ = zeros(folder, **{"model.d_inner": 32768})  # 13 MB
with Checkpoints(str(folder / "run"), exp.checkpoint) as checkpoints:
    step = max(checkpoints.steps(), default=0)
    print("saving", flush=True)
    while True:
        step += 1
        meta = {"config": exp.to_dict(), "window": {"n": step}}
        checkpoints.save(step, at_step(state, step), meta, None)
        print(step, flush=True)
"""


@pytest.mark.slow
def test_killed_twenty_times_while_saving_there_is_always_a_checkpoint(tmp_path):
    """Each child process starts from the last checkpoint, and saves without pause until killed."""
    draw = random.Random(0)
    exp, state, abstract = zeros(tmp_path, **{"model.d_inner": 32768})
    newest = 0
    for _ in range(20):
        child = subprocess.Popen(
            [sys.executable, "-c", SAVING, str(tmp_path), *sys.path],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        assert child.stdout.readline() == "saving\n"
        n = draw.randint(1, 3)  # saves to wait for before the kill
        started = [int(child.stdout.readline() or 0) for _ in range(n)]
        time.sleep(draw.uniform(0, 0.5))
        child.kill()
        started += [int(line) for line in child.communicate()[0].split()]
        assert started == list(range(newest + 1, newest + 1 + len(started)))
        restored = restore(tmp_path, exp, abstract)
        if restored is None:
            assert newest == 0
            continue
        got, meta = restored
        step = int(got.step)
        assert max(newest, started[-1] - 1) <= step <= started[-1] + 1
        assert meta["window"] == {"n": step}
        want = at_step(state, step).params
        assert all(map(bool, jax.tree.leaves(jax.tree.map(np.array_equal, got.params, want))))
        newest = step
    assert newest >= 10


# --------------------------------------------------------------------------------------
# Signals to stop at any moment.


def sigterm(*_):
    os.kill(os.getpid(), signal.SIGTERM)


def before(function, then=sigterm):
    """Wraps a function: each call first calls ``then``, which by default sends a SIGTERM."""

    def captured(*arguments, **more):
        then()
        return function(*arguments, **more)

    return captured


def read_lines(workdir):
    """The lines of ``metrics.jsonl``; an empty list if there is no such file."""
    path = os.path.join(workdir, "metrics.jsonl")
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8") as file:
        return file.read().splitlines()


def after(function):
    """Wraps a function: each call sends a SIGTERM when the function has returned."""

    def captured(*arguments, **more):
        result = function(*arguments, **more)
        sigterm()
        return result

    return captured


MOMENTS = {
    "compiling": (
        StepSetup,
        "update",
        before,
        " before the first step, so there is nothing to save",
    ),
    "validating": (Evaluator, "run", before, ", and the state is saved"),
    "saving": (Checkpoints, "_save_items", after, ", and the state is saved"),
    "reporting": (run_module, "score_split", before, ", and the state is saved"),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder with an uninterrupted run in its subfolder ``whole``."""
    folder = tmp_path_factory.mktemp("whole")
    assert modes.train(experiment(folder), str(folder / "whole")) == 0
    return folder


ASKING = ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU"]


@pytest.mark.parametrize("name", ASKING)
def test_a_signal_asks_to_stop_and_is_handled_as_before_afterwards(name):
    number, taken = signal.Signals[name], []
    before = signal.signal(number, lambda *_: taken.append(number))
    try:
        with PreemptionGuard() as guard:
            signal.raise_signal(number)
            assert guard.requested()
            if name != "SIGINT":
                signal.raise_signal(number)  # schedulers repeat signals
            signal.raise_signal(signal.SIGTERM)
        assert (guard.signal, taken) == (number, [])
        signal.raise_signal(number)
        assert taken == [number]
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("name", ASKING[2:])
def test_an_ignored_warning_stays_ignored(name):
    number = signal.Signals[name]
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with PreemptionGuard() as guard:
            signal.raise_signal(number)
            assert not guard.requested()
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


@pytest.mark.integration
@pytest.mark.parametrize("moment", rest_slow(2, MOMENTS))
@pytest.mark.few(1)
def test_sigterm_ends_a_run_saved_with_exit_code_0(whole, moment, monkeypatch, capsys):
    owner, name, around, what = MOMENTS[moment]
    workdir = str(whole / moment)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, around(getattr(owner, name)))
        patch.setattr(modes, "typed_command", lambda: "COMMAND")
        assert modes.train(experiment(whole), workdir) == 0
    captured = capsys.readouterr().err
    assert captured.endswith(f"stopped by SIGTERM{what}; to resume:\n  COMMAND\n")
    scored = [r["step"] for r in map(json.loads, read_lines(workdir)) if r["kind"] == "valid"]
    assert scored == ([6, 12] if moment == "reporting" else [])  # others stop before validation
    assert not {"evaluation.json", "sample.txt"} & set(os.listdir(workdir))
    assert modes.train(experiment(whole), workdir) == 0
    assert_same_run(whole, whole / "whole", workdir)


# --------------------------------------------------------------------------------------
# Two runs in one folder.


@pytest.mark.integration
def test_a_second_run_in_a_workdir_refuses_and_evaluation_does_not(whole, capsys):
    workdir = whole / "whole"
    before = {p: p.stat().st_mtime_ns for p in workdir.iterdir() if p.name != "tensorboard"}
    with training_lock(str(workdir)):
        with pytest.raises(LockedError, match=f"process {os.getpid()} on "):
            modes.train(experiment(whole), str(workdir))
        there = {p: p.stat().st_mtime_ns for p in workdir.iterdir() if p.name != "tensorboard"}
        assert {p: t for p, t in there.items() if p.name != ".lock"} == {
            p: t for p, t in before.items() if p.name != ".lock"
        }
        assert modes.use_model("generate", None, {}, str(workdir), "best") == 0
    assert issubclass(LockedError, UserError)
