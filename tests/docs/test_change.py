"""The edits of docs/change.md change the model as the page says."""

import os
import re
import subprocess
import sys

import pytest
from page_edits import copy_with, edits
from places import DOCS

CHANGES = edits((DOCS / "change.md").read_text(encoding="utf-8"))
SETTINGS = {
    "SwiGLU": ("activation", "swiglu"),
    "A learned temperature per head": ("temperature", "True"),
    "ALiBi": ("attention", "alibi"),
    "RoPE": ("attention", "rope"),
    "Heads that share keys and values": ("n_kv_head", "1"),
    "A soft cap of scores": ("soft_cap", "0.5"),
}
"""The setting that each change adds or extends, and a value of this setting."""
NAMES = ("swiglu", "temperature", "alibi", "rope", "n_kv_head", "soft_cap")
WORDS = dict(zip(SETTINGS, NAMES, strict=True))
"""For each change, a word in the names of its tests."""
TESTS = ("tests/model/test_changes.py", "tests/model/test_reference.py")
FORGOTTEN = [
    ("SwiGLU", "def feed_forward_flops", "products_of_the_formula[activation=swiglu]"),
    ("ALiBi", "def score", "equal_the_formulas[alibi]"),
    ("Heads that share keys and values", "def attention", "equal_the_formulas[n_kv_head=1]"),
]
"""A change, the edit that is left out, and a test that must then fail."""
RUN = """
import sys, jax
jax.config.update("jax_num_cpu_devices", 2)
import txl_jax
key, value = sys.argv[1:]
few = {"train.steps": 2, "optimizer.warmup_steps": 1, "train.batch_size": 2, "mesh.fsdp": 2}
txl_jax.train("quickstart:smoke", "run", {**few, f"model.{key}": value})
trained = txl_jax.load("run")
trained.generate("def ", length=3)
trained.export("programs", seg_len=4, mem_len=4)
"""


def python(folder, *arguments):
    """Runs Python with the copy of the package; returns the finished process."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def run_tests(folder, words):
    return python(folder, "-m", "pytest", *TESTS, "-n", "0", "-m", "not gpu", "-k", words)


def test_each_change_edits_the_settings_and_one_file_of_the_package():
    assert set(CHANGES) == set(SETTINGS)
    for name, found in CHANGES.items():
        files = {edit.file for edit in found if edit.file.startswith("txl_jax/")}
        assert len(files) == 2, name
        assert "txl_jax/config/model.py" in files, name


@pytest.mark.parametrize("name", CHANGES)
def test_the_edits_find_their_places_and_obey_the_style(name, tmp_path):
    folder = copy_with(tmp_path, CHANGES[name])
    files = sorted({edit.file for edit in CHANGES[name]})
    done = python(folder, "-m", "ruff", "check", *files)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_model_passes_the_tests_of_the_page(name, tmp_path):
    words = f"{WORDS[name]} or reference_knows or reference_refuses"
    done = run_tests(copy_with(tmp_path, CHANGES[name]), words)
    assert done.returncode == 0, done.stdout
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) >= 8


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_model_trains_on_two_devices_generates_and_is_exported(name, tmp_path):
    done = python(copy_with(tmp_path, CHANGES[name]), "-c", RUN, *SETTINGS[name])
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "programs" / "step.jax").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "left_out", "test"), FORGOTTEN)
def test_what_is_forgotten_fails_the_test_that_the_page_names(name, left_out, test, tmp_path):
    kept = [edit for edit in CHANGES[name] if edit.about != left_out]
    assert len(kept) == len(CHANGES[name]) - 1
    done = run_tests(copy_with(tmp_path, kept), WORDS[name])
    assert done.returncode == 1
    assert test in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_the_reference_refuses_what_only_the_model_has(name, tmp_path):
    kept = [edit for edit in CHANGES[name] if edit.file != "tests/helpers/reference.py"]
    done = run_tests(copy_with(tmp_path, kept), "reference_knows")
    assert done.returncode == 1
    assert "test_the_reference_knows_every_setting" in done.stdout


@pytest.mark.slow
def test_two_devices_that_share_one_core_do_not_wait_for_ever(tmp_path, monkeypatch):
    """In this model, a collective in a loop and one after it once blocked both threads of XLA."""
    monkeypatch.delenv("PJRT_NPROC")
    folder = copy_with(tmp_path, CHANGES["Heads that share keys and values"])
    one_core = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    longer = RUN.replace('"train.steps": 2', '"train.steps": 100')
    done = python(folder, "-c", one_core + longer, "n_kv_head", "1")
    assert done.returncode == 0, done.stderr
