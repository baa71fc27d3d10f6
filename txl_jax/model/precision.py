"""How a model computes on its devices: dtype, precision of float32 products, scanned layers."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from txl_jax.config import TransformerXLConfig
from txl_jax.model.derivatives import current_precision
from txl_jax.model.products import share_matrices
from txl_jax.parallel.platforms import has_bfloat16, platform_of, prefers_bfloat16

F = TypeVar("F", bound=Callable[..., Any])

_PASSES: dict[str | None, int] = {
    **dict.fromkeys((None, "default", "bfloat16", "BF16_BF16_F32"), 1),
    **dict.fromkeys(("high", "tensorfloat32", "TF32_TF32_F32"), 3),
}


def resolved(c: TransformerXLConfig, mesh: Mesh | None) -> TransformerXLConfig:
    """Returns the config, in which values for the devices of a mesh replace ``auto``.

    ``dtype`` becomes bfloat16 on TPUs, and on GPUs and CPUs that are faster with bfloat16, else
    float32. ``scan_layers`` becomes True on TPUs, whose compiler takes minutes without a loop over
    layers. On GPUs it becomes True if the model's width is not a multiple of 4 (such as 410) and
    model/products.py does not pad the width. Without a loop, XLA (jaxlib 0.10.2) refuses bfloat16
    products of this width. In all other cases ``scan_layers`` becomes False, since a loop only
    copies the arrays for the gradient into stacked arrays of all layers and back.
    """
    platform, dtype, scan_layers = platform_of(mesh), c.dtype, c.scan_layers
    on_tpu = platform == "tpu"
    if dtype == "auto":
        dtype = "bfloat16" if on_tpu or prefers_bfloat16(mesh) else "float32"
    if scan_layers == "auto":
        odd = platform == "gpu" and c.d_model % 4 > 0
        scan_layers = on_tpu or (odd and bool(c.gate or share_matrices(mesh)))
    return dataclasses.replace(c, dtype=dtype, scan_layers=scan_layers)


def in_compute_dtype(c: TransformerXLConfig, params: Any) -> Any:
    """Returns the parameters with all matrices cast to the compute dtype, as the model does.

    A program that runs often then reads fewer bytes. A model with a mixture of softmaxes uses its
    parameters in float32, so they are not cast. ``params`` are arrays or their shapes.
    """
    if c.dtype == "float32" or c.mixtures > 1:
        return params

    def cast(path, x):
        stacked = path[0].key == "layers"  # has an axis of layers (model/layout.py)
        if x.ndim - stacked < 2:
            return x
        shape = isinstance(x, jax.ShapeDtypeStruct)
        return x.update(dtype=jnp.dtype(c.dtype)) if shape else x.astype(c.dtype)

    return jax.tree_util.tree_map_with_path(cast, params)


def at_precision(method: F) -> F:
    """Makes a module's method, and its gradient, multiply at the config's ``matmul_precision``."""

    @functools.wraps(method)
    def run(self, *args, **kwargs):
        with product_precision(self.cfg.matmul_precision):
            return method(self, *args, **kwargs)

    return run  # type: ignore[return-value]


def product_precision(name: str | None) -> contextlib.AbstractContextManager[Any]:
    """Returns a context for ``model.matmul_precision``; ``None`` leaves JAX's setting as it is."""
    return contextlib.nullcontext() if name is None else jax.default_matmul_precision(name)


def describe(c: TransformerXLConfig, mesh: Mesh | None) -> list[str]:
    """Returns lines on dtype and matrix products to print first; the last can be a warning."""
    c, asked = resolved(c, mesh), c.matmul_precision
    named = "unset" if asked is None else repr(asked)
    lines = [
        f"computing in {c.dtype}; float32 products: {float32_products(asked, mesh)}"
        f" (model.matmul_precision {named})"
    ]
    needed = {"gpu": "compute capability 8.0", "cpu": "AVX512-BF16 or AMX"}
    platform = platform_of(mesh)
    if c.dtype == "bfloat16" and platform in needed and not has_bfloat16(mesh):
        why = f"this {platform.upper()} has no bfloat16 units, which need {needed[platform]}"
        lines.append(f"warning: {why}; use model.dtype float32")
    return lines


def arithmetic_record(c: TransformerXLConfig, mesh: Mesh | None) -> dict[str, Any]:
    """Returns a model's dtype and the precision of its matrix products, for a result's JSON."""
    dtype, asked = resolved(c, mesh).dtype, c.matmul_precision
    products = float32_products(asked, mesh)
    return {"dtype": dtype, "matmul_precision": asked, "float32_products": products}


def rounding(c: TransformerXLConfig, mesh: Mesh | None) -> str:
    """Names the arithmetic of a model on its devices; the name is empty for float32."""
    c = resolved(c, mesh)
    products = float32_products(c.matmul_precision, mesh)
    if c.dtype == "float32":
        return "" if products.startswith("float32") else f"products: {products}"
    return c.dtype


def float32_products(name: str | None, mesh: Mesh | None) -> str:
    """Describes how float32 factors are multiplied at a precision, such as ``TF32 on this GPU``.

    ``name`` is ``model.matmul_precision``; ``None`` stands for JAX's own setting.
    """
    platform, passes = platform_of(mesh), bfloat16_passes(name)
    if platform == "tpu":
        of_6 = "float32 in six bfloat16 passes"
        rounded = {1: "one bfloat16 pass", 3: "three bfloat16 passes"}
        return f"{rounded.get(passes, of_6)} on this TPU"
    if platform == "cpu":
        return "float32 on a CPU"
    if platform == "gpu":
        rounds = passes < 6 and has_bfloat16(mesh)
        return f"{'TF32' if rounds else 'float32'} on this GPU"
    return f"{'float32' if passes == 6 else 'as its libraries choose'} on this {platform}"


def bfloat16_passes(name: str | None = None) -> int:
    """Returns how many bfloat16 passes a float32 product takes on a TPU at a precision: 1, 3 or 6.

    ``name`` is a precision; ``None`` stands for the one that JAX uses now. NVIDIA GPUs use TF32 if
    the result is below 6.
    """
    return _PASSES.get(current_precision() if name is None else name, 6)
