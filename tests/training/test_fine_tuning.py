"""Fine-tuning begins with the parameters, vocabulary and shape of the trained model."""

import json
import pathlib
import shutil
from typing import Any

import jax
import numpy as np
import optax
import pytest
from run_records import StopAt
from tiny_runs import arrays, corpus_and_experiment, experiment, text, train

import txl_jax
from txl_jax import modes
from txl_jax.checkpoint.errors import CheckpointError, ModelFormatError, WorkdirError
from txl_jax.checkpoint.trained_model import TrainedModel
from txl_jax.checkpoint.workdir import init_workdir, with_vocab
from txl_jax.config import ConfigError, load_config
from txl_jax.convert import export
from txl_jax.data.errors import DataError
from txl_jax.training.fine_tuning import load_encoded_corpus, resolve_experiment
from txl_jax.training.preemption import PreemptionGuard

SHAPE = ("n_layer", "d_model", "n_head", "d_head", "d_inner")
UNNAMED = {f"model.{key}": getattr(txl_jax.TransformerXLConfig(), key) for key in SHAPE}
"""The defaults of the settings of the model's shape, as in a config that sets none of them."""
FEW = {"train.steps": 4, "train.eval_every": 0}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Returns the workdir of a trained character model.

    A high learning rate moved its parameters far from their first values.
    """
    folder = tmp_path_factory.mktemp("start")
    exp, corpus = claimed(folder, folder / "run", **{"optimizer.learning_rate": 0.05, "seed": 3})
    train(exp, corpus, str(folder / "run"), PreemptionGuard())
    return folder / "run"


def claimed(folder, workdir, **changes):
    """Writes config and vocabulary to a workdir without training; returns experiment and corpus."""
    corpus, exp = corpus_and_experiment(folder, **changes)
    workdir.mkdir()
    init_workdir(str(workdir), exp, corpus)
    return exp, corpus


def resolved(folder, start, workdir, said=None, **changes):
    """Prepares a run that fine-tunes the model of the workdir ``start`` on another text.

    ``said`` is this text, unless None. ``changes`` are settings. Prepares as the command does, and
    returns the experiment and the corpus.
    """
    folder.mkdir(exist_ok=True)
    (folder / "text.txt").write_text(said or text(seed=9)[: 1 << 13], encoding="utf-8")
    given = {**UNNAMED, "data.vocab": None, "train.start_from": str(start), "train.log_every": 1}
    exp = experiment(folder, **{**given, **changes})
    exp, vocab = resolve_experiment(exp, str(workdir))
    corpus = load_encoded_corpus(exp, vocab)
    return with_vocab(exp, corpus), corpus


def begin(folder, start, workdir, stop=None, **changes):
    """Prepares fine-tuning by :func:`resolved`, and trains; returns experiment, corpus, outcome."""
    exp, corpus = resolved(folder, start, workdir, **changes)
    workdir.mkdir(exist_ok=True)
    init_workdir(str(workdir), exp, corpus)
    return exp, corpus, train(exp, corpus, str(workdir), stop or PreemptionGuard())


def losses(workdir):
    """The losses of the training records, in order."""
    lines = (pathlib.Path(workdir) / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [record["loss"] for record in records if record["kind"] == "train"]


def loss_by_hand(model, params, corpus, batch_size=4, seg_len=16):
    """Mean loss in nats over the first segments of all streams of the training split."""
    length = len(corpus.train) // batch_size
    rows = np.stack([corpus.train[b * length :][: seg_len + 1] for b in range(batch_size)])
    rows = rows.astype(np.int32)
    mems = model.init_mems(batch_size, 16)
    nll, _ = model.apply({"params": params}, rows[:, :-1], rows[:, 1:], mems, method="nll")
    return float(np.mean(nll))


# What a fine-tuned run starts from.


@pytest.mark.slow
@pytest.mark.parametrize("scan_layers", [False, True])
def test_the_first_loss_is_the_starting_models_and_training_changes_it(
    trained, tmp_path, scan_layers
):
    changes = {"model.scan_layers": scan_layers, "optimizer.learning_rate": 0.01, **FEW}
    exp, corpus, _ = begin(tmp_path / "text", trained, tmp_path / "tuned", **changes)
    start = txl_jax.load(str(trained))
    want = loss_by_hand(start.model, start.params, corpus)
    tokens, mems = np.zeros((4, 16), np.int32), start.model.init_mems(4, 16)
    fresh = start.model.init(jax.random.key(exp.seed), tokens, mems)["params"]
    new = loss_by_hand(start.model, fresh, corpus)
    assert losses(tmp_path / "tuned")[0] == pytest.approx(want, abs=1e-5)
    assert abs(new - want) > 0.1  # a new model has another loss
    assert losses(tmp_path / "tuned")[-1] < want - 0.01
    before, after = (arrays(txl_jax.load(str(w)).params) for w in (trained, tmp_path / "tuned"))
    assert before.keys() == after.keys()
    assert all(np.abs(before[key] - after[key]).max() > 0 for key in before)
    assert exp.model.n_layer == 2
    record = json.loads((tmp_path / "tuned" / "start.json").read_text())
    assert record["folder"] == str(trained)
    assert record["step"] == txl_jax.load(str(trained)).step
    config = json.loads((tmp_path / "tuned" / "config.json").read_text())
    assert config["train"]["start_from"] == str(trained)


@pytest.mark.slow
@pytest.mark.parametrize("scan_layers", [False, True])
def test_an_optimizer_that_keeps_the_first_parameters_keeps_those_it_starts_from(
    trained, tmp_path, scan_layers
):
    """Prodigy and cocob (tested here) compute updates relative to the first parameters."""
    changes = {"optimizer.name": "optax.contrib.cocob", "optimizer.learning_rate": 1.0}
    changes |= {"model.scan_layers": scan_layers, **FEW}
    *_, outcome = begin(tmp_path / "text", trained, tmp_path / "tuned", **changes)
    kept = optax.tree_utils.tree_get(outcome.state.opt_state, "init_particles")
    kept = {name.replace("one_layer", "layer"): x for name, x in arrays(kept).items()}
    want = arrays(txl_jax.load(str(trained)).params)
    assert kept.keys() == want.keys()
    for name in want:
        np.testing.assert_array_equal(kept[name], want[name], err_msg=name)


def test_vocabulary_and_shape_are_those_of_the_starting_model(trained, tmp_path):
    exp, corpus = resolved(tmp_path / "text", trained, tmp_path / "new", said="the cat\n" * 300)
    start = txl_jax.load(str(trained))
    assert corpus.vocab == start.vocab  # the new text has 7 characters only
    assert corpus.info["foreign_vocab"]
    assert exp.data.vocab == "char"
    for key in SHAPE:
        assert getattr(exp.model, key) == getattr(start.config.model, key)


def test_dropout_is_the_new_runs_own(trained, tmp_path):
    exp = experiment(tmp_path, **UNNAMED, **{"model.dropout": 0.3, "data.vocab": None})
    exp = txl_jax.config.override(exp, {"train.start_from": str(trained)})
    model = resolve_experiment(exp, str(tmp_path / "tuned"))[0].model
    assert model.dropout == 0.3
    assert model.n_layer == 2


@pytest.mark.integration
def test_a_start_of_another_shape_before_the_first_checkpoint_is_refused(trained, tmp_path):
    start = tmp_path / "start"
    export(str(trained), str(start))
    begin(tmp_path / "text", start, tmp_path / "tuned", StopAt(1))
    assert not list((tmp_path / "tuned").glob("checkpoints/*"))
    shutil.rmtree(start)
    (tmp_path / "other").mkdir()
    exp, corpus = claimed(tmp_path / "other", tmp_path / "deep", **{"model.n_layer": 3, **FEW})
    train(exp, corpus, str(tmp_path / "deep"), PreemptionGuard())
    export(str(tmp_path / "deep"), str(start))
    with pytest.raises(ConfigError, match=r"train\.start_from.*n_layer 3, not 2"):
        begin(tmp_path / "text", start, tmp_path / "tuned")


@pytest.mark.integration
def test_an_exported_folder_starts_the_same_run(trained, tmp_path):
    export(str(trained), str(tmp_path / "exported"))
    begin(tmp_path / "text", trained, tmp_path / "a", **FEW)
    begin(tmp_path / "text", tmp_path / "exported", tmp_path / "b", **FEW)
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    of = lambda name: json.loads((tmp_path / name / "start.json").read_text())["parameters_sha256"]
    assert of("a") == of("b")


# Resuming.


@pytest.mark.slow
def test_a_resumed_run_is_the_same_and_does_not_read_the_model_it_started_from(trained, tmp_path):
    start = tmp_path / "start"
    shutil.copytree(trained, start)
    changes = {"model.dropout": 0.2, "train.steps": 8, "train.eval_every": 0, "checkpoint.every": 4}
    _, _, whole = begin(tmp_path / "text", start, tmp_path / "whole", **changes)
    _, _, cut = begin(tmp_path / "text", start, tmp_path / "cut", StopAt(4), **changes)
    assert 0 < int(cut.state.step) < 8
    shutil.rmtree(start)
    _, _, cut = begin(tmp_path / "text", start, tmp_path / "cut", **changes)
    assert cut.finished
    assert losses(tmp_path / "whole") == losses(tmp_path / "cut")
    want, got = arrays(whole.state), arrays(cut.state)
    for key in want:
        np.testing.assert_array_equal(want[key], got[key], err_msg=key)


@pytest.mark.integration
def test_another_start_is_another_run(trained, tmp_path):
    exp, corpus = resolved(tmp_path / "text", trained, tmp_path / "tuned")
    (tmp_path / "tuned").mkdir()
    init_workdir(str(tmp_path / "tuned"), exp, corpus)
    shutil.copytree(trained, tmp_path / "copy")
    with pytest.raises(WorkdirError, match=r"(?s)of another run.*differs:\ntrain\.start_from"):
        begin(tmp_path / "text", tmp_path / "copy", tmp_path / "tuned")


# What is refused.


def test_the_config_that_started_a_run_also_uses_its_model(tmp_path, monkeypatch):
    """The config that started a fine-tuning run can also evaluate the run.

    This config lacks the model's shape and kind of token, so both come from the run's workdir. The
    model from which the run started has been deleted by then.
    """
    claimed(tmp_path, tmp_path / "run")
    exp, corpus = resolved(tmp_path / "text", tmp_path / "run", tmp_path / "tuned")
    (tmp_path / "tuned").mkdir()
    init_workdir(str(tmp_path / "tuned"), exp, corpus)
    loaded = TrainedModel(txl_jax.TransformerXL(exp.model), {}, corpus.vocab, exp, 1)
    used: list[Any] = []
    monkeypatch.setattr(modes, "load", lambda *_: loaded)
    monkeypatch.setattr(modes, "evaluate", lambda model, *_: used.append(model.config))
    shutil.rmtree(tmp_path / "run")
    given = {**UNNAMED, "data.vocab": None, "train.start_from": str(tmp_path / "run")}
    asked = experiment(tmp_path / "text", **given, **{"evaluate.mem_len": 5})
    modes.use_model("evaluate", asked, {}, str(tmp_path / "tuned"), "best")
    moved = txl_jax.config.override(exp, {"train.start_from": str(tmp_path / "moved")})
    modes.use_model("evaluate", moved, {}, str(tmp_path / "tuned"), "best")
    config, of_moved = used
    assert (config.model, config.data.vocab) == (exp.model, "char")
    assert config.evaluate.mem_len == 5
    assert of_moved.model == exp.model


def test_another_shape_is_refused_with_the_flags_to_give(trained, tmp_path):
    changes = {"model.n_layer": 3, "model.d_inner": 64, "model.untie_r": True}
    with pytest.raises(ConfigError) as error:
        begin(tmp_path / "text", trained, tmp_path / "tuned", **changes)
    assert str(error.value) == (
        f"config key train.start_from = {str(trained)!r}: the trained model has n_layer 2, not 3,"
        " d_inner 32, not 64, untie_r False, not True; give model.n_layer=2"
        " model.d_inner=32 model.untie_r=False, or leave these settings out"
    )
    assert not (tmp_path / "tuned").exists()


def test_lengths_that_the_starting_model_cannot_have_are_refused_before_it_begins(tmp_path):
    absolute: dict[str, Any] = {"model.attention": "absolute"}
    absolute |= {f"{section}.mem_len": 0 for section in ("train", "validate", "evaluate")}
    claimed(tmp_path, tmp_path / "start", **absolute)
    with pytest.raises(
        ConfigError,
        match=r"train\.mem_len = 16: must be 0, because .* has no mem",
    ):
        resolved(tmp_path / "text", tmp_path / "start", tmp_path / "tuned")


def test_a_character_that_the_starting_model_lacks_is_refused(trained, tmp_path):
    said = "the cat\n" * 100 + "é\n" + "the cat\n" * 200
    with pytest.raises(DataError) as error:
        resolved(tmp_path / "text", trained, tmp_path / "tuned", said=said)
    assert "line 101, character 800: 'é'" in str(error.value)
    assert "keeps the vocabulary of the trained model" in str(error.value)
    assert "start from a model of bytes or subwords" in str(error.value)


@pytest.mark.parametrize("has_unk", [True, False])
def test_an_unknown_word_is_unk_where_there_is_one_and_an_error_where_not(tmp_path, has_unk):
    start = tmp_path / "start.txt"
    start.write_text(text(300).replace("night", "<unk>" if has_unk else "night"))
    words = {"data.vocab": "word", "data.path": str(start)}
    claimed(tmp_path, tmp_path / "start", **words)
    said = "the cat saw a zebra\n" * 200
    if not has_unk:
        with pytest.raises(DataError, match=r"the word 'zebra' is not among .* with <unk>$"):
            resolved(tmp_path / "text", tmp_path / "start", tmp_path / "tuned", said=said)
        return
    _, corpus = resolved(tmp_path / "text", tmp_path / "start", tmp_path / "tuned", said=said)
    assert corpus.vocab.decode(corpus.train[:6]) == "the cat saw a <unk>\n"


def test_another_kind_of_token_is_refused(trained, tmp_path):
    with pytest.raises(DataError, match="the model has a vocabulary of kind 'char'"):
        begin(tmp_path / "text", trained, tmp_path / "tuned", **{"data.vocab": "byte"})


@pytest.mark.integration
def test_a_folder_without_a_model_is_refused(trained, tmp_path):
    for folder in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(ConfigError, match=r"no config\.json and vocab\.json; name the workdir"):
            begin(tmp_path / "text", folder, tmp_path / "tuned")
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "vocab.json"):
        shutil.copy(trained / name, bare / name)
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        begin(tmp_path / "text", bare, tmp_path / "tuned")
    export(str(trained), str(tmp_path / "exported"))
    (tmp_path / "exported" / "model.safetensors").write_bytes(b"{}")
    with pytest.raises(ModelFormatError, match=r"model\.safetensors"):
        begin(tmp_path / "text", tmp_path / "exported", tmp_path / "other")


# A model of subwords, and the recipe.


def test_a_model_of_subwords_takes_any_text(tmp_path):
    subwords = {"data.vocab": "subword", "data.vocab_size": 280}
    _, before = claimed(tmp_path, tmp_path / "start", **subwords)
    said = "猫が座った the cat\n" * 100
    exp, corpus = resolved(tmp_path / "text", tmp_path / "start", tmp_path / "tuned", said=said)
    assert (exp.data.vocab, exp.data.vocab_size) == ("subword", 280)
    assert corpus.vocab == before.vocab
    assert said.startswith(corpus.vocab.decode(corpus.train))


def test_the_recipe_for_fine_tuning_is_refused_without_a_model(tmp_path):
    exp = load_config("my_text:fine_tune")
    with pytest.raises(ConfigError, match=r"= 'WORKDIR_OF_THE_MODEL': .*name the workdir of a run"):
        resolve_experiment(exp, str(tmp_path))
