"""Several processes act as one: they compute the same results, write once and end together.

The tests start the processes as a user does. The processes find each other over the loopback
network. Every wait has a limit, so a test fails if a process hangs.
"""

import json
import os
import shutil
import signal
import sys
from typing import Any

import jax
import numpy as np
import pytest
from many_processes import Processes, ran
from run_records import assert_near, assert_near_state, final_state, records
from tiny_runs import call, run, write_config

from txl_jax.checkpoint.checkpoints import Checkpoints
from txl_jax.config import CheckpointConfig, ConfigError, MeshConfig, TransformerXLConfig
from txl_jax.parallel import processes
from txl_jax.parallel.mesh import make_mesh

IN_ORDER = "--xla_cpu_enable_concurrency_optimized_scheduler=false"
SHORT: dict[str, Any] = {
    "model.n_layer": 1,
    "validate.batch_size": 3,  # rows of padding on the last process
    "checkpoint.keep_last": 9,
    "mesh.data": -1,
}
LONG: dict[str, Any] = {
    "model.n_layer": 1,
    "model.d_model": 64,
    "model.d_inner": 256,
    "model.dropout": 0.2,
    "optimizer.learning_rate": 2e-4,
    "train.seg_len": 96,
    "train.steps": 240,
    "train.log_every": 5,
    "train.eval_every": 120,
    "checkpoint.every": 20,
    "generate.length": 0,
    "mesh.data": -1,
}
"""Settings of a run of some seconds, because processes check only once a second whether to stop."""


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """A text's folder, a config for it, and the final state of one process on one device."""
    folder = tmp_path_factory.mktemp("short")
    config = write_config(folder, **SHORT)
    run(folder, folder / "one", **{**SHORT, "mesh.data": 1})
    return folder, config, final_state(folder, folder / "one", **SHORT)


@pytest.fixture(scope="module")
def two(short):
    """The workdir of a run by two processes, and what they printed."""
    folder, config, _ = short
    outputs = ran(folder / "said", 2, f"--config={config}", f"--workdir={folder / 'two'}")
    return folder / "two", outputs


@pytest.fixture(scope="module")
def fsdp(short):
    """The workdir of a run by two processes of two devices; pairs of devices split parameters."""
    folder, config, _ = short
    arguments = (f"--config={config}", f"--workdir={folder / 'fsdp'}", "--config.mesh.fsdp=2")
    ran(folder / "said", 2, *arguments, devices=2, spy=folder / "fsdp-read")
    return folder / "fsdp"


@pytest.mark.integration
def test_two_processes_train_as_one(short, two):
    folder, _, state = short
    workdir, _ = two
    assert_near(records(folder / "one"), records(workdir))
    assert_near_state(state, final_state(folder, workdir, **SHORT))


@pytest.mark.integration
def test_one_process_writes_and_talks(two):
    workdir, (first, second) = two
    steps = [(r["kind"], r["step"]) for r in records(workdir)]
    assert len(set(steps)) == len(steps)
    assert {"config.json", "vocab.json", "sample.txt", "evaluation.json", "loss.png"} <= set(
        os.listdir(workdir)
    )
    assert len(list((workdir / "tensorboard").iterdir())) == 1
    sample = (workdir / "sample.txt").read_text()
    assert sample.startswith("the cat")
    assert len(sample) == len("the cat") + 8 + 1
    assert sample in first
    assert "held-out bpc" in first
    told = [line for line in second.splitlines() if not line.startswith("[Gloo]")]
    assert told == []


@pytest.mark.slow
def test_two_processes_with_two_devices_and_cut_parameters_train_as_one(short, fsdp):
    folder, _, state = short
    assert_near(records(folder / "one"), records(fsdp))
    assert_near_state(state, final_state(folder, fsdp, **SHORT))
    results = json.loads((fsdp / "evaluation.json").read_text())["results"]
    assert all(np.isfinite(r["loss"]) for r in results)


@pytest.mark.slow
def test_a_process_reads_the_rows_of_its_own_devices(short, fsdp):
    folder, *_ = short
    read = [json.loads((folder / f"fsdp-read.rows-{i}").read_text()) for i in range(2)]
    assert read == [[0, 1], [2, 3]]


