"""The records of a run are the same however often it was stopped, except for their times."""

import contextlib
import fcntl
import json
import math
import os
import re
import resource
import shutil
import struct
import subprocess
import sys
import termios
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from txl_jax import progress, records
from txl_jax.checkpoint import provenance
from txl_jax.training import events, goodput, run_log
from txl_jax.training.events import Logger
from txl_jax.training.run_log import RunLog


def metrics(nll_sum, count, grad_norm, learning_rate, tokens=100):
    """The metrics of a step."""
    return {
        "nll_sum": nll_sum,
        "count": count,
        "grad_norm": grad_norm,
        "learning_rate": learning_rate,
        "tokens": tokens,
    }


def _step(log: RunLog, step: int) -> None:
    """Logs an update with values that have no short decimal form."""
    nll_sum = float(np.float32(1000 / (step + 2) + math.pi))
    log.train_step(step, metrics(nll_sum, 97 + step % 3, math.sqrt(step), 2.5e-4 / step))


def _train(log: RunLog, start: int, stop: int, windows: dict[int, str] | None = None) -> None:
    """Logs steps start+1 ... stop like the training loop: train records every 4, valid every 8."""
    for step in range(start + 1, stop + 1):
        _step(log, step)
        if step % 4 == 0 or step == 21:
            log.flush_window(step, epoch=step / 13)
        if step % 8 == 0:
            log.record("valid", step, {"loss": np.float32(3 / step)}, {"seconds": 1.5})
        if windows is not None:
            windows[step] = json.dumps(log.window)


def _untimed(workdir: Path) -> list[str]:
    kept = records.read_counted(workdir / "metrics.jsonl")[0]
    return [json.dumps({k: v for k, v in r.items() if k != "timing"}) for r in kept]


@pytest.fixture
def make(tmp_path):
    """Makes run logs in ``tmp_path/name`` and closes them at the end."""
    logs = []

    def make(name: str = "run", **changes) -> RunLog:
        settings: dict[str, Any] = {"total_steps": 21, "unit": "bpc", **changes}
        settings = {"logger": events.make_logger(None), "config": {"seed": 3}, **settings}
        logs.append(RunLog(tmp_path / name, **settings))
        return logs[-1]

    yield make
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_log, "draw_loss_curve", lambda *settings: None)  # a curve takes 0.3 s
        for log in logs:
            log.close()


@pytest.fixture
def terminal(monkeypatch, capsys):
    """Makes standard error look like a terminal."""
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda stream: True)


@pytest.fixture
def clock(monkeypatch):
    """A wall clock that the test moves: ``clock[0] += seconds``."""
    now = [100.0]
    monkeypatch.setattr(goodput, "perf_counter", lambda: now[0])
    return now


@pytest.mark.parametrize("checkpoint", [1, 6, 8, 11, 20, 21])
def test_a_resumed_run_leaves_bit_identical_records(make, tmp_path, checkpoint):
    _train(make("whole"), 0, 21)

    windows: dict[int, str] = {}
    _train(make("cut"), 0, min(checkpoint + 7, 21), windows)
    with open(tmp_path / "cut" / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "step": 3, "lo')  # as after kill -9
    resumed = make("cut", resume_step=checkpoint, window=json.loads(windows[checkpoint]))
    _train(resumed, checkpoint, 21)

    assert _untimed(tmp_path / "cut") == _untimed(tmp_path / "whole")
    assert len(_untimed(tmp_path / "whole")) == 8


def test_resuming_keeps_earlier_lines_byte_for_byte_and_drops_later_and_half_lines(make, tmp_path):
    _train(make(), 0, 20)
    path = tmp_path / "run" / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:-9])
    make(resume_step=8)
    assert path.read_bytes() == b"".join(lines[:3])
    assert [json.loads(line)["step"] for line in lines[:4]] == [4, 8, 8, 12]
    assert os.listdir(tmp_path / "run").count("metrics.jsonl.tmp") == 0


def test_a_last_record_that_lacks_only_its_line_end_is_kept(make, tmp_path):
    _train(make(), 0, 8)
    path = tmp_path / "run" / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    make(resume_step=8)
    assert path.read_bytes() == whole


def test_a_resumed_run_writes_the_records_of_its_first_step_again(tmp_path):
    """Resuming at step 2 drops that step's valid record, later records and an unfinished line.

    Other complete lines stay, even those that are no records.
    """
    path = tmp_path / "metrics.jsonl"
    old = [{"kind": kind, "step": step} for step in (1, 2, 3) for kind in ("train", "valid")]
    records.append(str(path), *old)
    with open(path, "a") as file:
        deep = "[" * 100_000
        file.write(f'not JSON\n{deep}\n{{"kind": "train", "st')
    records.truncate(str(path), 2, rewritten="valid")
    assert records.read_counted(path)[0] == old[:3]
    assert path.read_text().splitlines()[-2:] == ["not JSON", deep]
    records.truncate(str(path), 0, rewritten=None)
    assert path.read_text() == ""


