"""The mode ``compile`` compiles every program of a run for accelerators that are absent."""

import os
import re

import pytest
from tiny_runs import call, write_config

from txl_jax.planning import gpus, topologies
from txl_jax.planning.machines import PlanningError

FORMS: dict[str, dict[str, object]] = {
    "relative": {"dropatt": 0.1, "scan_layers": True},
    "shared_projection": {"attention": "shared_projection"},
    "shaw": {"attention": "shaw", "n_positions": 64},
    "absolute": {"attention": "absolute"},
    "absolute_per_layer": {"attention": "absolute_per_layer", "n_positions": 300},
}
"""The forms of attention, and the settings of each."""
NO_MEMORY = {f"{part}.mem_len": 0 for part in ("train", "validate", "evaluate")}
SIZES = {
    # Segments are longer than one group of queries in attention without a fused kernel.
    **{f"{part}.seg_len": 256 for part in ("train", "validate", "evaluate")},
    **{"model.vocab_size": 30, "train.batch_size": 8, "mesh.data": -1},
}


PLAIN = {"model.kernel": "reference", "model.scan_layers": False, "generate.length": 0}
"""The plain form of every program: all attention scores at once, and unrolled layers."""


def compiled(folder, topology, form, dtype, **changes):
    """The output of ``--mode=compile`` for a small run; its exit code must be 0."""
    settings = {f"model.{key}": value for key, value in FORMS[form].items()}
    settings |= NO_MEMORY if form.startswith("absolute") else {}
    config = write_config(folder, **{**SIZES, **settings, "model.dtype": dtype, **changes})
    done = call(
        *(f"--config={config}", "--mode=compile", f"--topology={topology}"),
        timeout=900,
        XLA_FLAGS="",  # libtpu refuses flags of the CPU
        JAX_DISABLE_MOST_OPTIMIZATIONS="0",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def require(topology):
    """Skips the test where the compiler for a topology is not installed."""
    if topology.partition(":")[0] not in gpus.GPUS:
        topologies.accelerator_type(topology)
        if not os.environ.get("TPU_LIBRARY_PATH"):
            pytest.importorskip("libtpu", exc_type=ImportError)
        return
    try:
        gpus.check_wheels(topology)
    except PlanningError as missing:
        pytest.skip(str(missing))
    pytest.importorskip("jax_triton", exc_type=ImportError)


def walk(folder, topology, form, dtypes):
    """Compiles every program of a form, and checks what the command prints about each."""
    require(topology)
    for dtype in dtypes:
        told = compiled(folder, topology, form, dtype)
        names = re.findall(r"^(\w.*?): .*\n  memory", told, re.MULTILINE)
        expected = ["initialise", "train", "validate", "evaluate", "generate, extend"]
        assert [name for name in names if name in expected] == expected, told
        for said in ("fits", "floating-point atomics: ", "compiled in"):
            assert told.count(said) == len(names), told
        kind = "bfloat16" if dtype == "bfloat16" else "float32 at default"
        train = told.partition("\ntrain: ")[2].partition("\nvalidate")[0]
        assert kind in re.findall(r"products +(.*)", train)[0], told
        if not topology.endswith("1x1x1") and "collectives unknown" not in told:
            check_collectives(told, compiled(folder, topology, form, dtype, **PLAIN))


def check_collectives(told, plain):
    """Checks that no program exchanges more bytes by any kind of collective than its plain form.

    Self-checks are skipped: they have no plain form.
    """
    found, allowed = collectives(told), collectives(plain)
    assert any(allowed.values()), plain  # several devices share the work
    for name, bytes_of_kind in found.items():
        if not name.startswith("self-check"):
            for kind, size in bytes_of_kind.items():
                assert size <= allowed.get(name, {}).get(kind, 0), (name, kind, told, plain)


def collectives(told):
    """For each program in the output ``told``, the bytes of each kind of collective.

    Fails at 100,000 bytes or more, which are printed in MB.
    """
    found = {}
    for program in re.split(r"\n(?=\w)", told):
        if said := re.search(r"^  collectives +(.*)", program, re.MULTILINE):
            kinds = re.findall(r"\d+ ([a-z-]+) \(([\d,]+) bytes\)", said[1])
            assert said[1] == "none" or len(kinds) == said[1].count("("), said[1]
            name = program.partition(":")[0]
            found[name] = {kind: int(size.replace(",", "")) for kind, size in kinds}
    return found


@pytest.mark.integration
@pytest.mark.parametrize("topology", ["v5e:2x2", "h100:1x1x1"])
def test_every_program_of_a_run_compiles_for_an_accelerator(topology, tmp_path):
    walk(tmp_path, topology, "relative", ["bfloat16"])


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5e:2x4", "v6e:2x2", "h100:1x1x1", "h100:1x1x4"])
def test_every_program_of_every_form_compiles_in_both_dtypes(topology, form, tmp_path):
    walk(tmp_path, topology, form, ["float32", "bfloat16"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "topology",
    ["v4:2x2x1", "v5p:2x2x1", *(f"{kind}:1x1x1" for kind in gpus.GPUS if kind != "v100")],
)
def test_every_program_of_a_run_compiles_for_every_kind(topology, tmp_path):
    walk(tmp_path, topology, "relative", ["float32", "bfloat16"])


@pytest.mark.integration
def test_a_gpu_that_the_compiler_has_left_behind_is_refused_in_a_line(tmp_path):
    require("v100:1x1x1")
    config = write_config(tmp_path, **SIZES)
    done = call(*(f"--config={config}", "--mode=compile", "--topology=v100:1x1x1"), XLA_FLAGS="")
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]  # XLA prints other lines before it
    assert last.startswith("error: the installed ptxas")
    assert "CUDA 13 does not support a V100" in last
