"""Runs fused attention in Triton's interpreter, and computes plain attention to compare it with.

``FORMS`` has an example of each case that the kernels distinguish. The interpreter runs in its own
process, because TRITON_INTERPRET must be set before Python imports Triton.
"""

import concurrent.futures
import contextlib
import multiprocessing
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from txl_jax.model.dropout import AttentionDropout
from txl_jax.model.kernels import parity, reference, triton
from txl_jax.model.masks import AttentionMask, BothWaysMask
from txl_jax.model.positions import Positions

N, B = 2, 2
FORMS: dict[str, dict] = {
    "causal with memory": {},
    "tiles that are full": {"t": 64, "m": 64, "h": 32},
    "other tiles": {
        "t": 70,
        "m": 75,
        "tile": {"SX": 32, "SD": 64, "SQ": 16, "SK": 32},
        "rate": 0.2,
        "filled": (75, 60),
    },
    "heads of 64": {"h": 64, "t": 40, "m": 24},
    "no memory": {"m": 0, "t": 37},
    "one query": {"t": 1, "m": 40},
    "one query, no memory": {"t": 1, "m": 0},
    "every eighth query": {"t": 50, "m": 30, "every": 8},
    "every second query": {"t": 50, "m": 30, "every": 2},
    "window": {"reach": 9},
    "window of more than a tile": {"m": 50, "reach": 20},
    "window of TF": {"m": 20, "reach": 20},
    "window and long segment": {"t": 100, "m": 32, "reach": 31},
    "memory empty or partly so": {"m": 43, "filled": (0, 5)},
    "episodes": {"episodes": True},
    "long episodes": {"t": 100, "m": 30, "starts": ((60,), (9, 40))},
    "dropout": {"rate": 0.3},
    "everything": {
        "t": 33,
        "m": 40,
        "reach": 41,
        "filled": (3, 40),
        "episodes": True,
        "rate": 0.5,
    },
    "memory of whole tiles": {"t": 40, "m": 128, "filled": (128, 30), "rate": 0.2},
    "memory of whole tiles, window": {"t": 150, "m": 128, "reach": 120, "episodes": True},
    "memory in a ring": {"t": 40, "m": 128, "filled": (128, 30), "oldest": 27},
    "memory in a ring, heads of 64": {"t": 40, "m": 256, "reach": 120, "h": 64, "oldest": 250},
    "both directions": {"t": 40, "m": 0, "both": True, "filled": (40, 29)},
    "both directions, window and memory": {
        "t": 53,
        "m": 20,
        "both": True,
        "filled": (1, 53),
        "reach": 17,
        "rate": 0.3,
    },
}
NAMES = ("out", "dq", "dk", "dval", "du", "dv", "dr")
TILE = {"SX": 16, "SD": 32, "SQ": 32, "SK": 16}
TOLERANCE = {"float32": 1e-6, "float16": 5e-3, "bfloat16": 2e-2}
"""The allowed error of each array, relative to its largest entry.

Measured: at most 6.5e-7 in float32 and 1.4e-3 in float16.
"""


def made(form, dtype="float32"):
    """The inputs of attention for ``form``, a value of ``FORMS``."""
    t, m = form.get("t", 21), form.get("m", 27)
    rows = form.get("rows", B)
    filled = jnp.asarray(form.get("filled", (m,) * rows), jnp.int32)
    episode = None
    if form.get("episodes"):
        starts = np.random.default_rng(1).random((rows, t)) < 0.15
        episode = jnp.cumsum(jnp.asarray(starts, jnp.int32), axis=1)
    if form.get("starts"):
        starts = np.zeros((rows, t), np.int32)
        for row, places in enumerate(form["starts"]):
            starts[row, list(places)] = 1
        episode = jnp.cumsum(jnp.asarray(starts), axis=1)
    kind = BothWaysMask if form.get("both") else AttentionMask
    mask = kind(filled, episode, t, m, form.get("reach", m + t - 1))
    rate = form.get("rate")
    dropout = AttentionDropout.draw(jax.random.key(3), rate) if rate else None
    x = parity.random_inputs(N, rows, mask, form.get("h", 41), jnp.dtype(dtype), dropout)
    return x.replace(oldest=jnp.int32(form["oldest"])) if "oldest" in form else x


def values_and_gradients(attend, inputs):
    """The result of ``attend`` and its gradients, by name, computed under ``jit``."""
    return by_name(jax.jit(parity.values_and_gradients, static_argnums=0)(attend, inputs))


def floats_as(x, dtype):
    """The tree with its floating-point arrays converted to ``dtype``."""
    change = lambda leaf: leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
    return jax.tree.map(change, x)


def by_name(results):
    """Attention and its gradients as a dict of NumPy arrays with the keys ``NAMES``."""
    out, (dq, dk, dval, positions) = results
    found = (out, dq, dk, dval, positions.u, positions.v, positions.r)
    return {name: np.asarray(x, np.float64) for name, x in zip(NAMES, found, strict=True)}


def assert_near(found, expected, tolerance):
    for name in NAMES:
        assert np.isfinite(found[name]).all(), name
        # If each query attends only to itself, some gradients are 0 except for rounding errors,
        # which come from sums of H products. The limit is then relative to sqrt(H).
        largest = np.abs(expected[name]).max()
        largest = largest if largest > 1e-9 else expected["out"].shape[-1] ** 0.5
        apart = np.abs(found[name] - expected[name]).max() / largest
        assert apart <= tolerance, f"{name}: {apart:.1e} of {largest:.1e}"


