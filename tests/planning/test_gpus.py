"""Programs compiled for absent NVIDIA GPUs have the kernels of a run on such a GPU."""

import dataclasses
import functools
import importlib.metadata
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from planned_programs import MAIN, experiment, train_program
from tiny_models import tokens

from benchmarks import generated_token
from txl_jax.config import ExperimentConfig, TransformerXLConfig, override
from txl_jax.model import attention
from txl_jax.model.attention import planned_attention
from txl_jax.model.kernels import choice, triton
from txl_jax.model.transformer_xl import TransformerXL
from txl_jax.parallel import platforms
from txl_jax.parallel.autotuning import kept_choices
from txl_jax.planning import compile_ahead as ahead
from txl_jax.planning import gpus
from txl_jax.planning.costs import float_atomics, library_calls, matrix_products
from txl_jax.planning.machines import CHIPS, PlanningError
from txl_jax.planning.run_programs import RunProgram, run_programs
from txl_jax.planning.topologies import topology_devices
from txl_jax.training.plan import training_mesh
from txl_jax.training.trainer import Trainer

FUSED = {"model.dtype": "bfloat16", "model.dropatt": 0.1, "mesh.data": -1}
FUSED |= {f"{part}.seg_len": 128 for part in ("train", "validate", "evaluate")}

MESH = {"data": 1, "fsdp": 1, "tensor": 1}


# --------------------------------------------------------------------------------------
# Tests that run anywhere.


@pytest.mark.parametrize("topology", ["h200:8", "h200:1x8", "h100:0x1x8", "h200:1x1x8x1", "h200"])
def test_a_topology_of_gpus_has_three_numbers(topology):
    with pytest.raises(PlanningError, match=r"slices, hosts and devices of a host: h200:1x1x8"):
        gpus.gpu_devices(topology)


