"""Workdirs, texts and models can be in a bucket of Google Cloud Storage (here an emulator).

Tests that need the bucket are skipped if the extra ``gcs`` or the emulator is not installed.
"""

import contextlib
import gzip
import importlib.util
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
import tiny_runs
from run_records import StopAt, assert_same_run
from tiny_runs import corpus_and_experiment, train

import txl_jax
from txl_jax import files, modes, paths, records
from txl_jax.checkpoint import lock
from txl_jax.checkpoint.checkpoint_folder import CheckpointFolder
from txl_jax.checkpoint.errors import ModelFormatError
from txl_jax.checkpoint.lock import LockedError, training_lock
from txl_jax.config import ConfigError, override
from txl_jax.data.errors import DataError
from txl_jax.paths import StorageError
from txl_jax.training.preemption import PreemptionGuard

DROPOUT = {"model.dropout": 0.2}


# Paths.


@pytest.mark.parametrize(
    ("address", "fault"),
    [
        ("gs://", "must be gs://BUCKET/NAME"),
        ("gs:///run", "must be gs://BUCKET/NAME"),
        ("gs://Box/run", "must be gs://BUCKET/NAME"),
        ("gs://box//run", "with a bucket in lower case and names that are not empty"),
        ("gs://box/a*", "have none of"),
        ("gs://box/a#1", "have none of"),
        ("gs://box/a\\b", "have none of"),
        ("gs://box/a\n", "have none of"),
        ("gs://box/a/../b", "names that are not empty, '.' or '..'"),
    ],
)
def test_an_address_that_cannot_work_is_refused_in_one_line(address, fault):
    for use in (
        lambda: txl_jax.load(address),
        lambda: txl_jax.train("quickstart:smoke", address),
        lambda: txl_jax.load_config("quickstart:smoke", {"data.path": address}),
    ):
        with pytest.raises(ConfigError) as caught:
            use()
        assert fault in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["data.cache_dir", "generate.json", "score.json"])
def test_what_must_be_local_is_refused_in_a_bucket(key):
    with pytest.raises(ConfigError, match="is a URL, and only local paths can be used"):
        txl_jax.load_config("quickstart:smoke", {key: "gs://box/x"})


def test_an_address_that_pathlib_has_shortened_is_explained():
    with pytest.raises(ConfigError, match=r"pathlib\.Path drops a slash of gs://"):
        txl_jax.train("quickstart:smoke", pathlib.Path("gs://box/run"))


def test_without_its_package_the_error_names_the_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs a package: pip install 'txl_jax\[gcs\]'"):
        txl_jax.train("quickstart:smoke", "gs://box/run")


