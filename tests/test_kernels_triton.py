"""The fused kernel for NVIDIA GPUs gives what plain attention gives, interpreted here; it compiles.

There is no GPU where tests run: Triton's interpreter does a kernel's operations one by one, and its
compiler makes programs for an H100 that is not there. What needs triton, torch or jax-triton (none
is among the requirements of tests) is skipped where these are missing.
"""

import concurrent.futures
import contextlib
import multiprocessing
import os
import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from txl_jax.model.dropout import AttentionDropout
from txl_jax.model.kernels import AttentionInputs, parity, reference, triton
from txl_jax.model.masks import AttentionMask
from txl_jax.model.positions import Positions

N, B = 2, 2
FORMS: dict[str, dict] = {
    "causal with memory": {},
    "one tile, exactly": {"t": 16, "m": 16, "h": 16},
    "tiles that memory and segment fill": {"t": 32, "m": 64, "h": 32},
    "larger tiles": {"t": 35, "m": 45, "size": 32},
    "no memory": {"m": 0, "t": 37},
    "one query": {"t": 1, "m": 40},
    "one query, no memory": {"t": 1, "m": 0},
    "window": {"reach": 9},
    "window of more than a tile": {"m": 50, "reach": 20},
    "window of TF": {"m": 20, "reach": 20},
    "memory empty or partly so": {"m": 43, "filled": (0, 5)},
    "episodes": {"episodes": True},
    "dropout": {"rate": 0.3},
    "everything": {
        "t": 33,
        "m": 40,
        "reach": 41,
        "filled": (3, 40),
        "episodes": True,
        "rate": 0.5,
    },
}
NAMES = ("out", "dq", "dk", "dval", "du", "dv", "dr")
TOLERANCE = {"float32": 3e-6, "float16": 5e-3, "bfloat16": 2e-2}
"""Of the largest entry; measured here: at most 8e-7 in float32 and 1.4e-3 in float16."""


def made(form, dtype="float32"):
    """A form's attention inputs."""
    t, m = form.get("t", 21), form.get("m", 27)
    rows = form.get("rows", B)
    filled = jnp.asarray(form.get("filled", (m,) * rows), jnp.int32)
    episode = None
    if form.get("episodes"):
        starts = np.random.default_rng(1).random((rows, t)) < 0.15
        episode = jnp.cumsum(jnp.asarray(starts, jnp.int32), axis=1)
    mask = AttentionMask(filled, episode, t, m, form.get("reach", m + t - 1))
    rate = form.get("rate")
    dropout = AttentionDropout.draw(jax.random.key(3), rate) if rate else None
    return parity.random_inputs(N, rows, mask, form.get("h", 41), jnp.dtype(dtype), dropout)


def values_and_gradients(attend, inputs):
    """By name, compiled."""
    return by_name(jax.jit(parity.values_and_gradients, static_argnums=0)(attend, inputs))


def floats_as(x, dtype):
    """The tree with its floating-point arrays of another dtype."""
    change = lambda leaf: leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
    return jax.tree.map(change, x)


def by_name(results):
    """Values and gradients as NumPy arrays, by ``NAMES``."""
    out, (dq, dk, dval, positions) = results
    found = (out, dq, dk, dval, positions.u, positions.v, positions.r)
    return {name: np.asarray(x, np.float64) for name, x in zip(NAMES, found, strict=True)}


def assert_near(found, expected, tolerance):
    for name in NAMES:
        assert np.isfinite(found[name]).all(), name
        # Where a query sees itself alone, gradients are 0: a difference of sums of H products.
        largest = np.abs(expected[name]).max() or expected["out"].shape[-1] ** 0.5
        apart = np.abs(found[name] - expected[name]).max() / largest
        assert apart <= tolerance, f"{name}: {apart:.1e} of {largest:.1e}"


def expected(form, dtype="float32"):
    """What plain attention gives in float32 for the same numbers."""
    inputs = floats_as(made(form, dtype), jnp.float32)
    with jax.default_matmul_precision("highest"):
        return values_and_gradients(reference.attend, inputs)


# --- Interpreted, in a process of its own: Triton is imported for it in another way. -------------


@pytest.fixture(scope="module")
def interpreter():
    """Where functions of this module run with Triton's interpreter."""
    pytest.importorskip("torch", reason="Triton's interpreter works on PyTorch's arrays")
    pytest.importorskip("triton")
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            patch.setenv("JAX_PLATFORMS", "cpu")
            pool.submit(os.getpid).result()
        yield pool


def interpreted(form, dtype="float32"):
    """What the kernels give; called in the interpreter's process."""
    triton.launch = launch_interpreted
    triton.tiling = lambda *_: triton.Tiling(form.get("size", 16), 4, 2)
    triton._ENOUGH_PROGRAMS = form.get("programs", 1)
    # Without jit, so that kernels are given arrays.
    return by_name(parity.values_and_gradients(triton.attend, made(form, dtype)))


