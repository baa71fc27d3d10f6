"""An exported model runs without this library, and gives the model's logits and losses."""

import dataclasses
import importlib
import json
import os
import pathlib
import re
import runpy
import subprocess
import sys
import types
from typing import Any

import jax
import numpy as np
import pytest
import tiny_models as tiny
import tiny_runs
from packaging.version import Version

import txl_jax
from txl_jax.checkpoint.errors import ModelFormatError
from txl_jax.checkpoint.trained_model import TrainedModel
from txl_jax.config import ConfigError, ExperimentConfig
from txl_jax.data.vocab import Vocab
from txl_jax.library import language_model
from txl_jax.model.transformer_xl import TransformerXL

SIZES: dict[str, Any] = {"seg_len": 5, "mem_len": 7}
NEEDED = ("flatbuffers", "jax", "jaxlib", "ml_dtypes", "numpy", "opt_einsum", "scipy")
"""What ``pip install jax numpy flatbuffers`` installs."""
RUN = """
import runpy, sys
sys.argv = ["run.py", *sys.argv[1:]]
runpy.run_path("run.py", run_name="__main__")
assert not {"txl_jax", "flax", "safetensors"} & sys.modules.keys()
"""
AGAIN = """
import jax, jax.export
with open("logits.jax", "rb") as file:
    read = jax.export.deserialize(bytearray(file.read()))
shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in read.in_avals]
arguments, _ = jax.tree.unflatten(read.in_tree, shapes)
again = jax.export.export(jax.jit(read.call), platforms=read.platforms)(*arguments)
with open("logits.jax", "wb") as file:
    file.write(again.serialize())
print(jax.__version__)
"""
OTHERS = list(filter(None, os.environ.get("TXL_OTHER_JAX", "").split(os.pathsep)))
"""Paths of Python interpreters that have another version of jax, numpy and flatbuffers."""
WORDS = Vocab.from_words(["a b c d e f g h i j k\n<unk> l"])
MODELS: dict[str, tuple[Vocab, dict[str, Any]]] = {
    "bytes": (Vocab("byte", [str(value) for value in range(97, 110)]), {}),
    "words, adaptive": (WORDS, {"cutoffs": (4, 9), "div_val": 2, "same_length": "pytorch"}),
    "bfloat16": (Vocab.from_ids(13), {"dtype": "bfloat16"}),
}


def trained(vocab, **changes):
    """Returns a model with random parameters that are large enough to affect the outputs."""
    cfg = tiny.config(vocab_size=len(vocab), **changes)
    params = jax.tree.map(np.asarray, tiny.variables(cfg)["params"])
    parts = ("train", "validate", "evaluate")
    short = {name: {"seg_len": 5, "mem_len": 0} for name in parts if cfg.memory_free}
    exp = ExperimentConfig.from_dict({"model": dataclasses.asdict(cfg), "name": "tiny", **short})
    return language_model(TrainedModel(TransformerXL(cfg), params, vocab, exp, 5))


def script(folder):
    """Runs run.py of an exported folder in this process; returns its global names as attributes."""
    return types.SimpleNamespace(**runpy.run_path(str(folder / "run.py")))


def logits_of(model, ids, seg_len, mem_len):
    """Returns this library's logits for ``ids`` [rows, tokens], and the memory after all tokens.

    The model reads segments of ``seg_len`` tokens with a memory of ``mem_len`` states.
    """
    mems, found, apply = model.model.init_mems(len(ids), mem_len), [], jax.jit(model.model.apply)
    for start in range(0, ids.shape[1], seg_len):
        segment = ids[:, start : start + seg_len]
        logits, mems = apply({"params": model.params}, segment, mems)
        found.append(logits)
    return np.concatenate(found, axis=1), mems


def only_what_jax_needs(folder):
    """Links jax and its dependencies, but no other package, into a folder; returns the folder.

    The folder can be the ``PYTHONPATH`` of a process that must not import anything else.
    """
    for name in NEEDED:
        package = pathlib.Path(str(importlib.import_module(name).__file__)).parent
        for found in (package, package.with_name(f"{name}.libs")):
            if found.exists():
                (folder / found.name).symlink_to(found)
    return folder