def resumed_at(workdir, step, to):
    """A copy of a run as it was after a step."""
    shutil.copytree(workdir, to)
    for later in (to / "checkpoints").iterdir():
        if later.name.isdigit() and int(later.name) > step:
            shutil.rmtree(later)
    return to


@pytest.mark.slow
def test_one_process_goes_on_from_two(short, fsdp):
    folder, _, state = short
    workdir = resumed_at(fsdp, 8, folder / "from-two")
    run(folder, workdir, **{**SHORT, "mesh.data": 2, "mesh.tensor": 2})
    assert_near([r for r in records(folder / "one") if r["kind"] == "train"], trained(workdir))
    assert_near_state(state, final_state(folder, workdir, **SHORT))


def trained(workdir):
    return [r for r in records(workdir) if r["kind"] == "train"]


@pytest.mark.slow
def test_sigterm_to_one_of_two_ends_both_saved_at_the_same_step(tmp_path):
    config, workdir = write_config(tmp_path, **LONG), tmp_path / "two"
    with Processes(tmp_path, 2, f"--config={config}", f"--workdir={workdir}") as pair:
        pair.until_step(workdir / "metrics.jsonl", 5)
        os.kill(pair.all[1].pid, signal.SIGTERM)
        codes, (first, second) = pair.wait()
    assert codes == [0, 0], first + second
    command = f"{sys.executable} -m txl_jax.main"
    assert f"stopped by SIGTERM, and the state is saved; to resume:\n  {command}" in first
    assert "stopped by" not in second
    steps = [int(name) for name in os.listdir(workdir / "checkpoints") if name.isdigit()]
    assert 0 < max(steps) < LONG["train.steps"]
    run(tmp_path, tmp_path / "one", **{**LONG, "mesh.data": 1})
    run(tmp_path, workdir, **{**LONG, "mesh.data": 1})
    assert_near(records(tmp_path / "one"), records(workdir), 1e-4)


# ------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("node0:1234", None, 0), "--coordinator=HOST:PORT, --num_processes=N and --process_id=I"),
        ((None, 2, None), "--coordinator=HOST:PORT, --num_processes=N and --process_id=I: give"),
        (("node0", 2, 0), "--coordinator=node0: must be HOST:PORT, such as node0:12345"),
        ((":1234", 2, 0), "--coordinator=:1234: must be HOST:PORT"),
        (("node0:0", 2, 0), "must be HOST:PORT"),
        (("node0:70000", 2, 0), "must be HOST:PORT"),
        (("node0:1234", 2, 2), "--process_id=2: must be from 0 to --num_processes - 1 = 1"),
        (("node0:1234", 0, 0), "--process_id=0: must be from 0 to"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(flags, text, monkeypatch):
    reached = lambda **_: pytest.fail("the network was asked")
    monkeypatch.setattr(jax.distributed, "initialize", reached)
    with pytest.raises(ConfigError) as caught:
        processes.initialise(True, *flags)
    assert text in str(caught.value)


def test_several_processes_that_no_variable_describes_are_refused(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("SLURM", "OMPI", "TPU"))]:
        monkeypatch.delenv(name)

    def nothing_found(**_):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", nothing_found)
    with pytest.raises(ConfigError, match=r"no Slurm, Open MPI, TPU pod or GKE.*--coordinator"):
        processes.initialise(True, None, None, None)


@pytest.mark.parametrize(
    ("mesh", "batch", "parts", "text"),
    [
        ({"data": 4}, 6, 1, "data x fsdp = 4 must divide train.batch_size = 6; a"
         " train.batch_size of 4 or 8 works"),
        ({"data": 4, "fsdp": 2}, 6, 1, "a train.batch_size of 8 works"),
        ({"data": 2, "fsdp": 2}, 24, 4, "train.batch_size / train.micro_batches = 6; a"
         " train.batch_size of 16 or 32 works"),
    ],
)  # fmt: skip
def test_a_batch_that_the_mesh_does_not_divide_is_refused_with_sizes(mesh, batch, parts, text):
    with pytest.raises(ConfigError) as caught:
        make_mesh(MeshConfig(**mesh), TransformerXLConfig(), batch, parts)
    assert text in str(caught.value)


