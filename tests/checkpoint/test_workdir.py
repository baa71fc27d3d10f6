"""A run overwrites no file of the user in its workdir, and a workdir never has two models."""

import ast
import contextlib
import dataclasses
import importlib
import json
import os
import pathlib
import re
import shutil
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import tiny_runs
from places import ROOT

import txl_jax
from txl_jax import modes
from txl_jax.analysis import recl_table
from txl_jax.analysis import report_page as page
from txl_jax.checkpoint import workdir_files
from txl_jax.checkpoint.errors import WorkdirError
from txl_jax.checkpoint.loading import load
from txl_jax.checkpoint.lock import training_lock
from txl_jax.checkpoint.workdir import init_workdir
from txl_jax.checkpoint.workdir_files import (
    CONFIG,
    FILES,
    MODEL,
    check_file,
    check_free,
    register_outputs,
)
from txl_jax.config import ConfigError, ExperimentConfig, override
from txl_jax.config.folders import expanded
from txl_jax.convert import export
from txl_jax.convert.conversion import Request, to_workdir
from txl_jax.data.corpus import corpus_from_config
from txl_jax.data.errors import DataError
from txl_jax.evaluation import any_text
from txl_jax.messages import UserError
from txl_jax.training.fine_tuning import resolve_experiment
from txl_jax.training.plan import check_final_outputs

MADE_BY_USE = {CONFIG, MODEL, ".writable", ".lock", ".txl_jax"}
"""Names that the test of overwritten files leaves out, because other tests cover them."""


def contents(folder):
    return {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def claimed(tmp_path_factory):
    """Returns a folder with a text, and the corpus and experiment made from this text."""
    folder = tmp_path_factory.mktemp("claim")
    return (folder, *tiny_runs.corpus_and_experiment(folder))


@pytest.fixture(scope="module")
def trained(trained_run, tmp_path_factory):
    """Returns the workdir of a finished run."""
    return trained_run.copied(tmp_path_factory.mktemp("trained") / "run")


# URLs given in place of folders.

CALLS: dict[str, Any] = {
    "train": lambda url: txl_jax.train("quickstart:smoke", url),
    "load": txl_jax.load,
    "save": lambda url: txl_jax.save(cast(Any, None), url),
    "convert to": lambda url: to_workdir(Request(source="x", workdir=url)),
    "convert from": lambda url: to_workdir(Request(source=url, workdir="x")),
    "start_from": lambda url: txl_jax.load_config("quickstart", {"train.start_from": url}),
    "teachers": lambda url: txl_jax.load_config("quickstart", {"distil.teachers": [url]}),
    "corpus": lambda url: txl_jax.load_corpus("text", path=url),
    "json": lambda url: txl_jax.load_config("quickstart", {"generate.json": url}),
}


@pytest.mark.parametrize("url", ["gs:/b/r", "S3://b", "file:///r", "hdfs:/r", "https://a.b/r"])
@pytest.mark.parametrize("call", CALLS)
def test_a_url_is_refused_and_makes_no_local_folder(tmp_path, monkeypatch, url, call):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="is a URL, and only local paths"):
        CALLS[call](url)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("name", ["a:b", "./gs:/r", "c:/x", "x/gs://r"])
def test_a_folder_with_a_colon_is_no_url(name):
    assert expanded(name, "workdir") == pathlib.Path(name)


# The user's own files.


@pytest.mark.parametrize("name", sorted(set(FILES) - MADE_BY_USE))
def test_a_folder_with_a_file_that_a_run_would_overwrite_is_refused(claimed, tmp_path, name):
    _, corpus, exp = claimed
    (tmp_path / "notes.txt").write_text("mine")
    if "." in name:
        (tmp_path / name).write_text("mine")
    else:
        (tmp_path / name).mkdir()
        (tmp_path / name / "100").mkdir()
    before = contents(tmp_path)
    with pytest.raises(WorkdirError) as caught:
        init_workdir(str(tmp_path), exp, corpus)
    assert str(caught.value) == (
        f"workdir={tmp_path}: is not the folder of a run, and these files in it would be"
        f" overwritten: {name}. Name another workdir, or move them elsewhere"
    )
    assert contents(tmp_path) == before


