"""The dtype and the precision in which a model computes on its devices."""

import collections
import contextlib
import dataclasses
import json
import os
import re
import types
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models as tiny
from absent_devices import absent_tpus, needs_libtpu
from planned_programs import experiment
from tiers import rest_integration
from tiny_runs import experiment as small_run

import txl_jax
from txl_jax import convert
from txl_jax.checkpoint.errors import WorkdirError
from txl_jax.checkpoint.trained_model import with_settings
from txl_jax.checkpoint.workdir import read_experiment
from txl_jax.config.model import Precision
from txl_jax.model import cross_entropy, precision
from txl_jax.model.attention import planned_attention
from txl_jax.model.layout import stack_layers
from txl_jax.model.precision import describe, float32_products, in_compute_dtype, resolved
from txl_jax.parallel import platforms
from txl_jax.training.plan import locked_workdirs, plan_run

MESH = {"data": 1, "fsdp": 1, "tensor": 1}


def mesh_of(platform, capability=None, **sizes) -> Any:
    """A stand-in for a mesh, with one device of a platform and axes of the given sizes."""
    device = types.SimpleNamespace(platform=platform, device_kind="a device")
    if capability:
        device.compute_capability = capability
    return types.SimpleNamespace(devices=np.array([device]), shape={**MESH, **sizes}, size=1)


TPU, CPU, H100 = mesh_of("tpu"), mesh_of("cpu"), mesh_of("gpu", "9.0")
T4, V100, A100, B200 = (mesh_of("gpu", c) for c in ("7.5", "7.0", "8.0", "10.0"))
AMD = mesh_of("gpu", "gfx942")
SHARED = [mesh_of("gpu", "9.0", **{axis: 2}) for axis in ("fsdp", "tensor")]


# --------------------------------------------------------------------------------------
# model.dtype = "auto"


@pytest.mark.parametrize(
    ("mesh", "dtype"),
    [
        *((mesh, "bfloat16") for mesh in (TPU, A100, H100, B200)),
        *((mesh, "float32") for mesh in (T4, V100, AMD)),
    ],
)
def test_auto_is_bfloat16_where_the_device_has_units_for_it(mesh, dtype):
    assert resolved(tiny.config(dtype="auto"), mesh).dtype == dtype
    assert resolved(tiny.config(dtype="float16"), mesh).dtype == "float16"


@pytest.mark.parametrize("units", [True, False])
def test_auto_on_a_cpu_is_bfloat16_if_it_has_units_and_a_warning_says_that_it_has_none(
    monkeypatch, units
):
    monkeypatch.setattr(platforms, "cpu_has_bfloat16", lambda: units)
    monkeypatch.setattr(platforms, "_about_cpu", lambda: "vendor_id\t: AuthenticAMD\n")
    for mesh in (CPU, None):
        assert resolved(tiny.config(dtype="auto"), mesh).dtype == (
            "bfloat16" if units else "float32"
        )
        warnings = describe(tiny.config(dtype="bfloat16"), mesh)[1:]
        assert len(warnings) == (not units)
        assert all(
            "this CPU has no bfloat16 units, which need AVX512-BF16" in text for text in warnings
        )
        assert len(describe(tiny.config(dtype="float32"), mesh)) == 1


def test_auto_is_float32_on_an_intel_cpu_which_is_slower_in_bfloat16(monkeypatch):
    monkeypatch.setattr(platforms, "cpu_has_bfloat16", lambda: True)
    monkeypatch.setattr(platforms, "_about_cpu", lambda: "vendor_id\t: GenuineIntel\n")
    for mesh in (CPU, None):
        assert resolved(tiny.config(dtype="auto"), mesh).dtype == "float32"
        assert len(describe(tiny.config(dtype="bfloat16"), mesh)) == 1
    assert resolved(tiny.config(dtype="auto"), H100).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("mesh", "scanned"), [(TPU, True), *((mesh, False) for mesh in (CPU, H100, T4, AMD, None))]
)
def test_layers_are_a_loop_by_themselves_on_tpus_and_for_products_that_a_gpu_needs_in_one(
    mesh, scanned
):
    of = lambda mesh, **settings: resolved(tiny.config(**settings), mesh).scan_layers
    assert of(mesh, scan_layers="auto") is scanned
    odd = {"scan_layers": "auto", "d_model": 410}
    assert of(mesh, **odd) is scanned  # its matrix products are padded
    assert of(mesh, **odd, gate="gru") is (scanned or mesh in (H100, T4))
    for shared in SHARED:
        assert of(shared, **odd)
        assert not of(shared, scan_layers="auto")
    for asked in (True, False):
        assert of(mesh, scan_layers=asked) is asked