def test_one_process_waits_for_no_other(monkeypatch):
    assert not processes.many()
    assert processes.is_process_zero()
    assert processes.on_process_zero(lambda: (1, "as it is")) == (1, "as it is")
    assert processes.process_zero_first(lambda: "mine") == "mine"
    assert processes.failing(False) == []
    assert processes.failing(True) == [0]
    with pytest.raises(KeyError):
        processes.on_process_zero(lambda: dict[str, int]()["no"])


@pytest.mark.parametrize("outer", [processes.on_process_zero, processes.process_zero_first])
def test_work_of_process_zero_must_not_wait_for_others(outer):
    """With several processes, such work would wait forever. With one process, it fails as well."""
    inner = [
        lambda: processes.on_process_zero(int),
        lambda: processes.process_zero_first(int),
        lambda: processes.failing(False),
    ]
    for work in inner:
        with pytest.raises(RuntimeError, match="on process 0 alone must not wait for other"):
            outer(work)
        assert outer(int) == 0  # afterwards, other work still runs


def test_saving_does_not_ask_whether_to_stop(tmp_path, monkeypatch):
    """Orbax does not ask JAX whether a notice to stop has come: only training asks this.

    Training numbers its calls. Calls by Orbax, with other numbers, could make JAX lose a notice.
    """
    asked: list[int] = []
    name = "jax.experimental.multihost_utils.reached_preemption_sync_point"
    monkeypatch.setattr(name, asked.append)
    with Checkpoints(str(tmp_path), CheckpointConfig()) as checkpoints:
        checkpoints.save_params(7, {"a": np.ones(3)}, {"config": {}})
    assert (tmp_path / "checkpoints" / "7" / "checksums.json").exists()
    assert asked == []


# ---------------------------------------------------------------------------------- slow


@pytest.mark.slow
def test_four_processes_train_as_one_and_go_on_from_two(short, fsdp):
    folder, config, state = short
    arguments = (f"--config={config}", "--config.validate.batch_size=6")
    ran(folder / "said", 4, f"--config={config}", f"--workdir={folder / 'four'}", timeout=500)
    assert_near(records(folder / "one"), records(folder / "four"))
    assert_near_state(state, final_state(folder, folder / "four", **SHORT))
    workdir = resumed_at(fsdp, 8, folder / "four-from-two")
    ran(folder / "said", 4, *arguments, f"--workdir={workdir}", timeout=500)
    assert_near(trained(folder / "one"), trained(workdir))
    assert_near_state(state, final_state(folder, workdir, **SHORT))


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """A folder, and the path of a config file.

    The folder has a text, and ``whole``, the workdir of an uninterrupted run.
    """
    folder = tmp_path_factory.mktemp("long")
    config = write_config(folder, **LONG)
    ran(folder, 2, f"--config={config}", f"--workdir={folder / 'whole'}")
    return folder, config


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_kill_9_of_one_of_two_ends_both_and_both_go_on_bit_identically(long, killed):
    folder, config = long
    workdir = folder / f"killed-{killed}"
    arguments = (f"--config={config}", f"--workdir={workdir}")
    with Processes(folder / "said", 2, *arguments, heartbeat=10) as pair:
        pair.until_step(workdir / "metrics.jsonl", 50)
        os.kill(pair.all[killed].pid, signal.SIGKILL)
        codes, _ = pair.wait(timeout=60)
    assert codes[killed] == -signal.SIGKILL
    assert codes[1 - killed] != 0
    outputs = ran(folder / "said", 2, *arguments)
    assert "resuming at step" in outputs[0]
    assert records(folder / "whole") == records(workdir)
    whole = final_state(folder, folder / "whole", **LONG)
    for key, value in final_state(folder, workdir, **LONG).items():
        np.testing.assert_array_equal(value, whole[key], err_msg=key)