def test_training_refuses_before_it_reads_the_text_and_names_all_files(claimed, tmp_path):
    folder, _, exp = claimed
    exp = override(exp, {"data.path": str(folder / "no such text"), "model.vocab_size": None})
    for name in ("vocab.json", "metrics.jsonl", "sample.txt", ".lock", "loss.png.0a1b2c3d.tmp"):
        (tmp_path / name).write_text("mine")
    before = contents(tmp_path)
    with pytest.raises(WorkdirError) as caught:
        modes.train(exp, str(tmp_path))
    listed = ".lock, loss.png.0a1b2c3d.tmp, metrics.jsonl, sample.txt, vocab.json"
    assert f"would be overwritten: {listed}. Name another" in str(caught.value)
    assert contents(tmp_path) == before


def test_each_run_side_by_side_has_a_folder_of_its_own_to_check(claimed, tmp_path):
    _, _, exp = claimed
    (tmp_path / "seed_1").mkdir()
    (tmp_path / "seed_1" / "vocab.json").write_text("mine")
    exp = override(exp, {"train.num_seeds": 2})
    with pytest.raises(WorkdirError, match=r"seed_1: is not the folder of a run.*: vocab\.json"):
        modes.train(exp, str(tmp_path))
    assert not (tmp_path / "seed_0").exists()


def test_what_a_run_leaves_that_was_killed_at_its_start_is_no_hindrance(claimed, tmp_path):
    _, corpus, exp = claimed
    (tmp_path / "notes.txt").write_text("mine")
    with training_lock(str(tmp_path)):
        pass
    (tmp_path / ".writable").touch()
    (tmp_path / "config.json.tmp").write_text('{"name": "ti')
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / ".writable").touch()
    init_workdir(str(tmp_path), exp, corpus)
    (tmp_path / "vocab.json").unlink()  # as if the run was killed after writing config.json
    init_workdir(str(tmp_path), exp, corpus)
    assert (tmp_path / "vocab.json").exists()
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.slow
def test_modes_that_compare_runs_overwrite_their_own_files_only(trained, tmp_path):
    exp = override(ExperimentConfig(), {"report.workdirs": [str(trained)]})
    mine = tmp_path / "report.html"
    mine.write_text("mine")
    with pytest.raises(WorkdirError, match=r"would be overwritten: report\.html\. Name another"):
        page.run(exp, str(tmp_path))
    assert mine.read_text() == "mine"
    mine.unlink()
    (tmp_path / "recl.csv").write_text("mine")
    for _ in range(2):
        page.run(exp, str(tmp_path))
    with pytest.raises(WorkdirError, match=r"overwritten: recl\.csv\. Name"):
        register_outputs(str(tmp_path), "recl")
    with pytest.raises(WorkdirError, match=r"overwritten: recl\.csv, report\.html\. Name"):
        check_free(str(tmp_path))
    register_outputs(str(trained), "recl")  # a run's workdir needs no .txl_jax, a list of modes
    assert not (trained / ".txl_jax").exists()


def test_a_table_is_not_written_over_the_users_own(claimed, tmp_path):
    (tmp_path / "ablation.csv").write_text("mine")
    with pytest.raises(WorkdirError, match=r"overwritten: ablation\.csv\. Name"):
        modes.ablate("configs/table6.py", {}, str(tmp_path))


# Two models in one folder.


def test_training_in_an_exported_folder_is_refused(claimed, trained, tmp_path):
    _, corpus, exp = claimed
    folder = tmp_path / "exported"
    export(str(trained), str(folder))
    before = contents(folder)
    for attempt in (
        lambda: init_workdir(str(folder), exp, corpus),
        lambda: modes.train(exp, str(folder)),
    ):
        with pytest.raises(WorkdirError) as caught:
            attempt()
        assert str(caught.value) == (
            f"workdir={folder}: has an exported model (model.safetensors), and training would"
            " put a second one beside it. Name another workdir;"
            f" train.start_from={folder} starts from the parameters of the exported model"
        )
    assert contents(folder) == before


