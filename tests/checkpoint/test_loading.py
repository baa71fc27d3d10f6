"""A saved model is loaded bit for bit, from a folder, a workdir or the Hub."""

import dataclasses
import json
import shutil
import sys
import types

import jax
import numpy as np
import pytest
import tiny_models
import tiny_runs
from safetensors.numpy import load_file, save_file

import txl_jax
from txl_jax.checkpoint import saving
from txl_jax.checkpoint.errors import ModelFormatError, WorkdirError
from txl_jax.checkpoint.trained_model import TrainedModel
from txl_jax.checkpoint.workdir import read_vocab
from txl_jax.config import ExperimentConfig
from txl_jax.data.errors import DataError
from txl_jax.data.vocab import Vocab
from txl_jax.model.layout import stack_layers
from txl_jax.model.transformer_xl import TransformerXL


@pytest.fixture
def trained():
    cfg = tiny_models.config()
    vocab = Vocab.from_chars(["abcdefghijkl\n"])
    params = jax.tree.map(np.asarray, tiny_models.variables(cfg)["params"])
    return TrainedModel(
        TransformerXL(cfg), params, vocab, ExperimentConfig(model=cfg, name="tiny"), 5
    )


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a.params, b.params)
    assert (a.vocab, a.config.model, a.config.name) == (b.vocab, b.config.model, b.config.name)
    assert a.step == b.step


def test_what_is_saved_is_loaded_bit_for_bit(trained, tmp_path):
    folder = str(tmp_path / "out")
    txl_jax.save(trained, folder)
    assert_same(txl_jax.load(folder), trained)
    with pytest.raises(ModelFormatError, match="is not empty"):
        txl_jax.save(trained, folder)


@pytest.mark.parametrize("stacked", [False, True])
def test_a_model_trained_with_scanned_layers_and_a_kernel_is_loaded_without(
    trained, stacked, tmp_path
):
    """Loading resets ``scan_layers``, ``remat`` and ``kernel``, and unstacks the parameters."""
    record = trained.config.to_dict()
    record["model"] |= {"scan_layers": True, "remat": "layer", "kernel": "triton"}
    params = stack_layers(trained.params) if stacked else trained.params
    txl_jax.save(dataclasses.replace(trained, params=params), tmp_path / "out", record)
    assert_same(txl_jax.load(tmp_path / "out"), trained)


