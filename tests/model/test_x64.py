"""Enabling JAX's 64-bit types changes neither values nor types of the package's functions."""

import json
import os
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest
import tiny_models as tiny
from places import ROOT
from tiers import rest_slow

import txl_jax
from txl_jax import agents

FORMS: dict[str, dict] = {
    **{name: tiny.attention(name) for name in tiny.ATTENTION},
    "clusters": {"cutoffs": (4, 9)},
    "clusters of their own widths": {"cutoffs": (4, 9), "div_val": 2, "proj_same_dim": True},
    "mixture": {"mixtures": 2, "past_decode": True},
    "sampled softmax": {"sample_softmax": 3},
    "40,000 words": {"vocab_size": 40_000},
    "agents": {**tiny.GTRXL, "same_length": "tf", "clamp_len": 3},
    "scanned": {"scan_layers": True, "untie_r": True, "tie_weight": False, "d_embed": 6},
    "reference": {"kernel": "reference"},
}
DROPOUT = {"dropout": 0.3, "dropatt": 0.2}
FLOATS = "float64", "float32"
DOCUMENTED = {"float32", "int32", "bool", "uint32"}


def types_of(tree):
    return {str(leaf.dtype) for leaf in jax.tree.leaves(tree)}


def everything(cfg, seg_len=6, dtype="float32"):
    """A function of a random key that draws parameters and calls all methods of the model.

    It returns the parameters, cast to ``dtype``, and the results of the methods.
    """
    model = txl_jax.TransformerXL(cfg)
    tokens, lengths = tiny.tokens(cfg, 2, seg_len).astype(np.int64), np.array([seg_len, 3])
    reset = np.zeros((2, seg_len), bool)
    reset[0, 2] = True
    x = tiny.embeddings(cfg, 2, seg_len).astype(np.float64)

    def run(key):
        mems = model.init_mems(2, 0 if cfg.memory_free else 5)
        variables = jax.tree.map(lambda x: x.astype(dtype), model.init(key, tokens, mems))
        options: Any = {"reset": reset, "lengths": lengths}
        apply = lambda *given, **more: model.apply(variables, *given, **{**options, **more})
        of_core, after = apply(x, mems, method="core")
        done = [of_core, after, apply(tokens, after), apply(tokens, after, context_len=2)]
        nll = lambda v: model.apply(
            v, tokens, tokens, after, train=True, rngs={"dropout": key}, method="nll", **options
        )
        done += [nll(variables), jax.grad(lambda v: nll(v)[0].sum())(variables)]
        if cfg.past_decode:
            log_p = np.zeros((2, seg_len, cfg.vocab_size))
            done.append(model.apply(variables, log_p, tokens, method="past_nll"))
        if not cfg.memory_free and not cfg.scan_layers:
            cache = model.apply(variables, after, seg_len=seg_len, method="init_cache")
            done += [cache, apply(tokens, cache), model.apply(variables, tokens, cache)]
        return variables, done

    return run


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_every_method_gives_the_documented_types_and_values(form):
    """Initial parameters and dropout masks are the same as without 64-bit types."""
    seg_len = 150 if form == "40,000 words" else 6
    cfg = tiny.config(**{"n_layer": 1, "dropout_embedding": 0.2, **DROPOUT, **FORMS[form]})
    key = jax.random.key(0)
    want = tiny.quick(everything(cfg, seg_len))(key)
    with jax.enable_x64(True):
        got = tiny.quick(everything(cfg, seg_len))(key)
    assert types_of(got) <= DOCUMENTED
    assert types_of(got[0]) == {"float32"}
    same = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    drawn = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6)  # equal but for rounding
    jax.tree.map(drawn, got[0], want[0])
    jax.tree.map(same, got[1], want[1])


@pytest.mark.integration
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("form", rest_slow(4, FORMS))
@pytest.mark.few(2)
def test_parameters_of_another_dtype_give_results_of_the_documented_types(form, dtype):
    """Only the gradients of parameters have the dtype of the parameters."""
    seg_len = 150 if form == "40,000 words" else 6
    cfg = tiny.config(**{"n_layer": 1, "dropout_embedding": 0.2, **DROPOUT, **FORMS[form]})
    key = jax.random.key(0)
    with jax.enable_x64(True):
        variables, got = jax.eval_shape(everything(cfg, seg_len, dtype), key)
        gradients = got.pop(5)
    assert types_of(variables) == types_of(gradients) == {dtype}
    assert types_of(got) <= DOCUMENTED