def test_a_folder_with_two_models_is_not_loaded(trained, tmp_path):
    export(str(trained), str(tmp_path / "exported"))
    os.link(tmp_path / "exported" / MODEL, trained / MODEL)
    try:
        with pytest.raises(WorkdirError, match=r"has two models, model\.safetensors and check"):
            txl_jax.load(str(trained))
    finally:
        (trained / MODEL).unlink()
    assert txl_jax.load(str(trained)).step == load(str(trained)).step == 12


# Files of a workdir that are damaged, or written by another program.

SUBWORD = b'{"kind": "subword", "symbols": [], "tokenizer": {"model": {"vocab": %s}}}'
ODD = {
    "list": b"[1, 2]",
    "number": b"7",
    "null": b"null",
    "text": b'"config"',
    "empty": b"",
    "no keys": b"{}",
    "half": b'{"model": {',
    "not UTF-8": b'{"model": "\xff"}',
    "sections of another type": b'{"model": [], "data": 1, "train": null}',
    "another program": b'{"model_type": "gpt2", "n_layer": 12}',
    "wrong sections": b'{"model": {}, "data": {}, "train": {}, "corpus": []}',
    "wrong value": b'{"model": {"n_layer": "two"}, "data": {}, "train": {}}',
    "NaN": b'{"model": {"dropout": NaN}, "data": {}, "train": {}}',
    "unknown key": b'{"model": {}, "data": {}, "train": {"stepz": 1}}',
    "huge": b'{"model": {"d_model": 1' + 5000 * b"0" + b'}, "data": {}, "train": {}}',
    "symbols are a number": b'{"kind": "char", "symbols": 5}',
    "symbols are numbers": b'{"kind": "char", "symbols": [1, [2]]}',
    "kind is a list": b'{"kind": ["char"], "symbols": ["a"]}',
    "tokenizer is a list": b'{"kind": "subword", "symbols": ["a"], "tokenizer": [1]}',
    "tokenizer of numbers": SUBWORD % b"5",
    "tokenizer of a list": SUBWORD % b"[7]",
}
"""Contents of a config.json or vocab.json that is damaged, or of another program."""
VALUES = ("wrong value", "NaN", "unknown key")
"""Keys of ODD whose content can be read, but has an unknown setting or a refused value."""


def readers(folder, claimed):
    """Returns functions by name, one for each way to read a workdir or an exported folder."""
    text, corpus, exp = claimed
    start = override(exp, {"train.start_from": str(folder), "model.vocab_size": None})
    recl = override(ExperimentConfig(), {"recl.models": [f"a={folder}", f"b={folder}"]})
    return {
        "load": lambda: txl_jax.load(str(folder)),
        "start_from": lambda: resolve_experiment(start, str(text / "new")),
        "page": lambda: page.run(ExperimentConfig(), str(folder)),
        "recl": lambda: recl_table.run(recl, str(text / "out")),
        "export": lambda: export(str(folder), str(text / "plain")),
        "train": lambda: init_workdir(str(folder), exp, corpus),
    }


@pytest.mark.parametrize("form", ["run", "exported"])
@pytest.mark.parametrize("name", ["config.json", "vocab.json"])
@pytest.mark.parametrize("kind", ODD)
def test_a_damaged_record_is_one_line_that_names_the_file(
    claimed, described, tmp_path, form, name, kind
):
    folder = tmp_path / "run"
    shutil.copytree(described[form], folder)
    (folder / name).write_bytes(ODD[kind])
    for reader, read in readers(folder, claimed).items():
        if name == "vocab.json" and reader in ("page", "train"):
            continue  # these two do not read vocab.json
        if kind in VALUES and reader == "page":
            continue  # the report page shows such values
        if form == "exported" and reader in ("train", "export"):
            continue  # refused: an exported model cannot be trained or exported
        with pytest.raises(UserError) as caught:
            read()
        text = str(caught.value)
        assert "\n" not in text, reader
        assert name in text, (reader, text)
        if name == "config.json" and kind in VALUES:
            assert re.search(r"config\.json: (config key|was written by)", text), reader


