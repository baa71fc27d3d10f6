"""What is to run on a rented GPU: its commands are sound, and rehearsals on a CPU end well."""

import json
import os
import re
import shlex
import subprocess
import sys

import pytest
import shared_files
from test_docs import ROOT, calls

from benchmarks import compile_recipes, gpu_pass
from txl_jax.config import ExperimentConfig, load_config, override

PAGE = (ROOT / "benchmarks" / "results" / "ptb" / "README.md").read_text()
SCRIPT = ROOT / "benchmarks" / "ptb_gpu.sh"


def settings(words: list[str]) -> dict[str, str]:
    """Settings that flags give, by key."""
    pairs = (word.removeprefix("--config.").partition("=") for word in words)
    return {key: value for key, _, value in pairs if not key.startswith("--")}


def test_the_candidates_are_settings_that_training_accepts():
    """A wrong one would be found when a GPU is paid for."""
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
def test_what_trains_on_the_gpu_is_compiled_ahead_with_its_settings_and_a_predicted_time():
    """A row of the table: the bounds of an update of all seeds, in milliseconds."""
    jobs = dict(compile_recipes.ptb_jobs()) | dict(compile_recipes.gpu_pass_jobs())
    assert len(jobs) == 10 + len(gpu_pass.RECIPES)
    assert "--config.train.num_seeds=4" in jobs["ours-h200-x1"]
    assert "--config.train.batch_size=60" in jobs["wt103_base-h200-x1"]
    bounds = {}
    for name, words in jobs.items():
        low, high = compile_recipes.predicted(shlex.join(["$", "python", *words])).split(" to ")
        bounds[name] = float(low), float(high)
        assert 0 < bounds[name][0] < bounds[name][1]
    assert bounds["ours-h200-x1"][0] == pytest.approx(2 * bounds["fixed-h200-x1"][0], rel=0.02)


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


def test_a_table_of_two_folders_has_both_figures_where_they_differ(tmp_path, capsys):
    one, two = tmp_path / "one", tmp_path / "two"
    for folder, name, text in (
        (one, "ptb_small-h200-x1.txt", COMPILED),
        (two, "ptb_small-h200-x1.txt", COMPILED.replace("1.500 GiB", "1.700 GiB")),
        (two, "quickstart-h200-x1.txt", COMPILED.replace("ptb_small", "quickstart")),
    ):
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    compile_recipes.main([f"--out={one}", f"--beside={two}"])
    _, _, first, second = (line.split(" | ") for line in capsys.readouterr().out.splitlines())
    kernel, seconds = "not fused: segments of 64", "21, 4"
    assert first[:6] == ["| `ptb_small`", "1 x H200", "1.50; 1.70", "0.75", "-", kernel]
    assert second[2:7] == ["-; 1.50", "-; 0.75", "-; -", kernel, f"-; {seconds}"]
    assert first[6] == seconds
    assert " to " in second[7]


@pytest.mark.slow
def test_a_rehearsal_goes_on_where_its_time_was_over_and_is_scored_once_it_is_finished(tmp_path):
    """Two seeds of the small variant on the real text, in slices that double until one suffices."""
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
