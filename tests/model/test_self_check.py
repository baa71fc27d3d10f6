"""The self-check tests a run's planned attention; with ``auto``, a failure does not end the run.

Most tests replace the fused kernels by functions on the CPU. Others compile for absent TPUs and
GPUs, where the compilers are installed.
"""

import dataclasses
import json
import os
import subprocess
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absent_devices import absent_tpus, needs_libtpu
from many_processes import free_port
from planned_programs import experiment
from tiers import rest_slow

from txl_jax.config import GenerateConfig, ScoreConfig, TransformerXLConfig
from txl_jax.evaluation import any_text
from txl_jax.generation import generate
from txl_jax.model import self_check
from txl_jax.model.attention import planned_attention
from txl_jax.model.kernels import choice, reference
from txl_jax.model.kernels.choice import KernelError
from txl_jax.model.transformer_xl import TransformerXL
from txl_jax.training.plan import attention_sizes, training_mesh

T, M, ROWS = 128, 40, 4


def config(**changes) -> TransformerXLConfig:
    sizes = {"vocab_size": 11, "n_layer": 2, "d_model": 16, "n_head": 4, "d_head": 8, "d_inner": 16}
    return TransformerXLConfig(**{**sizes, **changes})


@pytest.fixture
def kernel(monkeypatch, tmp_path):
    """A fake kernel for TPUs. ``seen`` lists its traced inputs; ``fails`` can spoil its result."""
    fake: Any = types.SimpleNamespace(seen=[], fails=lambda out: out)
    fake.supports = lambda x: None

    def attend(x):
        precision: Any = jax.config
        fake.seen.append((x, precision.jax_default_matmul_precision))
        return fake.fails(reference.attend(x))

    fake.attend = attend
    real = choice._module
    monkeypatch.setattr(
        choice, "_module", lambda name: fake if name == "pallas_tpu" else real(name)
    )
    monkeypatch.setattr(choice, "platform_of", lambda mesh: "tpu")
    monkeypatch.setattr(choice, "_failures", {})
    monkeypatch.setattr(self_check, "_results", {})
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield fake
    jax.config.update("jax_compilation_cache_dir", before)


def mesh(**axes):
    return training_mesh(experiment(**{f"mesh.{name}": n for name, n in axes.items()}))


def check(c, on=None, seg_len=T, **program):
    self_check.check(c, on or mesh(), ROWS, seg_len, M, **{"train": True, **program})


def raises(out):
    raise jax.errors.JaxRuntimeError("INTERNAL: Mosaic failed to compile\nTPU kernel: Bad lhs type")


def test_a_correct_kernel_passes_and_stays_chosen(kernel):
    check(config())
    assert kernel.seen
    assert choice._failures == {}


@pytest.mark.parametrize("how", [raises, lambda out: 2 * out, lambda out: out * jnp.nan])
def test_any_failure_under_auto_is_a_warning_and_the_plain_path(kernel, how, capsys):
    kernel.fails = how
    check(config())
    assert capsys.readouterr().err.startswith(
        "warning: pallas_tpu fails its self-check on this dev"
    )
    exp = experiment(**{f"{part}.seg_len": T for part in ("train", "validate", "evaluate")})
    planned = planned_attention(exp.model, *attention_sizes(exp.train), True, mesh())
    assert (planned.name, planned.falls_back) == ("xla", True)
    assert "fails its self-check" in planned.describe()
    # The model itself takes the plain path: the broken kernel is not traced again.
    kernel.seen.clear()
    model = TransformerXL(config())
    text = np.zeros((1, T), np.int32)
    jax.eval_shape(lambda: model.init(jax.random.key(0), text, model.init_mems(1, M)))
    assert kernel.seen == []


@pytest.mark.parametrize("how", [raises, lambda out: 2 * out])
def test_a_failure_of_a_kernel_that_the_user_named_is_an_error(kernel, how):
    kernel.fails = how
    with pytest.raises(
        KernelError, match=r"model.kernel = 'pallas_tpu' fails.*use 'auto' or 'xla'"
    ):
        check(config(kernel="pallas_tpu"))
    assert choice._failures == {}


def test_nothing_is_checked_where_the_plan_is_no_fused_kernel(kernel):
    kernel.fails = raises
    check(config(), seg_len=64)  # too short for a fused kernel
    check(config(kernel="xla"))
    check(config(kernel="reference"))
    assert kernel.seen == []
    assert choice._failures == {}


def test_a_named_kernel_that_the_tpu_cannot_run_is_an_error(kernel, monkeypatch):
    monkeypatch.setattr(choice, "tpu_generation", lambda mesh: 4)
    with pytest.raises(KernelError, match=r"'pallas_tpu' needs a TPU v5 or later.*use 'auto'"):
        check(config(kernel="pallas_tpu"))
    assert kernel.seen == []


