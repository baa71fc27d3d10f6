"""PPO and R2D2 of memorax work with the unchanged SequenceModel, in a venv of their own."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from places import ROOT

PINNED = ("memorax==1.0.1", "gymnax==1.0.1")
PROGRAM = ROOT / "tests" / "helpers" / "memorax_runs.py"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The path of a Python with memorax: TXL_MEMORAX_PYTHON, or the Python of a new venv."""
    if ready := os.environ.get("TXL_MEMORAX_PYTHON"):
        return ready
    folder = tmp_path_factory.mktemp("memorax")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*install, str(ROOT), *PINNED], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{', '.join(PINNED)} cannot be installed: {done.stderr.strip()[-300:]}")
    return python


@pytest.fixture(scope="module")
def ran(python, tmp_path_factory):
    """A function that runs the program in a mode, and returns the folder of all results."""
    folder = tmp_path_factory.mktemp("runs")

    def run(mode):
        done = subprocess.run(
            [python, str(PROGRAM), mode, str(folder)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return folder

    return run


def test_ppo_learns_from_the_outputs_it_acted_on_and_resumes(ran):
    folder = ran("ppo")
    for divergence, entropy in json.loads((folder / "ppo.json").read_text()):
        # The divergence of the policies in acting and learning, before a rollout's only update.
        assert abs(divergence) < 1e-6
        assert 0.1 < entropy < 0.7
    ran("resume")
    whole, resumed = (np.load(folder / f"{name}.npz") for name in ("ppo", "resume"))
    assert len(whole.files) > 50
    for name in whole.files:
        np.testing.assert_array_equal(whole[name], resumed[name], err_msg=name)


def test_ppo_remembers(ran):
    found = json.loads((ran("learn") / "learn.json").read_text())
    assert found["trained"] > 0.5  # without memory the mean return is 0
    assert found["tested"] > 0.9


def test_r2d2_runs(ran):
    found = json.loads((ran("r2d2") / "r2d2.json").read_text())
    assert np.isfinite(found["losses"]).all()
    assert len(found["losses"]) == 100
    assert found["episodes"] == 128
