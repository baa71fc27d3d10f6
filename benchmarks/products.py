"""Times a model's matrix products alone; the sum is about the least time that the model needs.

    python -m benchmarks.products --size=12l_512 [--of=segment] [--rounds=7] [--out=FILE.json]

Each matrix product of a layer and of the softmax runs as a separate program on random numbers, with
the shapes that it has in the model. Its median time is multiplied by the number of times that the
model computes it. The model's whole computation is timed in the same rounds. By default, this is a
training update, with the products of the forward pass and those of the gradients. With
``--of=segment``, it is the evaluation of a segment, with keys and values of the memory in a ring
buffer.
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
from txl_jax.analysis.speed import random_params, scoring, time_alternating, timed
from txl_jax.config import ExperimentConfig
from txl_jax.model import ring

_IN_A_ROW = 5


@dataclasses.dataclass(frozen=True)
class Product:
    """``count`` matrix products of [batch,m,k] and [batch,k,n]; plain matrices have ``batch`` 1."""

    name: str
    count: int
    batch: int
    m: int
    k: int
    n: int

    @property
    def operations(self) -> float:
        """The operations of all ``count`` products; a multiply-add is two operations."""
        return 2.0 * self.count * self.batch * self.m * self.k * self.n


def segment_products(exp: ExperimentConfig) -> Iterator[Product]:
    """Yields the matrix products with which a model scores a segment in evaluation.

    The model has relative attention, and one softmax over the vocabulary (no clusters).
    """
    c, p = exp.model, exp.evaluate
    rows, heads, layers = p.batch_size * p.seg_len, p.batch_size * c.n_head, c.n_layer
    width, (slots, _) = c.n_head * c.d_head, ring.slots_of(p.mem_len, p.seg_len)
    yield Product("queries", layers, 1, rows, c.d_model, width)
    yield Product("keys, values", 2 * layers, 1, rows, c.d_model, width)
    yield Product("output", layers, 1, rows, width, c.d_model)
    yield Product("feed-forward, inner", layers, 1, rows, c.d_model, c.d_inner)
    yield Product("feed-forward, outer", layers, 1, rows, c.d_inner, c.d_model)
    yield Product("position scores", layers, c.n_head, rows, c.d_head, slots + p.seg_len)
    for name, keys in (("memory", slots), ("segment", p.seg_len)):
        yield Product(f"content scores, {name}", layers, heads, p.seg_len, c.d_head, keys)
        yield Product(f"weighted sum, {name}", layers, heads, p.seg_len, keys, c.d_head)
    yield Product("softmax", 1, 1, rows, c.d_model, c.vocab_size or 0)


def update_products(exp: ExperimentConfig) -> Iterator[Product]:
    """Yields the matrix products of a training update, with those of the gradients.

    The model has relative attention, and one softmax over the vocabulary (no clusters).
    """
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
    """Returns a function that runs a product several times and returns the seconds of one run."""
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
    """Measures, prints the results and writes them to the file ``--out``, if given."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_flags(parser)
    parser.add_argument("--of", choices=("update", "segment"), default="update", help="the whole")
    flags = parser.parse_args(argv)
    exp = experiment(flags.size, {"model.scan_layers": False, **changes(flags)})
    if flags.of == "update":
        found, whole = list(update_products(exp)), training(exp, 1)
    else:
        found = list(segment_products(exp))
        whole = scoring(exp.model, exp.evaluate, random_params(exp.model), segments=4)
    programs: dict[str, Callable[[], float]] = {"whole": whole}
    programs |= {p.name: alone(p) for p in found}
    seconds = time_alternating(programs, flags.rounds)
    median = {name: statistics.median(seconds[name]) for name in programs}
    rows: list[dict[str, Any]] = []
    for p in found:
        taken = p.count * median[p.name]
        rows.append({**dataclasses.asdict(p), "operations": p.operations, "seconds": taken})
        print(f"{p.name:32} {1e3 * taken:7.1f} ms  {p.operations / taken / 1e9:6.0f} GFLOP/s")
    whole_seconds, products_alone = median["whole"], sum(row["seconds"] for row in rows)
    totals = {"operations": sum(row["operations"] for row in rows)}
    totals |= {"products": products_alone, flags.of: whole_seconds}
    print(f"all products: {products_alone:.3f} s")
    ratio = whole_seconds / products_alone
    print(f"{flags.of}: {whole_seconds:.3f} s, {ratio:.2f} times its products")
    report = {"benchmark": "products", "size": flags.size, "machine": machine()}
    write(flags.out, {**report, "rounds": flags.rounds, "rows": rows, "totals": totals})


if __name__ == "__main__":
    main()
