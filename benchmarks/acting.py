"""Measures environment steps a second of ``agents.Actor``, and of the same model in plain Flax.

    python -m benchmarks.acting [--environments=16,64,512] [--lengths=32,128,512] [--out=FILE]

For acting, ``agents.Actor`` runs a rollout of ``--steps`` steps under ``jax.lax.scan``. It projects
its memory once, at the start of the rollout. The plain model (plain_gtrxl.py) keeps hidden states
and projects all of them at every step. For learning, both models compute the gradient of
``--windows`` windows of ``--window`` steps, which start with a full memory of ``--learning-memory``
steps. Both models have the same parameters. The benchmark first compares their outputs, and then
times them in turn. Model and rollout are those of transformerXL_PPO_JAX: GTrXL with gates, two
layers, width 256 and 8 heads, and rollouts of 128 steps. With ``--dtype=bfloat16`` both models
compute in bfloat16, and the plain model is timed in float32 too.
"""

import argparse
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

import txl_jax
from benchmarks.interleaved import machine, write
from benchmarks.plain_gtrxl import PlainGTrXL
from txl_jax import agents
from txl_jax.analysis.speed import ratio, summary, time_alternating, timed
from txl_jax.convert import config_from_ppo_jax, params_from_ppo_jax

SETTINGS = {"d_model": 256, "n_head": 8, "n_layer": 2, "gating": True, "gating_bias": 2.0}


class Programs:
    """Our model and the plain model, with the same parameters."""

    def __init__(self, settings: dict[str, Any], dtype: Any):
        cfg = dataclasses.replace(config_from_ppo_jax(settings), dtype=dtype)
        self.width, self.ours = cfg.d_model, txl_jax.TransformerXL(cfg)
        self.plain = PlainGTrXL(cfg.n_layer, cfg.n_head, cfg.gate_bias)
        x = jnp.zeros((1, 1, self.width))
        memory, mask = jnp.zeros((1, 1, cfg.n_layer, self.width)), jnp.ones((1, 1, 2), bool)
        self.plain_variables: Any = jax.jit(self.plain.init)(jax.random.key(0), x, memory, mask)
        flat = flatten_dict(self.plain_variables["params"], sep="/")
        self.variables = {"params": params_from_ppo_jax(flat, cfg)}

    def memory(self, rows: int, mem_len: int) -> txl_jax.Memory:
        """Returns a full memory of random states."""
        mems: txl_jax.Memory = self.ours.init_mems(rows, mem_len)
        hidden = jax.random.normal(jax.random.key(1), mems.hidden.shape)
        return mems.replace(hidden=hidden, filled=jnp.full(rows, mem_len))

    def acting(self, rows: int, mem_len: int, steps: int):
        """Returns for each program a function that acts once and returns the seconds.

        It acts for ``steps`` steps in ``rows`` environments.
        """
        mems = self.memory(rows, mem_len)
        inputs = jax.random.normal(jax.random.key(2), (steps, rows, self.width))
        begins = jax.random.bernoulli(jax.random.key(3), 0.02, (steps, rows))

        def ours(variables, inputs, begins, mems):
            def step(actor, now):
                outputs, actor, states = actor.step(*now)
                return actor, (outputs, states)

            actor = agents.Actor.start(self.ours, variables, mems)
            return jax.lax.scan(step, actor, (inputs, begins))[1]

        def plain(variables, inputs, begins, mems):
            def step(carry, now):
                memory, filled = carry
                x, begins = now
                filled = jnp.where(begins, 0, filled)
                seen = jnp.arange(mem_len) >= mem_len - filled[:, None]
                mask = jnp.concatenate([seen, jnp.ones((rows, 1), bool)], axis=1)[:, None]
                found: Any = self.plain.apply(variables, x[:, None], memory, mask)
                outputs, states = found
                memory = jnp.roll(memory, -1, axis=1).at[:, -1].set(states[:, 0])
                return (memory, jnp.minimum(filled + 1, mem_len)), (outputs[:, 0], states[:, 0])

            first = mems.hidden.transpose(1, 2, 0, 3), mems.filled
            return jax.lax.scan(step, first, (inputs, begins))[1]

        arguments = inputs, begins, mems
        return self._both(ours, plain, arguments)

    def learning(self, rows: int, window: int, mem_len: int):
        """Returns for each program a function that computes one gradient and returns the seconds.

        It is the gradient of the outputs' mean square, for ``rows`` windows of ``window`` steps.
        """
        mems = self.memory(rows, mem_len)
        inputs = jax.random.normal(jax.random.key(2), (rows, window, self.width))
        begins = jax.random.bernoulli(jax.random.key(3), 0.02, (rows, window))

        def ours(variables, inputs, begins, mems):
            return self.ours.apply(variables, inputs, mems, method="core", reset=begins)[0]

        def plain(variables, inputs, begins, mems):
            episode = jnp.cumsum(begins, axis=1)
            of_key = jnp.pad(episode, [(0, 0), (mem_len, 0)])
            distance = mem_len + jnp.arange(window)[:, None] - jnp.arange(mem_len + window)
            mask = (distance >= 0) & (distance <= mem_len)
            mask = mask & (episode[:, :, None] == of_key[:, None])
            memory = mems.hidden.transpose(1, 2, 0, 3)
            return self.plain.apply(variables, inputs, memory, mask)[0]

        def gradient(outputs):
            def loss(variables, *arguments):
                found = outputs(variables, *arguments)
                return jnp.mean(found**2), found

            return lambda *args: jax.grad(loss, has_aux=True)(*args)[::-1]

        return self._both(gradient(ours), gradient(plain), (inputs, begins, mems))

    def _both(self, ours, plain, arguments):
        """Returns by name a function that times each program, after a check of their outputs."""
        dtype = self.ours.cfg.dtype
        functions = {
            "txl_jax": (ours, self.variables),
            "plain Flax": (_in_dtype(plain, dtype), self.plain_variables),
        }
        if dtype != "float32":
            functions["plain Flax, float32"] = plain, self.plain_variables
        runs = {}
        for name, (function, variables) in functions.items():
            compiled: Any = jax.jit(function).lower(variables, *arguments).compile()
            runs[name] = lambda c=compiled, v=variables: c(v, *arguments)
        got, *others = (np.asarray(run()[0], np.float32) for run in runs.values())
        near = 1e-4 if dtype == "float32" else 4 * jnp.finfo(dtype).eps
        for want in others:
            np.testing.assert_allclose(got, want, rtol=0, atol=near * np.abs(want).max())
        return {name: lambda run=run: timed(run) for name, run in runs.items()}