def test_a_run_from_the_beginning_starts_with_empty_records(make, tmp_path):
    make().record("valid", 0, {"loss": 1.0})
    make()
    assert _untimed(tmp_path / "run") == []


def test_the_wall_clock_shows_under_timing_only(make, tmp_path, clock):
    for name, pace in (("slow", 3.0), ("fast", 0.25)):
        log = make(name)
        for step in range(1, 10):
            clock[0] += pace
            _step(log, step)
            if step % 3 == 0:
                log.flush_window(step)
                log.record("valid", step, {"loss": 1.25}, {"seconds": pace})
    assert _untimed(tmp_path / "slow") == _untimed(tmp_path / "fast")
    slow, fast = (records.read_counted(tmp_path / n / "metrics.jsonl")[0] for n in ("slow", "fast"))
    assert all(a["timing"] != b["timing"] for a, b in zip(slow, fast, strict=True))


def test_a_training_record_holds_the_means_of_its_window(make, tmp_path):
    log = make(unit="ppl")
    log.train_step(1, metrics(10.0, 4.0, 1.0, 0.5, 4))
    log.train_step(2, metrics(2.0, 2.0, 4.0, 0.25, 2))
    log.flush_window(2, epoch=0.5)
    log.flush_window(2)  # an empty window writes no record
    log.train_step(3, metrics(6.0, 2.0, 7.0, 0.125, 2))
    log.flush_window(3)
    first, second = records.read_counted(tmp_path / "run" / "metrics.jsonl")[0]
    first.pop("timing")
    assert first == {
        "kind": "train",
        "step": 2,
        "epoch": 0.5,
        "loss": 2.0,
        "ppl": math.exp(2.0),
        "grad_norm": 2.5,
        "learning_rate": 0.25,
    }
    assert (second["loss"], second["grad_norm"], second["learning_rate"]) == (3.0, 7.0, 0.125)


def test_speed_leaves_out_pauses(make, tmp_path, clock):
    log = make()
    for step in (1, 2):
        clock[0] += 2.0
        _step(log, step)
        with log.goodput.pause("evaluate"):
            clock[0] += 50.0
        with log.goodput.pause("compile"):
            clock[0] += 50.0
        if step == 2:
            clock[0] += 1.0
    log.flush_window(2)
    (record,) = records.read_counted(tmp_path / "run" / "metrics.jsonl")[0]
    timing = {"seconds": 5.0, "tokens_per_second": 40.0, "data_seconds": 0.0, "save_seconds": 0.0}
    assert record["timing"] == timing


def test_seconds_lost_to_data_and_saving_stand_in_the_record_they_fell_into(make, tmp_path, clock):
    log = make()

    def batches():
        for _ in range(2):
            clock[0] += 0.5
            yield

    for step, _ in enumerate(log.goodput.waiting(batches()), start=1):
        clock[0] += 2.0
        _step(log, step)
        log.flush_window(step)
        with log.goodput.pause("save"):
            clock[0] += 7.0
    _step(log, 3)
    log.flush_window(3)
    timings = [r["timing"] for r in records.read_counted(tmp_path / "run" / "metrics.jsonl")[0]]
    assert [t["seconds"] for t in timings] == [2.5, 2.5, 0.0]
    assert [t["data_seconds"] for t in timings] == [0.5, 0.5, 0.0]
    assert [t["save_seconds"] for t in timings] == [0.0, 7.0, 7.0]
    with log.goodput.pause("compile"):
        clock[0] += 1.0
    assert log.goodput.line() == (
        "time 20.0 s: step 4.0, compile 1.0, data 1.0, evaluate 0.0, save 14.0; 20% in steps"
    )


def test_records_that_cannot_be_written_raise_or_wait_whole(make, tmp_path, monkeypatch):
    """To imitate a full disk, a limit on the file's size lies in the middle of its fourth line."""
    log = make("whole")
    _train(log, 0, 21)
    lines = (tmp_path / "whole" / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    impatient, patient = make("impatient"), make("patient", tolerate_errors=True)
    for log in (impatient, patient):
        monkeypatch.setattr(log, "_logger", Logger())
        monkeypatch.setattr(log._console, "message", lambda text: None)  # stderr is limited too
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (sum(map(len, lines[:3])) + 90, hard))
        with pytest.raises(OSError, match=r"cannot write: .*metrics\.jsonl"):
            _train(impatient, 0, 21)
        _train(patient, 0, 16)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(_untimed(tmp_path / "impatient")) == len(_untimed(tmp_path / "patient")) == 3
    assert (tmp_path / "patient" / "metrics.jsonl").read_bytes().endswith(b"}\n")
    _train(patient, 16, 21)
    assert _untimed(tmp_path / "patient") == _untimed(tmp_path / "whole")