def launch_interpreted(kernel, given, results, grid, form):
    """As ``triton.launch``. What is not written holds 77."""
    import torch
    from triton.runtime import interpreter as runtime

    from txl_jax.model.kernels import triton_tiles

    h = given[0].shape[-1]
    tiles = triton.tiling(kernel, h, given[0].dtype, form.capability)
    constants = triton.constants(tiles, form, h)
    tensor = lambda x: torch.from_numpy(np.array(x))
    reads = [tensor(x) if hasattr(x, "shape") else x for x in given]
    writes = [tensor(np.full(x.shape, 77, x.dtype)) for x in results]
    with indices_of_one_element(runtime):
        getattr(triton_tiles, kernel)[grid(tiles.size)](*reads, *writes, **constants)
    return [jnp.asarray(x.numpy()) for x in writes]


@contextlib.contextmanager
def indices_of_one_element(runtime):
    """For Triton 3.6's interpreter: NumPy 2.4 makes no integer of an array of one element."""
    plain = runtime._patch_lang_tensor

    def patched(tensor, scope):
        plain(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    runtime._patch_lang_tensor = patched
    yield
    runtime._patch_lang_tensor = plain


@pytest.mark.parametrize("form", FORMS)
def test_values_and_gradients_are_those_of_plain_attention(interpreter, form):
    found = interpreter.submit(interpreted, FORMS[form]).result()
    assert_near(found, expected(FORMS[form]), TOLERANCE["float32"])


def test_half_precision_rounds_and_does_nothing_else(interpreter):
    """float16, since the interpreter multiplies bfloat16 as if it were integers."""
    form = {"t": 33, "m": 30, "h": 64, "rate": 0.2}
    found = interpreter.submit(interpreted, form, "float16").result()
    assert_near(found, expected(form, "float16"), TOLERANCE["float16"])


def test_the_gradient_of_distances_is_the_same_however_rows_are_shared_out(interpreter):
    form = {"rows": 5, "filled": (0, 27, 3, 27, 20), "episodes": True}
    for programs in (1, 20, 1000):  # 5 rows at a time, 3 and 2, 1
        found = interpreter.submit(interpreted, {**form, "programs": programs}).result()
        assert_near(found, expected(form), TOLERANCE["float32"])


def test_biases_of_queries_may_be_missing(interpreter):
    found = interpreter.submit(interpreted_without_biases).result()
    out = reference.attend(without_biases())
    np.testing.assert_allclose(found, out, atol=3e-6 * np.abs(out).max())


def interpreted_without_biases():
    triton.launch = launch_interpreted
    triton.tiling = lambda *_: triton.Tiling(16, 4, 2)
    return np.asarray(triton.attend(without_biases()))


def without_biases():
    inputs = made({})
    return inputs.replace(positions=Positions(r=inputs.positions.r))


# --- Compiled for a GPU that is not there. -------------------------------------------------------

SHARED = 227 * 1024
"""Bytes of shared memory that a program can have on an H100."""


@pytest.fixture
def programs(monkeypatch):
    """What jax-triton has compiled, by kernel, for an H100."""
    pytest.importorskip("triton")
    # Without JAX's plugin for CUDA this is an ImportError, and not that of a missing module.
    jax_triton = pytest.importorskip("jax_triton", exc_type=ImportError)
    library, made = jax_triton.triton_lib, {}
    plain = library.compile_ttir_to_ptx_inplace

    def recorded(*args):
        result = plain(*args)
        made[result.name] = result
        return result

    monkeypatch.setattr(library, "compile_ttir_to_ptx_inplace", recorded)
    monkeypatch.setattr(library, "_COMPILED_KERNEL_CACHE", {}, raising=False)  # until 0.3
    return made


def lowered(h, dtype, rate=0.1):
    """Attention and its gradient for CUDA, of T = M = 512."""
    n, b, t, m = 8, 4, 512, 512
    k, dtype = m + t, jnp.dtype(dtype)
    shape: Any = lambda *s, dtype=dtype: jax.ShapeDtypeStruct(s, dtype)
    positions = Positions(u=shape(n, h), v=shape(n, h), r=shape(n, k, h))
    arrays: Any = (shape(n, b, t, h), shape(n, b, k, h), shape(n, b, k, h), positions)
    integers = [shape(b, dtype=jnp.int32), shape(b, t, dtype=jnp.int32)]
    key = jax.eval_shape(lambda: jax.random.key(0))

    def run(q, keys, values, positions, filled, episode, key):
        mask = AttentionMask(filled, episode, t, m, k - 1)
        inputs = AttentionInputs(q, keys, values, positions, mask, AttentionDropout.draw(key, rate))
        return parity.values_and_gradients(triton.attend, inputs)

    return jax.jit(run).trace(*arrays, *integers, key).lower(lowering_platforms=("cuda",))


def spilled(ptx, folder):
    """Bytes a thread that ``ptxas`` puts into slow memory for want of registers."""
    from triton import knobs

    source = folder / "kernel.ptx"
    source.write_text(ptx)
    command = [knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", source, "-o", folder / "cubin"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    (found,) = re.findall(r"(\d+) bytes spill stores", said)
    return int(found)


@pytest.mark.parametrize("h", [41, 48, 64, 128])
def test_it_compiles_for_an_h100_to_asynchronous_products_that_fit(programs, tmp_path, h):
    assert lowered(h, "bfloat16").as_text().count("@triton_kernel_call") == 4
    assert len(programs) == 4
    for name, made in programs.items():
        assert "wgmma.mma_async" in made.binary, name
        assert made.shared_mem_bytes <= SHARED, name
        # Measured: at most 196 (H = 41: 412), and next to nothing of it within a loop.
        assert spilled(made.binary, tmp_path) <= (256 if h != 41 else 512), name


@pytest.mark.parametrize("h", [64, 128])
def test_float32_compiles_to_products_of_tensor_cores_that_fit_everywhere(programs, tmp_path, h):
    lowered(h, "float32")
    for name, made in programs.items():
        assert "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32" in made.binary, name
        assert made.shared_mem_bytes <= 99 * 1024, name  # the least from compute capability 8.0 on
        # Measured: at most 24 for heads of 64; 820 for heads of 128, in the gradient of queries.
        assert spilled(made.binary, tmp_path) <= (64 if h == 64 else 1024), name


# --- Anywhere. -----------------------------------------------------------------------------------


def of_shape(h=8, dtype=jnp.bfloat16, positions=None):
    """Inputs of this width and dtype; with vectors of distances unless said otherwise."""
    x = floats_as(made({"h": h}), dtype)
    return x if positions is None else x.replace(positions=positions)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"positions": Positions()}, "vectors of distances"),
        ({"positions": Positions(r=jnp.zeros(()), b=jnp.zeros(()))}, "learnt scalars"),
        ({"dtype": jnp.float16}, "bfloat16 and float32"),
        ({"h": 160}, "at most 128"),
    ],
)
def test_it_says_what_it_does_not_have(change, said):
    refused = triton.supports(of_shape(**change))
    assert refused is not None
    assert said in refused


