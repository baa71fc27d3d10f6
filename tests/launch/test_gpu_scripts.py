"""The scripts for a rented GPU give valid commands, and small runs of them on a CPU succeed."""

import fcntl
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import shared_files
from page_commands import calls
from places import ROOT

from benchmarks import compile_recipes, gpu_image, gpu_pass, rehearsal
from txl_jax.config import ExperimentConfig, load_config, override

PAGE = (ROOT / "benchmarks" / "results" / "ptb" / "README.md").read_text()
SCRIPT = ROOT / "benchmarks" / "ptb_gpu.sh"


def settings(words: list[str]) -> dict[str, str]:
    """Returns ``{key: value}`` of the settings that command-line flags give."""
    pairs = (word.removeprefix("--config.").partition("=") for word in words)
    return {key: value for key, _, value in pairs if not key.startswith("--")}


def test_the_candidates_are_settings_that_training_accepts():
    """A wrong setting of a command on the page would otherwise fail only on a rented GPU."""
    commands = calls(PAGE, r"benchmarks/ptb_gpu\.sh$")
    assert len(commands) == 10
    own = settings(re.findall(r"--config\.[a-z.]+=\w+", SCRIPT.read_text()))
    assert set(own) == {"mesh.data", "generate.length", "evaluate.split"}
    for config, _, _, _, seconds, *words in commands:
        assert seconds.isdigit()
        exp = load_config(str(ROOT / config), {**own, **settings(words)})
        assert exp.name in ("ptb", "ptb_authors")
        assert exp.validate == load_config(str(ROOT / config)).validate


def test_a_finished_candidate_is_evaluated_with_settings_that_exist():
    (words,) = calls(PAGE, r"txl_jax\.main$")
    override(ExperimentConfig(), settings([word for word in words if "config." in word]))