@pytest.mark.slow
def test_a_process_that_freezes_ends_the_other_after_the_heartbeat(long):
    folder, config = long
    workdir = folder / "frozen"
    arguments = (f"--config={config}", f"--workdir={workdir}")
    with Processes(folder / "said", 2, *arguments, heartbeat=10) as pair:
        pair.until_step(workdir / "metrics.jsonl", 5)
        os.kill(pair.all[1].pid, signal.SIGSTOP)
        assert pair.all[0].wait(timeout=60) != 0


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGUSR1, 0)])
def test_a_signal_to_one_of_two_saves_both(long, sent, code):
    folder, config = long
    workdir = folder / sent.name
    with Processes(folder / "said", 2, f"--config={config}", f"--workdir={workdir}") as pair:
        pair.until_step(workdir / "metrics.jsonl", 5)
        os.kill(pair.all[0].pid, sent)
        codes, (first, _) = pair.wait()
    assert codes == [code, 0]
    assert f"stopped by {sent.name}, and the state is saved; to resume:" in first


@pytest.mark.slow
def test_an_error_of_process_0_ends_all_with_its_text(short, two, tmp_path):
    _, config, _ = short
    workdir = shutil.copytree(two[0], tmp_path / "run")
    arguments = (f"--config={config}", f"--workdir={workdir}", "--config.train.seg_len=8")
    with Processes(tmp_path, 2, *arguments) as pair:
        codes, (first, second) = pair.wait()
    assert "error: --workdir" in first
    assert "is the folder of another run\n  name another workdir" in first
    assert "what differs:\n  train.seg_len: 16 -> 8" in first
    assert codes[0] == 2
    assert codes[1] != 0
    assert "error: process 0 failed: AnotherRunError: --workdir" in second


@pytest.mark.slow
def test_two_processes_that_slurm_starts_evaluate_as_one(two, tmp_path):
    """The protocols include dynamic evaluation and a warm start of the streams."""
    learning = ("rule=rms", "learning_rate=1e-3", "statistics=3")
    changes = [f"--config.evaluate.dynamic.{change}" for change in learning]
    found = []
    for n in (1, 2):
        workdir = shutil.copytree(two[0], tmp_path / str(n))
        (workdir / "evaluation.json").unlink()
        arguments = ("--mode=evaluate", f"--workdir={workdir}", "--config.evaluate.warm_start=20")
        ran(tmp_path / "said", n, *arguments, *changes, devices=n, slurm=n > 1)
        found.append(json.loads((workdir / "evaluation.json").read_text())["results"])
    assert [r["name"] for r in found[0]] == [r["name"] for r in found[1]]
    losses = [[r["loss"] for r in results] for results in found]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert len(set(losses[0])) == len(losses[0])


@pytest.mark.slow
def test_two_processes_generate_as_one_does(two, tmp_path):
    workdir = shutil.copytree(two[0], tmp_path / "run")
    sample = (workdir / "sample.txt").read_text()
    (workdir / "sample.txt").unlink()
    outputs = ran(tmp_path / "said", 2, "--mode=generate", f"--workdir={workdir}")
    assert (workdir / "sample.txt").read_text() == sample
    assert [sample in output for output in outputs] == [True, False]


# ------------------------------------------------------------------ order of collectives


@pytest.mark.slow
def test_a_mesh_of_cpu_devices_trains_from_cached_programs_without_a_deadlock(tmp_path):
    """The command sets the flag IN_ORDER. Without this flag, about every second run aborted.

    A compiler option would not suffice: it has no effect on a program from the cache.
    """
    mesh = {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2, "model.scan_layers": True}
    config = write_config(tmp_path, **mesh)
    cache = str(tmp_path / "compiled")
    for i in range(6):
        done = call(
            f"--config={config}",
            f"--workdir={tmp_path / str(i)}",
            JAX_NUM_CPU_DEVICES="8",
            JAX_COMPILATION_CACHE_DIR=cache,
            XLA_FLAGS=os.environ["XLA_FLAGS"].replace(IN_ORDER, ""),
        )
        assert done.returncode == 0, done.stderr