def test_it_says_that_jax_triton_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    refused = triton.supports(of_shape())
    assert refused is not None
    assert "jax-triton" in refused


def in_float64(form, dtype="float32"):
    """Attention with a vector of distance for every pair, in float64; and its gradients."""
    inputs = made(form, dtype)
    mask, t, m = inputs.mask, inputs.mask.seg_len, inputs.mask.mem_len
    seen, keep = np.asarray(mask.allowed()), np.ones(())
    if inputs.dropout is not None:
        keep = np.asarray(inputs.dropout.mask((N, mask.filled.shape[0], t, m + t)), np.float64)
    column = np.clip(t - 1 - np.arange(t)[:, None] + np.arange(m + t), 0, m + t - 1)

    def attend(q, k, val, positions):
        qu, qv = q + positions.u[:, None, None], q + positions.v[:, None, None]
        scores = jnp.einsum("nbth,nbkh->nbtk", qu, k)
        scores += jnp.einsum("nbth,ntkh->nbtk", qv, positions.r[:, column])
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)) * keep
        return jnp.einsum("nbtk,nbkh->nbth", weights, val)

    # The direction is that of float32, drawn before.
    direction = np.asarray(jax.random.normal(jax.random.key(9), inputs.q.shape), np.float64)
    arrays = (inputs.q, inputs.k, inputs.val, inputs.positions)
    numbers = jax.tree.map(lambda x: np.asarray(x, np.float64), arrays)
    with jax.enable_x64(True):
        loss = lambda inputs: jnp.sum(attend(*inputs) * direction)
        numbers = jax.tree.map(jnp.asarray, numbers)
        return by_name((attend(*numbers), jax.grad(loss)(numbers)))


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
    # Factors of float32 are cut to TF32, which has as many bits as float16.
    tolerance = TOLERANCE["float16" if dtype == "float32" else "bfloat16"]
    assert_near(found, in_float64(ON_GPU[form], dtype), tolerance)


@pytest.mark.gpu
def test_on_a_gpu_results_are_the_same_every_time(gpu):
    inputs = made({**ON_GPU["everything"], "rows": 8, "filled": (190,) * 8}, "bfloat16")
    first, second = (values_and_gradients(triton.attend, inputs) for _ in range(2))
    for name in NAMES:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


@pytest.mark.gpu
def test_on_a_gpu_nothing_of_all_scores_is_in_memory(gpu):
    form = {"t": 2048, "m": 2048, "h": 64}
    run = jax.jit(parity.values_and_gradients, static_argnums=0)
    compiled = run.lower(triton.attend, made(form, "bfloat16")).compile()
    analysis: Any = compiled.memory_analysis()
    assert analysis.temp_size_in_bytes < N * B * 2048 * 4096