def test_a_home_folder_is_the_same_in_saving_and_loading(trained, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    txl_jax.save(trained, "~/out")
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert not (tmp_path / "~").exists()
    assert_same(txl_jax.load("~/out"), trained)
    with pytest.raises(txl_jax.ConfigError, match="there is no home folder '~nobody-here'"):
        txl_jax.save(trained, "~nobody-here/out")


def test_parameters_trained_further_are_the_ones_saved(trained, tmp_path):
    more = dataclasses.replace(trained, params=jax.tree.map(lambda x: x + 1, trained.params))
    txl_jax.save(more, str(tmp_path / "out"))
    assert_same(txl_jax.load(str(tmp_path / "out")), more)


SECRET = "secret"
LEAKS = {
    "data.path": f"~/{SECRET}/text.txt",
    "data.cache_dir": f"/home/{SECRET}",
    "train.start_from": f"/home/{SECRET}/run",
    "train.text_on_device": True,
    "distil.teachers": [f"/home/{SECRET}/teacher"],
    "generate.prompts_file": f"{SECRET}/prompts.txt",
    "generate.json": f"{SECRET}.jsonl",
    "score.path": f"{SECRET}.txt",
    "score.json": f"{SECRET}.json",
    "recl.models": [f"mine=/home/{SECRET}"],
    "ablation.workdirs": [f"row=/home/{SECRET}"],
    "report.workdirs": [f"/home/{SECRET}"],
}


def files_of(folder):
    return b"".join(path.read_bytes() for path in folder.iterdir()).decode("latin-1")


def test_no_path_of_the_users_own_is_in_what_is_saved_or_pushed(trained, hub, tmp_path):
    exp = txl_jax.config.override(trained.config, LEAKS)
    leaky = dataclasses.replace(trained, config=exp)
    txl_jax.save(leaky, str(tmp_path / "out"))
    assert SECRET not in files_of(tmp_path / "out")
    txl_jax.push(leaky, "me/tiny")
    assert SECRET not in files_of(tmp_path / "hub" / "me" / "tiny")
    kept = txl_jax.config.override(trained.config, {"train.text_on_device": True})
    assert txl_jax.load("me/tiny").config == kept  # only paths are left out


@pytest.mark.parametrize(
    ("data", "label", "kept"),
    [
        ({"path": "~/secret/mine.txt"}, "/home/secret/secret/mine.txt", "mine.txt"),
        ({"path": "~"}, "/home/secret, its own splits", "text, its own splits"),
        ({"path": "."}, ".", "text"),
        ({"path": "~secret"}, "/home/secret", "text"),
        ({"path": "../secret/texts/"}, "../secret/texts, its own splits", "texts, its own splits"),
        (
            {"path": "secret//mine.txt"},
            "secret/mine.txt; encoded with a trained model's vocabulary, not its own",
            "mine.txt; encoded with a trained model's vocabulary, not its own",
        ),
        (
            {"path": "/secret/texts"},
            "/secret/texts, its own splits; encoded with a trained model's vocabulary, not its own",
            "texts, its own splits; encoded with a trained model's vocabulary, not its own",
        ),
        (
            {"url": "https://host/a.txt?token=secret", "hash": "md5:" + 32 * "a"},
            "https://host/a.txt?token=secret",
            "text",
        ),
        (
            {"url": "https://host/a.txt", "hash": "md5:" + 32 * "a"},
            "https://host/a.txt",
            "https://host/a.txt",
        ),
    ],
)
def test_the_label_of_the_text_has_no_folder_of_the_users_own(trained, tmp_path, data, label, kept):
    exp = txl_jax.config.override(trained.config, {f"data.{k}": v for k, v in data.items()})
    record = {**exp.to_dict(), "corpus": {"name": "text", "label": label}}
    saving.save(trained, str(tmp_path / "out"), record)
    assert SECRET not in files_of(tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["corpus"]["label"] == kept
    assert written["data"]["url"] == (kept if kept.startswith("https") else None)


class Hub(types.ModuleType):
    """A fake module huggingface_hub, whose repositories are local folders."""

    def __init__(self, root):
        super().__init__("huggingface_hub")
        self.root, self.asked = root, []

    def create_repo(self, name, private, exist_ok):
        self.asked.append((name, private, exist_ok))

    def upload_folder(self, repo_id, folder_path):
        shutil.copytree(folder_path, self.root / repo_id)
        return f"https://hub/{repo_id}"

    def snapshot_download(self, name, revision, allow_patterns):
        self.asked.append((name, revision))
        if not (self.root / name).is_dir():
            raise RuntimeError("404 not found\nand a long story")
        assert set(allow_patterns) == {"model.safetensors", "config.json", "vocab.json"}
        return str(self.root / name)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    fake = Hub(tmp_path / "hub")
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    return fake


def test_the_hub_gives_back_what_was_pushed(trained, hub):
    assert txl_jax.push(trained, "me/tiny") == "https://hub/me/tiny"
    assert hub.asked == [("me/tiny", True, True)]
    for name in ("me/tiny", "hub:me/tiny", "me/tiny@v1"):
        assert_same(txl_jax.load(name), trained)
    assert hub.asked[-1] == ("me/tiny", "v1")


def test_what_is_nowhere_is_a_clear_error(hub, tmp_path, monkeypatch):
    with pytest.raises(
        WorkdirError,
        match=r"me/no: .* Hugging Face Hub \(404 not found and a long story\)$",
    ):
        txl_jax.load("me/no")
    with pytest.raises(WorkdirError, match=r"runs/nothing: there is no such folder"):
        txl_jax.load("runs/nothing")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(WorkdirError, match=r"pip install 'txl_jax\[hub\]'"):
        txl_jax.load("me/no")


def test_loading_a_workdir_prints_and_logs_nothing(trained_run, capfd, caplog):
    """Orbax would log a warning when a folder is opened only for reading."""
    txl_jax.load(trained_run.workdir)
    assert capfd.readouterr() == ("", "")
    assert not [record for record in caplog.records if record.levelname != "DEBUG"]


def test_a_workdir_is_loaded_as_before(trained_run):
    from txl_jax.checkpoint.loading import load_workdir as load

    assert_same(txl_jax.load(str(trained_run.workdir)), load(str(trained_run.workdir)))


@pytest.mark.parametrize("version", ["1", "99", None])
def test_a_folder_of_another_format_is_refused(trained, tmp_path, version):
    txl_jax.save(trained, str(tmp_path))
    path = tmp_path / "model.safetensors"
    save_file(load_file(path), path, {"version": version} if version else None)
    refused = rf"has format {version or 0}, and this version of txl_jax reads format 2 only; export"
    with pytest.raises(ModelFormatError, match=refused):
        txl_jax.load(str(tmp_path))


def test_an_invalid_vocabulary_is_a_clear_error(trained, tmp_path):
    txl_jax.save(trained, str(tmp_path))
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(DataError, match=r"vocab.json\) must have symbols, a list"):
        txl_jax.load(str(tmp_path))


@pytest.mark.parametrize("change", ["swapped", "shorter", "renamed", "kind"])
@pytest.mark.parametrize("form", ["exported", "run"])
def test_a_vocabulary_that_was_changed_afterwards_is_refused(trained, tmp_path, form, change):
    """With a changed vocabulary, the model would read and write the wrong symbols."""
    folder = tmp_path / form
    if form == "exported":
        txl_jax.save(trained, folder)
    else:
        corpus, exp = tiny_runs.corpus_and_experiment(tmp_path)
        tiny_runs.claimed(folder, exp, corpus)
    assert len(read_vocab(str(folder))) > 2
    stored = json.loads((folder / "vocab.json").read_text())
    symbols = stored["symbols"]
    if change == "swapped":
        symbols[0], symbols[1] = symbols[1], symbols[0]
    elif change == "renamed":
        symbols[0] = "ß"
    elif change == "shorter":
        symbols.pop()
    else:
        stored["kind"] = "id"
    (folder / "vocab.json").write_text(json.dumps(stored))
    why = "it has [0-9]+ symbols, and the model has [0-9]+" if change == "shorter" else "its hash"
    with pytest.raises(DataError, match=rf"vocab\.json: was changed since .*: {why}.*; restore"):
        txl_jax.load(folder)