@pytest.fixture(scope="module")
def described(claimed, tmp_path_factory):
    """Returns two folders: a run without checkpoints, and an exported model without parameters."""
    _, corpus, exp = claimed
    folder = tmp_path_factory.mktemp("described")
    init_workdir(tiny_runs.claimed(folder / "run", exp, corpus), exp, corpus)
    shutil.copytree(folder / "run", folder / "exported")
    (folder / "exported" / MODEL).touch()
    return {"run": folder / "run", "exported": folder / "exported"}


# The list of the names of all files that a run may write.

ELSEWHERE = None
"""Marks a path that the user, or the caller of the writing function, chooses."""

NAMED_BY_HAND = {
    ("analysis/report_page.py", "page"): "report.html",
    ("analysis/results.py", "os.path.join(folder, f'{name}.{kind}')"): ELSEWHERE,
    ("analysis/results.py", "path"): ELSEWHERE,
    ("analysis/recl.py", "expanded_text(path, 'path')"): ELSEWHERE,
    ("evaluation/split.py", "kept"): "evaluations.jsonl",
    ("evaluation/any_text.py", "path"): ELSEWHERE,
    ("files.py", "path"): ELSEWHERE,
    ("files.py", "temporary"): ELSEWHERE,
    ("generation/write.py", "path"): ELSEWHERE,
    ("library_errors.py", "self._path"): "library.log",
    ("checkpoint/export.py", "os.path.join(made, f'{name}.jax')"): "export",
    ("checkpoint/export.py", "os.path.join(made, 'tokenizer.json')"): "export",
    ("checkpoint/export.py", "os.path.join(made, 'run.py')"): "export",
    ("checkpoint/export.py", "os.path.join(made, 'README.md')"): "export",
    ("convert/writing.py", "os.path.join(folder, CONFIG if to == 'huggingface' else ARGS)"): (
        ELSEWHERE
    ),
    ("checkpoint/workdir_files.py", "file"): ELSEWHERE,
    ("checkpoint/workdir_files.py", "probe"): ".writable",
    ("checkpoint/workdir_files.py", "str(record)"): ".txl_jax",
    ("training/distil.py", "str(stored)"): "soft_targets.npz",
    ("training/run_log.py", "figure_path"): "loss.png",
    ("records.py", "metrics_path"): "metrics.jsonl",
    ("training/run_log.py", "self.metrics_path"): "metrics.jsonl",
    ("checkpoint/checkpoint_folder.py", "os.path.join(folder, MANIFEST)"): "checkpoints",
    ("training/events.py", "self._path"): "tensorboard",
    ("training/events.py", "str(made)"): "wandb",
    ("checkpoint/workdir.py", "str(config)"): "config.json",
    ("parallel/autotuning.py", "file"): "autotuned.json",
}
"""``{(module, path expression): file name}`` where the code's path is no string constant."""


def written_paths():
    """Yields (module, path as an AST node, whether it is a plot) of each file that the code writes.

    The path of a plot has no ending, since a plot is written as both .png and .svg.
    """
    for file in sorted((ROOT / "txl_jax").rglob("*.py")):
        module = file.relative_to(ROOT / "txl_jax").as_posix()
        if not module.startswith("data/"):  # data/ writes into the cache, not a workdir
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "files":
                    for name in getattr(node.value, "keys", ()):  # the files of an analysis
                        yield module, name, "." not in name.value
                elif not isinstance(node, ast.Call):
                    continue
                elif called(node) == "write_results":
                    assert ast.unparse(node.args[2]) == "files"
                elif (path := written_path(node)) is not None:
                    yield module, path, False


def called(node):
    """Returns the last part of the called function's dotted name."""
    return node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")