@pytest.mark.slow
def test_float64_parameters_give_the_values_of_float32_ones():
    cfg = tiny.config(n_layer=1, cutoffs=(4, 9), div_val=2)
    key = jax.random.key(0)
    with jax.enable_x64(True):
        got, want = (tiny.quick(everything(cfg, 6, dtype))(key)[1] for dtype in FLOATS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), got, want)


@pytest.mark.slow
def test_an_actor_and_its_buffer_have_the_documented_types():
    cfg = tiny.config(n_layer=1, vocab_size=None, same_length="tf")
    model, variables = txl_jax.TransformerXL(cfg), tiny.variables(cfg)
    x = tiny.embeddings(cfg, 2, 1)[:, 0].astype(np.float64)
    begins: Any = np.array([[True], [False]])

    def act(x):
        buffer = agents.StateBuffer.start(model.init_mems(2, 3), steps=2)
        actor = agents.Actor.start(model, variables, buffer.memory(3))
        outputs, actor, states = actor.step(x, begins[:, 0])
        buffer = buffer.add(states[:, :, None], begins)
        return outputs, actor, buffer, buffer.memory(3, before=np.array([4, 5]), rows=np.arange(2))

    want = act(x)
    with jax.enable_x64(True):
        assert types_of(jax.eval_shape(act, x)) <= DOCUMENTED
        got = act(x)
    assert types_of(got) <= DOCUMENTED
    same = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5)
    jax.tree.map(same, got, want)


RUN = """
import json, sys
import jax, txl_jax
config = {
    "data": {"name": "text", "path": "cats.txt"},
    "model": {"n_layer": 2, "d_model": 8, "n_head": 1, "d_head": 8, "d_inner": 8, "dropout": 0.1},
    "train": {"steps": 6, "batch_size": 2, "seg_len": 8, "mem_len": 8, "skip_spikes": 3.0},
    "optimizer": {"warmup_steps": 2, "weight_decay": 0.001}, "generate": {"length": 0},
}
if __name__ == "__main__":
    results = []
    for changes in json.loads(sys.argv[1]):
        folder = f"{sys.argv[2]}/{len(results)}"
        trained = txl_jax.train(config, folder, changes)
        trained = txl_jax.load(folder)
        types = sorted({str(leaf.dtype) for leaf in jax.tree.leaves(trained.params)})
        text = trained.generate("the ", length=6, temperature=0.7, top_p=0.9, top_k=40)
        numbers = [trained.evaluate().loss, trained.score("the cat\\n").nll, text[0].loss]
        results.append([types, numbers, text.text])
    print("results:", json.dumps(results))
"""
RUNS = [
    {
        "data.vocab": "word",
        "model.cutoffs": (3,),
        "optimizer.name": "lamb",
        "train.micro_batches": 2,
        "average.ema_decay": 0.9,
        "model.scan_layers": True,
    },
    {
        "model.mixtures": 2,
        "optimizer.name": "muon",
        "train.steps_per_dispatch": 2,
        "loss.ar": 1.0,
        "loss.tar": 1.0,
        "loss.r_drop": 1.0,
        "evaluate.dynamic.rule": "sgd",
    },
]


@pytest.mark.slow
def test_a_run_has_the_parameters_and_results_that_it_has_without_the_flag(tmp_path):
    """Compares training, checkpoints, evaluation, scoring and generation in separate processes."""
    (tmp_path / "run.py").write_text(RUN)
    (tmp_path / "cats.txt").write_text("the cat sat on the mat\na dog ran off\n" * 400)

    def results(flag):
        environment = {**os.environ, "JAX_ENABLE_X64": flag, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "run.py", json.dumps(RUNS), f"x64_{flag}"]
        options: dict = {"cwd": tmp_path, "env": environment, "text": True, "check": True}
        printed = subprocess.run(command, stdout=subprocess.PIPE, **options).stdout
        return json.loads(printed.split("results:")[1])

    for (types, got, text), (_, want, same) in zip(results("1"), results("0"), strict=True):
        assert types == ["float32"]
        assert text == same
        np.testing.assert_allclose(got, want, rtol=1e-5)