def expected(form, dtype="float32"):
    """Plain attention and its gradients in float32, for inputs that are rounded to ``dtype``."""
    inputs = floats_as(made(form, dtype), jnp.float32)
    with jax.default_matmul_precision("highest"):
        return values_and_gradients(reference.attend, inputs)


def in_float64(form, dtype="float32"):
    """Attention and its gradients in float64, by the plain formula.

    For every pair of a query and a key, it looks up the position vector of their distance.
    """
    inputs = made(form, dtype)
    mask, t, m = inputs.mask, inputs.mask.seg_len, inputs.mask.mem_len
    seen, keep = np.asarray(mask.allowed()), np.ones(())
    if inputs.dropout is not None:
        keep = np.asarray(inputs.dropout.mask((N, mask.filled.shape[0], t, m + t)), np.float64)
    column = t - 1 - np.arange(t)[:, None] + np.arange(m + t)
    column = np.minimum(column, mask.n_distances - 1)

    def attend(q, k, val, positions):
        if inputs.oldest is not None:
            turn = lambda x: jnp.roll(x[:, :, :m], -form["oldest"], axis=2)
            k, val = (jnp.concatenate([turn(x), x[:, :, m:]], axis=2) for x in (k, val))
        qu, qv = q + positions.u[:, None, None], q + positions.v[:, None, None]
        scores = jnp.einsum("nbth,nbkh->nbtk", qu, k)
        scores += jnp.einsum("nbth,ntkh->nbtk", qv, positions.r[:, column])
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)) * keep
        return jnp.einsum("nbtk,nbkh->nbth", weights, val)

    # The gradients are those of sum(attention * direction). As in parity.values_and_gradients, the
    # direction is drawn in float32.
    direction = np.asarray(jax.random.normal(jax.random.key(9), inputs.q.shape), np.float64)
    arrays = (inputs.q, inputs.k, inputs.val, inputs.positions)
    numbers = jax.tree.map(lambda x: np.asarray(x, np.float64), arrays)
    with jax.enable_x64(True):
        loss = lambda inputs: jnp.sum(attend(*inputs) * direction)
        numbers = jax.tree.map(jnp.asarray, numbers)
        return by_name((attend(*numbers), jax.grad(loss)(numbers)))


@pytest.fixture(scope="module")
def interpreter():
    """A process pool in which functions of this module run with Triton's interpreter."""
    pytest.importorskip("torch", reason="Triton's interpreter works on PyTorch's arrays")
    pytest.importorskip("triton")
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            patch.setenv("JAX_PLATFORMS", "cpu")
            pool.submit(os.getpid).result()
        yield pool


def small_tiling(form):
    """A replacement of ``triton.tiling`` that returns the tile sizes of ``form``."""
    sizes = {**TILE, **form.get("tile", {})}

    def tiling(kernel, *_):
        neighbours = kernel in ("forward", "gradient_of_keys")
        return triton.Tiling(
            4, 2, {x: sizes[x] for x in (("SQ", "SK") if neighbours else ("SX", "SD"))}
        )

    return tiling


def interpreted(form, dtype="float32"):
    """The kernels' attention and gradients; to be called in the interpreter's process."""
    triton.launch = launch_interpreted
    triton.tiling = small_tiling(form)
    setattr(triton.Form, "every", form.get("every", 4))  # noqa: B010
    # Without jit, so that kernels get arrays and not tracers.
    return by_name(parity.values_and_gradients(triton.attend, made(form, dtype)))


def launch_interpreted(kernel, given, results, grid, form):
    """Replaces ``triton.launch``: runs a kernel in the interpreter and returns its results.

    Entries that the kernel does not write are NaN.
    """
    import torch
    from triton.runtime import interpreter as runtime

    from txl_jax.model.kernels import triton_tiles

    dtype = given[0].dtype
    tensor = lambda x: torch.from_numpy(np.array(x))
    reads = [tensor(x) if hasattr(x, "shape") else x for x in given]
    writes = [tensor(np.full(x.shape, np.nan, x.dtype)) for x in results]
    with indices_of_one_element(runtime):
        programs = grid(triton.tiling(kernel, dtype, form).sizes)
        constants = triton.constants(kernel, dtype, form) | {"PRECISION": "ieee"}
        getattr(triton_tiles, kernel)[programs](*reads, *writes, **constants)
    return [jnp.asarray(x.numpy()) for x in writes]


@contextlib.contextmanager
def indices_of_one_element(runtime):
    """Lets Triton 3.6's interpreter convert one-element arrays to int, which NumPy 2.4 refuses."""
    plain = runtime._patch_lang_tensor

    def patched(tensor, scope):
        plain(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    runtime._patch_lang_tensor = patched
    yield
    runtime._patch_lang_tensor = plain


def interpreted_without_biases():
    triton.launch = launch_interpreted
    triton.tiling = small_tiling({})
    return np.asarray(triton.attend(without_biases()))


def without_biases():
    inputs = made({})
    return inputs.replace(positions=Positions(r=inputs.positions.r))
