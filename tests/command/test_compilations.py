"""A repeated call with other settings, texts or numbers of prompts compiles nothing."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
import tiny_models
import tiny_runs

import txl_jax
from txl_jax.checkpoint.trained_model import param_shapes
from txl_jax.config import ExperimentConfig, override
from txl_jax.data.batch import make_batch
from txl_jax.data.vocab import Vocab
from txl_jax.evaluation.any_text import _program as score_program
from txl_jax.model.transformer_xl import TransformerXL
from txl_jax.training.plan import StepSetup, build_plan, training_mesh
from txl_jax.training.state import init_state

COMPILED = "/jax/core/compile/backend_compile_duration"
FORMS: dict[str, dict[str, Any]] = {"memory": {}, "no memory": {"attention": "absolute"}}


@pytest.fixture
def compiled():
    """A list to which the name of each program that JAX compiles is added."""
    events: list[str] = []

    def listen(event: str, duration_secs: float, **about: str | int) -> None:
        if event == COMPILED:
            events.append(str(about.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


def model(seed=0, **changes):
    """Returns a byte-level model with random parameters; each call makes a new one."""
    cfg = tiny_models.config(vocab_size=256, n_layer=1, **changes)
    params = jax.tree.map(np.array, tiny_models.variables(cfg, seed)["params"])
    lengths = {"mem_len": 0 if cfg.memory_free else 8, "seg_len": 8}
    exp = ExperimentConfig.from_dict(
        {
            "model": dataclasses.asdict(cfg),
            **{key: {**lengths, "batch_size": 2} for key in ("train", "validate", "evaluate")},
        }
    )
    exp = override(exp, {"generate.mem_len": 8, "score.mem_len": 8, "score.seg_len": 8})
    return txl_jax.LanguageModel(TransformerXL(cfg), params, Vocab.all_bytes(), exp, 0)


OTHERS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "greedy": {"temperature": 0.0},
    "top-k": {"top_k": 5},
    "top-k of all words": {"top_k": 1000},
    "top-p": {"top_p": 0.9},
    "min-p": {"min_p": 0.1},
    "penalty": {"repetition_penalty": 1.5},
    "all": {"temperature": 0.9, "top_k": 9, "top_p": 0.8, "min_p": 0.01, "seed": 2**32 - 1},
    "seed": {"seed": 7},
    "shorter": {"length": 1},
    "longer": {"length": 67},
    "stop text": {"stop": ("x",)},
    "bytes that are not UTF-8": {"valid_text": False},
}


@pytest.mark.integration
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.few(1)
def test_generation_with_other_settings_prompts_and_parameters_compiles_nothing(form, compiled):
    trained, prompts = model(**FORMS[form]), ["the", "a cat", "saw", "dogs"]
    first = {text: trained.generate(text, length=30)[0].ids.tolist() for text in prompts[:1]}
    trained.generate(prompts, length=30)
    assert compiled, "the first calls compile"
    compiled.clear()
    for name, settings in OTHERS.items():
        trained.generate("the", **{"length": 30, **settings})
        assert not compiled, name
    for other in (["one", "two", "three"], ["a text of 40 bytes with several words in", *"bcd"]):
        trained.generate(other, length=12, top_p=0.5)
        assert not compiled, other
    trained.generate("a", samples=4, length=5)
    model(seed=1, **FORMS[form]).generate("the", length=9)
    assert not compiled, "samples of one prompt, and another model of the same config"
    assert trained.generate("the", length=30)[0].ids.tolist() == first["the"]


@pytest.mark.integration
def test_scores_of_other_texts_and_other_models_of_a_config_compile_nothing(compiled):
    trained = model()
    trained.score("the cat saw a dog")
    trained.score(["a\n", "b c\n", "d\n", "e\n"], memory="line")
    assert compiled
    compiled.clear()
    trained.score("a")
    trained.score("a much longer text\nof two lines, which takes several segments")
    trained.score(["x\n", "a line of several segments\n", "z"], memory="line")
    model(seed=1).score("the cat")
    assert not compiled


@pytest.mark.integration
def test_a_repeated_evaluation_compiles_nothing(compiled, tmp_path):
    trained = model()
    (tmp_path / "a.txt").write_text("the cat saw a dog\n" * 30)
    (tmp_path / "b.txt").write_text("a longer line about another animal\n" * 40)
    data = {"path": str(tmp_path / "a.txt"), "cache_dir": str(tmp_path / "cache")}
    other = {**data, "path": str(tmp_path / "b.txt")}
    dynamic = {"rule": "rms", "learning_rate": 0.1, "statistics": 2}
    first = trained.evaluate(data=data)
    trained.evaluate(data=data, temperature=1.2)
    trained.evaluate(data=data, dynamic=dynamic)
    assert compiled
    compiled.clear()
    assert trained.evaluate(data=data).loss == first.loss
    assert model(seed=1).evaluate(data=data).loss != first.loss
    assert not compiled, "the same, and another model of the same config"
    trained.evaluate("valid", data=other, max_segments=2, baselines=["unigram"])
    assert not compiled, "another split and text"
    rates = {"learning_rate": 0.2, "decay": 0.1, "epsilon": 0.01}
    trained.evaluate(data=data, temperature=0.9)
    trained.evaluate(data=data, dynamic={**dynamic, **rates})
    assert not compiled, "another temperature and other rates of dynamic evaluation"


@pytest.mark.integration
def test_every_validation_of_a_run_but_the_first_compiles_nothing(compiled, tmp_path):
    """The validation uses dynamic evaluation by ``rms``, which gathers statistics each time."""
    changes = {"validate.dynamic": {"rule": "rms", "learning_rate": 0.1, "statistics": 2}}
    corpus, exp = tiny_runs.corpus_and_experiment(tmp_path, **changes)
    plan, params = build_plan(exp, corpus, "unused"), param_shapes(exp.model)
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), params)
    first = plan.validation.run(zeros)
    assert first is not None
    assert compiled
    compiled.clear()
    again = build_plan(exp, corpus, "unused").validation.run(zeros)
    assert again is not None
    assert again.loss == first.loss
    assert not compiled


@pytest.mark.slow
def test_seeds_share_the_program_that_draws_their_parameters(compiled, tmp_path):
    _, exp = tiny_runs.corpus_and_experiment(tmp_path)
    setup = StepSetup.on(training_mesh(exp), exp)
    states = {1: setup.initial_state(override(exp, {"seed": 1}))}
    assert compiled
    compiled.clear()
    states |= {seed: setup.initial_state(override(exp, {"seed": seed})) for seed in (2, 2**32 - 1)}
    assert not compiled
    for seed, state in states.items():
        own = override(exp, {"seed": seed})
        plain = jax.jit(lambda: init_state(own, setup.model, setup.optimizer))()  # noqa: B023
        jax.tree.map(np.testing.assert_array_equal, state.params, plain.params)


def test_scoring_a_text_writes_the_new_memory_over_the_old():
    cfg = tiny_models.config(vocab_size=256, n_layer=1)
    module, score = score_program(cfg)
    batch = make_batch(
        next(iter(txl_jax.segments(np.zeros(40, np.int32), batch_size=4, seg_len=8))),
        reset_memory=False,
    )
    mems = module.init_mems(4, 64)
    lowered = score.lower(tiny_models.variables(cfg)["params"], batch, mems)
    analysis: Any = lowered.compile().memory_analysis()
    assert analysis.alias_size_in_bytes >= mems.hidden.nbytes
