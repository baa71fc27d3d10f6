"""The fused kernel for NVIDIA GPUs equals plain attention, and compiles for several GPUs.

Most tests need no GPU: Triton's interpreter runs the kernel's operations one by one on the CPU, and
its compiler makes programs for absent GPUs. Some tests need triton, torch or jax-triton, which the
test requirements do not include; these tests are skipped where the package is missing.
"""

import re
import sys
from typing import Any

import interpreted_kernels as suite
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreted_kernels import (
    FORMS,
    NAMES,
    TOLERANCE,
    B,
    N,
    assert_near,
    expected,
    floats_as,
    in_float64,
    interpreted,
    interpreted_without_biases,
    made,
    values_and_gradients,
    without_biases,
)

from benchmarks import attention_cycles, predicted_steps
from txl_jax.model.kernels import parity, reference, triton
from txl_jax.model.positions import Positions

# --- Interpreted in another process: TRITON_INTERPRET must be set before Triton is imported. ------


@pytest.mark.parametrize("form", FORMS)
def test_values_and_gradients_are_those_of_plain_attention(interpreter, form):
    found = interpreter.submit(interpreted, FORMS[form]).result()
    assert_near(found, in_float64(FORMS[form]), TOLERANCE["float32"])


def test_half_precision_rounds_and_does_nothing_else(interpreter):
    """The dtype is float16, since the interpreter multiplies bfloat16 as if it were integers."""
    form = {"t": 33, "m": 30, "h": 64, "rate": 0.2}
    found = interpreter.submit(interpreted, form, "float16").result()
    assert_near(found, expected(form, "float16"), TOLERANCE["float16"])


def test_float32_in_three_parts_of_tf32_errs_by_less_than_the_promise(interpreter):
    """The promised error is 1e-5. A single TF32 product has one of 1e-3. NumPy emulates TF32."""
    form = {"t": 64, "m": 64, "h": 128, "tile": {"SX": 16, "SD": 64, "SQ": 64, "SK": 64}}
    exact = in_float64(form)
    assert_near(interpreter.submit(interpreted_as, "tf32x3", form).result(), exact, 1e-5)
    with pytest.raises(AssertionError):
        assert_near(interpreter.submit(interpreted_as, "tf32", form).result(), exact, 1e-4)


def interpreted_as(precision, form):
    """Runs ``interpreted`` with float32 matrix products rounded as tensor cores round them."""
    from triton.runtime import interpreter as runtime

    def cut(x):  # to the 10 bits of TF32, rounded to nearest
        return ((x.view(np.uint32) + 0x1000) & 0xFFFFE000).view(np.float32)

    def create_dot(self, a, b, d, *_):
        a, b = (np.ascontiguousarray(x.data) for x in (a, b))
        of_a, of_b = cut(a), cut(b)
        found = of_a @ of_b
        if precision == "tf32x3":
            found = cut(a - of_a) @ of_b + of_a @ cut(b - of_b) + found
        return runtime.TensorHandle(found + d.data, d.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime.InterpreterBuilder, "create_dot", create_dot)
        return interpreted(form)


def test_biases_of_queries_may_be_missing(interpreter):
    found = interpreter.submit(interpreted_without_biases).result()
    out = reference.attend(without_biases())
    np.testing.assert_allclose(found, out, atol=3e-6 * np.abs(out).max())


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"t": 50, "m": 30, "every": 8},
        {"t": 50, "m": 30, "every": 2, "reach": 9},
        {"t": 100, "m": 32, "reach": 31},
        {"t": 70, "m": 128, "tile": {"SX": 32, "SD": 64, "SQ": 16, "SK": 32}},
    ],
    ids=str,
)
def test_kernels_multiply_as_many_tiles_as_predicted(interpreter, form):
    found, expected = interpreter.submit(products, form).result()
    assert found == expected


def products(form):
    """Returns each kernel's number of tile products, and the number from predicted_steps.py."""
    from triton.runtime import interpreter as runtime

    found = dict.fromkeys(attention_cycles.KERNELS, 0)
    names = []
    launch, create_dot = suite.launch_interpreted, runtime.InterpreterBuilder.create_dot

    def launched(kernel, *rest):
        names.append(kernel)
        return launch(kernel, *rest)

    def counted(*operands):
        found[names[-1]] += 1
        return create_dot(*operands)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suite, "launch_interpreted", launched)
        patch.setattr(runtime.InterpreterBuilder, "create_dot", counted)
        interpreted(form)
    f, expected = triton.form_of(made(form), 90), {}
    for kernel in found:
        one, other = triton.tiling(kernel, jnp.float32, f).sizes.values()
        blocks = B * N * sum(predicted_steps.tiles(kernel, jnp.float32, f))
        expected[kernel] = predicted_steps.PRODUCTS_OF[kernel] * blocks * 4096 / (one * other)
    launches = names.count("position_scores")  # one in the forward and one in the backward pass
    return found, expected | {"position_scores": launches * expected["position_scores"]}


# --- Compiled for absent GPUs. --------------------------------------------------------------------