def test_skipped_steps_are_counted_and_in_no_mean(make, tmp_path, capsys):
    log = make()
    _step(log, 1)
    log.skipped_step(2, "gradient norm is nan", metrics(math.nan, 1, math.nan, 0.5))
    log.flush_window(2)
    log.skipped_step(3, "gradient norm is nan", metrics(math.nan, 1, math.nan, 0.25))
    assert log.window["skipped"] == 1
    log.flush_window(3)
    whole = make("whole")
    _step(whole, 1)
    whole.flush_window(2)
    first, second = records.read_counted(tmp_path / "run" / "metrics.jsonl")[0]
    (want,) = records.read_counted(tmp_path / "whole" / "metrics.jsonl")[0]
    for key in ("loss", "bpc", "grad_norm"):
        assert first[key] == want[key]
        assert second[key] is None
    assert (first["skipped"], second["skipped"]) == (1, 1)
    assert (first["learning_rate"], second["learning_rate"]) == (0.5, 0.25)
    captured = capsys.readouterr().err
    assert "step  2/21  skipped: gradient norm is nan\n" in captured
    assert "lr 5.0e-01  skipped 1  " in captured


def test_a_number_that_is_not_finite_is_null_and_every_line_is_strict_json(make, tmp_path):
    log = make(unit="ppl")
    log.train_step(1, metrics(math.nan, 1.0, math.inf, 0.1, 1))
    log.flush_window(1)
    log.record("valid", 1, {"loss": np.float32(1e9), "inner": [np.int64(3), {"a": math.nan}]})

    def refuse(name):
        raise AssertionError(name)

    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    train, valid = (json.loads(line, parse_constant=refuse) for line in lines)
    assert train["loss"] is train["ppl"] is train["grad_norm"] is None
    assert valid["loss"] == 1e9
    assert valid["ppl"] is None
    assert valid["inner"] == [3, {"a": None}]


def test_without_a_terminal_each_record_is_one_plain_line(make, capsys, clock):
    log = make(total_steps=1000)
    for step in range(1, 101):
        clock[0] += 0.125
        log.train_step(step, metrics(2.345 * 1543, 1543, 1.0, 2.5e-4, 1543))
    log.flush_window(100)
    log.record("valid", 100, {"loss": 2.0, "tokens": 512})
    assert capsys.readouterr().err.splitlines() == [
        "step  100/1000  bpc 3.383  lr 2.5e-04  12,344 tok/s  0:01:52 left",
        "step  100/1000  valid  bpc 2.885  tokens 512",
    ]


def test_time_left_follows_the_recent_steps(make, capsys, clock):
    log = make(total_steps=1000)
    for step in range(1, 201):
        clock[0] += 100.0 if step <= 100 else 2.0
        _step(log, step)
    log.flush_window(200)
    assert capsys.readouterr().err.rstrip().endswith("  0:26:40 left")


@pytest.mark.parametrize("stream", [None, types.SimpleNamespace(write=len, flush=bool)])
def test_a_program_may_have_no_standard_error_or_an_object_that_can_only_write(
    make, tmp_path, monkeypatch, stream
):
    """A service, or a program with a window but no console, has no standard error."""
    monkeypatch.setattr(sys, "stderr", stream)
    _train(make("run"), 0, 10)
    assert not progress.is_watched()
    assert (tmp_path / "run/metrics.jsonl").exists()


@pytest.mark.parametrize(("columns", "most"), [(0, 79), (60, 59), (200, 79)])
def test_a_bar_fits_a_terminal_of_any_size(make, monkeypatch, columns, most):
    """A container's terminal can report 0 columns, for which tqdm would show nothing."""
    outer, inner = os.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("4H", 0, columns, 0, 0))
    with os.fdopen(inner, "w") as stream, os.fdopen(outer, "rb", buffering=0) as screen:
        monkeypatch.setattr(sys, "stderr", stream)
        log = make(unit="ppl")
        _train(log, 1, 4)
        log.close()
        assert stream.isatty()
        seen = screen.read(100_000).decode()
    assert "step 4/" in seen
    assert max(map(len, re.split(r"[\r\n]", seen))) == most