def _in_dtype(function, dtype: str):
    """Returns a function that first casts its floating-point arguments to a dtype."""
    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
    cast = lambda x: x.astype(dtype) if is_float(x) else x
    return lambda *arguments: function(*jax.tree.map(cast, arguments))


def main(argv: list[str] | None = None) -> None:
    """Compares and times the programs; prints the results and writes them to ``--out``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--environments", default="16,64,512")
    add("--lengths", default="32,128,512", help="of memory, in acting")
    add("--steps", type=int, default=128, help="of acting in a timed unit")
    add("--windows", type=int, default=64)
    add("--window", type=int, default=64)
    add("--learning-memory", type=int, default=128)
    add("--width", type=int, default=256)
    add("--rounds", type=int, default=10)
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    add("--out")
    flags = parser.parse_args(argv)
    programs, rows = Programs({**SETTINGS, "d_model": flags.width}, flags.dtype), []
    numbers = lambda text: [int(n) for n in text.split(",")]
    cases = [("act", n, m) for n in numbers(flags.environments) for m in numbers(flags.lengths)]
    for what, n, mem_len in [*cases, ("learn", flags.windows, flags.learning_memory)]:
        steps = flags.steps if what == "act" else flags.window
        make = programs.acting if what == "act" else programs.learning
        shape = (n, mem_len, steps) if what == "act" else (n, steps, mem_len)
        seconds = time_alternating(make(*shape), flags.rounds)
        took = {name: summary(found) for name, found in seconds.items()}
        ours = seconds.pop("txl_jax")
        times = {name: ratio(found, ours) for name, found in seconds.items()}
        rows.append({"what": what, "rows": n, "mem_len": mem_len, "steps": steps, "times": times}
                    | {"seconds": took})  # fmt: skip
        rates = ", ".join(f"{name} {n * steps / t['median']:,.0f}/s" for name, t in took.items())
        faster = ", ".join(f"{t['median']:.2f} times {name}" for name, t in times.items())
        print(f"{what:<6} {n:>4} x {steps}, memory {mem_len:>4}: {rates}; {faster}", flush=True)
    settings = {k: v for k, v in vars(flags).items() if k != "out"}
    report = {"benchmark": "acting", "machine": machine(), "settings": settings}
    write(flags.out, {**report, "rows": rows})


if __name__ == "__main__":
    main()