@pytest.mark.parametrize("mesh", [T4, V100])
def test_a_gpu_without_bfloat16_units_gets_a_warning_and_no_fused_kernel(mesh):
    c = tiny.config(dtype="bfloat16", d_head=64)
    *_, warning = describe(c, mesh)
    assert re.match(
        r"warning: this GPU has no bfloat16 units, .*8\.0.*model.dtype float32", warning
    )
    assert len(describe(tiny.config(dtype="auto"), mesh)) == 1
    for dtype in ("bfloat16", "auto", "float32"):
        planned = planned_attention(dataclasses.replace(c, dtype=dtype), 4, 256, 64, True, mesh)
        assert planned.name == "xla"
        assert "compute capability 8.0" in planned.describe()
        assert not planned.falls_back


def test_a_gpu_with_bfloat16_units_gets_no_warning():
    for mesh in (H100, A100, TPU, AMD):
        assert len(describe(tiny.config(dtype="bfloat16"), mesh)) == 1


def test_a_model_resolves_auto_by_its_mesh_wherever_it_is_built():
    c = tiny.config(dtype="auto")
    model = txl_jax.TransformerXL(c)
    here = "bfloat16" if platforms.prefers_bfloat16(CPU) else "float32"
    assert model.cfg.dtype == model.clone().cfg.dtype == here
    assert txl_jax.TransformerXL(c, H100).cfg.dtype == "bfloat16"
    assert model.init_mems(1, 2).hidden.dtype == here


@contextlib.contextmanager
def devices_with_bfloat16(monkeypatch, units=True):
    """Makes ``auto`` mean bfloat16 on this CPU, or float32 without ``units``."""
    with monkeypatch.context() as patch:
        patch.setattr(precision, "has_bfloat16", lambda mesh: units)
        patch.setattr(precision, "prefers_bfloat16", lambda mesh: units)
        yield


def stored(workdir):
    with open(os.path.join(workdir, "config.json")) as file:
        return json.load(file)["model"]["dtype"]


@pytest.mark.slow
def test_a_run_resumes_in_its_dtype_and_its_model_loads_in_that_of_other_devices(
    tmp_path, monkeypatch
):
    workdir = str(tmp_path / "run")
    exp = small_run(tmp_path, **{"model.dtype": "auto", "generate.length": 0})
    with devices_with_bfloat16(monkeypatch):
        trained = txl_jax.train(exp, workdir=workdir)
        assert (trained.config.model.dtype, trained.model.cfg.dtype) == ("auto", "bfloat16")
    assert stored(workdir) == read_experiment(workdir).model.dtype == "bfloat16"
    with devices_with_bfloat16(monkeypatch, units=False):
        resumed = txl_jax.train(exp, workdir=workdir)
        assert resumed.config.model.dtype == "bfloat16"
        loaded = txl_jax.load(workdir)
        assert (loaded.config.model.dtype, loaded.model.cfg.dtype) == ("auto", "float32")
    with devices_with_bfloat16(monkeypatch):
        assert txl_jax.load(workdir).model.cfg.dtype == "bfloat16"
    for name, model in (("here", loaded), ("there", trained)):
        txl_jax.save(model, str(tmp_path / name))
        assert stored(tmp_path / name) == "auto"
    convert.export(workdir, str(tmp_path / "copied"))
    assert txl_jax.load(str(tmp_path / "copied")).config.model.dtype == "auto"