def test_on_a_terminal_a_bar_shows_the_loss_and_messages_stand_above_it(make, terminal, capsys):
    log = make(unit="ppl")
    _train(log, 0, 21)
    log.message("a checkpoint was saved")
    log.close()
    text = capsys.readouterr().err
    assert re.search(r"step 21/21 \|█+\| ppl \d+\.\d\d  ", text)
    assert re.search(r"(^|\r|\n)a checkpoint was saved\n", text)
    assert "lr " not in text


@pytest.mark.parametrize(
    ("unit", "loss"), [("bpb", 1.4), ("bpc", 1.4), ("ppl", 12.0), ("ppl", 1e3)]
)
def test_the_bar_and_the_time_left_fit_80_columns(make, terminal, capsys, clock, unit, loss):
    log = make(unit=unit, total_steps=9_999_999, resume_step=8_000_000)
    for step in range(8_000_001, 8_000_003):
        clock[0] += 3.0
        log.train_step(step, metrics(loss, 1.0, 1.0, 0.1, 3_000_000))
    log.close()
    shown = re.split(r"[\r\n]", capsys.readouterr().err.rstrip())[-1]
    value = {"bpb": "bpb 2.020", "bpc": "bpc 2.020", 12.0: "ppl 162754.79", 1e3: "ppl inf"}
    assert value.get(loss, value.get(unit, "")) in shown
    assert shown.endswith("  1,000,000 tok/s  1666:39:51 left")
    assert len(shown) <= 80


@pytest.mark.parametrize("unit", ["bpc", "ppl"])
def test_the_curve_of_a_run_is_a_readable_png(make, tmp_path, unit, monkeypatch):
    from matplotlib.axes import Axes
    from matplotlib.image import imread

    titles = []
    monkeypatch.setattr(Axes, "set_title", lambda self, text, **more: titles.append(text))
    log = make(unit=unit)
    _train(log, 0, 21)
    log.record("train", 22, {"loss": math.nan})
    assert not (tmp_path / "run" / "loss.png").exists()
    log.close()
    assert [title.splitlines()[0] for title in titles] == ["run"]
    image = imread(tmp_path / "run" / "loss.png")[..., :3]
    assert image.shape == (600, 960, 3)
    colours = {"training": (31, 119, 180), "validation": (255, 127, 14), "best": (214, 39, 40)}
    for name, colour in colours.items():
        drawn = (np.abs(image * 255 - np.array(colour)) < 2).all(-1)
        assert drawn.sum() > 20, name


def test_a_run_that_is_stopped_by_an_error_leaves_its_curve_and_one_without_records_none(tmp_path):
    def stopped():
        log = RunLog(tmp_path / "a", total_steps=9, unit="bpc")
        with contextlib.closing(log):
            _train(log, 0, 5)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert (tmp_path / "a" / "loss.png").exists()
    RunLog(tmp_path / "b", total_steps=9, unit="bpc").close()
    assert not (tmp_path / "b" / "loss.png").exists()


FOREIGN = [
    '{"step": 4, "loss": 1.0, "bpc": 1.4}',  # no kind
    '{"kind": "train", "step": "4", "bpc": 1.0}',
    '{"kind": "train", "step": true, "bpc": 1.0}',
    '{"kind": ["train"], "step": 4, "bpc": 1.0}',
    '["kind", "step"]',
    "7",
    '{"kind": "train", "st',
    "\udcff",
]
"""Lines that are not records: from another program, edited by hand, or damaged."""


def test_lines_that_are_no_records_are_skipped_counted_and_kept(make, tmp_path, capsys):
    log = make()
    _train(log, 0, 8)
    log.close()
    path = tmp_path / "run" / "metrics.jsonl"
    own = path.read_bytes().splitlines(keepends=True)
    foreign = "".join(line + "\n" for line in FOREIGN).encode("utf-8", "surrogateescape")
    path.write_bytes(own[0] + foreign + b"".join(own[1:]) + b'{"kind": "tr')
    half_written = path.read_bytes()
    log = make(resume_step=8)
    assert path.read_bytes() == own[0] + foreign + b"".join(own[1:])
    _train(log, 8, 21)
    log.close()
    assert (tmp_path / "run" / "loss.png").exists()
    said = f"metrics.jsonl: {len(FOREIGN)} lines were skipped (damaged, or no record of a run)"
    assert said in capsys.readouterr().err
    _train(make("whole"), 0, 21)
    assert _untimed(tmp_path / "run") == _untimed(tmp_path / "whole")
    path.write_bytes(half_written)
    assert records.read_counted(path)[1] == len(FOREIGN)  # an unfinished last line is not counted