@pytest.mark.parametrize("memory", [True, False])
def test_generation_and_scoring_check_what_they_compute(memory, monkeypatch):
    """Generation and scoring use one device. No earlier program has checked their attention."""
    c = config() if memory else config(attention="absolute_per_layer", n_positions=512, d_head=4)
    seen: list[Any] = []
    note = lambda c, mesh, *sizes, **program: seen.append((mesh.size, *sizes, program))
    monkeypatch.setattr(self_check, "check", note)
    params = TransformerXL(c).init(*first_inputs(c))["params"]
    generated = GenerateConfig(length=1, mem_len=M)
    list(generate.generate(c, params, [np.arange(5)], generated))
    scored = ScoreConfig(batch_size=2, seg_len=7, mem_len=M)
    any_text.score_texts(c, params, [np.arange(9) % 11], scored)
    read, score = seen
    rows, m, episodes = (1, M, False) if memory else (1, 0, True)
    expected = {"train": False, "episodes": episodes}
    assert read == (1, rows, generate.PREFILL if memory else M, m, expected)
    assert score == (1, rows, 7 if memory else 7 + M, m, expected)


def first_inputs(c):
    model = TransformerXL(c)
    mems = model.init_mems(1, 0 if c.memory_free else M)
    return jax.random.key(0), np.zeros((1, 2), np.int32), mems


def test_the_attention_is_the_planned_one(kernel):
    c = config(dtype="bfloat16", dropatt=0.1, same_length="pytorch", matmul_precision="high")
    check(c, episodes=True)
    (x, precision), *_ = kernel.seen
    assert (x.q.dtype, x.q.shape[2:], x.mask.mem_len) == (jnp.bfloat16, (T, 8), M)
    assert (x.mask.reach, x.dropout.rate, precision) == (M - 1, 0.1, "high")
    assert x.mask.episode.shape == (3, T)
    kernel.seen.clear()
    check(c, episodes=False, train=False)
    (x, _), *_ = kernel.seen
    assert x.mask.episode is None
    assert x.dropout is None


def test_the_plain_form_is_float32_and_the_kernel_keeps_its_own_precision(kernel, monkeypatch):
    precisions = []

    def plain(x):
        settings: Any = jax.config
        precisions.append((x.q.dtype, settings.jax_default_matmul_precision))
        return reference.attend(x)

    monkeypatch.setattr(self_check, "reference", types.SimpleNamespace(attend=plain))
    monkeypatch.setattr(self_check, "_file", lambda *_: "file")
    check(config(dtype="bfloat16"))
    assert set(precisions) == {(jnp.dtype("float32"), "highest")}
    assert {precision for _, precision in kernel.seen} == {None}


@pytest.mark.parametrize("program", [{"scanned": True}, {"several_seeds": True}])
def test_loops_and_seeds_around_the_kernel_change_no_result(kernel, program):
    attention = self_check.planned(config(dropatt=0.2), mesh(), ROWS, T, M, train=True)
    assert self_check.comparison(attention._replace(**program), "pallas_tpu")() < 1e-5


def test_each_device_of_a_mesh_runs_its_own_rows_and_heads(kernel):
    on = mesh(data=2, fsdp=2, tensor=2)
    attention = self_check.planned(config(dropatt=0.2), on, ROWS, T, M, train=True, episodes=True)
    assert self_check.comparison(attention, "pallas_tpu")() < 1e-5
    assert {x.q.shape for x, _ in kernel.seen} == {(2, 1, T, 8)}


@pytest.mark.parametrize("how", [lambda out: out, raises])
def test_the_result_is_kept_beside_the_compilation_cache(kernel, tmp_path, monkeypatch, how):
    kernel.fails = how
    check(config())
    (file,) = tmp_path.glob("self-check-pallas_tpu-*.json")
    assert bool(json.loads(file.read_text())["failure"]) == (how is raises)

    def start_again():
        kernel.seen.clear()
        choice._failures.clear()
        self_check._results.clear()
        check(config())
        return len(kernel.seen)

    assert start_again() == 0
    assert bool(choice._failures) == (how is raises)
    monkeypatch.setattr(self_check, "installed_version", lambda package: "another version")
    assert start_again() > 0


def test_a_damaged_result_is_computed_again(kernel, tmp_path):
    check(config())
    (file,) = tmp_path.glob("self-check-*")
    file.write_text("{")
    self_check._results.clear()
    kernel.seen.clear()
    check(config())
    assert kernel.seen


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "bfloat16"},
        {"dropatt": 0.1},
        {"same_length": "tf"},
        {"matmul_precision": "highest"},
        {"scan_layers": True},
        {"d_head": 16},
    ],
)
def test_the_result_of_one_attention_is_not_that_of_another(kernel, change):
    key = lambda c: self_check._file(self_check.planned(c, mesh(), 4, T, M, train=True), "triton")
    assert key(config()) == key(config())
    assert key(config()) != key(config(**change))


def test_a_lack_of_memory_is_not_kept(kernel, tmp_path):
    def full(out):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    kernel.fails = full
    check(config())
    assert not list(tmp_path.glob("self-check-*"))


# --------------------------------------------------------------------------------------
# Two processes.