@pytest.mark.integration
def test_what_trains_on_the_gpu_is_compiled_ahead_with_its_settings():
    jobs = dict(compile_recipes.ptb_jobs()) | dict(compile_recipes.gpu_pass_jobs())
    assert len(jobs) == 10 + 4 * len(gpu_pass.RECIPES)
    assert "--config.train.num_seeds=4" in jobs["ours-h200-x1"]
    assert "--config.train.batch_size=60" in jobs["wt103_base_bf16_scan-h200-x1"]
    assert "--config=configs/wt103_base.py" in jobs["wt103_base_f32_unrolled-h200-x1"]
    for words in jobs.values():
        config = next(word[9:] for word in words if word.startswith("--config="))
        load_config(str(ROOT / config), settings([w for w in words if "--config." in w]))


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """Returns a function that writes Python modules for benchmarks.gpu_pass to run as commands.

    gpu_pass then runs no other commands.
    """
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}")

    def make(**programs):
        for name, text in programs.items():
            (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.setattr(
            gpu_pass, "commands", lambda original: [(name, [name], 60) for name in programs]
        )

    return make


def done(out):
    """Returns ``{command: how it ended}`` from the files ``*.done`` that gpu_pass wrote."""
    return {path.stem: path.read_text().strip() for path in pathlib.Path(out).glob("*.done")}


@pytest.mark.slow
def test_a_command_that_the_end_of_a_slice_cuts_is_run_again(stub, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu_pass, "LEAST", 0)
    out, once = tmp_path / "out", tmp_path / "once"
    sleeps = f"""
import pathlib, time
first = not pathlib.Path({str(once)!r}).exists()
pathlib.Path({str(once)!r}).touch()
time.sleep(600 if first else 0)
"""
    stub(quick="print('1 ms')", cut=sleeps, last="print('2 ms')")
    gpu_pass.main([f"--out={out}", "--seconds=25", "--smoke"])
    assert "out of time before" in capsys.readouterr().out
    assert {"cut", "last"}.isdisjoint(done(out))
    once.touch()
    gpu_pass.main([f"--out={out}", "--seconds=300", "--smoke"])
    assert done(out) == dict.fromkeys(("image", "quick", "cut", "last"), "ok")
    report = json.loads((out / "report.json").read_text())
    assert report["cut"]["ended"] == "ok"


def test_a_cut_command_is_told_from_one_that_is_too_slow_and_from_one_that_fails(stub, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    stub(sleeps="import time; time.sleep(600)", fails="raise SystemExit(3)", works="pass")
    run = lambda name, limit, left: gpu_pass.run(out, name, [name], limit, left, smoke=True)
    assert run("sleeps", 60, 0.5) is None
    assert done(out) == {}
    assert run("sleeps", 0.5, 60) == "stopped after 0 s"
    assert run("fails", 60, 60) == "ended with 3"
    assert run("works", 60, 60) == "ok"
    assert done(out) == {"sleeps": "stopped after 0 s", "fails": "ended with 3", "works": "ok"}


def test_a_command_that_is_repeated_and_fails_keeps_no_figures_of_before(stub, tmp_path):
    out, failing = tmp_path / "out", tmp_path / "failing"
    out.mkdir()
    writes = "import os, pathlib, sys\n"
    writes += f"if os.path.exists({str(failing)!r}): raise SystemExit(3)\n"
    stub(figures=writes + "pathlib.Path(sys.argv[-1].partition('=')[2]).write_text('1')")
    for expected, files in (("ok", ["figures.json"]), ("ended with 3", [])):
        said = gpu_pass.run(out, "figures", ["figures"], 60, 60, smoke=True)
        assert (said, [path.name for path in out.glob("*.json")]) == (expected, files)
        failing.touch()


LOCKS = """
import fcntl, pathlib, subprocess, sys, time
if len(sys.argv) < 3:
    subprocess.Popen([sys.executable, __file__, "child", "child"])
else:
    file = open(FOLDER + "/lock", "w")
    fcntl.flock(file, fcntl.LOCK_EX)
    pathlib.Path(FOLDER, "held").touch()
time.sleep(600)
"""


def test_a_command_that_is_stopped_leaves_no_process_on_the_gpu(stub, tmp_path):
    """When gpu_pass stops a command after its time limit, the command's child process ends too.

    The child holds a lock while it runs. The limit grows until the child has time to start.
    """
    out = tmp_path / "out"
    out.mkdir()
    stub(parent=f"FOLDER = {str(tmp_path)!r}\n{LOCKS}")
    limits = iter((1, 4, 16, 64))
    while not (tmp_path / "held").exists():
        said = gpu_pass.run(out, "parent", ["parent"], limit := next(limits), 600, smoke=True)
        assert said == f"stopped after {limit} s"
    with open(tmp_path / "lock", "w") as file:
        deadline = time.monotonic() + 30
        while True:
            try:
                return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                assert time.monotonic() < deadline, "the child is still there"
                time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_pass_that_is_told_to_end_ends_its_command(tmp_path, number):
    """A signal that ends gpu_pass also ends the command that gpu_pass runs, and its child process.

    This command is benchmarks.gpu_image. A ``sitecustomize.py`` makes it start a child that holds a
    lock.
    """
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'benchmarks.gpu_image' in sys.orig_argv:\n"
        f"    FOLDER = {str(tmp_path)!r}\n    sys.argv = ['a', 'b', 'c']\n"
        + "".join(f"    {line}\n" for line in LOCKS.splitlines())
    )
    added = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    words = [sys.executable, "-m", "benchmarks.gpu_pass", f"--out={tmp_path / 'out'}", "--smoke"]
    process = subprocess.Popen(words, env=os.environ | added, cwd=ROOT)
    while not (tmp_path / "held").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    with open(tmp_path / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("script", ["gpu.sh", "ptb_gpu.sh"])
def test_folders_are_those_of_the_folder_where_the_command_was_typed(tmp_path, script):
    """Relative folders start at the folder in which the user typed the command.

    A fake Python prints its arguments, which contain the folders.
    """
    (tmp_path / "repository").mkdir()
    shutil.copytree(ROOT / "benchmarks", tmp_path / "repository" / "benchmarks")
    python = tmp_path / "python"
    python.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    first = ["out"] if script == "gpu.sh" else ["configs/ptb.py", "data", "run", "out"]
    ended = subprocess.run(
        ["bash", tmp_path / "repository" / "benchmarks" / script, *first],
        env=os.environ | {"PYTHON": str(python), "ORIGINAL": "peer", "WHEELS": "wheels"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    names = {"--find-links": "wheels", "--out": "out", "--original": "peer"}
    if script == "ptb_gpu.sh":
        names = {"--find-links": "wheels", "--workdir": "run", "--config.data.path": "data"}
        assert (tmp_path / "out" / "log.txt").exists()
    given = dict(word.split("=", 1) for word in ended.stdout.splitlines() if "=" in word)
    assert {flag: given[flag] for flag in names} == {f: str(tmp_path / n) for f, n in names.items()}


@pytest.mark.slow
def test_correctness_of_which_a_test_is_skipped_is_no_pass(tmp_path):
    """A command that runs tests does not count as passed if a test was skipped.

    First, the command is the GPU tests, which are skipped without a GPU. Then it is stub tests that
    pass, are skipped, fail or are missing.
    """
    (command,) = (words for name, words, _ in gpu_pass.commands(None) if name == "parity")
    said = gpu_pass.run(tmp_path, "parity", command, 300, 300, smoke=True)
    assert re.fullmatch(r"(\d+) of \1 tests skipped: not a pass", said or "")
    assert int((said or "").split()[0]) > 10
    tests = tmp_path / "test_stub.py"
    works, skips = "def test_a(): pass\n", "import pytest\ndef test_b(): pytest.skip('none')\n"
    for text, expected in (
        (works, "ok"),
        (works + skips, "1 of 2 tests skipped: not a pass"),
        (works + "def test_c(): assert 0\n", "ended with 1"),
        ("", "ended with 5"),
    ):
        tests.write_text(text)
        words = ["pytest", "-n", "0", "-c", os.devnull, f"--rootdir={tmp_path}", str(tests)]
        assert gpu_pass.run(tmp_path, "stub", words, 300, 300, smoke=True) == expected


def test_correctness_runs_on_the_gpu_as_users_compile(monkeypatch):
    """The GPU tests get the GPU and full optimisation from the environment of their command.

    By default, tests/conftest.py chooses the CPU and less optimisation. This test imports
    conftest.py, and then reads JAX's settings.
    """
    for name in ("JAX_PLATFORMS", "JAX_DISABLE_MOST_OPTIMIZATIONS", "XLA_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    (parity,) = (words for name, words, _ in gpu_pass.commands(None) if name == "parity")
    code = "import conftest, jax, os; v = jax.config.values; print("
    code += "v['jax_platforms'], v['jax_disable_most_optimizations'], os.environ['XLA_FLAGS'])"
    environment = gpu_pass.environment(parity)
    environment["PYTHONPATH"] = str(ROOT / "tests")
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    platforms, reduced, *flags = ended.stdout.split()
    assert (platforms, reduced) == ("cuda", "False")
    assert not any("fusion_emitters" in flag for flag in flags)
    for _, words, _ in gpu_pass.commands("original"):
        assert gpu_pass.environment(words)["JAX_PLATFORMS"].startswith("cuda")


def test_every_recipe_is_timed_in_both_types_and_with_scanned_layers_and_without():
    found = set()
    for name, words, _ in gpu_pass.commands("original"):
        sets = dict(word[6:].split("=") for word in words if word.startswith("--set="))
        if name.startswith("train_") and "--original=original" not in words:
            (recipe,) = (word[7:] for word in words if word.startswith("--size="))
            found.add((recipe, sets["model.dtype"], sets["model.scan_layers"]))
            rehearsed = gpu_pass.small(words)
            assert f"--set=model.dtype={sets['model.dtype']}" in rehearsed
            assert f"--set=model.scan_layers={sets['model.scan_layers']}" in rehearsed
            assert "--set=train.batch_size=2" in rehearsed
    types, layers = ("float32", "bfloat16"), ("True", "False")
    assert found == {(r, t, s) for r in gpu_pass.RECIPES for t in types for s in layers}
    names = [name for name, *_ in gpu_pass.commands("original")]
    assert len(names) == len(set(names))
    for kind in ("attention_768", "attention_dropout", "eval_enwik8_24l", "generate"):
        assert {f"{kind}_bf16", f"{kind}_f32"} <= set(names)


def test_an_image_with_other_versions_is_refused_by_name():
    here = {name: gpu_image.version(name) for name in gpu_image.OF_THE_IMAGE}
    good: dict[str, str | None] = {"packaging": "26"}
    good |= {name: version for name, version in here.items() if version}
    assert gpu_image.problems(good) == []
    bad = good | {"flax": "0.11.2", "orbax-checkpoint": "0.11.0", "tensorboardx": "2.0"}
    lines = gpu_image.problems(bad | {"optax": None})
    for text in ("optax is missing", "flax 0.11.2 is not", "orbax-checkpoint 0.11.0", "2.0 is not"):
        assert any(text in line for line in lines)
    assert len(lines) == 4
    (line,) = gpu_image.problems({"jax": "0.7.2", "packaging": None})
    assert "packaging is missing" in line


@pytest.mark.integration
@pytest.mark.parametrize("script", ["gpu.sh", "ptb_gpu.sh"])
@pytest.mark.parametrize("smoke", [True, False])
def test_the_image_is_checked_before_anything_else_runs(tmp_path, script, smoke):
    """If the machine lacks something, a script ends with an error before it tests or trains.

    With ``SMOKE``, importing flax fails. Without ``SMOKE``, a GPU is missing.
    """
    if smoke:
        (tmp_path / "flax").mkdir()
        (tmp_path / "flax" / "__init__.py").write_text("raise ImportError('flax needs jax 0.6')")
    out = tmp_path / "out"
    first = [out] if script == "gpu.sh" else ["configs/ptb.py", tmp_path, tmp_path / "run", out]
    added = {"PYTHON": sys.executable, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    ended = subprocess.run(
        ["bash", ROOT / "benchmarks" / script, *first],
        env={**os.environ, **added, "SMOKE": "1" if smoke else ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    expected = "error: import flax.linen: ImportError: flax needs jax 0.6" if smoke else "error: "
    assert expected in ended.stdout
    assert "Traceback" not in ended.stdout
    assert not (tmp_path / "run").exists()
    assert {path.name for path in out.iterdir()} <= {
        "image.txt",
        "image.json",
        "image.done",
        "log.txt",
    }


@pytest.mark.slow
def test_a_rehearsal_of_the_pass_runs_every_command_well(tmp_path):
    out = tmp_path / "out"
    ended = subprocess.run(
        ["bash", ROOT / "benchmarks" / "gpu.sh", out, "3600"],
        env={**os.environ, "SMOKE": "1", "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
    names = [name for name, *_ in gpu_pass.commands(None)]
    assert done(out) == dict.fromkeys(["image", *names], "ok")
    passed = re.search(r"(\d+) passed", (out / "parity.txt").read_text())
    assert passed is not None
    assert int(passed[1]) > 0


COMPILED = """\
$ python -m txl_jax.main --config=configs/ptb_small.py --mode=compile --topology=h200:1x1x1
train: 1 update(s) of 20 x 64 targets, memory 64
  total       1.500 GiB of 131.316 GiB: fits
  attention   xla (not fused: segments of 64)
  compiled in 21.0 s
validate: one segment
  total       0.250 GiB + 0.500 GiB of the training state of 131.316 GiB: fits
  compiled in 3.6 s
exit code 0 after 30 s
"""


def test_a_row_of_the_table_has_the_figures_of_what_was_compiled(tmp_path):
    path = tmp_path / "ptb_small-h200-x1.txt"
    path.write_text(COMPILED)
    found = compile_recipes.row(path).split(" | ")
    kernel, seconds = "not fused: segments of 64", "21, 4 |"
    assert found == ["| `ptb_small`", "1 x H200", "1.50", "0.75", "-", kernel, seconds]


@pytest.mark.slow
def test_a_rehearsal_goes_on_where_its_time_was_over_and_is_scored_once_it_is_finished(tmp_path):
    """A script that ran out of time resumes its run when it is called again.

    It trains two seeds of the smoke variant on Penn Treebank. Each call doubles the time limit.
    """
    data, run, out = shared_files.path("data/ptb"), tmp_path / "run", tmp_path / "out"
    changes = [
        "train.num_seeds=2",
        "train.steps=1000",
        "checkpoint.every=500",
        "train.log_every=100",
    ]
    flags = [f"--config.{change}" for change in changes]
    environment = {"SMOKE": "1", "TEST": "1", "PYTHON": sys.executable, "JAX_PLATFORMS": "cpu"}
    ended: list[int] = []
    for seconds in (20, 40, 80, 160, 320):
        done = subprocess.run(
            ["bash", SCRIPT, "configs/ptb.py", data, run, out, str(seconds), *flags],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
        )
        ended.append(done.returncode)
        if done.returncode == 0:
            break
        assert f"not finished (exit code {done.returncode}): call again" in done.stdout
        assert not list(out.rglob("pieces.json"))
    assert ended[0] == 124, "the first slice was long enough: give it more steps"
    assert ended[-1] == 0, done.stdout + done.stderr
    assert "resume" in (out / "log.txt").read_text()
    for seed in ("seed_0", "seed_1"):
        steps = [json.loads(line) for line in (out / seed / "metrics.jsonl").open()]
        assert max(row.get("step", 0) for row in steps) == 1000
        assert json.loads((out / seed / "weights" / "pieces.json").read_text())["step"] == 1000
        scored = json.loads((out / seed / "temperature.json").read_text())
        assert scored["test"][0]["temperature"] in (scored["chosen"], 1.0)
        assert len(scored["valid"]) == 7
        assert (out / seed / "evaluation.json").exists()


TOLD = """\
$ python -m txl_jax.main --config=configs/ptb.py --mode=compile --topology=h100:1x1x1
ptb: 24,000,000 parameters, vocabulary 10,000; bfloat16, layers scanned, remat none
float32 products: TF32 on this GPU
initialise: the state before the first update
  memory      on each device: arguments 0.000 GiB, output 0.006 GiB
  total       0.300 GiB of 74.506 GiB: fits
  atomics     floating-point atomics: none
  compiled in 1.5 s
train: 1 update(s) of 16 x 128 targets, memory 128
  memory      on each device: arguments 0.006 GiB, output 0.006 GiB
  total       1.250 GiB of 74.506 GiB: fits
  attention   triton (fused)
  products    bfloat16; float32 at default
  atomics     floating-point atomics: 2
  compiled in 20.0 s
validate: one segment; valid split
  memory      on each device: arguments 0.006 GiB, output 0.006 GiB
  total       0.750 GiB + 1.000 GiB of the training state of 74.506 GiB: fits
  attention   triton (fused)
  products    bfloat16
  atomics     floating-point atomics: none
  compiled in 2.5 s
exit code 0 after 30 s
"""


def test_a_row_of_the_rehearsal_has_the_largest_program_and_every_atomic(tmp_path):
    file = tmp_path / "ptb-h100-1x1x1.txt"
    file.write_text(TOLD)
    assert rehearsal.row(file) == (
        "| `ptb` | h100:1x1x1 | 3 | 1.75 (validate) | 74.506 | triton (fused) |"
        " bfloat16; float32 at default | 2 (train) | 24 |"
    )
    too_large = TOLD.replace(
        "1.250 GiB of 74.506 GiB: fits", "90.0 GiB of 74.506 GiB: DOES NOT FIT"
    )
    file.write_text(too_large.replace("exit code 0", "exit code 1"))
    assert "| 3 | does not fit (train) |" in rehearsal.row(file)
    file.write_text(f"{TOLD.splitlines()[0]}\nerror: no libtpu\nexit code 2 after 1 s\n")
    assert "error: no libtpu" in rehearsal.row(file)