def test_missing_wheels_are_named_with_the_extra_that_has_them(monkeypatch):
    have = {"jax-cuda13-pjrt": jax.__version__, "jax-cuda13-plugin": "0.0.1"}

    def version(name):
        if name not in have:
            raise importlib.metadata.PackageNotFoundError
        return have[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(PlanningError) as refused:
        gpus.gpu_devices("h200:1x1x8")
    assert str(refused.value) == (
        f"--topology=h200:1x1x8: needs jax-cuda13-plugin=={jax.__version__} (not 0.0.1),"
        " nvidia-nvvm, nvidia-cuda-nvcc, whose compiler needs no GPU: pip install"
        " 'txl_jax[compile-cuda]'"
    )


@pytest.mark.parametrize("kind", gpus.GPUS)
def test_the_description_of_a_gpu_has_its_name_and_its_memory(kind):
    text = gpus.target_config(kind)
    assert text.count("{") == text.count("}")
    gpu = gpus.GPUS[kind]
    assert gpu.name in text
    assert CHIPS[kind].memory <= gpu.memory < 1.1 * CHIPS[kind].memory
    assert gpu.bandwidth == pytest.approx(CHIPS[kind].bandwidth, rel=0.01)


@pytest.mark.parametrize(
    ("line", "atomics"),
    [
        ("\tatom.global.add.f32 \t%f1, [%rd3], %f2;", 1),
        ("\t@%p3 red.relaxed.gpu.global.add.f64 [%rd3], %fd1;", 1),
        ("\tatom.global.v4.f32.add \t{%f1, %f2}, [%rd3], {%f3};", 1),
        ("\tatom.relaxed.sys.global.cas.b32 \t%r5, [%rd3], %r17, %r16;", 1),
        ("\tatom.global.add.u32 \t%r5, [%rd3], 1;", 0),
        ("\tatom.global.max.s32 \t%r5, [%rd3], %r6;", 0),
        ("\t// atom.global.add.f32 in words", 0),
        ("\tadd.f32 \t%f1, %f2, %f3;", 0),
    ],
)
def test_additions_of_floats_in_an_undefined_order_are_counted(line, atomics, tmp_path):
    (tmp_path / "module_0001.jit_step.ptx").write_text(f".version 8.8\n{line}\n\tret;\n")
    assert float_atomics(tmp_path) == atomics


def test_matrix_products_are_told_by_the_type_of_their_factors_and_their_precision():
    def products(dtype, precision):
        x = jax.ShapeDtypeStruct((4, 4), dtype)
        lowered = jax.jit(lambda a, b: jnp.matmul(a, b, precision=precision)).lower(x, x)
        return matrix_products(lowered.as_text())

    assert products(jnp.float32, None) == ("float32 at default",)
    assert products(jnp.float32, "highest") == ("float32 at highest",)
    assert products(jnp.bfloat16, None) == ("bfloat16",)
    both = jax.jit(lambda a, b, c: (a @ b, c @ c))
    shapes = (jax.ShapeDtypeStruct((4, 4), dtype) for dtype in (jnp.float32,) * 2 + (jnp.float16,))
    assert matrix_products(both.lower(*shapes).as_text()) == ("float16", "float32 at default")


PROGRAM = """\
%body (p: (s32[])) -> (s32[]) {
  %a = f32[8]{0} custom-call(%x), custom_call_target="triton_kernel_call"
  %g = f32[8]{0} fusion(%x), kind=kCustom, calls=%gemm, \
backend_config={"fusion_backend_config":{"kind":"__triton_gemm"}}
}

%command_buffer (a: f32[8]) -> f32[] {
  %d = f32[8]{0} custom-call(%x), custom_call_target="triton_kernel_call"
}

ENTRY %main (a: f32[8]) -> f32[] {
  %w = (s32[]) while(%t), condition=%cond, body=%body, \
backend_config={"known_trip_count":{"n":"3"}}
  %c = f32[8]{0} custom-call(%x), custom_call_target="__cublas$lt$matmul"
  %d = f32[8]{0} call(%x), to_apply=%command_buffer
}
"""


class Refusing:
    """A program that compiles with cuBLAS for matrix products, but not with Triton for them."""

    def __init__(self, words):
        self.words = words

    def compile(self, options):
        if options.get("xla_gpu_enable_triton_gemm", True):
            raise jax.errors.JaxRuntimeError(self.words)
        return options


@pytest.mark.parametrize(
    "words",
    [
        "INTERNAL: Couldn't find output tile sizes that satisfy hlo: %dot.23",  # jax 0.10
        "INTERNAL: Failed to get configs for: 67 out of 67 instructions.",  # jax 0.11
    ],
)
def test_a_product_without_tiles_is_one_of_cublas_and_other_errors_stay(monkeypatch, words):
    tiles: Any = Refusing(words)
    options: Any = ahead._compile(tiles, {"xla_dump_to": "x"})
    assert options == {"xla_dump_to": "x", "xla_gpu_enable_triton_gemm": False}
    other: Any = Refusing("ptxas")
    with pytest.raises(jax.errors.JaxRuntimeError, match="ptxas"):
        ahead._compile(other, {})
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")  # then a run would fail too
    with pytest.raises(jax.errors.JaxRuntimeError, match=words[10:30]):
        ahead._compile(tiles, {})


def test_kernels_and_libraries_are_counted_as_often_as_they_run():
    assert library_calls(PROGRAM) == {
        "__cublas$lt$matmul": 1,
        "__triton_gemm": 3,
        "triton_kernel_call": 4,
    }


def test_the_description_says_how_attention_is_computed_and_what_is_called():
    p = dataclasses.replace(train_program(), compiler_flops=None, calls={"triton_kernel_call": 8})
    text = ahead.format_program(p, None)
    assert "attention   xla (not fused: there is no fused kernel for a cpu)" in text
    assert "calls       8 triton_kernel_call" in text
    assert f"FLOPs       by formula {p.flops.model:.3e}" in text
    assert "the compiler counts" not in text


FORMS: dict[str, dict[str, Any]] = {
    "relative": {"dropatt": 0.1},
    "window": {"same_length": "pytorch"},
    "shared_projection": {"attention": "shared_projection", "dtype": "bfloat16"},
    "shaw": {"attention": "shaw", "n_positions": 8},
    "absolute": {"attention": "absolute", "mem_len": 0},
    "absolute_per_layer": {"attention": "absolute_per_layer", "n_positions": 8, "mem_len": 0}
    | {"pre_lnorm": True, "d_head": 8},
}


@pytest.mark.parametrize("form", FORMS)
def test_attention_is_planned_from_the_inputs_that_the_model_gives(monkeypatch, form):
    """Shapes, dtypes and missing terms equal those of the model's own call."""
    changes = {"n_layer": 1, "d_model": 16, "n_head": 2, "d_head": 4, "vocab_size": 11}
    settings = {**changes, **FORMS[form]}
    m, c = settings.pop("mem_len", 5), TransformerXLConfig(**settings)
    seen: list[Any] = []

    def choose(implementation, x, mesh=None):
        joined = jax.eval_shape(lambda x: x.joined(), x)  # the model passes memory separately
        shapes = jax.tree.map(jnp.shape, joined.replace(mask=None))
        seen.append((shapes, x.q.dtype, x.mask.reach, x.mask.mem_len))
        return choice.Choice("reference")

    monkeypatch.setattr(choice, "choose", choose)
    monkeypatch.setattr(attention, "choose", choose)
    model, text = TransformerXL(c), tokens(c, 3, 6)
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    jax.eval_shape(lambda: model.init(rngs, text, model.init_mems(3, m), train=True))
    planned_attention(c, 3, 6, m, True, None)
    made, planned = seen
    assert made == planned


def test_a_fused_kernel_that_cannot_run_is_a_fallback_with_its_reason(monkeypatch):
    monkeypatch.setattr(choice, "platform_of", lambda mesh: "gpu")
    planned = lambda t=128, **model: planned_attention(
        TransformerXLConfig(vocab_size=11, d_head=16, **model), 4, t, 64, True, None
    )
    few = planned(64)
    assert not few.falls_back
    assert few.describe() == (
        "xla (not fused: triton gains nothing for segments of 64 tokens, below 128)"
    )
    wrong = planned(dtype="float16")
    assert wrong.falls_back
    assert "triton cannot run: it supports bfloat16 and float32, not float16" in wrong.reason
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    missing = planned(dtype="bfloat16")
    assert missing.falls_back
    assert "pip install 'txl_jax[compile-cuda]'" in missing.reason


@pytest.mark.parametrize(("platform", "capability"), [("gpu", "gfx942"), ("rocm", "9.4")])
def test_a_gpu_of_amd_falls_back_and_refuses_the_kernels_of_nvidia(platform, capability):
    """For JAX, an AMD GPU has the platform ``gpu``, and its capability is a name, not a number."""
    device = types.SimpleNamespace(platform=platform, compute_capability=capability)
    mesh: Any = types.SimpleNamespace(devices=np.array([device]), shape=MESH)
    c = TransformerXLConfig(vocab_size=11, d_head=16, dtype="bfloat16")
    planned = planned_attention(c, 4, 128, 64, True, mesh)
    assert planned == choice.Choice("xla", "there is no fused kernel for a ROCm GPU")
    with pytest.raises(
        choice.KernelError, match="needs an NVIDIA GPU, but the program runs on a ROCm GPU"
    ):
        choice.check_platform("triton", mesh)


@pytest.mark.parametrize(
    ("kind", "fused"), [("TPU v4", False), ("TPU v5 lite", True), ("TPU v6 lite", True)]
)
def test_a_tpu_before_v5_falls_back(kind, fused):
    """The kernel needs strided rolls, which the TPU compiler Mosaic supports from TPU v5 on."""
    device = types.SimpleNamespace(platform="tpu", device_kind=kind)
    mesh: Any = types.SimpleNamespace(devices=np.array([device]), shape=MESH)
    c = TransformerXLConfig(vocab_size=11, d_head=16, dtype="bfloat16")
    planned = planned_attention(c, 4, 128, 64, True, mesh)
    assert (planned.name == "pallas_tpu") is fused
    assert ("v5 or later" in planned.describe()) is not fused


def test_a_gpu_of_nvidia_gives_its_capability():
    device = types.SimpleNamespace(platform="gpu", compute_capability="9.0")
    mesh: Any = types.SimpleNamespace(devices=np.array([device]), shape=MESH)
    assert choice.platform_of(mesh) == "gpu"
    assert platforms.compute_capability(mesh) == 90


@pytest.mark.parametrize("platform", ["gpu", "cpu"])
@pytest.mark.parametrize("version", [(0, 10, 2), (0, 11, 2), (0, 12, 0)])
def test_programs_of_gpus_are_deterministic_and_run_a_kernel_once(monkeypatch, version, platform):
    monkeypatch.setattr(jax, "__version_info__", version)
    monkeypatch.setattr(choice, "platform_of", lambda mesh: platform)
    found = choice.compiler_options(None) or {}
    assert found.get("xla_gpu_exclude_nondeterministic_ops", False) == (platform == "gpu")
    once = version == (0, 11, 2) and platform == "gpu"
    assert ("xla_gpu_enable_dynamic_slice_fusion" in found) == once


@pytest.mark.parametrize(
    ("platform", "devices", "where"), [("gpu", 8, True), ("gpu", 1, False), ("cpu", 8, False)]
)
def test_several_gpus_add_gradients_where_they_are(monkeypatch, platform, devices, where):
    monkeypatch.setattr(choice, "platform_of", lambda mesh: platform)
    mesh: Any = types.SimpleNamespace(size=devices)
    found = choice.compiler_options(mesh) or {}
    assert (found.get("xla_disable_hlo_passes") == "all-reduce-contiguous") is where


def told(attention: choice.Choice, exp: ExperimentConfig | None = None) -> str:
    """The lines that a run prints before its first step."""
    lines: list[str] = []
    trainer: Any = types.SimpleNamespace(
        exp=exp or experiment(),
        corpus=types.SimpleNamespace(name="text", info={"tokens": {"train": 9}}, vocab="ab"),
        streams=types.SimpleNamespace(n_segments=3),
        setup=types.SimpleNamespace(
            attention=attention,
            shardings=types.SimpleNamespace(mesh=training_mesh(experiment())),
            abstract=types.SimpleNamespace(params={}),
        ),
        log=types.SimpleNamespace(message=lines.append),
        _resumed=False,
    )
    Trainer.log_start(trainer)
    return "\n".join(lines)


def test_a_run_tells_its_kernel_and_warns_of_a_fallback_with_what_mends_it(monkeypatch):
    monkeypatch.setattr(choice, "platform_of", lambda mesh: "gpu")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    c = TransformerXLConfig(vocab_size=11, d_head=16, dtype="bfloat16")
    planned = lambda seg_len: planned_attention(c, 4, seg_len, 64, True, None)
    assert "\nwarning: attention by xla (not fused: triton cannot run" in told(planned(128))
    monkeypatch.setattr(triton, "driver_of_gpus", lambda: ("580.95", None))
    assert "pip install 'txl_jax[cuda13]'" in told(planned(128))
    monkeypatch.setattr(triton, "driver_of_gpus", lambda: ("550.54", (7, 0)))
    assert "pip install 'txl_jax[cuda12]'" in told(planned(128))
    assert "\nattention by xla (not fused: triton gains nothing" in told(planned(64))
    assert "\nattention by triton (fused)" in told(choice.Choice("triton"))


def test_a_run_tells_the_default_rate_of_an_optimizer_that_finds_its_own():
    prodigy = override(experiment(), {"optimizer.name": "optax.contrib.prodigy"})
    note = ", and the default of optax.contrib.prodigy is 1; to use that, give"
    assert note in told(choice.Choice("xla"), prodigy)
    assert note not in told(choice.Choice("xla"), experiment())


# --------------------------------------------------------------------------------------
# Tests that need the wheels of the extra compile-cuda.


def fused_calls(calls) -> int:
    """The number of jax-triton calls. From version 0.4 on, their name ends in ``_ffi``."""
    return sum(n for name, n in calls.items() if name.startswith("triton_kernel_call"))


def programs(devices, n=3, **changes) -> list[Any]:
    """The first n programs of a tiny experiment with fused attention."""
    exp: ExperimentConfig = experiment(**{**FUSED, **changes})
    return list(ahead.programs(exp, devices, MAIN[:n]))


@pytest.mark.integration
def test_training_compiles_for_a_gpu_with_fused_attention(eight_gpus):
    train, validate, evaluate = programs(eight_gpus[:1], **{"model.scan_layers": True})
    layers = experiment().model.n_layer
    assert train.attention == validate.attention == evaluate.attention == "triton (fused)"
    assert fused_calls(train.calls) == 6 * layers  # two kernels forward, four for the gradient
    assert fused_calls(validate.calls) == 2 * layers
    assert train.compiler_flops is None
    assert train.memory.temp_size_in_bytes > 0
    assert train.collectives == ()
    assert fused_calls(evaluate.calls) == 2 * layers  # these read a cache's ring buffer


@pytest.mark.integration
def test_devices_of_a_mesh_each_run_the_fused_kernel_and_sum_gradients(eight_gpus):
    mesh = {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2, "model.remat": "layer"}
    (train,) = programs(eight_gpus, 1, **mesh)
    assert fused_calls(train.calls) >= 5 * experiment().model.n_layer
    assert {"all-reduce", "all-gather"} <= {x.kind for x in train.collectives}


@pytest.mark.integration
@pytest.mark.usefixtures("eight_gpus")  # skips without a compiler
def test_a_generated_token_reads_each_matrix_and_the_cache_once():
    model = {"d_model": 256, "n_head": 4, "d_head": 64, "d_inner": 1024, "dtype": "bfloat16"}
    changes = {f"model.{key}": value for key, value in model.items()}
    exp = experiment(**changes, **{"generate.mem_len": 64})
    kernels, least = generated_token.token(exp, "h100:1x1x1")
    matrices = 2 * 2 * (4 * 256 * 256 + 2 * 256 * 1024)  # two bytes per entry, two layers
    assert matrices < least < 1.3 * matrices
    # The token's activations are read and written too: less than a fifth of the bytes in ``least``.
    assert least < sum(k.moved for k in kernels) < 1.2 * least


@pytest.mark.integration
def test_short_segments_compile_without_the_fused_kernel(eight_gpus):
    (train,) = programs(eight_gpus[:1], 1, **{"train.seg_len": 64})
    assert train.attention.startswith("xla (not fused: triton gains nothing")
    assert fused_calls(train.calls) == 0


@pytest.mark.integration
@pytest.mark.usefixtures("eight_gpus", "as_users_compile")  # skips without a compiler
def test_a_program_that_sorts_many_numbers_compiles_for_an_absent_gpu():
    """Above about 20,000 numbers, XLA would use CUB's sort, which queries the absent H100."""
    (device,) = topology_devices("h100:1x1x1")
    x = jax.ShapeDtypeStruct(
        (50_000,), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(device)
    )
    program = RunProgram("sort", "", functools.partial(jax.jit(jnp.sort).lower, x))
    compiled = ahead.compile_program(program, program.lower(), device)
    assert compiled.memory.argument_size_in_bytes == 200_000


def gradients_of_two_texts(devices) -> jax.stages.Lowered:
    """A program with ``jax.vmap`` around the gradient, as for several seeds."""
    c = override(experiment(), FUSED).model
    model = TransformerXL(c, ahead.training_mesh(experiment(), devices[:1]))
    text, mems = jax.ShapeDtypeStruct((2, 1, 128), jnp.int32), model.init_mems(1, 8)
    init = functools.partial(model.init, jax.random.key(0))
    params = jax.eval_shape(init, jnp.zeros((1, 128), jnp.int32), mems)
    where = jax.sharding.SingleDeviceSharding(devices[0])
    loss = lambda params, text: model.apply(params, text, text, mems, method="nll")[0].sum()
    gradients = jax.jit(jax.vmap(jax.grad(loss), in_axes=(None, 0)), in_shardings=where)
    return gradients.lower(params, text)


@pytest.mark.integration
def test_several_seeds_run_the_fused_kernel_one_after_the_other(eight_gpus):
    """``sequential_vmap`` makes this work, because jax-triton has no rule for ``jax.vmap``."""
    calls = library_calls(gradients_of_two_texts(eight_gpus).compile().as_text() or "")
    assert fused_calls(calls) >= 2 * 5 * experiment().model.n_layer


@pytest.mark.integration
def test_jax_triton_alone_still_has_no_gradient_with_the_newest_jax(eight_gpus, monkeypatch):
    """If this fails, jax-triton works with JAX 0.12: correct the docstring of triton.launch."""
    if jax.__version_info__ < (0, 12):
        pytest.skip("jax-triton has the rule that JAX before 0.12 needs")
    monkeypatch.setattr(jax.custom_batching, "sequential_vmap", lambda call: call)
    with pytest.raises(TypeError, match="dce_rule"):
        programs(eight_gpus[:1], 1)


OUTPUTS: dict[str, dict[str, Any]] = {
    "plain": {"model.d_embed": 16},
    "sampled": {"model.sample_softmax": 8},
    "adaptive": {"model.cutoffs": (10, 20), "model.div_val": 2},
    "mixture": {"model.mixtures": 3},
    "decoded": {"model.past_decode": True, "loss.past_decode": 0.1},
    "large": {"model.vocab_size": 70_000, "model.cutoffs": (20_000,)},  # in several blocks of rows
}


@pytest.mark.integration
@pytest.mark.parametrize("output", OUTPUTS)
def test_no_sum_of_an_update_has_an_undefined_order(eight_gpus, tmp_path, output):
    exp: ExperimentConfig = experiment(**{**FUSED, **OUTPUTS[output]})
    mesh = training_mesh(exp, eight_gpus[:1])
    programs = run_programs(exp, eight_gpus[:1])
    lowered = next(program.lower() for program in programs if program.name == "train")
    with kept_choices(lowered, mesh, str(tmp_path / "autotuned.json")) as kept:
        options = {**kept, "xla_dump_to": str(tmp_path)}  # type: ignore[dict-item]
        lowered.compile(compiler_options=options)
    assert list(tmp_path.glob("*.ptx"))
    assert not float_atomics(tmp_path)
