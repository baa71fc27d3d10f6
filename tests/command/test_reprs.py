"""The ``repr`` of every public object is a few lines, and it prints no array."""

import dataclasses
import importlib
import inspect
import re
from typing import Any

import jax
import numpy as np
import pytest
import tiny_models as tiny
import tiny_runs
from places import DOCS

import txl_jax
from txl_jax import agents
from txl_jax.analysis.ablation import RowRun
from txl_jax.analysis.recl import Gains, Losses
from txl_jax.analysis.sweep import Sweep, SweepRow
from txl_jax.config.fields import Section
from txl_jax.data.batch import make_batch
from txl_jax.data.corpus import corpus_from_config
from txl_jax.data.vocab import Vocab
from txl_jax.evaluation.any_text import LineScore, TextScore
from txl_jax.evaluation.dynamic import Learner, rates_of
from txl_jax.evaluation.evaluator import Score
from txl_jax.evaluation.results import Evaluation, SplitScore
from txl_jax.generation.generate import DecodeState, LastTokens, TokenChunk
from txl_jax.generation.sampling import sampling_of
from txl_jax.generation.text import Continuation
from txl_jax.library import Generated, Generation
from txl_jax.messages import fields_repr
from txl_jax.model.memory import Slots
from txl_jax.training.optimizer import make_optimizer
from txl_jax.training.state import TrainState, init_state

API = DOCS / "api.md"
OWN_OBJECT_REPR = {"Logger", "AttentionReader", "Decoder", "EvaluationBatches", "Evaluator"}
OWN_OBJECT_REPR |= {"StackedSeeds"}
"""Classes with the default ``repr`` of Python, which the tests leave out."""
SCORE = SplitScore("memory 640", "test split, 1 stream, segment 128", 1.0, "ppl", 2.0, 10)
MEMORY = re.compile(r" object at 0x[0-9a-f]+")


def documented_classes():
    """Returns the classes of ``txl_jax`` and of docs/api.md other than exceptions."""
    text, found = API.read_text(), {getattr(txl_jax, name) for name in txl_jax.__all__}
    for path in re.findall(r"autoclass:: ([\w.]+)", text):
        module, _, name = path.rpartition(".")
        found.add(getattr(importlib.import_module(module), name))
    for path in re.findall(r"automodule:: ([\w.]+)\n +:members:", text):
        module = importlib.import_module(path)
        own = (c for c in vars(module).values() if getattr(c, "__module__", "").startswith(path))
        found.update(own)
    classes = {c for c in found if inspect.isclass(c) and not c.__name__.startswith("_")}
    return {c for c in classes if not issubclass(c, BaseException)}


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    """Returns a dict from each class whose ``repr`` is tested to an object of this class.

    Classes of settings are not in it.
    """
    folder = tmp_path_factory.mktemp("reprs")
    exp = tiny_runs.experiment(folder, **{"model.n_layer": 3, "train.steps": 50})
    corpus = corpus_from_config(exp.data)
    cfg = dataclasses.replace(exp.model, vocab_size=len(corpus.vocab))
    exp = dataclasses.replace(exp, model=cfg)
    model, params = txl_jax.TransformerXL(cfg), tiny.variables(cfg)["params"]
    state = init_state(exp, model, make_optimizer(exp))
    mems = model.init_mems(4, 500)
    cache: Any = model.apply({"params": params}, mems, seg_len=1, method="init_cache")
    tokens, nll = np.zeros((4, 500), np.int32), np.zeros((2, 500))
    segment = txl_jax.Segment(tokens, tokens, tokens, tokens > 0, True)
    ids = list(range(500))
    generate = exp.generate
    trained = txl_jax.LanguageModel(model, params, corpus.vocab, exp, 12345)
    made = [
        *(exp, model, state, mems, cache, cache.near, segment, corpus, corpus.vocab, trained),
        *(make_batch(segment, False), Learner(params, params, params), Score(1.5, 10, 0.1)),
        *(TokenChunk(tokens, nll), LastTokens(tokens, tokens), RowRun("a", exp, "runs/a")),
        DecodeState(tokens[0], cache, jax.numpy.asarray(tokens > 0), tokens[0]),
        Continuation("a prompt " * 100, corpus.vocab, generate, [0], nll=[1.0] * 500),
        Generated("a " * 500, "a", "b", 0, tokens[0], nll[0], 1.5, "length"),
        Generation([Generated("a " * 500, "a", "b", 0, tokens[0], nll[0], 1.5, "length")] * 50),
        LineScore("a " * 500, tokens[0], nll[0], ("a",) * 500),
        SweepRow("steps=5", {"train.steps": 5}, ["runs/sweep/steps=5/seed_0"], [1.5], 1.5),
        Sweep([SweepRow("x", {"train.steps": n}, ["x"], [1.5], 1.5) for n in range(50)], "bpc", {}),
        TextScore((), 1.0, 500, 0, "bpc", 1.5, None, ("note " * 50,) * 50),
        Evaluation(**dataclasses.asdict(SCORE), results=(SCORE,) * 50, about={}),
        *(SCORE, sampling_of(generate), rates_of(exp.evaluate.dynamic)),
        *(agents.Actor({"params": params}, cache, model), agents.StateBuffer.start(mems, 5)),
        agents.SequenceModel(dataclasses.replace(exp.model, same_length="tf"), 500),
        txl_jax.convert.Request(source="model.pt", workdir="runs/x"),
        txl_jax.Pieces(np.arange(500), np.arange(0, 500, 2)),
        Losses("model", tuple(range(1, 3)), nll),
        Gains("model", tuple(range(500)), nll, nll),
    ]
    return {type(one): one for one in [*made, Vocab("char", [chr(1000 + n) for n in ids])]}