def written_path(node):
    """Returns the path argument of a call that writes a file, or ``None`` for another call."""
    name, bare = called(node), isinstance(node.func, ast.Name)
    names = ("atomic_write", "write_json", "write_csv", "write_arrays", "append_new")
    if node.args and (name in names or (name == "append" and bare)):
        return node.args[0]
    if name == "open" and len(node.args) > 1:
        mode = ast.unparse(node.args[1])
        return node.args[0] if set(mode) & set("wax+") or "O_CREAT" in mode else None
    return None


def spelled_out(module, path):
    """Returns the file name at the end of a path if the name is a constant, else ``None``."""
    if isinstance(path, ast.Call) and called(path) == "join":
        path = path.args[-1]
    if isinstance(path, ast.Constant):
        return path.value
    name = path.id if isinstance(path, ast.Name) else getattr(path, "attr", "")
    if not name.isupper():
        return None
    dotted = "txl_jax." + module.removesuffix(".py").replace("/", ".")
    places = (importlib.import_module(dotted), workdir_files)
    return next(vars(place)[name] for place in places if name in vars(place))


def test_every_file_that_is_written_is_in_the_list_of_names():
    """Fails if a new call writes a file whose name is not in ``workdir_files.FILES``."""
    # Libraries write these files, so no call in this package does.
    seen: set[str | None] = {"checkpoints", ".lock"}
    unknown: list[tuple[str, str]] = []
    for module, path, picture in written_paths():
        key = module, ast.unparse(path)
        name = NAMED_BY_HAND[key] if key in NAMED_BY_HAND else spelled_out(module, path)
        if name is None and key not in NAMED_BY_HAND:
            unknown.append(key)
            continue
        seen |= {f"{name}.png", f"{name}.svg"} if picture and name else {name}
    assert unknown == []
    assert seen - {ELSEWHERE} == set(FILES)


# A folder with both a text and a run; stored paths in later commands.


@pytest.mark.parametrize("files", [False, True])
@pytest.mark.parametrize("name", ["text", "tokens"])
def test_what_a_run_wrote_is_no_part_of_the_text_in_its_folder(tmp_path, capsys, name, files):
    for n in range(3):
        (tmp_path / f"{n}.txt").write_text(tiny_runs.text(60, seed=n))
        np.save(tmp_path / f"{n}.npy", np.arange(300) % 7)
    settings = {"data.name": name, "data.path": str(tmp_path), "data.document_files": files}
    if name == "tokens":
        settings |= {"data.document_files": False, "data.vocab": None}
    corpus, exp = tiny_runs.corpus_and_experiment(tmp_path / "..", **settings)
    init_workdir(str(tmp_path), exp, corpus)
    (tmp_path / "sample.txt").write_text("zebra")
    np.save(tmp_path / "sample.npy", np.arange(30) % 20)
    np.save(tmp_path / "sample.starts.npy", np.array([0, 9]))
    capsys.readouterr()
    # A message is printed once per path, so the second reading uses another path.
    link = tmp_path.with_name(f"{tmp_path.name}-link")
    link.unlink(missing_ok=True)
    link.symlink_to(tmp_path)
    for path in (tmp_path, link):
        again = corpus_from_config(dataclasses.replace(exp.data, path=str(path)))
        assert again.source_hash == corpus.source_hash
        assert again.vocab == corpus.vocab
        assert "left out sample." in capsys.readouterr().err
        init_workdir(str(tmp_path), exp, again)  # as the repeated command does
    (tmp_path / CONFIG).write_text('{"model_type": "gpt2"}')  # a config of another program
    (tmp_path / "sample.starts.npy").unlink()  # a file of starts is refused beside several arrays
    assert corpus_from_config(exp.data).source_hash != corpus.source_hash