SHARED = {80: 163, 89: 99, 90: 227, 100: 227}
"""KiB of shared memory that a kernel can use, by compute capability: A100, L4, H100, B200."""
PRODUCTS = {
    "bfloat16": {80: "mma.sync", 89: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"},
    "float32": {80: "mma.sync", 89: "mma.sync", 90: "mma", 100: "mma"},
}
MOST_CYCLES = {("bfloat16", 64): 2200, ("bfloat16", 128): 2700, ("float32", 128): 20_000}
"""By dtype and head width, upper bounds of the issue cycles for 64 x 64 scores on an H100.

The cycles are those of the forward and the backward pass, with dropout.
"""


@pytest.mark.integration
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("h", [64, 128])
@pytest.mark.parametrize("capability", SHARED)
def test_it_compiles_to_products_of_tensor_cores_that_fit(capability, h, dtype):
    pytest.importorskip("triton")
    # Without JAX's plugin for CUDA this raises ImportError, not ModuleNotFoundError.
    pytest.importorskip("jax_triton", exc_type=ImportError)
    found = attention_cycles.counted(h, dtype, capability)
    assert [x.kernel for x in found] == list(attention_cycles.KERNELS)
    for x in found:
        assert PRODUCTS[dtype][capability] in x.ptx, x.kernel
        assert "atom." not in x.ptx, x.kernel
        assert x.shared <= SHARED[capability] * 1024, x.kernel
        # Measured in float32: at most 3,136, in the forward pass of heads of 128 on sm_80.
        assert x.spilled <= (128 if dtype == "bfloat16" else 4096), x.kernel
    if capability == 90:
        assert sum(x.cycles for x in found) <= MOST_CYCLES.get((dtype, h), 20_000)


@pytest.mark.integration
@pytest.mark.parametrize("h", [64, 128])
def test_memory_in_a_ring_costs_at_most_a_sixth_more_and_is_loaded_as_widely(h):
    pytest.importorskip("triton")
    pytest.importorskip("jax_triton", exc_type=ImportError)
    both = (attention_cycles.counted(h, "bfloat16", 90, 0.0, ring) for ring in (False, True))
    (straight, turned) = (next(x for x in found if x.kernel == "forward") for found in both)
    assert turned.cycles < 7 / 6 * straight.cycles  # measured: 1.09
    wide = re.compile(r"cp\.async\.cg\.shared\.global .*, 0x10")
    assert len(wide.findall(turned.ptx)) >= len(wide.findall(straight.ptx)) > 0


# --- Tests that run anywhere. ---------------------------------------------------------------------


def of_shape(h=8, dtype=jnp.bfloat16, positions=None):
    """Inputs with heads of width ``h``, and vectors of distances unless ``positions`` is given."""
    x = floats_as(made({"h": h}), dtype)
    return x if positions is None else x.replace(positions=positions)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"positions": Positions()}, "vectors of distances"),
        (
            {"positions": Positions(r=jnp.zeros(()), b=jnp.zeros(()))},
            "a learnt score for each distance",
        ),
        ({"dtype": jnp.float16}, "bfloat16 and float32"),
        ({"h": 160}, "at most 128"),
    ],
)
def test_an_unsupported_shape_is_refused_with_the_reason(change, said):
    refused = triton.supports(of_shape(**change))
    assert refused is not None
    assert said in refused


def test_a_missing_jax_triton_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    refused = triton.supports(of_shape())
    assert refused is not None
    assert "jax-triton" in refused


@pytest.mark.integration
def test_plain_attention_is_that_with_a_vector_for_every_pair_of_query_and_key():
    form = FORMS["everything"]
    assert_near(expected(form), in_float64(form), 3e-6)


# --- On a GPU. -----------------------------------------------------------------------------------

ON_GPU: dict[str, dict] = {
    "causal with memory": {"t": 200, "m": 150, "h": 64},
    "heads of 128": {"t": 128, "m": 192, "h": 128},
    "heads of 41": {"t": 70, "m": 70, "h": 41},
    "heads of 48, no memory": {"t": 130, "m": 0, "h": 48},
    "window": {"t": 300, "m": 100, "h": 64, "reach": 99},
    "one query": {"t": 1, "m": 333, "h": 64},
    "everything": {
        "t": 257,
        "m": 190,
        "h": 64,
        "reach": 200,
        "filled": (7, 190),
        "episodes": True,
        "rate": 0.25,
    },
    "memory of whole tiles, heads of 128": {"t": 128, "m": 128, "h": 128, "rate": 0.25},
    "memory in a ring": {"t": 128, "m": 384, "h": 64, "reach": 383, "oldest": 200},
    "memory in a ring, heads of 128": {"t": 130, "m": 256, "h": 128, "oldest": 128},
    "memory of whole tiles, everything": {
        "t": 257,
        "m": 256,
        "h": 64,
        "reach": 200,
        "filled": (7, 256),
        "episodes": True,
        "rate": 0.25,
    },
}


@pytest.fixture
def gpu():
    pytest.importorskip("jax_triton", exc_type=ImportError)
    if jax.default_backend() != "gpu":
        pytest.skip("there is no GPU: JAX_PLATFORMS=cuda pytest -m gpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", ON_GPU)
def test_on_a_gpu_values_and_gradients_are_those_in_float64(gpu, form, dtype):
    found = values_and_gradients(triton.attend, made(ON_GPU[form], dtype))
    tolerance = 1e-5 if dtype == "float32" else TOLERANCE["bfloat16"]
    assert_near(found, in_float64(ON_GPU[form], dtype), tolerance)


@pytest.mark.gpu
def test_on_a_gpu_results_are_the_same_every_time(gpu):
    inputs = made({**ON_GPU["everything"], "rows": 8, "filled": (190,) * 8}, "bfloat16")
    first, second = (values_and_gradients(triton.attend, inputs) for _ in range(2))
    for name in NAMES:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


@pytest.mark.gpu
def test_on_a_gpu_two_arrays_of_scores_are_in_memory_at_a_time(gpu):
    form = {"t": 2048, "m": 2048, "h": 64}
    run = jax.jit(parity.values_and_gradients, static_argnums=0)
    compiled = run.lower(triton.attend, made(form, "bfloat16")).compile()
    analysis: Any = compiled.memory_analysis()
    assert analysis.temp_size_in_bytes < 3 * 2 * N * B * 2048 * 4096
