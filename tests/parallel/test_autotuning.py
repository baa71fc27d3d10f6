"""A run keeps the autotuner's choices, and runs of the same program share its compiled form."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from txl_jax.parallel import autotuning, processes
from txl_jax.parallel.autotuning import kept_choices

ONE_DEVICE: Any = jax.sharding.Mesh(jax.devices()[:1], ("data",))


def program(n=3):
    return jax.jit(lambda x: x + 1).lower(jnp.zeros(n))


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """Makes the devices count as GPUs, and returns the folder of compiled programs."""
    monkeypatch.setattr(autotuning, "platform_of", lambda mesh: "gpu")
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "compiled"))
    yield tmp_path / "compiled"
    jax.config.update("jax_compilation_cache_dir", before)


def compiled(file, chosen=None, lowered=None):
    """Simulates a compilation by a run that keeps its choices in ``file``.

    The files of ``chosen`` that are missing are written, as XLA would do. Returns the folder of the
    choices, and the texts of its files by name.
    """
    with kept_choices(lowered or program(), ONE_DEVICE, str(file)) as options:
        assert options is not None
        folder = Path(str(options["xla_gpu_per_fusion_autotune_cache_dir"]))
        assert folder.is_dir()  # XLA requires it
        for name, text in (chosen or {}).items():
            if not (folder / name).exists():
                (folder / name).write_text(text)
        return folder, {x.name: x.read_text() for x in folder.iterdir()}


def test_runs_of_a_program_compile_it_with_the_same_options(tmp_path):
    """The cache finds a compiled program by a key that includes XLA's options."""
    first, _ = compiled(tmp_path / "one.json", {"a.textproto": "fast"})
    second, _ = compiled(tmp_path / "two.json")
    again, _ = compiled(tmp_path / "one.json")
    other, _ = compiled(tmp_path / "one.json", lowered=program(4))
    assert first == second == again != other


def test_every_run_keeps_the_choices_of_its_program(tmp_path, cache):
    compiled(tmp_path / "one.json", {"a.textproto": "fast"})
    compiled(tmp_path / "two.json")  # its program was compiled before
    shutil.rmtree(cache)
    for name in ("two.json", "one.json"):
        assert compiled(tmp_path / name, {"a.textproto": "slow"})[1] == {"a.textproto": "fast"}


def test_what_another_run_chose_since_the_cache_was_lost_is_not_taken(tmp_path, cache):
    compiled(tmp_path / "one.json", {"a.textproto": "fast"})
    shutil.rmtree(cache)
    other, _ = compiled(tmp_path / "two.json", {"a.textproto": "slow"})
    for _ in range(2):
        mine, kept = compiled(tmp_path / "one.json")
        assert kept == {"a.textproto": "fast"}
        assert mine != other
    assert compiled(tmp_path / "two.json") == (other, {"a.textproto": "slow"})


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text.replace("jaxlib", "jaxlib 0.0.1 or"),
        lambda text: text[:-5],
        lambda text: "[1]",
        lambda text: '{"choices": 1}',
        lambda text: text.replace("a.textproto", "../a.textproto"),
    ],
)
def test_choices_of_another_version_or_of_a_damaged_file_are_made_anew(damage, tmp_path, cache):
    file = tmp_path / "one.json"
    compiled(file, {"a.textproto": "fast"})
    file.write_text(damage(file.read_text()))
    shutil.rmtree(cache)
    assert compiled(file, {"b.textproto": "new"})[1] == {"b.textproto": "new"}
    assert json.loads(file.read_text())["choices"] == {"b.textproto": "new"}


def test_one_of_several_processes_writes_the_choices(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "is_process_zero", lambda: False)
    compiled(tmp_path / "one.json", {"a.textproto": "fast"})
    assert not (tmp_path / "one.json").exists()


def test_other_devices_and_a_machine_without_a_folder_keep_no_choices(tmp_path, monkeypatch):
    monkeypatch.setattr(autotuning, "cache_folder", lambda: None)
    with kept_choices(program(), ONE_DEVICE, str(tmp_path / "one.json")) as options:
        assert options is None
    monkeypatch.undo()
    with kept_choices(program(), ONE_DEVICE, str(tmp_path / "one.json")) as options:
        assert options is None
    assert not (tmp_path / "one.json").exists()