def shown(one):
    text = repr(one)
    lines = text.splitlines()
    assert len(text) <= 800, text
    assert len(lines) <= 6, text
    assert not re.search(r"[aA]rray\(|\d\.? +\d\.? +\d|dtype=(?!')", text), text
    return text


@pytest.mark.integration
def test_every_documented_object_has_a_short_repr(objects):
    for cls in documented_classes():
        if issubclass(cls, Section):
            assert "'" not in shown(cls()), "only settings that differ from the defaults are shown"
        elif cls.__name__ not in OWN_OBJECT_REPR:
            assert cls in objects, f"{cls.__name__}: add an object of it to this test"
            assert not MEMORY.search(shown(objects[cls])), cls


def test_undocumented_objects_that_are_often_met_have_a_short_repr(objects):
    for cls in (Slots, TrainState, Vocab):
        shown(objects[cls])


@pytest.mark.parametrize("name", ["enwik8_24l", "quickstart", "nvidia_wt103_large"])
def test_a_recipe_fits_a_screen(name):
    assert shown(txl_jax.load_config(name)).startswith(f"ExperimentConfig(name={name!r}")


def test_a_section_shows_what_differs_from_its_defaults():
    cfg = txl_jax.TransformerXLConfig(n_layer=3, cutoffs=(4, 9), div_val=2)
    assert repr(cfg) == "TransformerXLConfig(n_layer=3, cutoffs=(4, 9), div_val=2)"
    exp = txl_jax.ExperimentConfig.from_dict({"seed": 1, "train": {"steps": 5}})
    assert repr(exp) == "ExperimentConfig(seed=1, train=TrainConfig(steps=5))"


def test_arrays_are_shown_by_dtype_and_shape_also_while_they_are_traced():
    mems = tiny.memory(tiny.config(), (0, 2), 5)
    text = "Memory(hidden=float32[2,2,5,8], filled=int32[2])"
    assert repr(mems) == text
    seen: list[str] = []

    def traced(mems):
        seen.append(repr(mems))
        return mems

    jax.eval_shape(traced, mems)
    assert seen == [text]
    assert repr(mems.replace(hidden=None, filled=[1] * 50)) == (
        "Memory(hidden=None, filled=<list of 50>)"
    )


def test_a_model_names_its_size_its_step_and_its_vocabulary(objects):
    (trained,) = (one for one in objects.values() if isinstance(one, txl_jax.LanguageModel))
    assert re.fullmatch(
        r"\w+\('experiment', step 12,345, [\d,]+ raw parameters, Vocab\('char', 19 symbols\)\)",
        repr(trained),
    )
    assert fields_repr(Score(1.5, 10, 0.1)) == "Score(loss=1.5, targets=10, seconds=0.1)"