@pytest.mark.integration
def test_a_run_without_a_checkpoint_takes_the_dtype_of_the_devices_that_begin_it(
    tmp_path, monkeypatch
):
    """For example, a first start only fetches the text, on a machine without bfloat16 units."""
    workdir = str(tmp_path / "run")
    exp = small_run(tmp_path, **{"model.dtype": "auto", "generate.length": 0})
    with devices_with_bfloat16(monkeypatch, units=False), locked_workdirs(plan_run(exp, workdir)):
        assert stored(workdir) == "float32"
    with devices_with_bfloat16(monkeypatch):
        plan = plan_run(exp, workdir)
        assert plan.setup.exp.model.dtype == "bfloat16"
        with locked_workdirs(plan):
            assert stored(workdir) == "bfloat16"


@pytest.mark.integration
def test_a_dtype_that_the_user_named_stays_that_of_the_model(tmp_path):
    workdir = str(tmp_path / "run")
    exp = small_run(tmp_path, **{"model.dtype": "bfloat16", "generate.length": 0})
    txl_jax.train(exp, workdir=workdir)
    assert txl_jax.load(workdir).model.cfg.dtype == "bfloat16"


@pytest.mark.integration
def test_dtype_and_precision_of_a_trained_model_may_be_chosen_anew(tmp_path):
    workdir = str(tmp_path / "run")
    txl_jax.train(small_run(tmp_path, **{"generate.length": 0}), workdir=workdir)
    chosen = small_run(tmp_path, **{"model.dtype": "bfloat16", "model.matmul_precision": "highest"})
    trained = with_settings(txl_jax.load(workdir), chosen)
    assert (trained.model.cfg.dtype, trained.model.cfg.matmul_precision) == ("bfloat16", "highest")
    with pytest.raises(WorkdirError, match=r"model\.dtype: 'float32' -> 'bfloat16'"):
        txl_jax.train(chosen, workdir=workdir)  # a resumed run keeps its own dtype


# --------------------------------------------------------------------------------------
# model.matmul_precision


def products(lowered) -> dict[str, int]:
    """Counts a program's matrix products by precision."""
    text = lowered.as_text()
    found = collections.Counter(re.findall(r"precision = \[(\w+), \w+\]", text))
    found["none"] = len(re.findall(r"stablehlo\.dot_general", text)) - found.total()
    return {name: n for name, n in found.items() if n}


FORMS: dict[str, dict[str, Any]] = {
    "unrolled": {"dropout": 0.1, "dropatt": 0.1},
    "scanned and recomputed": {"scan_layers": True, "remat": "layer"},
    "adaptive": {"cutoffs": (4, 9), "div_val": 2},
    "plain attention": {"kernel": "reference", "pre_lnorm": True},
    "shaw": tiny.attention("shaw"),
    "mixture": {"mixtures": 3},
    "gated": tiny.GTRXL,
}


@pytest.mark.parametrize("form", rest_integration(3, FORMS))
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.few(3)
def test_all_products_and_gradients_have_the_precision_of_the_setting(form, compiled, monkeypatch):
    """Functions with custom derivatives, which JAX traces later, have the precision too."""
    monkeypatch.setattr(cross_entropy, "MAX_LOGITS", 64)  # several blocks
    monkeypatch.setattr(cross_entropy, "MIN_ROWS", 16)
    c = tiny.config(matmul_precision="highest", **FORMS[form])
    model, text = txl_jax.TransformerXL(c), tiny.tokens(c, 2, 150)
    mems, key = model.init_mems(2, 7), jax.random.key(0)
    variables = jax.eval_shape(model.init, key, text, mems)

    def loss(v):
        keys = {"dropout": jax.random.key(1)}
        nll, _ = model.apply(v, text, text, mems, method="nll", train=True, rngs=keys)
        return nll.mean()

    gradient = jax.grad(jax.jit(loss) if compiled else loss)
    assert set(products(jax.jit(gradient).lower(variables))) == {"HIGHEST"}


@pytest.mark.parametrize("method", ["__call__", "core", "init_cache"])
def test_every_method_has_the_precision_of_the_setting(method):
    c = tiny.config(matmul_precision="tensorfloat32")
    mems, apply = tiny.memory(c, (0, 2, 5), 5), tiny.apply(c, method)
    inputs = {"__call__": (tiny.tokens(c, 3, 4),), "core": (tiny.embeddings(c, 3, 4),)}
    given: Any = {"seg_len": 4} if method == "init_cache" else {}
    run = lambda v: apply(v, *inputs.get(method, ()), mems, **given)
    assert set(products(jax.jit(run).lower(tiny.variables(c)))) == {"HIGH"}


