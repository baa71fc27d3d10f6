"""Loggers get the settings, the numbers, the sample and the final scores of a run."""

import contextlib
import json
import re
import sys
import time
from typing import Any

import pytest
from places import DOCS
from tiny_runs import experiment

import txl_jax
from txl_jax import modes, records
from txl_jax.config import ConfigError
from txl_jax.training.events import WandbRun, make_logger


class Recorder(txl_jax.Logger):
    """A logger that records the calls of its methods."""

    def __init__(self):
        self.calls: list[tuple[Any, ...]] = []

    def start(self, workdir, config, step):
        self.calls.append(("start", workdir, config, step))

    def metrics(self, step, values):
        self.calls.append(("metrics", step, dict(values)))

    def text(self, step, name, text):
        self.calls.append(("text", step, name, text))

    def close(self):
        self.calls.append(("close",))


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """Returns the workdir of a run, and the calls that the run's ``Recorder`` got.

    The example logger of docs/training.md gets the same calls.
    """
    folder = tmp_path_factory.mktemp("logged")
    (block,) = re.findall(r"```python\n(.*?)```", (DOCS / "training.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(block, "training.md", "exec"), names)
    recorder, workdir = Recorder(), folder / "run"
    loggers = [recorder, names["CsvLogger"]()]
    txl_jax.train(experiment(folder), workdir, loggers=loggers)
    return workdir, recorder.calls


@pytest.mark.integration
def test_a_logger_gets_the_whole_run_and_is_closed(logged):
    workdir, calls = logged
    assert calls[0][:2] == ("start", str(workdir))
    assert calls[0][2]["train"]["steps"] == 12
    assert calls[0][3] == 0
    assert calls[-1] == ("close",)
    numbers = [call[1:] for call in calls if call[0] == "metrics"]
    *sent, (step, scores) = numbers
    written = records.read_counted(workdir / "metrics.jsonl")[0]
    assert [s for s, _ in sent] == [record["step"] for record in written]
    assert [v.get("train/bpc", v.get("valid/bpc")) for _, v in sent] == [r["bpc"] for r in written]
    final = json.loads((workdir / "evaluation.json").read_text())
    first, second = final["results"][:2]
    assert step == final["step"]
    assert scores["test/bpc"] == first["bpc"]
    assert scores[f"test/{second['name'].replace(' ', '_')}/bpc"] == second["bpc"]
    assert ("text", step, "sample", (workdir / "sample.txt").read_text()) in calls


def test_a_run_that_does_not_start_closes_only_the_loggers_that_were_started(tmp_path):
    recorder, exp = Recorder(), experiment(tmp_path, **{"data.path": str(tmp_path / "none.txt")})
    with pytest.raises(txl_jax.DataError):
        txl_jax.train(exp, tmp_path / "run", loggers=[recorder])
    assert recorder.calls == []


@pytest.mark.integration
def test_the_logger_of_the_page_works(logged):
    lines = (logged[0] / "metrics.csv").read_text().splitlines()
    assert lines[0] == "step,name,value"
    names = {line.split(",")[1] for line in lines[1:]}
    assert {"train/loss", "valid/bpc", "test/bpc"} <= names


def test_without_wandb_a_run_is_refused_at_once_with_the_extra_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr("txl_jax.training.run.plan_run", None)
    with pytest.raises(ConfigError, match=r"train\.wandb = 'p': .*pip install 'txl_jax\[wandb\]'"):
        modes.train(experiment(tmp_path, **{"train.wandb": "p"}), str(tmp_path / "run"))


@pytest.mark.integration
def test_wandb_gets_the_run_offline_and_a_resumed_run_continues_it(tmp_path, monkeypatch):
    """The test reads the file of an offline run, where wandb stores texts as plain bytes."""
    wandb = pytest.importorskip("wandb", reason="the extra wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    init, given = wandb.init, list[dict[str, Any]]()

    def spied(**settings):
        given.append(settings)
        return init(**settings)

    monkeypatch.setattr(wandb, "init", spied)
    for step in (0, 4):
        run = make_logger("a-project")
        with contextlib.closing(run):
            run.start(str(tmp_path), {"seed": 7, "settings": {"width": 5}}, step)
            run.metrics(step + 1, {"train/bpb": 1.5})
            run.text(step + 1, "sample", "a <word>\n")
    name = (tmp_path / "wandb" / "id").read_text()
    assert [(one["id"], one["resume"]) for one in given] == 2 * [(name, "allow")]
    first, second = sorted((tmp_path / "wandb").glob(f"offline-run-*/run-{name}.wandb"))
    for path in (first, second):
        limit, wanted = time.monotonic() + 60, {b"a-project", b"width", b"train/bpb", b"sample"}
        while not all(text in path.read_bytes() for text in wanted):  # written asynchronously
            assert time.monotonic() < limit, path.read_bytes()
            time.sleep(0.05)
    (page,) = first.parent.glob("files/media/html/*.html")
    assert "<pre>a &lt;word&gt;\n</pre>" in page.read_text()


@pytest.mark.integration
def test_each_of_several_seeds_has_a_run_of_its_own(tmp_path, monkeypatch):
    """By default, a second wandb start in one process would continue the run of the first."""
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    with contextlib.ExitStack() as stack:
        for seed in (0, 1):
            run = stack.enter_context(contextlib.closing(make_logger("a-project")))
            run.start(str(tmp_path / f"seed_{seed}"), {}, 0)
            run.metrics(1, {f"train/of_seed_{seed}": 1.5})
    for seed in (0, 1):
        (file,) = tmp_path.glob(f"seed_{seed}/wandb/offline-run-*/*.wandb")
        limit = time.monotonic() + 60
        while f"of_seed_{seed}".encode() not in file.read_bytes():  # written asynchronously
            assert time.monotonic() < limit, file.read_bytes()
            time.sleep(0.05)
        assert f"of_seed_{1 - seed}".encode() not in file.read_bytes()


def test_a_run_that_wandb_cannot_start_is_refused_in_one_line(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="the extra wandb is not installed")

    def refused(**settings):
        raise wandb.errors.UsageError("No API key configured")

    monkeypatch.setattr(wandb, "init", refused)
    with pytest.raises(ConfigError, match=r"No API key configured; run wandb login, or set WANDB_"):
        WandbRun("p").start(str(tmp_path), {}, 0)
