"""Devices exchange each gradient and sum once. No collective serves only to order operations."""

import re
from typing import Any

import jax
import pytest
from absent_devices import check_compiler
from tiers import rest_slow
from tiny_runs import call, write_config

from txl_jax.checkpoint.trained_model import param_shapes
from txl_jax.config import ExperimentConfig, override
from txl_jax.evaluation.evaluator import Evaluator
from txl_jax.parallel.mesh import make_mesh
from txl_jax.parallel.shardings import Shardings
from txl_jax.planning.costs import collectives
from txl_jax.planning.run_programs import _zeros, lower_update
from txl_jax.training.plan import StepSetup, training_mesh

ROWS, BOTH = {"mesh.data": 4}, {"mesh.data": 2, "mesh.tensor": 2}
LONG = 260  # three groups of queries

FORMS: dict[str, dict[str, Any]] = {
    "relative": {"model.dropatt": 0.1},
    "shaw": {"model.attention": "shaw", "model.n_positions": 9},
    "shared_projection": {"model.attention": "shared_projection"},
    "absolute": {"model.attention": "absolute"},
    "absolute_per_layer": {"model.attention": "absolute_per_layer", "model.n_positions": LONG},
}
NO_MEMORY = {f"{part}.mem_len": 0 for part in ("train", "validate", "evaluate")}


def experiment(**changes) -> ExperimentConfig:
    settings = {
        "model": {
            "vocab_size": 96,
            "n_layer": 2,
            "d_model": 16,
            "n_head": 2,
            "d_head": 8,
            "d_inner": 32,
        },
        "train": {"batch_size": 4, "seg_len": 12, "mem_len": 8},
        "validate": {"batch_size": 4, "seg_len": 12, "mem_len": 8},
        "evaluate": {"batch_size": 4, "seg_len": 12, "mem_len": 24},
    }
    if str(changes.get("model.attention")).startswith("absolute"):
        changes = {**changes, **NO_MEMORY}
    return override(ExperimentConfig.from_dict(settings), changes)


def of_update(**changes) -> dict[str, tuple[int, int]]:
    """For each kind of collective in an update, their number and their bytes."""
    exp = experiment(**changes)
    return counted(lower_update(StepSetup.on(training_mesh(exp), exp)))


def of_scoring(**changes) -> dict[str, tuple[int, int]]:
    """For each kind of collective when a segment is scored, their number and their bytes."""
    exp = experiment(**changes)
    mesh, p = make_mesh(exp.mesh, exp.model, exp.evaluate.batch_size), exp.evaluate
    shapes, text = param_shapes(exp.model), _zeros(exp.data, p.batch_size, p.seg_len)
    place = lambda x, sharding: x.update(sharding=sharding)
    params = jax.tree.map(place, shapes, Shardings(mesh).parameters(shapes))
    return counted(Evaluator(exp.model, p, text, mesh, training=text).lower(params))


def counted(lowered: jax.stages.Lowered) -> dict[str, tuple[int, int]]:
    return {x.kind: (x.count, x.size) for x in collectives(lowered.compile().as_text() or "")}


def numbers(found: dict[str, tuple[int, int]]) -> dict[str, int]:
    return {kind: count for kind, (count, _) in found.items()}


@pytest.mark.integration
@pytest.mark.parametrize(
    ("form", "mesh"),
    rest_slow(2, [("relative", BOTH), ("absolute", BOTH), *[(form, ROWS) for form in FORMS]]),
)
@pytest.mark.few(1)
def test_a_long_segment_needs_no_more_collectives_than_a_short_one(form, mesh):
    short = of_update(**FORMS[form], **mesh)
    assert numbers(of_update(**FORMS[form], **mesh, **{"train.seg_len": LONG})) == numbers(short)


@pytest.mark.slow
def test_a_sampled_softmax_exchanges_what_the_whole_softmax_does():
    assert of_update(**ROWS, **{"model.sample_softmax": 8}) == of_update(**ROWS)


@pytest.mark.integration
@pytest.mark.parametrize("mesh", [ROWS, BOTH], ids=["rows", "rows and heads"])
def test_writing_to_the_rings_of_a_cache_needs_no_collective(mesh):
    """A cache has one ring buffer. With ``clamp_len`` it has another one for larger distances."""
    lengths = {"evaluate.seg_len": 16, "evaluate.mem_len": 64}
    one = of_scoring(**mesh, **lengths)
    two = of_scoring(**mesh, **lengths, **{"evaluate.clamp_len": 20})
    assert numbers(two) == numbers(one)


# --------------------------------------------------------------------------------------
# Four absent devices.


@pytest.mark.integration
@pytest.mark.parametrize("topology", ["v5e:2x2", "h100:1x1x4"])
def test_absent_devices_exchange_gradients_and_sums_alone(tmp_path, topology):
    """The programs have XLA's attention, a sampled softmax, and a cache with two ring buffers."""
    check_compiler(topology)
    config = f"--config={write_config(tmp_path)}"
    flags: tuple[str, ...] = ("--mode=compile", f"--topology={topology}", "--config.mesh.data=-1")
    flags += (f"--config.train.seg_len={LONG}", "--config.model.kernel=xla")
    flags += ("--config.model.vocab_size=96", "--config.model.sample_softmax=8")
    flags += ("--config.evaluate.clamp_len=16",)
    done = call(config, *flags, XLA_FLAGS="")  # libtpu refuses flags of the CPU
    assert done.returncode == 0, done.stderr
    told = dict(re.findall(r"^(\w.*?): .*?\n  collectives +(.*?)$", done.stdout, re.M | re.S))
    train, validate, evaluate = (told[name] for name in ("train", "validate", "evaluate"))
    assert re.fullmatch(r"[1-4] all-reduce \(.*?\)", train)
    for scoring in (validate, evaluate):
        assert re.fullmatch(r"1 all-reduce \(.*?\)", scoring)