def test_a_curve_that_cannot_be_drawn_does_not_end_the_run(make, tmp_path, capsys):
    log = make()
    _train(log, 0, 8)
    (tmp_path / "run" / "loss.png").mkdir()
    log.close()
    (line,) = [s for s in capsys.readouterr().err.splitlines() if "drawn" in s]
    assert "loss.png: the loss curve cannot be drawn (IsADirectoryError(" in line


def _events(workdir: Path):
    from tensorboardX.proto.event_pb2 import Event

    for path in sorted((workdir / "tensorboard").iterdir()):
        assert "tfevents" in path.name
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("Q", data[:8])
            yield Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]


def test_tensorboard_gets_the_settings_and_texts(make, tmp_path):
    board = events.make_logger(None)
    make(logger=board)
    board.text(21, "sample", "a *star*\nand \udcff")
    texts = {
        value.tag: (event.step, value.tensor.string_val[0].decode())
        for event in _events(tmp_path / "run")
        for value in event.summary.value
        if value.metadata.plugin_data.plugin_name == "text"
    }
    step, config = texts["config"]
    assert (step, json.loads(config)) == (0, {"seed": 3})
    assert texts["sample"] == (21, "    a *star*\n    and ?\n")


def test_tensorboard_gets_the_same_numbers_at_once_and_hides_those_that_are_made_again(
    make, tmp_path
):
    log = make()
    _train(log, 0, 8)
    make(resume_step=4)
    seen = [
        (e.step, v.tag, v.simple_value) for e in _events(tmp_path / "run") for v in e.summary.value
    ]
    shown = {(step, tag): value for step, tag, value in seen}
    # The expected records are read from a run that was not resumed.
    _train(make("other"), 0, 8)
    for record in records.read_counted(tmp_path / "other" / "metrics.jsonl")[0]:
        key = (record["step"], f"{record['kind']}/bpc")
        assert shown[key] == pytest.approx(record["bpc"], rel=1e-6)
    assert (8, "train/tokens_per_second") in shown
    starts = [e.step for e in _events(tmp_path / "run") if e.HasField("session_log")]
    assert starts == [0, 5]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_run_goes_on_if_its_tensorboard_folder_is_removed(make, tmp_path):
    log = make()
    _train(log, 0, 4)
    shutil.rmtree(tmp_path / "run" / "tensorboard")
    _train(log, 4, 8)
    assert list((tmp_path / "run" / "tensorboard").iterdir())


def test_a_full_disk_is_an_error_that_names_the_file_and_not_a_hang(make, tmp_path, monkeypatch):
    log = make()
    path = tmp_path / "run" / "metrics.jsonl"
    path.unlink()
    path.symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"cannot write: No space left.*metrics\.jsonl"):
        log.record("valid", 1, {"loss": 1.0})
    path.unlink()
    path.touch()

    monkeypatch.setattr(events.time, "time_ns", lambda: 1)
    (tmp_path / "full" / "tensorboard").mkdir(parents=True)
    (tmp_path / "full" / "tensorboard" / "events.out.tfevents.1").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"cannot write: No space left.*tfevents"):
        make("full")


# --------------------------------------------------------------------------------------
# Provenance.


def test_provenance_names_versions_and_devices_and_neither_host_nor_user_nor_path():
    import jax
    import numpy

    got = provenance.provenance()
    assert got["versions"]["jax"] == jax.__version__
    assert got["versions"]["numpy"] == numpy.__version__
    assert got["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert None not in [v for k, v in got["versions"].items() if k != "txl_jax"]
    assert got["device_count"] == len(jax.devices())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", got["date"])
    text = json.dumps(got)
    assert os.uname().nodename not in text
    assert os.sep not in text
    assert set(got) == {"versions", "revision", "platform", "device_kind", "device_count", "date"}


def test_the_revision_is_the_commit_with_dirty_for_a_change_and_none_where_git_does_not_track(
    tmp_path,
):
    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    package, other = tmp_path / "package", tmp_path / "other"
    package.mkdir()
    other.mkdir()
    assert provenance.revision(str(package)) is None  # no repository
    git("init", "-q")
    (package / "a.py").write_text("1")
    git("add", "package")
    assert provenance.revision(str(package)) is None  # no commit
    git("commit", "-q", "-m", "first")
    (other / "notes").write_text("not the package's")
    assert provenance.revision(str(package)) == git("rev-parse", "HEAD")
    assert provenance.revision(str(other)) is None
    (package / "a.py").write_text("2")
    assert provenance.revision(str(package)) == git("rev-parse", "HEAD") + "+dirty"