def test_unset_leaves_the_precision_to_jax():
    c = tiny.config()
    mems, text = tiny.memory(c, (0, 2, 5), 5), tiny.tokens(c, 3, 4)
    lower = lambda: jax.jit(lambda v: tiny.apply(c, "nll")(v, text, text, mems)).lower(
        tiny.variables(c)
    )
    assert set(products(lower())) <= {"none", "DEFAULT"}
    with jax.default_matmul_precision("highest"):
        assert set(products(lower())) == {"HIGHEST"}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (None, ("one bfloat16 pass", "TF32", "float32", "float32")),
        ("bfloat16", ("one bfloat16 pass", "TF32", "float32", "float32")),
        ("default", ("one bfloat16 pass", "TF32", "float32", "float32")),
        ("high", ("three bfloat16 passes", "TF32", "float32", "float32")),
        ("tensorfloat32", ("three bfloat16 passes", "TF32", "float32", "float32")),
        ("highest", ("float32 in six bfloat16 passes", "float32", "float32", "float32")),
        ("float32", ("float32 in six bfloat16 passes", "float32", "float32", "float32")),
    ],
)
def test_a_run_prints_what_a_float32_product_is_on_its_device(name, said):
    places = ("on this TPU", "on this GPU", "on this GPU", "on a CPU")
    for mesh, what, place in zip((TPU, H100, T4, CPU), said, places, strict=True):
        assert float32_products(name, mesh) == f"{what} {place}"
        (line,) = describe(tiny.config(matmul_precision=name), mesh)
        assert line.startswith(f"computing in float32; float32 products: {what} {place} (model.mat")


def test_the_setting_of_jax_is_what_an_unset_precision_means():
    with jax.default_matmul_precision("highest"):
        assert float32_products(None, TPU) == "float32 in six bfloat16 passes on this TPU"
        assert float32_products("default", TPU) == "one bfloat16 pass on this TPU"


def test_every_precision_is_one_of_jax():
    for name in get_args(Precision):
        assert txl_jax.TransformerXL(tiny.config(matmul_precision=name))
        with precision.product_precision(name):
            jax.eval_shape(jnp.dot, jnp.ones((2, 2)), jnp.ones((2, 2)))


# --------------------------------------------------------------------------------------
# Tests that need the compilers for absent devices.


def product_program(device, name):
    """The program text of a product of two float32 matrices, compiled for a device."""
    sharding = jax.sharding.SingleDeviceSharding(device)
    x = jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=sharding)
    with precision.product_precision(name):
        return jax.jit(jnp.dot).lower(x, x).compile().as_text()


@pytest.mark.integration
def test_auto_knows_absent_gpus(eight_gpus):
    mesh = mesh_of("gpu")
    mesh.devices = np.array(eight_gpus[:1])
    assert platforms.has_bfloat16(mesh)
    assert resolved(tiny.config(dtype="auto"), mesh).dtype == "bfloat16"


@needs_libtpu
@pytest.mark.integration
def test_auto_knows_absent_tpus():
    mesh = mesh_of("tpu")
    with absent_tpus("v5e:2x2") as devices:
        mesh.devices = np.array(devices[:1])
    assert resolved(tiny.config(dtype="auto"), mesh).dtype == "bfloat16"
    assert float32_products(None, mesh) == "one bfloat16 pass on this TPU"
    assert experiment().model.dtype == "float32"  # the default in Python; only recipes set auto


def test_matrices_are_cast_once_and_vectors_stay_in_either_layout_of_the_layers():
    """Stacked vectors [L,D] are not cast like matrices: the model needs vectors in float32."""
    cfg = tiny.config(dtype="bfloat16", gate="gru", attention_bias=True)
    params = tiny.variables(cfg)["params"]
    want = stack_layers(in_compute_dtype(cfg, params))
    got = in_compute_dtype(cfg, stack_layers(params))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    types = lambda tree: [x.dtype for x in jax.tree.leaves(tree)]
    assert types(got) == types(want)
    assert {str(kind) for kind in types(got["layers"])} == {"float32", "bfloat16"}
