"""The planner rightly predicts a program's memory, operations, collectives, and whether it fits."""

import dataclasses
import functools
import importlib.util
import itertools
import os
import re
import shutil
import subprocess
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absent_devices import needs_libtpu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from planned_programs import MAIN, B, M, T, compiled, experiment, train_program
from tiers import rest_slow
from tiny_runs import call, claimed, corpus_and_experiment, write_config

import txl_jax
from txl_jax.checkpoint.trained_model import param_shapes
from txl_jax.config import ConfigError, DataConfig, ExperimentConfig, override
from txl_jax.data.batch import Batch
from txl_jax.model import flops
from txl_jax.parallel.device_memory import GIB, host_memory, program_bytes
from txl_jax.planning import compile_ahead as ahead
from txl_jax.planning import run_programs
from txl_jax.planning.costs import Collective, branches, collectives
from txl_jax.planning.gpus import GPUS
from txl_jax.planning.machines import PlanningError
from txl_jax.planning.topologies import accelerator_type, topology_devices
from txl_jax.planning.vocabulary import known_vocab_size, with_vocab_size
from txl_jax.training.optimizer import make_optimizer
from txl_jax.training.plan import StepSetup
from txl_jax.training.state import init_state


def n_parameters(exp: ExperimentConfig) -> int:
    return sum(x.size for x in jax.tree.leaves(param_shapes(exp.model)))


# --------------------------------------------------------------------------------------
# The programs are those of training and scoring.


@pytest.mark.integration
@pytest.mark.parametrize(
    "changes",
    rest_slow(
        1,
        [
            {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2, "model.scan_layers": True},
            {"mesh.data": 8},
            {"train.micro_batches": 2, "train.steps_per_dispatch": 2},
        ],
    ),
)
def test_train_program_holds_what_the_step_of_training_holds(changes):
    exp = experiment(**changes)
    t = exp.train
    setup = StepSetup.on(ahead.training_mesh(exp, jax.devices()), exp)
    lead = (t.steps_per_dispatch,) if t.steps_per_dispatch > 1 else ()
    ints = jax.ShapeDtypeStruct((*lead, B, T), np.int32)
    floats = jax.ShapeDtypeStruct((*lead, B, T), np.float32)
    batch = Batch(ints, ints, floats, jax.ShapeDtypeStruct((*lead, B), bool))  # type: ignore[arg-type]
    analysis = setup.update().lower(setup.abstract, batch).compile().memory_analysis()
    held = train_program(**changes).memory
    kinds = ("argument", "output", "alias", "temp", "generated_code")
    got, want = ([getattr(m, f"{kind}_size_in_bytes") for kind in kinds] for m in (held, analysis))
    assert got[:4] == want[:4]
    assert program_bytes(held) == got[0] + got[1] - got[2] + got[3] + got[4]


@pytest.mark.integration
def test_the_text_on_the_device_and_what_teachers_say_of_it_are_planned_with():
    on_device = {"train.text_on_device": True, "mesh.data": 1}
    own = train_program(**on_device).memory
    taught = train_program(
        **on_device, **{"distil.teachers": ("runs/a",), "distil.words": 9}
    ).memory
    more = taught.argument_size_in_bytes - own.argument_size_in_bytes
    assert more >= B * T * 9 * (2 + 2)  # uint16 and float16
    assert taught.temp_size_in_bytes > own.temp_size_in_bytes


