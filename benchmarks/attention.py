"""Compares implementations of attention: time of forward and backward pass, device memory.

    python -m benchmarks.attention [--implementations=reference,xla] [--lengths=768] [--dtype=…]

Each number of ``--lengths`` is one case, with this segment length T and the same memory length M.
Each number of ``--keys`` is one more case, with this number of keys K: T is the first length and
M = K - T. These cases show how the device memory grows. By default, the number of heads and their
width are those of enwik8_24l, and the batch has one row. Before the benchmark times an
implementation, it compares the results with those of the plain form
(txl_jax/model/kernels/parity.py).
"""

import argparse
import functools
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.interleaved import machine, write
from txl_jax.analysis.speed import summary, time_alternating, timed
from txl_jax.model.dropout import AttentionDropout
from txl_jax.model.kernels import attend, parity
from txl_jax.model.masks import attention_mask


def main(argv: list[str] | None = None) -> None:
    """Compares and times the implementations; prints the results and writes them to ``--out``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--implementations", default="reference,xla")
    add("--lengths", default="768")
    add("--keys", default="", help="more K for the first length, as 4096,8192,16384")
    add("--heads", type=int, default=8)
    add("--d-head", type=int, default=128)
    add("--rows", type=int, default=1)
    add("--dtype", default="float32", choices=("float32", "bfloat16"))
    add("--dropatt", type=float, default=0.0)
    add("--rounds", type=int, default=10)
    add("--out")
    flags = parser.parse_args(argv)
    names = flags.implementations.split(",")
    lengths = [int(n) for n in flags.lengths.split(",")]
    cuts = [(n, n) for n in lengths]
    cuts += [(lengths[0], int(k) - lengths[0]) for k in filter(None, flags.keys.split(","))]
    differences = {}
    for name in names:
        differences[name] = parity.difference(name, flags.d_head, flags.dtype, flags.dropatt)
        print(f"{name:<12} differs from the plain form by {differences[name]:.2g}", flush=True)
    rows = []
    for seg_len, mem_len in cuts:
        programs, held = {}, {}
        for name in names:
            programs[name], held[name] = _program(name, flags, seg_len, mem_len)
        seconds = time_alternating(programs, flags.rounds)
        for name in names:
            took = summary(seconds[name])
            rows.append(
                {"implementation": name, "seg_len": seg_len, "mem_len": mem_len}
                | {"seconds": took, "held": held[name]}
            )
            print(
                f"{name:<12} T {seg_len:>5}  K {seg_len + mem_len:>6}  {1e3 * took['median']:9.2f}"
                f" ms ({1e3 * took['lower_quartile']:.2f} to {1e3 * took['upper_quartile']:.2f})"
                f"  {held[name] / 2**20:,.1f} MiB held",
                flush=True,
            )
    settings = {k: v for k, v in vars(flags).items() if k != "out"}
    report = {"benchmark": "attention", "machine": machine(), "settings": settings}
    write(flags.out, {**report, "differences": differences, "rows": rows})


def _program(name: str, flags: Any, seg_len: int, mem_len: int):
    """Returns a function that times attention with its gradients, and the bytes that it holds.

    These bytes are those of the temporary arrays.
    """
    dtype = jnp.dtype(flags.dtype)
    mask = attention_mask(seg_len, jnp.full(flags.rows, mem_len), mem_len)
    dropout = AttentionDropout.draw(jax.random.key(0), flags.dropatt) if flags.dropatt else None
    inputs = parity.random_inputs(flags.heads, flags.rows, mask, flags.d_head, dtype, dropout)
    run = functools.partial(attend, implementation=name)
    step = jax.jit(functools.partial(parity.values_and_gradients, run))
    compiled: Any = step.lower(inputs).compile()
    held = compiled.memory_analysis().temp_size_in_bytes
    return lambda: timed(lambda: compiled(inputs)), held


if __name__ == "__main__":
    main()