@pytest.mark.integration
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.few(1)
def test_run_py_gives_the_logits_of_ten_segments_without_this_library(name, tmp_path):
    """Logits are near 1. Tolerances: 1e-5 in float32, 3e-2 in bfloat16 (8 significant bits)."""
    vocab, changes = MODELS[name]
    model, out, packages = trained(vocab, **changes), tmp_path / "out", tmp_path / "packages"
    model.export(out, **SIZES)
    packages.mkdir()
    ids = tiny.tokens(model.model.cfg, 2, 10 * SIZES["seg_len"])
    np.save(tmp_path / "ids.npy", ids)
    files = [str(tmp_path / f"{file}.npy") for file in ("ids", "logits")]
    environment = {**os.environ, "PYTHONPATH": str(only_what_jax_needs(packages))}
    command = [sys.executable, "-S", "-c", RUN, *files]  # -S: without site-packages
    done = subprocess.run(command, cwd=out, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    expected, _ = logits_of(model, ids, **SIZES)
    exact = changes.get("dtype") is None
    np.testing.assert_allclose(np.load(files[1]), expected, rtol=0, atol=1e-5 if exact else 3e-2)


@pytest.mark.integration
@pytest.mark.parametrize("name", ["bytes", "words, adaptive"])
@pytest.mark.skipif(not OTHERS, reason="TXL_OTHER_JAX names no Python with another jax")
def test_another_jax_runs_what_this_one_exports_and_the_reverse_if_it_is_older(name, tmp_path):
    """Another version of jax runs the exported program, and exports it again.

    If the jax of this process is the newer one, it runs this second export.
    """
    vocab, changes = MODELS[name]
    model, out = trained(vocab, **changes), tmp_path / "out"
    model.export(out, **SIZES)
    ids = tiny.tokens(model.model.cfg, 2, 10 * SIZES["seg_len"])
    np.save(tmp_path / "ids.npy", ids)
    files = [str(tmp_path / f"{file}.npy") for file in ("ids", "logits")]
    expected, _ = logits_of(model, ids, **SIZES)
    own = (out / "logits.jax").read_bytes()
    for python in OTHERS:
        (out / "logits.jax").write_bytes(own)
        command = [python, "-c", RUN + AGAIN, *files]
        done = subprocess.run(command, cwd=out, env={"JAX_PLATFORMS": "cpu"}, capture_output=True)
        assert done.returncode == 0, done.stderr.decode()
        np.testing.assert_allclose(np.load(files[1]), expected, rtol=0, atol=1e-5)
        other, this = (Version(x) for x in (done.stdout.decode().split()[-1], jax.__version__))
        assert other != this
        if other > this:  # an older jax need not read what a newer one exports
            continue
        assert (out / "logits.jax").read_bytes() != own
        run = script(out)
        found = [logits for logits, _ in run.read(run.parameters(), ids)]
        np.testing.assert_allclose(np.concatenate(found, axis=1), expected, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Returns a model, its exported folder, and the global names of run.py as attributes."""
    folder = tmp_path_factory.mktemp("exported") / "out"
    model, frames = trained(WORDS, cutoffs=(4, 9)), "jax_traceback_in_locations_limit"
    before = getattr(jax.config, frames)
    try:
        # conftest.py sets 0, which keeps source paths out of programs. Then a test could not show
        # that the export removes such paths.
        jax.config.update(frames, 7)
        model.export(folder, **SIZES)
        assert getattr(jax.config, frames) == 7
    finally:
        jax.config.update(frames, before)
    return model, folder, script(folder)


@pytest.mark.integration
def test_the_loss_is_that_of_the_model_for_rows_of_any_length(exported):
    model, _, run = exported
    cfg, params = model.model.cfg, run.parameters()
    nll, (*_, shapes) = run.program("nll")
    lengths = np.array([5, 2, 0], np.int32)
    tokens, targets = tiny.tokens(cfg, 3, 5), tiny.tokens(cfg, 3, 5, seed=1)
    mems, own = run.empty(shapes, 3), model.model.init_mems(3, SIZES["mem_len"])
    for _ in range(3):
        found, mems = nll(params, tokens, targets, lengths, mems)
        variables = {"params": model.params}
        expected, own = model.model.apply(
            variables, tokens, targets, own, lengths=lengths, method="nll"
        )
        for row, n in enumerate(lengths):
            np.testing.assert_allclose(found[row, :n], expected[row, :n], rtol=0, atol=1e-5)
        np.testing.assert_array_equal(mems["filled"], own.filled)
    np.testing.assert_allclose(mems["hidden"], own.hidden, rtol=0, atol=1e-5)


@pytest.mark.integration
def test_steps_go_on_from_the_memory_and_the_readme_shows_how(exported, monkeypatch, capsys):
    model, folder, run = exported
    ids = tiny.tokens(model.model.cfg, 2, 12)
    *_, (_, mems) = run.read(params := run.parameters(), ids[:, :10])
    (project, _), (step, _) = run.program("cache"), run.program("step")
    cache, own = project(params, mems), logits_of(model, ids[:, :10], **SIZES)[1]
    for token in ids[:, 10:].T:
        logits, cache = step(params, token, cache)
        variables = {"params": model.params}
        expected, own = model.model.apply(variables, token[:, None], own)
        np.testing.assert_allclose(logits, expected[:, 0], rtol=0, atol=1e-5)
    monkeypatch.syspath_prepend(folder)
    readme = (folder / "README.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    exec(compile(block, "README.md", "exec"), {})
    assert len(capsys.readouterr().out.split()) == 3
    for name, shape in (("hidden", "[2,B,7,8]"), ("near/layers/0/keys", "[2,B,7,3]")):
        assert f"| `{name}` | float32 {shape} |" in readme
    assert "The logits are log-probabilities." in readme
    assert "other words are `<unk>`" in readme


def test_the_folder_is_a_model_of_the_library_and_names_no_path_of_this_machine(exported):
    model, folder, _ = exported
    jax.tree.map(np.testing.assert_array_equal, txl_jax.load(folder).params, model.params)
    own = str(pathlib.Path(txl_jax.__file__).parents[1]).encode()
    # Importing run.py made __pycache__.
    written = [file for file in folder.iterdir() if file.name != "__pycache__"]
    assert not [file.name for file in written if own in file.read_bytes()]
    assert json.loads((folder / "vocab.json").read_text())["symbols"] == WORDS.symbols


def test_a_tokenizer_goes_along(tmp_path):
    vocab = Vocab.from_subwords(["the cat saw a dog\n" * 20], vocab_size=260)
    trained(vocab).export(tmp_path / "out", **SIZES)
    assert json.loads((tmp_path / "out" / "tokenizer.json").read_text()) == vocab.tokenizer
    assert "`tokenizer.json`" in (tmp_path / "out" / "README.md").read_text()


def test_a_model_without_memory_has_no_cache_and_a_fixed_batch_is_one(tmp_path):
    out = tmp_path / "out"
    model = trained(Vocab.from_ids(13), attention="absolute_per_layer", n_positions=5, d_head=4)
    with pytest.raises(ConfigError, match=r"export.seg_len = 6: must .*n_positions 5,"):
        model.export(out, seg_len=6)
    model.export(out, batch_size=2, **SIZES)
    assert sorted(file.stem for file in out.glob("*.jax")) == ["logits", "nll"]
    assert "`step`" not in (readme := (out / "README.md").read_text())
    assert "B is 2, T = 5" in readme
    run, ids = script(out), tiny.tokens(model.model.cfg, 2, 10)
    found = [logits for logits, _ in run.read(run.parameters(), ids)]
    expected, _ = logits_of(model, ids, 5, 0)
    np.testing.assert_allclose(np.concatenate(found, axis=1), expected, rtol=0, atol=1e-5)


def test_only_new_and_empty_folders_are_written_and_only_as_a_whole(tmp_path):
    model = trained(Vocab.from_ids(13))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "text.txt").write_text("mine")
    with pytest.raises(ModelFormatError, match="is not empty"):
        model.export(tmp_path / "mine")
    missing = {key: value for key, value in model.params.items() if key != "u"}
    with pytest.raises(Exception, match=r'"u"|/u|\bu\b'):
        dataclasses.replace(model, params=missing).export(tmp_path / "out")
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]
    with pytest.raises(TypeError, match="unexpected keyword argument 'mem_length'"):
        model.export(tmp_path / "out", mem_length=3)


def test_an_empty_folder_stays_the_same_one(tmp_path, monkeypatch):
    """The folder can be a mounted disk or the current folder, which must not be replaced."""
    (out := tmp_path / "out").mkdir()
    monkeypatch.chdir(out)
    trained(Vocab.from_ids(13), n_layer=1).export(".", **SIZES)
    assert "step.jax" in (found := os.listdir("."))
    assert sorted(found) == sorted(os.listdir(out))
    assert [name for name in found if name.endswith(".tmp")] == []


@pytest.mark.slow
def test_the_mode_writes_to_the_workdir_or_to_the_folder_of_the_setting(trained_run, tmp_path):
    workdir, other = trained_run.copied(tmp_path / "run"), tmp_path / "other"
    sizes = ["--config.export.seg_len=5", "--config.export.mem_len=7"]
    flags = [f"--workdir={workdir}", "--mode=export", *sizes]
    done = tiny_runs.call(*flags)
    assert done.returncode == 0, done.stderr
    assert (workdir / "export" / "step.jax").exists()
    assert "README.md" in done.stdout
    again = tiny_runs.call(*flags)
    assert (again.returncode, "is not empty" in again.stderr) == (2, True)
    done = tiny_runs.call(
        *flags, f"--config.export.folder={other}", "--config.model.dtype=bfloat16"
    )
    assert done.returncode == 0, done.stderr
    assert "| `hidden` | bfloat16 [2,B,7,16] |" in (other / "README.md").read_text()