@pytest.mark.integration
def test_arguments_are_the_state_and_validation_leaves_the_rest_of_it():
    exp = experiment(**{"mesh.data": 4})
    parameters = 4 * n_parameters(exp)
    memory = 2 * (B // 4) * M * 32 * 4
    found = compiled(**{"mesh.data": 4})
    slack = 4096  # bytes of counters and of the batch
    held = {name: program.memory.argument_size_in_bytes for name, program in found.items()}
    assert held["train"] == pytest.approx(3 * parameters + memory, abs=slack)

    def scoring(rows, mem_len):
        """The bytes of a scoring program's arguments: the parameters and the cache.

        The parameters lack the position projections, because the cache has projected arrays.
        """
        slots = -(-mem_len // T) * T
        projected = 2 * 32 * 4 * (2 * rows * slots + slots + T)
        return pytest.approx(parameters - 2 * 32 * 32 * 4 + projected, abs=slack)

    assert held["validate"] == scoring(B // 4, M)
    assert found["validate"].resident == pytest.approx(2 * parameters + memory, abs=slack)
    assert found["evaluate"].resident == 0
    assert held["evaluate"] == scoring(1, 2 * M)  # three streams on four devices


@pytest.mark.integration
def test_parameters_over_fsdp_are_held_in_parts():
    whole, cut = (train_program(**mesh).memory for mesh in ({"mesh.data": 8}, {"mesh.fsdp": 8}))
    assert cut.argument_size_in_bytes < 0.3 * whole.argument_size_in_bytes


# --------------------------------------------------------------------------------------
# Operations.


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model.n_layer": 1, "train.mem_len": 48, "model.d_inner": 512},
        {"model.attention": "absolute", "train.mem_len": 0, "train.context_len": 8},
        {"model.vocab_size": 2000, "model.d_embed": 16},
        {"model.gate": "gru", "model.d_inner": 8},
        {"model.remat": "layer"},
        {"model.remat": "products"},
    ],
    ids=str,
)
def test_formula_is_near_the_compilers_count_where_no_loop_hides_any(changes):
    if changes.get("model.attention") == "absolute":
        changes = {**changes, "validate.mem_len": 0, "evaluate.mem_len": 0}
    p = train_program(**changes)
    # Only the compiler counts softmax, norms and the optimizer. Only the formula counts gradients
    # of memory, and a recomputed softmax, which a single block of rows does not need.
    assert 0.8 < p.compiler_flops / (p.flops.model + p.flops.recomputed) < 1.25


def of_projecting_memory(rows, mem_len):
    """Operations that a cache saves: those that project keys, values and position vectors."""
    return 2 * 32 * 32 * (4 * mem_len * rows + 2 * (mem_len + T))


@pytest.mark.integration
def test_scoring_is_a_forward_pass():
    p = compiled()["validate"]
    assert 0.9 < p.compiler_flops / p.flops.model < 1.3
    spared = of_projecting_memory(rows=B, mem_len=M)
    assert p.flops.model == pytest.approx(train_program().flops.model / 3 - spared)


@pytest.mark.integration
def test_a_dispatch_has_the_operations_of_its_updates():
    several = train_program(**{"train.steps_per_dispatch": 4, "train.log_every": 4})
    assert several.flops.model == 4 * train_program().flops.model
    assert several.flops.device == 4 * train_program().flops.device


@pytest.mark.slow
def test_a_device_computes_its_rows_rounded_up_and_its_heads():
    one, eight = (compiled(**{"mesh.data": n}) for n in (1, 8))
    for name, rows in (("train", B), ("evaluate", 3)):
        whole = one[name].flops.device
        assert whole == one[name].flops.model + one[name].flops.recomputed
        # a device computes one row's share, and the whole projection of positions
        assert 1 <= eight[name].flops.device / (whole / rows) < 1.7
    halved = train_program(**{"mesh.tensor": 2})
    assert halved.flops.device == one["train"].flops.device / 2


@pytest.mark.integration
def test_a_segment_that_is_learnt_from_has_three_passes():
    learns = compiled(**{"evaluate.dynamic.rule": "sgd"})["evaluate"]
    spared = of_projecting_memory(rows=3, mem_len=2 * M)
    assert learns.flops.model == 3 * (compiled()["evaluate"].flops.model + spared)


@pytest.mark.integration
def test_evaluation_is_of_layers_one_by_one():
    """``load`` unstacks the layers of the evaluated model, so its program has no loop over layers.

    In a loop, the compiler counts the operations of only one layer.
    """
    scanned = compiled(**{"model.scan_layers": True})
    looped, one_by_one = (scanned[name] for name in ("validate", "evaluate"))
    assert looped.compiler_flops < 0.75 * looped.flops.model
    assert one_by_one.compiler_flops > 0.9 * one_by_one.flops.model


@pytest.mark.integration
def test_beyond_the_clamp_a_cache_has_no_scores_by_position():
    far, clamped = (
        compiled(**{"evaluate.mem_len": 12 * T, "evaluate.clamp_len": clamp})["evaluate"]
        for clamp in (-1, 2 * T)
    )
    c, rows, distances = experiment().model, 3, 10 * T
    spared = c.n_layer * rows * 2 * T * distances * c.n_head * c.d_head
    assert far.flops.model - clamped.flops.model == spared
    # The compiler also counts the additions of these scores to the other scores.
    assert spared <= far.compiler_flops - clamped.compiler_flops < 1.4 * spared


def test_a_fused_cache_has_the_scores_of_all_distances(monkeypatch):
    of = {"evaluate.mem_len": 12 * T, "evaluate.clamp_len": 2 * T}

    def scored() -> float:
        planned = run_programs.run_programs(experiment(**of), jax.devices())
        found = next(p.flops for p in planned if p.name == "evaluate")
        assert found is not None
        return found.model

    clamped = scored()
    monkeypatch.setattr(run_programs, "fuses_cache", lambda *_: True)
    c, rows, distances = experiment().model, 3, 10 * T
    assert scored() - clamped == c.n_layer * rows * 2 * T * distances * c.n_head * c.d_head


def test_shares_of_clusters_are_the_whole_text():
    ends = (0, 10, 300, 5000)
    shares = [flops.zipf_share(a, b, 5000) for a, b in itertools.pairwise(ends)]
    assert sum(shares) == pytest.approx(1)
    harmonic = np.cumsum(1 / np.arange(1, 5001))
    assert shares[0] == pytest.approx(harmonic[9] / harmonic[-1], rel=1e-3)


# --------------------------------------------------------------------------------------
# Exchanges.


def test_one_device_exchanges_nothing():
    assert train_program().collectives == ()


@pytest.mark.integration
def test_a_data_mesh_sums_the_gradient_and_nothing_else_of_size():
    exp = experiment(**{"mesh.data": 8})
    (found,) = train_program(**{"mesh.data": 8}).collectives
    assert found.kind == "all-reduce"
    # The gradient of the word vectors is summed twice: for inputs and for outputs. In so small a
    # model, arrays [K,D] (one row per key) matter too.
    assert 1 <= found.size / (4 * n_parameters(exp)) < 1.4


@pytest.mark.integration
def test_exchanges_in_a_loop_count_as_often_as_it_runs():
    """Scanned layers exchange as many bytes as unrolled layers."""
    programs = (train_program(**{"mesh.data": 8, "model.scan_layers": s}) for s in (False, True))
    one_by_one, looped = (sum(x.size for x in p.collectives) for p in programs)
    assert looped == pytest.approx(one_by_one, rel=0.05)


@pytest.mark.integration
def test_fsdp_gathers_parameters():
    kinds = {x.kind for x in train_program(**{"mesh.fsdp": 8}).collectives}
    assert "all-gather" in kinds


PROGRAM = """\
HloModule m

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %s = f32[] add(%a, %b)
}

%inner_cond (p: (s32[], f32[8])) -> pred[] {
  %p = (s32[], f32[8]) parameter(0)
  %limit = s32[]{:T(128)} constant(5)
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %lt = pred[] compare(%i, %limit), direction=LT
}

%inner (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %g = (f32[8]{0}, f32[64]{0}) all-gather-start(%x), dimensions={0}
  %d = f32[64]{0} all-gather-done(%g)
}

%cond (p: (s32[])) -> pred[] {
  %n = s32[] get-tuple-element(%p), index=1
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

%body (p: (s32[])) -> (s32[]) {
  %w = (s32[], f32[8]) while(%t), condition=%inner_cond, body=%inner
  %r = (f32[10]{0:T(128)}, bf16[3,4]{1,0}) all-reduce(%a, %b), to_apply=%add
}

%fused (p: f32[16]) -> f32[2] {
  %rs = f32[2]{0} reduce-scatter(%p), to_apply=%add
}

ENTRY %main (a: f32[8]) -> f32[] {
  %w1 = (s32[]) while(%t), condition=%cond, body=%body, \
backend_config={"known_trip_count":{"n":"3"}}
  %w2 = (s32[]) while(%t), condition=%cond, body=%body
  %c = (f32[6]{0}, f32[6]{0}, u32[], u32[]) collective-permute-start(%a)
  %e = f32[6]{0} collective-permute-done(%c)
  %f = f32[2]{0} fusion(%a), kind=kCustom, calls=%fused
}
"""


def test_exchanges_are_read_from_loops_in_loops_fusions_and_started_ones():
    assert collectives(PROGRAM) == [
        Collective("all-reduce", 3 + 1, 4 * (10 * 4 + 12 * 2)),  # loop of unknown length: once
        Collective("all-gather", 4 * 5, 4 * 5 * 64 * 4),
        Collective("reduce-scatter", 1, 2 * 4),
        Collective("collective-permute", 1, 6 * 4),
    ]


def test_of_a_conditional_the_longest_branch_is_read():
    """Three branches have one, two and no sums over two devices; a run takes one branch."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
    def chosen(index, x):
        total = lambda x: jax.lax.pcast(jax.lax.psum(x, "data"), "data", to="varying")
        branches = [total, lambda x: total(jnp.sin(total(x))), lambda x: x]
        return jax.lax.switch(index, branches, x)

    text = chosen.lower(jnp.int32(0), jnp.ones(8)).compile().as_text() or ""
    assert "branch_computations=" in text
    assert collectives(text) == [Collective("all-reduce", 2, 2 * 4 * 4)]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("%c = f32[] conditional(%i, %a, %b), branch_computations={%x.1, %y-2}, metadata={}", 2),
        ("%c = f32[] conditional(%p, %a, %b), true_computation=%x, false_computation=%y", 2),
        ("%c = f32[] fusion(%p), calls=%x, branch_computations", 0),
    ],
)
def test_the_branches_of_a_conditional_are_known_however_they_are_written(line, named):
    assert len(branches(line)) == named


# --------------------------------------------------------------------------------------
# What is printed, and what fits.


@pytest.mark.integration
def test_all_programs_are_told_with_their_numbers(capsys):
    changes = {"mesh.data": 8, "model.scan_layers": True, "generate.length": 1}
    assert ahead.compile_ahead(experiment(**changes), topology=None) == 0
    out = capsys.readouterr().out
    assert re.findall(r"^(\w.*?): ", out, flags=re.M) == [
        "experiment",
        "float32 products",
        "initialise",
        "stack",
        "unstack",
        "train",
        "validate",
        "evaluate, cache",
        "evaluate",
        "evaluate, no memory",
        "generate, read",
        "generate, cache",
        "generate, extend",
    ]
    parameters = n_parameters(experiment())
    assert f"{parameters:,} parameters, vocabulary 50; float32, layers scanned" in out
    assert "8 x cpu, mesh data 8 x fsdp 1 x tensor 1" in out
    p = train_program(**changes)
    held = p.memory
    for size in (held.argument_size_in_bytes, held.temp_size_in_bytes, program_bytes(held)):
        assert f"{size / GIB:.3f} GiB" in out
    assert f"by formula {p.flops.model:.3e}" in out
    (sums,) = p.collectives
    assert f"{sums.count} all-reduce ({sums.size / 1e6:,.1f} MB)" in out
    assert len(re.findall(r"compiled in [\d.]+ s", out)) == 11
    assert out.count("floating-point atomics: none") == 11
    assert out.count("products    float32 at default") == 8


def test_a_program_fits_to_the_last_byte_with_what_is_held_beside_it():
    p = compiled()["validate"]
    whole = program_bytes(p.memory) + p.resident
    assert p.fits(whole)
    assert not p.fits(whole - 1)
    assert p.fits(None)
    assert f"of {(whole - 1) / GIB:.3f} GiB: DOES NOT FIT" in ahead.format_program(p, whole - 1)


@pytest.mark.slow
@pytest.mark.parametrize("on_device", [False, True], ids=["text fed", "text on device"])
def test_several_seeds_are_compiled_as_the_one_program_that_trains_them(on_device):
    changes = {"train.text_on_device": on_device, "train.steps_per_dispatch": 2}
    alone, seeds = (compiled(**changes, **{"train.num_seeds": n}) for n in (1, 3))
    assert seeds["train"].description == alone["train"].description + ", 3 seeds"
    assert seeds["train"].flops.device == 3 * alone["train"].flops.device
    given = lambda found: found["train"].memory.argument_size_in_bytes
    state = 3 * 4 * n_parameters(experiment())  # parameters and the moments of Adam
    assert given(seeds) - given(alone) >= 2 * state
    assert seeds["validate"].resident - alone["validate"].resident >= 3 * state
    assert seeds["evaluate"].memory.argument_size_in_bytes == (
        alone["evaluate"].memory.argument_size_in_bytes
    )


def test_several_seeds_on_several_devices_are_refused_as_in_training():
    exp = experiment(**{"train.num_seeds": 2, "mesh.data": -1})
    with pytest.raises(ConfigError, match=r"several seeds need one device; give mesh.data=1"):
        next(ahead.programs(exp, jax.devices()))


def test_the_share_of_a_gpu_that_a_command_may_use_is_compared(monkeypatch, capsys):
    limits = []
    monkeypatch.setattr(ahead, "topology_devices", lambda topology: jax.devices()[:1])
    monkeypatch.setattr(ahead, "programs", lambda exp, devices: ["one"])
    monkeypatch.setattr(ahead, "format_program", lambda _, limit: limits.append(limit))
    monkeypatch.setattr(ahead, "Program", types.SimpleNamespace)
    for share, topology in ((None, "h100:1x1x1"), ("0.75", "h100:1x1x1"), (None, "v5e:1x1")):
        monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
        if share:
            monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", share)
        with pytest.raises(AttributeError):  # the fake program is a string without ``fits``
            ahead.compile_ahead(experiment(), topology)
    assert limits == [int(0.9 * 80 * 10**9), int(0.75 * 80 * 10**9), int(15.75 * GIB)]


DOCUMENTS = {"data.name": "tokens", "data.path": "x", "data.document_separator": "7"}


@pytest.mark.parametrize(
    ("changes", "episodes", "parts"),
    [
        ({}, {"train": False, "validate": (False,)}, []),
        (DOCUMENTS, {"train": True, "validate": (True,)}, []),
        ({"train.context_len": 3}, {"train": True, "validate": (False,)}, []),
        ({"evaluate.warm_start": 5}, {"train": False, "evaluate": (True, False)}, ["warm-up"]),
    ],
)
def test_programs_and_checks_know_where_memory_is_reset_within_a_segment(
    changes, episodes, parts, monkeypatch
):
    checked: dict[str, list[bool]] = {}

    def note(name, c, mesh, *sizes, episodes, **program):
        checked.setdefault(name, []).append(episodes)
        return iter(())

    monkeypatch.setattr(run_programs, "_self_check", note)
    monkeypatch.setattr(run_programs, "may_fuse_cache", lambda *_: True)
    exp = experiment(**changes)
    names = [program.name for program in run_programs.run_programs(exp, jax.devices())]
    for name, expected in episodes.items():
        assert checked[name] == [expected] if name == "train" else list(expected)
    assert [n for n in names if n.startswith("evaluate, warm")] == [
        f"evaluate, {part}" for part in parts
    ]
    batch = run_programs.training_text(exp).segment(0)
    assert (batch.resets is not None) == (changes is DOCUMENTS)


def test_a_kernel_by_name_changes_no_shape_and_no_first_parameter():
    """Shapes are found with a segment of one token, before the devices of the mesh are known."""
    for kernel in ("triton", "pallas_tpu"):
        exp = experiment(**{"model.kernel": kernel})
        plain = experiment(**{"model.kernel": "xla"})
        assert param_shapes(exp.model) == param_shapes(plain.model)
        parts = exp, txl_jax.TransformerXL(exp.model), make_optimizer(exp)
        assert jax.eval_shape(functools.partial(init_state, *parts))


def test_idle_devices_are_told_as_training_does(monkeypatch, capsys):
    monkeypatch.setattr(ahead, "programs", lambda exp, devices: [])
    said = "6 of 8 devices are in use, and the others stay idle; train.batch_size = 8 uses all"
    for data, times in ((-1, 1), (6, 0)):
        changes = {"train.batch_size": 6, "mesh.data": data}
        assert ahead.compile_ahead(experiment(**changes), topology=None) == 0
        assert capsys.readouterr().out.count(said) == times


@pytest.mark.integration
def test_what_the_compiler_refuses_does_not_fit(monkeypatch, capsys):
    class TooLarge:
        def compile(self, options):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 20G exceeds 15.75G.\nMore")

    monkeypatch.setattr(run_programs, "lower_update", lambda *args: TooLarge())
    assert ahead.compile_ahead(experiment(), topology=None) == 1
    assert "DOES NOT FIT: RESOURCE_EXHAUSTED: 20G exceeds 15.75G.\n" in capsys.readouterr().out


def test_a_program_that_cannot_be_read_back_is_told_without_its_exchanges():
    class Unreadable:
        def as_text(self):
            raise jax.errors.JaxRuntimeError("INTERNAL: RET_CHECK failure")

    unreadable: Any = Unreadable()
    assert ahead._exchanges_and_calls(unreadable) == (None, None)
    p = dataclasses.replace(train_program(), collectives=None)
    assert "collectives unknown" in ahead.format_program(p, None)


@pytest.mark.parametrize(("kind", "published"), [("v100", 15.7e12), ("t4", 8.1e12)])
def test_the_float32_rate_of_an_old_gpu_is_that_of_its_units(kind, published):
    gpu = GPUS[kind]  # each unit does two operations per clock
    rate = 2e9 * gpu.processors * gpu.units * gpu.clock
    assert published == pytest.approx(rate, rel=0.01)


def test_recomputing_layers_adds_a_forward_pass_and_recomputing_products_adds_less():
    exp = experiment()
    again = {
        remat: flops.update_flops(override(exp, {"model.remat": remat}))[1]
        for remat in ("none", "products", "layer")
    }
    layers = flops.layer_flops(exp.model, exp.train, B)
    assert again["layer"] - again["none"] == pytest.approx(layers)
    assert again["none"] < again["products"] < again["layer"]


def test_two_passes_with_two_dropout_masks_are_twice_the_operations():
    once, twice = experiment(), experiment(**{"loss.r_drop": 0.5})
    assert flops.update_flops(twice) == tuple(2 * x for x in flops.update_flops(once))


# --------------------------------------------------------------------------------------
# What cannot be planned for.


def refused(*arguments, **environment):
    """Runs the command, which must exit with code 2, and returns its error message.

    This is the last line on standard error; JAX might print a warning before it.
    """
    done = call(*arguments, **environment)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    return done.stderr.splitlines()[-1].removeprefix("error: ")


@pytest.mark.slow
def test_the_vocabulary_of_an_own_text_and_the_memory_of_this_machine_are_known(tmp_path):
    done = call(f"--config={write_config(tmp_path)}", "--mode=compile")
    assert done.returncode == 0, done.stderr
    n_symbols = len(set((tmp_path / "text.txt").read_text()))
    assert f"vocabulary {n_symbols}; float32" in done.stdout
    assert f"of {(host_memory() or 0) / GIB:.3f} GiB: fits" in done.stdout
    assert "unknown" not in done.stdout


@pytest.mark.integration
def test_slices_and_texts_that_are_not_known_are_refused_and_no_folder_is_made(tmp_path):
    config = write_config(tmp_path)
    flags = (f"--config={config}", "--mode=compile", f"--workdir={tmp_path / 'run'}")
    unread = ("--config.data.name=stdlib", "--config.data.vocab=char", "--config.data.path=None")
    assert refused(*flags, *unread) == (
        "the size of the vocabulary of data.name='stdlib' is known only from the text: give"
        " --config.data.path=FILE, or the size, --config.model.vocab_size=N"
    )
    sized = (*flags, "--config.model.vocab_size=30")
    assert refused(*sized, "--topology=v9:2x2") == (
        "--topology=v9:2x2: must start with a kind of TPU (v4, v5e, v5p, v6e) or GPU (v100, t4,"
        " a100, l4, rtx4090, h100, h200, b200) and a colon: v5e:4x4, v5p:2x2x4, h200:1x1x8"
    )
    assert refused(*sized, "--topology=v5e:2x4", TPU_LIBRARY_PATH="/nowhere/libtpu.so") == (
        "TPU_LIBRARY_PATH=/nowhere/libtpu.so: there is no such file; name a libtpu.so"
    )
    assert refused(f"--config={config}", "--topology=v5e:2x4") == (
        "--topology=v5e:2x4: only --mode=compile reads this flag; leave the flag out, or give that"
        " mode"
    )
    assert not (tmp_path / "run").exists()


def test_without_libtpu_the_error_names_what_to_install(monkeypatch):
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PlanningError, match=r"pip install 'txl_jax\[tpu\]'.*TPU_LIBRARY_PATH"):
        topology_devices("v5e:2x4")


def test_slices_have_the_names_they_are_rented_by():
    names = {
        "v5e:4x4": "v5litepod-16",
        "v5p:2x2x4": "v5p-32",
        "v6e:2x4": "v6e-8",
        "v4:2x2x1": "v4-8",
    }
    for topology, name in names.items():
        assert accelerator_type(topology) == name
    for wrong in ("v5p:4x4", "v5e:2x2x2", "v5e:0x4", "v5e", "v5e:4x4x", "4x4"):
        with pytest.raises(PlanningError, match="must be a kind of TPU"):
            accelerator_type(wrong)
    for topology in ("v4:4x4x8", "v5p:8x8x16", "v6e:16x16", "v5e:1x1"):
        assert accelerator_type(topology)
    for absent in ("v5e:1x2", "v5e:4x2", "v6e:16x32", "v5p:1x1x1", "v5p:2x2x8", "v4:8x4x4"):
        with pytest.raises(PlanningError, match="there is no such slice of a v"):
            accelerator_type(absent)


def test_vocabularies_of_published_corpora_are_known():
    sizes = {
        DataConfig(name="enwik8"): 204,
        DataConfig(name="enwik8", protocol="bytes"): 205,
        DataConfig(name="text8"): 27,
        DataConfig(name="ptb"): 10_000,
        DataConfig(name="ptb", vocab="char"): None,
        DataConfig(name="text", vocab="byte"): 256,
        DataConfig(name="text", vocab="word"): None,
        DataConfig(name="text", tokenizer="tokenizer.json"): None,
    }
    for data, size in sizes.items():
        assert known_vocab_size(data) == size
    exp = experiment(**{"data.name": "enwik8"})
    assert with_vocab_size(exp).model.vocab_size == 50  # the size in the config is kept
    unsized = dataclasses.replace(exp, model=dataclasses.replace(exp.model, vocab_size=None))
    assert with_vocab_size(unsized).model.vocab_size == 204


def test_only_a_model_of_bytes_generates_with_their_grammar():
    """The grammar has 256 tokens, and a tokenizer can have more."""
    few = {"model.n_layer": 1, "model.vocab_size": 300, "generate.mem_len": 8}
    for changes in ({"data.tokenizer": "tokenizer.json"}, {}):
        exp = experiment(**few, **changes)
        generation = run_programs._generation(exp, exp.model, run_programs.training_mesh(exp))
        assert {program.name: program.lower() for program in generation}["generate, extend"]


def test_a_run_that_starts_from_a_model_is_planned_with_its_settings(tmp_path, monkeypatch):
    corpus, trained = corpus_and_experiment(tmp_path)
    folder = claimed(tmp_path / "trained", trained, corpus)
    planned: list[ExperimentConfig] = []

    def note(exp, devices):
        planned.append(exp)
        return []

    monkeypatch.setattr(ahead, "programs", note)
    tuned = {"data": {"path": str(tmp_path / "text.txt")}, "train": {"start_from": folder}}
    exp = ExperimentConfig.from_dict({**tuned, "model": {"dropout": 0.1}})
    assert ahead.compile_ahead(exp, None, str(tmp_path / "tuned")) == 0
    expected = dataclasses.replace(trained.model, dropout=0.1)
    assert (planned[0].model, planned[0].data.vocab) == (expected, "char")
    # If the runs of several seeds have begun, the model that they started from is not read again.
    seeds = {"seed": 3, "train.num_seeds": 2}
    claimed(tmp_path / "tuned" / "seed_3", override(planned[0], {"seed": 3}), corpus)
    shutil.rmtree(folder)
    assert ahead.compile_ahead(override(exp, seeds), None, str(tmp_path / "tuned")) == 0
    assert planned[1].model == expected


# --------------------------------------------------------------------------------------
# Absent TPUs.


SLICES = """\
import sys
from jax.experimental import topologies
from txl_jax.config import ConfigError, MeshConfig, TransformerXLConfig
from txl_jax.parallel.mesh import make_mesh
from txl_jax.planning.topologies import topology_devices

topology_devices("v5e:2x2")  # sets up libtpu
devices = topologies.get_topology_desc("v5e:2x2", platform="tpu", num_slices=2).devices
for mesh, rows in (
    (MeshConfig(data=-1), 16),
    (MeshConfig(data=2, fsdp=4), 16),
    (MeshConfig(data=-1), 22),
    (MeshConfig(data=-1, tensor=2), 7),
    (MeshConfig(data=1, fsdp=8), 16),
):
    try:
        made = make_mesh(mesh, TransformerXLConfig(vocab_size=30), rows, devices=devices)
        print(*made.shape.values(), *(device.slice_index for device in made.devices.flat))
    except ConfigError as error:
        print(error)
"""


@pytest.mark.integration
@needs_libtpu
def test_slices_share_rows_and_each_has_its_part_of_the_mesh():
    command = [sys.executable, "-c", SLICES]
    environment = {**os.environ, "XLA_FLAGS": ""}  # libtpu refuses flags of the CPU
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.splitlines() == [
        "8 1 1 0 0 0 0 1 1 1 1",
        "2 4 1 0 0 0 0 1 1 1 1",
        "4 2 1 1 0 1 0 1 0 1 0 1",
        "4 1 1 2 0 0 0 0 1 1 1 1",
        "config key mesh = data 1 x fsdp 8 x tensor 1: only mesh.data divides work among the 2 TPU"
        " slices, so mesh.data must be a multiple of 2",
    ], done.stderr


@pytest.mark.integration
@needs_libtpu
def test_programs_compile_for_a_tpu_slice_and_donate_the_state(tmp_path):
    config = write_config(tmp_path)
    flags = (f"--config={config}", "--mode=compile", f"--workdir={tmp_path / 'run'}")
    done = call(
        *flags,
        "--topology=v5e:2x4",
        "--config.model.vocab_size=30",
        "--config.model.cutoffs=(8,16)",
        "--config.train.batch_size=8",
        "--config.mesh.data=2",
        "--config.mesh.fsdp=2",
        "--config.mesh.tensor=2",
        "--config.train.micro_batches=2",
        XLA_FLAGS="",  # libtpu refuses flags of the CPU
    )
    assert done.returncode == 0, done.stderr
    assert "8 of v5e:2x4 (TPU v5 lite), mesh data 2 x fsdp 2 x tensor 2" in done.stdout
    told_of = dict(re.findall(r"^(\w.*?): (.*?compiled in)", done.stdout, re.M | re.S))
    train, validate, evaluate = (told_of[name] for name in MAIN)
    assert "all-reduce" in train
    gib = [float(x) for x in re.findall(r"([\d.]+) GiB", train)]
    arguments, output, alias = gib[:3]
    assert 0.9 * output <= alias <= output <= arguments + 0.001
    for told in (train, validate, evaluate):
        assert "of 15.750 GiB: fits" in told
    assert not (tmp_path / "run").exists()


@pytest.mark.integration
@needs_libtpu
def test_the_hosts_of_small_tpu_slices_are_those_that_are_rented():
    code = "import sys; from txl_jax.planning.topologies import topology_devices as found\n"
    code += (
        "for t in sys.argv[1:]: print(t, len(found(t)), len({d.process_index for d in found(t)}))"
    )
    slices = ("v5e:1x1", "v5e:2x2", "v5e:2x4", "v6e:2x4", "v5e:4x4", "v5p:2x2x2")
    done = subprocess.run(
        [sys.executable, "-c", code, *slices],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
    )
    expected = ["1 1", "4 1", "8 1", "8 1", "16 4", "8 2"]
    assert done.stdout.splitlines() == [" ".join(x) for x in zip(slices, expected, strict=True)]


@pytest.mark.integration
@needs_libtpu
@pytest.mark.parametrize("topology", ["v5e:1x1", "v5e:4x4"])  # one host, and four
def test_tpus_of_one_host_and_of_several_get_the_fused_kernel(tmp_path, topology):
    sizes = [f"--config.{part}.seg_len=128" for part in ("train", "validate", "evaluate")]
    config = f"--config={write_config(tmp_path)}"
    flags = (config, "--mode=compile", "--config.model.vocab_size=30", "--config.model.dropatt=0.1")
    rows = "--config.train.batch_size=16"
    words = (*flags, f"--topology={topology}", rows, "--config.mesh.data=-1", *sizes)
    done = call(*words, XLA_FLAGS="")  # libtpu refuses flags of the CPU
    assert done.returncode == 0, done.stderr
    train = done.stdout.partition("\ntrain:")[2].partition("\nvalidate:")[0]
    assert "attention   pallas_tpu (fused)" in train
    assert "tpu_custom_call" in train
