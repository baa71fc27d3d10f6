"""What an update's matrix products take alone: the floor under any way of writing the rest.

    python -m benchmarks.products --size=12l_512 [--rounds=7] [--out=FILE.json]

Every product of a layer and of the softmax, forward and both of its gradients, is a program of its
own on random numbers in the layout that the training step gives it; its median time is multiplied
by how often an update has it. Beside the sum stands an update itself, timed in the same rounds.
"""

import argparse
import dataclasses
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.interleaved import add_flags, changes, machine, write
from benchmarks.sizes import experiment
from benchmarks.train_speed import training
from txl_jax.analysis.speed import time_alternating, timed
from txl_jax.config import ExperimentConfig

_IN_A_ROW = 5


@dataclasses.dataclass(frozen=True)
class Product:
    """``count`` products of [batch,m,k] and [batch,k,n] in an update; ``batch`` 1: of matrices."""

    name: str
    count: int
    batch: int
    m: int
    k: int
    n: int

    @property
    def operations(self) -> float:
        """Of all of them; a multiply-add is two."""
        return 2.0 * self.count * self.batch * self.m * self.k * self.n


def products(exp: ExperimentConfig) -> Iterator[Product]:
    """All products of an update of a model with one softmax and relative attention."""
    c, t = exp.model, exp.train
    rows, keys = t.batch_size * t.seg_len, t.batch_size * (t.seg_len + t.mem_len)
    width, heads = c.n_head * c.d_head, t.batch_size * c.n_head
    span, layers = t.seg_len + t.mem_len, c.n_layer
    weights = {
        "queries": (rows, c.d_model, width, rows),
        "keys and values": (keys, c.d_model, 2 * width, rows),
        "positions": (span, c.d_model, width, 0),
        "output": (rows, width, c.d_model, rows),
        "feed-forward, inner": (rows, c.d_model, c.d_inner, rows),
        "feed-forward, outer": (rows, c.d_inner, c.d_model, rows),
    }
    for name, (m, k, n, reached) in weights.items():
        yield Product(name, layers, 1, m, k, n)
        yield Product(f"{name}: of weights", layers, 1, k, m, n)
        if reached:  # memory and sinusoids get no gradient
            yield Product(f"{name}: of inputs", layers, 1, reached, n, k)
    for name, n_heads, m in (("content", heads, t.seg_len), ("position", c.n_head, rows)):
        yield Product(f"{name} scores", layers, n_heads, m, c.d_head, span)
        yield Product(f"{name} scores: of queries", layers, n_heads, m, span, c.d_head)
        yield Product(f"{name} scores: of keys", layers, n_heads, span, m, c.d_head)
    yield Product("weighted sum", layers, heads, t.seg_len, span, c.d_head)
    yield Product("weighted sum: of weights", layers, heads, t.seg_len, c.d_head, span)
    yield Product("weighted sum: of values", layers, heads, span, t.seg_len, c.d_head)
    v = c.vocab_size or 0
    yield Product("softmax", 1, 1, rows, c.d_model, v)
    yield Product("softmax: of inputs", 1, 1, rows, v, c.d_model)
    yield Product("softmax: of words", 1, 1, v, rows, c.d_model)


def alone(p: Product) -> Callable[[], float]:
    """A program of the one product, run some times in a row; seconds of one."""
    a, b = (jnp.asarray(x) for x in _numbers(p))
    dot = jax.jit(jnp.matmul)

    def work():
        for _ in range(_IN_A_ROW):
            product = dot(a, b)
        return product

    return lambda: timed(work) / _IN_A_ROW


def _numbers(p: Product) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    lead = (p.batch,) if p.batch > 1 else ()
    draw = lambda *shape: rng.standard_normal((*lead, *shape)).astype(np.float32)
    return draw(p.m, p.k), draw(p.k, p.n)


def main(argv: list[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_flags(parser)
    flags = parser.parse_args(argv)
    exp = experiment(flags.size, changes(flags))
    found = list(products(exp))
    programs: dict[str, Callable[[], float]] = {"an update": training(exp, 1)}
    programs |= {p.name: alone(p) for p in found}
    seconds = time_alternating(programs, flags.rounds)
    median = {name: statistics.median(seconds[name]) for name in programs}
    rows: list[dict[str, Any]] = []
    for p in found:
        taken = p.count * median[p.name]
        rows.append({**dataclasses.asdict(p), "operations": p.operations, "seconds": taken})
        print(f"{p.name:32} {1e3 * taken:7.1f} ms  {p.operations / taken / 1e9:6.0f} GFLOP/s")
    update, products_alone = median["an update"], sum(row["seconds"] for row in rows)
    totals = {"operations": sum(row["operations"] for row in rows)}
    totals |= {"products": products_alone, "an update": update}
    print(f"all products: {products_alone:.3f} s, {products_alone / update:.0%} of an update")
    print(f"an update: {update:.3f} s")
    report = {"benchmark": "products", "size": flags.size, "machine": machine()}
    write(flags.out, {**report, "rounds": flags.rounds, "rows": rows, "totals": totals})


if __name__ == "__main__":
    main()