@pytest.mark.slow
def test_a_run_in_the_folder_of_its_text_is_repeated(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text(tiny_runs.text())
    exp = tiny_runs.experiment(tmp_path.parent, **{"data.path": ".", "train.steps": 2})
    first = txl_jax.train(exp, ".").evaluate()
    assert (tmp_path / "sample.txt").exists()
    assert txl_jax.train(exp, ".").evaluate().loss == first.loss


@pytest.mark.slow
def test_a_stored_path_is_right_in_another_folder(tmp_path, monkeypatch):
    """Relative paths of data, start_from and prompts are stored as absolute paths."""
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    for folder in (here, elsewhere):
        folder.mkdir()
    monkeypatch.chdir(here)
    (here / "mine.txt").write_text(tiny_runs.text())
    (here / "prompt.txt").write_text("the cat")
    given = {"data.path": "mine.txt", "train.steps": 2, "generate.prompt_file": "prompt.txt"}
    exp = tiny_runs.experiment(tmp_path, **{**given, "generate.prompt": ""})
    trained = txl_jax.train(exp, "run")
    assert json.loads((here / "run" / CONFIG).read_text())["corpus"]["label"] == "mine.txt"
    more = override(exp, {"train.start_from": "run"})
    txl_jax.train(more, "more")
    same = override(more, {"train.start_from": "./../here/run/"})
    txl_jax.train(same, "more")  # resumes
    with pytest.raises(WorkdirError, match=r"train.start_from: '.*run' -> '.*more'"):
        txl_jax.train(override(more, {"train.start_from": "more"}), "more")
    stored = json.loads((here / "more" / CONFIG).read_text())
    assert stored["data"]["path"] == str(here / "mine.txt")
    assert stored["train"]["start_from"] == str(here / "run")
    assert stored["generate"]["prompt_file"] == str(here / "prompt.txt")
    assert (stored["score"]["path"], stored["data"]["cache_dir"]) == ("-", None)
    expected = trained.evaluate().loss
    monkeypatch.chdir(elsewhere)
    for model in (trained, txl_jax.load("../here/run")):
        assert model.evaluate().loss == expected
        assert model.generate(length=3)[0].prompt == "the cat"


@pytest.mark.parametrize("key", ["generate.json", "score.json"])
def test_results_are_not_written_into_the_text(claimed, tmp_path, key, monkeypatch):
    _, corpus, exp = claimed
    text = tmp_path / "text.txt"
    text.write_text("the cat\n")
    monkeypatch.chdir(tmp_path)
    for path, output in ((text, "text.txt"), (tmp_path, "out.txt"), (".", text)):
        asked = override(exp, {"data.path": str(path), key: str(output)})
        refuse: Any = lambda c=asked: check_final_outputs(c, corpus)
        if key == "score.json":
            refuse = lambda c=asked: any_text.run(mock.Mock(config=c), "unused")
        with pytest.raises(DataError, match=f"{key} = .*: is in the folder of the texts"):
            refuse()
    assert text.read_text() == "the cat\n"
    check_final_outputs(override(exp, {"generate.json": str(tmp_path / "o.json")}), corpus)


def test_results_are_not_written_into_a_folder_that_texts_are_read_from(tmp_path):
    for name, others, outputs in (
        ("text", "a.txt", {"o.json": False, "runs/o.json": True, "test/o.txt": False}),
        ("text", "train/a.txt", {"train/o.json": False, "train/x/o.json": False, "o.json": False}),
        ("text", "data/a.txt", {"data/o.json": False, "data/x/o.json": False}),
        ("text", "none/", {"o.json": False}),
        ("tokens", "a.npy", {"o.json": False, "runs/o.bin": True}),
        ("enwik8", "enwik8", {"o.json": False, "runs/o.txt": True}),
    ):
        folder = tmp_path / f"{name}-{others.replace('/', '-')}"
        for other in (others, *outputs):
            (folder / other).parent.mkdir(parents=True, exist_ok=True)
        if not others.endswith("/"):
            (folder / others).touch()
        data = ExperimentConfig.from_dict({"data": {"name": name, "path": str(folder)}}).data
        for output, allowed in outputs.items():
            refused = pytest.raises(DataError, match="is in the folder of the texts")
            with contextlib.nullcontext() if allowed else refused:
                check_file("score.json", str(folder / output), data)