def test_help_and_settings_load_no_client_of_a_bucket():
    code = (
        "import sys, txl_jax.main; print([m for m in sys.modules if m in ('gcsfs', 'etils.epath')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("root", ["/gs/x", "/s3/x", "/az/x", "/hf/x"])
def test_a_local_folder_with_the_name_of_a_scheme_is_local(root):
    assert not paths.path(root, "run").exists()
    assert os.path.realpath(paths.path(root, "run")) == f"{root}/run"


@pytest.mark.integration
def test_a_bucket_that_does_not_exist_is_refused_in_one_line(objects):
    with pytest.raises(StorageError, match=r"gs://other: cannot be listed \(there is no such buc"):
        txl_jax.train("quickstart:smoke", "gs://other/run")


@pytest.mark.integration
def test_lines_are_appended_and_files_replaced_listed_and_removed(place):
    assert paths.names(place) == []
    assert not paths.path(place).exists()
    lines = [{"kind": "train", "step": n, "loss": n / 3} for n in range(5)]
    for line in lines:
        records.append(f"{place}/a/metrics.jsonl", line)
    assert records.read_counted(f"{place}/a/metrics.jsonl") == (lines, 0)
    records.truncate(f"{place}/a/metrics.jsonl", 2, None)
    assert records.read_counted(f"{place}/a/metrics.jsonl")[0] == lines[:3]
    large = random.Random(0).randbytes(6_000_000)
    files.atomic_write(f"{place}/a/large", large)
    assert paths.path(place, "a", "large").read_bytes() == large
    files.atomic_write(f"{place}/a/large", b"small")
    assert paths.path(place, "a", "large").read_bytes() == b"small"
    assert sorted(paths.names(f"{place}/a")) == ["large", "metrics.jsonl"]
    assert sorted(paths.files_in(place)) == ["a/large", "a/metrics.jsonl"]
    paths.remove_folder(f"{place}/a")
    assert paths.names(place) == []


@pytest.mark.integration
def test_a_line_is_not_lost_while_the_bucket_cannot_be_read(place, monkeypatch):
    records.append(f"{place}/metrics.jsonl", {"kind": "train"})

    def refused(*_, **__):
        raise RuntimeError("no network")

    with monkeypatch.context() as patch:
        patch.setattr(paths.store(), "cat_file", refused)
        with pytest.raises(OSError, match="cannot write: no network"):
            records.append(f"{place}/metrics.jsonl", {"kind": "valid"})
    assert paths.path(place, "metrics.jsonl").read_bytes() == b'{"kind": "train"}\n'


# The lock.

HOLD = """
import sys
from txl_jax.checkpoint.errors import ModelFormatError
from txl_jax.checkpoint.lock import training_lock
with training_lock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def other_holder(place):
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, place],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


@pytest.mark.slow
def test_a_killed_run_of_this_machine_leaves_its_bucket_lock_free(place, monkeypatch):
    with other_holder(place) as process:
        monkeypatch.setattr(lock, "_STEP", 0.1)
        monkeypatch.setattr(lock, "EXPIRES_AFTER", 2 * lock.RENEWED_EVERY)
        refused = pytest.raises(LockedError, match=f"process {process.pid} on .* trains in this")
        with refused, training_lock(place):
            pass
        process.kill()
        process.wait()
        start = time.monotonic()
        with training_lock(place):
            assert time.monotonic() < start + 5
    assert ".lock" not in paths.names(place)


@pytest.mark.integration
def test_a_lock_of_another_machine_is_taken_when_it_is_no_longer_renewed(
    place, monkeypatch, capsys
):
    monkeypatch.setattr(lock, "_STEP", 0.05)
    monkeypatch.setattr(lock, "RENEWED_EVERY", 0.1)
    monkeypatch.setattr(lock, "EXPIRES_AFTER", 1.0)
    monkeypatch.setattr(lock, "_machine", lambda: "another")
    with training_lock(place):
        held = paths.path(place, ".lock").read_bytes()
        with pytest.raises(LockedError), training_lock(place):  # the lock is renewed
            pass
        monkeypatch.setattr(lock, "_machine", lambda: "this")
        with pytest.raises(LockedError), training_lock(place):
            pass
    capsys.readouterr()
    files.atomic_write(f"{place}/.lock", held)  # a killed holder leaves its lock file
    with training_lock(place):
        assert paths.path(place, ".lock").read_bytes() != held
    assert "waiting for process" in capsys.readouterr().err
    assert ".lock" not in paths.names(place)


# Runs.


@pytest.mark.slow
def test_a_run_in_a_bucket_stopped_and_resumed_has_the_bits_of_a_local_run(tmp_path, place):
    corpus, exp = corpus_and_experiment(tmp_path, **DROPOUT)
    tiny_runs.run_in_workdir(tmp_path, tmp_path / "whole", **DROPOUT)
    tiny_runs.claimed(place, exp, corpus)
    stopped = train(exp, corpus, place, StopAt(8))
    assert not stopped.finished
    assert train(exp, corpus, place, PreemptionGuard()).finished
    assert_same_run(tmp_path, tmp_path / "whole", place, **DROPOUT)
    local = {name for name in paths.files_in(str(tmp_path / "whole")) if "/" not in name}
    assert {name for name in paths.names(place) if "." in name} == local
    kept = CheckpointFolder(str(tmp_path / "whole")).steps()
    assert CheckpointFolder(place).steps() == kept
    want, got = txl_jax.load(tmp_path / "whole"), txl_jax.load(place)
    jax.tree.map(np.testing.assert_array_equal, want.params, got.params)
    txl_jax.save(got, f"{place}-exported")
    again = txl_jax.load(f"{place}-exported")
    jax.tree.map(np.testing.assert_array_equal, want.params, again.params)
    assert again.vocab.to_json() == want.vocab.to_json()
    with pytest.raises(ModelFormatError, match="is not empty"):
        txl_jax.save(got, f"{place}-exported")


@pytest.mark.slow
def test_a_damaged_checkpoint_in_a_bucket_is_moved_aside(tmp_path, place, capsys):
    corpus, exp = corpus_and_experiment(tmp_path)
    tiny_runs.run(tmp_path, tmp_path / "whole")
    train(exp, corpus, place, StopAt(10))
    *_, newest = CheckpointFolder(place).steps()
    (array,) = paths.names(folder := f"{place}/checkpoints/{newest}/params/d")
    files.atomic_write(f"{folder}/{array}", b"other")
    assert train(exp, corpus, place, PreemptionGuard()).finished
    assert f"renamed to checkpoints/damaged-{newest}" in capsys.readouterr().out
    assert f"damaged-{newest}" in paths.names(f"{place}/checkpoints")
    assert_same_run(tmp_path, tmp_path / "whole", place)


@pytest.mark.integration
@pytest.mark.parametrize("killed", ["copying", "removing", "saving again"])
def test_replacing_a_checkpoint_in_a_bucket_leaves_one_complete_at_any_kill(
    place, monkeypatch, killed
):
    class KillError(BaseException):
        pass

    folder = CheckpointFolder(place)
    for name in ("params/d/a", "params/d/b", "meta/metadata", "commit_success.txt"):
        files.atomic_write(f"{folder.step_path(4)}/{name}", name.encode())
    calls = 0

    def dies(*arguments, **settings):
        nonlocal calls
        calls += 1
        if calls == (3 if killed == "copying" else 2):
            raise KillError
        return real(*arguments, **settings)

    client = paths.store()
    if killed == "saving again":
        folder.begin_replacing(4)
        files.atomic_write(f"{folder.step_path(4)}/params/d/new", b"half")
    else:
        method = "copy" if killed == "copying" else "rm"
        real = getattr(client, method)
        with monkeypatch.context() as patch:
            patch.setattr(client, method, dies)
            with pytest.raises(KillError):
                folder.begin_replacing(4)
    folder.finish_replacing()
    folder.remove_temporary()
    assert folder.steps() == [4]
    stored = {name: paths.path(folder.step_path(4), name).read_bytes().decode()
              for name in paths.files_in(folder.step_path(4))}  # fmt: skip
    assert len(stored) == 4
    assert all(name == content for name, content in stored.items())


KILLS = 6


@pytest.mark.slow
def test_killed_in_the_middle_of_saves_in_a_bucket_and_resumed_is_bit_identical(
    tmp_path, place, objects
):
    changes = {**DROPOUT, "checkpoint.every": 1, "generate.length": 0}
    config = tiny_runs.write_config(tmp_path, **changes)
    environment = {"TXL_DATA_DIR": os.environ.get("TXL_DATA_DIR", str(tmp_path / "data"))}
    whole = tiny_runs.call(f"--config={config}", f"--workdir={tmp_path / 'whole'}", **environment)
    assert whole.returncode == 0, whole.stderr
    command = tiny_runs.command(f"--config={config}", f"--workdir={place}")
    saved = objects / place.removeprefix("gs://box/") / "checkpoints"
    draw, cut = random.Random(0), 0

    def unfinished(since=0.0):
        """Yields folders of uncommitted checkpoints with an object written after ``since``."""
        for step in saved.iterdir() if saved.is_dir() else ():
            with contextlib.suppress(FileNotFoundError):  # the step was removed in the meantime
                written = [x.stat().st_mtime for x in step.rglob("*") if x.is_file()]
                marked = (step / "commit_success.txt").exists()
                if step.name.isdigit() and not marked and max(written, default=-1) > since:
                    yield step

    for _ in range(KILLS):
        started = time.time()
        with subprocess.Popen(
            command, stderr=subprocess.DEVNULL, env=os.environ | environment
        ) as process:
            while process.poll() is None and not any(unfinished(started)):
                time.sleep(0.01)
            time.sleep(draw.uniform(0, 0.6))
            os.kill(process.pid, signal.SIGKILL)
        cut += any(unfinished())
    assert cut >= KILLS // 2  # at least half of the kills were in the middle of a save
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    assert done.returncode == 0, done.stderr
    assert not any(unfinished())
    assert_same_run(tmp_path, tmp_path / "whole", place, **changes)
    scores = [files.parse_json_object(paths.path(folder, "evaluation.json").read_bytes())
              for folder in (str(tmp_path / "whole"), place)]  # fmt: skip
    assert scores[0]["results"][0]["loss"] == scores[1]["results"][0]["loss"]


@pytest.mark.slow
def test_modes_read_and_write_a_workdir_in_a_bucket(tmp_path, place):
    changes = {"train.steps": 6, "generate.length": 4, "train.profile": "2:4"}
    exp = override(tiny_runs.experiment(tmp_path), changes)
    trained = txl_jax.train(exp, place)
    assert any(name.endswith(".xplane.pb") for name in paths.files_in(f"{place}/tensorboard"))
    assert {"evaluation.json", "samples.jsonl", "sample.txt"} <= set(paths.names(place))
    compared = override(exp, {"report.workdirs": [place]})
    assert modes.compare("report", compared, {}, place) == 0
    assert b"</html>" in paths.path(place, "report.html").read_bytes()
    evaluated = trained.evaluate()
    assert modes.use_model("evaluate", None, {}, place, "latest") == 0
    lines = paths.path(place, "evaluations.jsonl").read_bytes().splitlines()
    assert [json.loads(line)["results"][0]["loss"] for line in lines] == [evaluated.loss]
    tuned = override(exp, {"train.start_from": place, "train.steps": 2, "train.profile": None})
    assert txl_jax.train(tuned, f"{place}-tuned").step == 2
    assert "start.json" in paths.names(f"{place}-tuned")


# Texts and arrays.


@pytest.mark.integration
def test_a_text_in_a_bucket_is_the_local_text_and_is_copied_once(
    tmp_path, place, monkeypatch, capsys
):
    monkeypatch.setenv("TXL_DATA_DIR", str(tmp_path / "cache"))
    (tmp_path / "text").mkdir()
    for split in ("train", "valid", "test"):
        content = tiny_runs.text(40, seed=len(split)).encode()
        (tmp_path / "text" / f"{split}.txt").write_bytes(content)
        files.atomic_write(f"{place}/{split}.txt", content)
    want = txl_jax.load_corpus("text", path=tmp_path / "text", vocab="word")
    got = txl_jax.load_corpus("text", path=place, vocab="word")
    assert want.source_hash == got.source_hash
    assert got.info["label"] == f"{place}, its own splits"
    for split in ("train", "valid", "test"):
        np.testing.assert_array_equal(getattr(want, split), getattr(got, split))
    assert capsys.readouterr().err.count("copying gs://") == 1
    txl_jax.load_corpus("text", path=place, vocab="word")
    assert "copying gs://" not in capsys.readouterr().err
    files.atomic_write(f"{place}/train.txt", b"the cat\n" * 30)
    changed = txl_jax.load_corpus("text", path=place, vocab="word")
    assert len(changed.train) == 90
    with pytest.raises(DataError, match="there is no such object or folder"):
        txl_jax.load_corpus("text", path=f"{place}/other")


@pytest.mark.integration
def test_compressed_records_in_a_bucket_are_the_local_ones(tmp_path, place, monkeypatch, capsys):
    monkeypatch.setenv("TXL_DATA_DIR", str(tmp_path / "cache"))
    (tmp_path / "songs").mkdir()
    for split in ("train", "validation"):
        lines = "".join(json.dumps({"text": f"song {n} of {split}"}) + "\n" for n in range(30))
        (tmp_path / "songs" / f"{split}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
        content = (tmp_path / "songs" / f"{split}.jsonl.gz").read_bytes()
        files.atomic_write(f"{place}/{split}.jsonl.gz", content)
    want = txl_jax.load_corpus("text", path=tmp_path / "songs")
    got = txl_jax.load_corpus("text", path=place)
    assert got.source_hash == want.source_hash
    assert got.info["documents"] == want.info["documents"]
    assert "valid = validation.jsonl.gz" in capsys.readouterr().err
    one = txl_jax.load_corpus("text", path=f"{place}/train.jsonl.gz")
    assert sum(one.info["documents"].values()) == 30
    assert one.info["label"].startswith(f"{place}/train.jsonl.gz")


@pytest.mark.integration
def test_token_files_in_a_bucket_are_the_local_ones(tmp_path, place, monkeypatch):
    monkeypatch.setenv("TXL_DATA_DIR", str(tmp_path / "cache"))
    np.save(tmp_path / "all.npy", np.arange(3000, dtype=np.uint16) % 50)
    np.save(tmp_path / "all.starts.npy", np.arange(0, 3000, 100))
    for name in ("all.npy", "all.starts.npy"):
        files.atomic_write(f"{place}/{name}", (tmp_path / name).read_bytes())
    want = txl_jax.load_corpus("tokens", path=tmp_path / "all.npy")
    got = txl_jax.load_corpus("tokens", path=f"{place}/all.npy")
    assert want.info["documents"] == got.info["documents"]
    assert got.info["label"] == f"{place}/all.npy"
    for a, b in zip(want.train, got.train, strict=True):
        np.testing.assert_array_equal(a, b)
    shutil.rmtree(tmp_path / "cache")
