"""Counts the bytes that a generated token reads and writes on a GPU, in the compiled program.

    python -m benchmarks.generated_token enwik8_24l --topology=h100:1x1x1 [--samples=1]

Compiles the program that samples tokens (with the extra ``compile-cuda``; no GPU is needed), and
adds up the bytes of the kernels of one token (program_kernels.py). The output also has the bytes
that any program must read: each weight matrix of the layers and the output embedding once in the
compute dtype, and the keys, values and projected distances in the cache. The time is *predicted*
from the bytes alone: the kernels are assumed to reach the share TRAFFIC of the GPU's bandwidth, as
in predicted_steps.py. The time to launch kernels is not included.
"""

import argparse
import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import program_kernels
from benchmarks.interleaved import changes
from benchmarks.predicted_steps import TRAFFIC
from benchmarks.program_kernels import Kernel
from txl_jax.checkpoint.trained_model import memory_shapes, param_shapes
from txl_jax.config import ExperimentConfig, load_config, override
from txl_jax.model.precision import resolved
from txl_jax.model.transformer_xl import TransformerXL
from txl_jax.parallel.compile_cache import compiled_rows
from txl_jax.planning.compile_ahead import compiler_options
from txl_jax.planning.machines import CHIPS
from txl_jax.planning.run_programs import run_programs
from txl_jax.planning.topologies import topology_devices
from txl_jax.planning.vocabulary import with_vocab_size
from txl_jax.training.plan import training_mesh


def main(argv: list[str] | None = None) -> None:
    """Compiles the program, counts its bytes and prints them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("--topology", default="h100:1x1x1")
    parser.add_argument("--samples", type=int, default=1, help="rows that are continued")
    parser.add_argument("--largest", type=int, default=0, help="kernels to print")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=JSON")
    flags = parser.parse_args(argv)
    exp = override(load_config(flags.recipe), changes(flags))
    exp = override(with_vocab_size(exp), {"generate.samples": flags.samples})
    kernels, least = token(exp, flags.topology)
    moved = sum(k.moved for k in kernels)
    seconds = moved / (TRAFFIC * CHIPS[flags.topology.partition(":")[0]].bandwidth)
    print(f"{sum(k.times for k in kernels)} kernels move {moved / 1e6:.1f} MB for a token")
    print(f"weights and cache once are {least / 1e6:.1f} MB: {moved / least:.2f} times as much")
    print(f"{1e3 * seconds:.2f} ms by the bytes (*predicted*)")
    for k in sorted(kernels, key=lambda k: -k.moved)[: flags.largest]:
        about = f"read {k.read / 1e6:8.2f} MB, written {k.written / 1e6:8.2f} MB"
        print(f"{k.times:4} x {about}  {k.source:28} {k.name}")


def token(exp: ExperimentConfig, topology: str) -> tuple[list[Kernel], int]:
    """Returns the kernels of one token, and the bytes that any program must read for it."""
    devices = topology_devices(topology)
    model = resolved(exp.model, training_mesh(exp, devices))
    exp = dataclasses.replace(exp, model=model)
    programs = run_programs(exp, devices)
    extend = next(p for p in programs if p.name == "generate, extend")
    text = extend.lower().compile(compiler_options(devices[0])).as_text() or ""
    loops = program_kernels.iterations(text)
    return max(loops, key=lambda kernels: sum(k.moved for k in kernels)), least_bytes(exp)


def least_bytes(exp: ExperimentConfig) -> int:
    """Returns the bytes of the matrices and of the cache, which every token reads.

    The weights that project distances do not count, because the cache has projected distances. The
    input embedding does not count either if the output has weights of its own.
    """
    c = dataclasses.replace(exp.model, scan_layers=False)
    rows = compiled_rows(exp.generate.samples)
    params, mems = param_shapes(c), memory_shapes(c, rows, exp.generate.mem_len)
    size, total = jnp.dtype(c.dtype).itemsize, 0
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        name = str(path[-1].key)
        unread = name == "position" or (name.startswith("embedding") and not c.tie_weight)
        total += size * x.size * (x.ndim > 1 and not unread)
    make: Any = lambda *args: TransformerXL(c).apply(*args, seg_len=1, method="init_cache")
    cache = jax.eval_shape(make, {"params": params}, mems)
    return total + sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    main()
