"""Times the gradient of a recipe's adaptive softmax, and separately each of its matrix products.

    python -m benchmarks.large_vocabulary [--shapes=wt103_base,lm1b_large] [--tokens=600] \
        [--rounds=9] [--out=FILE.json]

A shape is the vocabulary of a recipe of ``configs/``: sizes, cutoffs, widths. The timed program
embeds and scores a segment of random words (Zipf), and computes the gradient of every parameter.
Each matrix product is also timed as a separate program: the projection and the logits of each
cluster, for the tokens that need this cluster, and the two gradients of each. The output has the
ratio of the gradient's time to the time of all products. The gradient program computes the logits
twice to avoid storing them, so a second ratio counts the products of the logits twice. The output
also has the temporary memory of the compiled gradient program.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.interleaved import machine, write
from benchmarks.products import Product, alone
from benchmarks.sizes import experiment
from txl_jax.analysis.speed import random_tokens, summary, time_alternating, timed
from txl_jax.config import TransformerXLConfig
from txl_jax.model.adaptive import Vocabulary, clusters


def main(argv: list[str] | None = None) -> None:
    """Measures every shape, prints the results and writes them to ``--out``, if given."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", default="wt103_base,wt103_large,lm1b_large")
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", help="JSON file to write")
    flags = parser.parse_args(argv)
    rows = {}
    for name in flags.shapes.split(","):
        row = rows[name] = measure(experiment(name).model, flags.tokens, flags.rounds)
        took = row["gradient"]
        print(
            f"{name}: {row['gradient']['median']:.3f} s ({took['lower_quartile']:.3f} to"
            f" {took['upper_quartile']:.3f}), products alone {row['products']:.3f} s, ratio"
            f" {row['ratio']:.2f} ({row['ratio_logits_twice']:.2f} with the logits twice),"
            f" {row['temporary_bytes'] / 2**20:.0f} MiB",
            flush=True,
        )
    report = {"benchmark": "large_vocabulary", "machine": machine(), "tokens": flags.tokens}
    write(flags.out, {**report, "rows": rows})


def measure(c: TransformerXLConfig, n: int, rounds: int) -> dict[str, Any]:
    """Returns the times of the gradient of ``n`` random tokens and of its matrix products.

    Also returns the two ratios of these times, and the bytes of the gradient's temporary arrays.
    """
    text = random_tokens(n + 1, c.vocab_size)
    tokens, targets = jnp.asarray(text[None, :-1]), jnp.asarray(text[None, 1:])
    words = Vocabulary(c)

    def loss(module, tokens, targets):
        return module.nll(module.embed(tokens), targets).sum()

    params = jax.jit(lambda key: words.init(key, tokens, targets, method=loss))(jax.random.key(0))
    gradient = jax.jit(jax.grad(lambda p: words.apply(p, tokens, targets, method=loss)))
    compiled = gradient.lower(params).compile()
    found = list(products(c, np.asarray(targets)))
    programs: dict[str, Callable[[], float]] = {"gradient": lambda: timed(lambda: compiled(params))}
    programs |= {p.name: alone(p) for p in found}
    seconds = time_alternating(programs, rounds)
    floor = sum(p.count * statistics.median(seconds[p.name]) for p in found)
    logits = sum(statistics.median(seconds[p.name]) for p in found if p.name.endswith(": logits"))
    took = summary(seconds["gradient"])
    analysis: Any = compiled.memory_analysis()
    return {
        "gradient": took,
        "products": floor,
        "ratio": took["median"] / floor,
        "ratio_logits_twice": took["median"] / (floor + logits),
        "temporary_bytes": analysis.temp_size_in_bytes,
    }


def products(c: TransformerXLConfig, targets: np.ndarray) -> Iterator[Product]:
    """Yields the matrix products of every cluster, for the tokens that need this cluster."""
    parts = clusters(c)
    for i, part in enumerate(parts):
        own = int(((part.start <= targets) & (targets < part.stop)).sum())
        rows, size = (own, part.size) if i else (targets.size, part.size + len(parts) - 1)
        sizes = {"logits": (part.width, size)}
        if part.projected:
            sizes["projection"] = (c.d_model, part.width)
        for name, (k, m) in sizes.items():
            if rows:
                yield Product(f"{i}: {name}", 1, 1, rows, k, m)
                yield Product(f"{i}: {name}, of inputs", 1, 1, rows, m, k)
                yield Product(f"{i}: {name}, of weights", 1, 1, m, rows, k)


if __name__ == "__main__":
    main()