PROCESS = """
import functools, json, sys, types
import jax
from txl_jax.config import MeshConfig, TransformerXLConfig
from txl_jax.model import self_check
from txl_jax.model.kernels import choice, pallas_tpu
from txl_jax.parallel import processes
from txl_jax.parallel.mesh import make_mesh

address, i, how = sys.argv[1], int(sys.argv[2]), sys.argv[3]
processes.initialise(False, address, 2, i)
written, ran, here = [], [], how.endswith(sys.argv[2])

def attend(x):
    ran.append(x)
    if here and how.startswith("full"):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
    if here and how.startswith("refused"):
        raise jax.errors.JaxRuntimeError("INTERNAL: Mosaic failed to compile")
    out = pallas_tpu.attend(x, interpret=True)
    return 2 * out if here and how.startswith("wrong") else out

choice._module = lambda name: types.SimpleNamespace(attend=attend, supports=lambda x: None)
choice.platform_of = lambda mesh: "tpu"
write = self_check._write
self_check._write = lambda *what: (written.append(what), write(*what))
c = TransformerXLConfig(vocab_size=11, n_layer=2, d_model=16, n_head=2, d_head=8, d_inner=16)
mesh = make_mesh(MeshConfig(), c, 4)
self_check.check(c, mesh, 4, 128, 40, train=True)
last = {"failures": choice._failures, "ran": len(ran), "written": len(written)}
print(json.dumps({**last, "devices": mesh.size}), flush=True)
"""


def two_processes(folder, how) -> list[Any]:
    """Runs the self-check in two processes with two devices each; returns the output of each."""
    address = f"127.0.0.1:{free_port()}"
    settings = {"JAX_NUM_CPU_DEVICES": "2", "JAX_COMPILATION_CACHE_DIR": str(folder)}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, address, str(i), how],
            env={**os.environ, **settings},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], outputs
    return [(json.loads(out.splitlines()[-1]), err) for out, err in outputs]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "words"),
    rest_slow(
        1,
        [
            ("wrong 1", "attention or its gradient differs from the reference by"),
            ("right", ""),
            ("refused 1", "fails its self-check on the devices of process 1"),
            ("full 0", "RESOURCE_EXHAUSTED"),
            ("full 1", "fails its self-check on the devices of process 1"),
        ],
    ),
)
def test_two_processes_take_one_decision_and_one_keeps_it(how, words, tmp_path):
    """The kernel is interpreted. With ``auto``, a failing process does not block the other one."""
    (first, said), (second, said_by_second) = two_processes(tmp_path, how)
    assert first["devices"] == 4
    assert min(first["ran"], second["ran"]) > 0
    assert bool(first["failures"]) == bool(second["failures"]) == bool(words)
    assert words in first["failures"].get("pallas_tpu", "")
    assert said.count("attention is computed by XLA") == bool(words)
    assert "attention is computed by XLA" not in said_by_second
    assert ("warning: process 1: fails its" in said_by_second) == (how in ("refused 1", "full 1"))
    kept = list(tmp_path.glob("self-check-*"))
    assert len(kept) == first["written"] == (not how.startswith("full"))
    assert second["written"] == 0
    if kept:
        (first, _), (second, _) = two_processes(tmp_path, how)
        assert bool(first["failures"]) == bool(second["failures"]) == bool(words)
        assert first["ran"] == second["ran"] == 0


# --------------------------------------------------------------------------------------
# Compilation for absent devices.

FORMS = [
    {"dtype": "bfloat16", "dropatt": 0.1, "scan_layers": True},
    {"dtype": "float32", "same_length": "tf"},
    {"dtype": "float32", "matmul_precision": "high", "scan_layers": True},
    {"dtype": "float32", "matmul_precision": "highest"},
    {"dtype": "bfloat16", "matmul_precision": "highest"},
]


def lowered(devices, c, **program):
    on = training_mesh(experiment(**{"mesh.data": -1}), devices)
    attention = self_check.planned(c, on, 8, 128, 128, **{"train": True, **program})
    return self_check.lower(attention, attention.fused() or "")


@needs_libtpu
@pytest.mark.integration
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("episodes", [False, True])
def test_it_compiles_for_tpus_in_every_dtype_and_precision(form, episodes):
    with absent_tpus("v5e:2x2") as devices:
        program = lowered(devices, config(d_head=64, **form), episodes=episodes).compile()
    assert program.as_text().count("tpu_custom_call") >= 2


@pytest.mark.integration
@pytest.mark.parametrize("form", FORMS[:3])
def test_it_compiles_for_gpus_on_a_mesh(eight_gpus, form):
    program = lowered(eight_gpus, config(d_head=64, **form), episodes=True).compile()
    assert program.as_text().count("triton_kernel_call") >= 5


@pytest.mark.integration
def test_float32_products_that_must_not_be_rounded_are_fused_too(eight_gpus):
    """Each product is computed as three TF32 products, as exactly as ``highest`` promises."""
    c = config(d_head=64, dropatt=0.1)
    on = training_mesh(experiment(**{"mesh.data": -1}), eight_gpus)
    planned = lambda c: self_check.planned(c, on, 8, 128, 128, train=True)
    for precision in (None, "highest"):
        attention = planned(dataclasses.replace(c, matmul_precision=precision))
        assert attention.fused() == "triton"
        assert self_check.tolerance(attention, "triton") == 1e-4
