"""Draws random settings, each of which must be refused in one line or be traced without an error.

    python tests/helpers/draw_settings.py --draws=10000 --seed=0

Each draw changes one to three settings of a tiny experiment. Half of the draws give values as
text, like command-line flags, and half as Python values, like JSON. A draw passes in two ways:

    refused     a ConfigError of one line is raised by the settings or by a check of memory
    accepted    the training step, the scoring of a segment and a step of generation pass
                ``jax.eval_shape``

Any other exception is a failure. It is also a failure if the settings and the checks of memory take
over 60 seconds of CPU time.
"""

import argparse
import collections
import dataclasses
import random
import time
import types
import typing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from txl_jax.analysis import probe
from txl_jax.checkpoint.trained_model import param_shapes
from txl_jax.config import ConfigError, ExperimentConfig, ProtocolConfig, override
from txl_jax.data.batch import Batch, SoftTargets
from txl_jax.data.on_device import BatchPosition, DeviceText
from txl_jax.evaluation.dynamic import Learner
from txl_jax.evaluation.evaluator import Evaluator
from txl_jax.evaluation.protocols import with_window
from txl_jax.generation import generate
from txl_jax.generation.sampling import sampling_of
from txl_jax.model.transformer_xl import TransformerXL
from txl_jax.parallel.compile_cache import compiled_rows
from txl_jax.parallel.mesh import make_mesh
from txl_jax.parallel.shardings import Shardings
from txl_jax.training.optimizer import make_optimizer
from txl_jax.training.plan import build_meshes, check_training_memory
from txl_jax.training.state import init_state
from txl_jax.training.step import make_dispatch

LONGEST_MESSAGE = 600
HUNG_SECONDS = 60.0
"""The most CPU time, in seconds, allowed for reading and checking settings."""
DEEP = 8
"""A model with more layers than this is traced as a scan over layers, or with this many layers.

This suffices because all layers are alike.
"""

BASE = {
    "model": {
        "vocab_size": 30,
        "n_layer": 1,
        "d_model": 8,
        "n_head": 2,
        "d_head": 4,
        "d_inner": 8,
    },
    "data": {"name": "text", "path": "text.txt"},
    "train": {"steps": 100, "batch_size": 4, "seg_len": 10, "mem_len": 6},
    "validate": {"batch_size": 4, "seg_len": 6, "mem_len": 6},
    "evaluate": {"batch_size": 4, "seg_len": 6, "mem_len": 6},
    "generate": {"length": 4, "mem_len": 6},
    "mesh": {"data": 1},
}

INTEGERS = (0, 1, 2, 3, 7, 16, 64, 100, 1000, 4097, 10**5, 10**6, 10**6 + 1, 2**31 - 1, 2**31)
HUGE = (2**32 - 1, 2**32, 10**9, 10**12, 2**63 - 1, 2**63, 10**18, 10**30, 10**400)
FLOATS = (0.0, 0.1, 0.5, 0.9, 1.0, 1.5, 2.0, 10.0, 1e-3, 1e-6, 1e-7, 1e-30, 1e-40, 1e-300)
EXTREME = (0.999999, 1 - 1e-12, 1e6, 1e30, 3e38, 1e39, 1e300, float("inf"), float("nan"), 5e-324)
WRONG: tuple[Any, ...] = (
    "",
    " ",
    "many",
    "none",
    "true",
    "1.5",
    "1_0",
    "0x10",
    "1e400",
    "²",
    "١٢",
    "text\nof two lines",
    "a" * 5000,
    "9" * 5000,
    "\ud800",
    "[" * 200,
    "\x00",
    None,
    True,
    [],
    {},
    [[1]],
    b"bytes",
    1 + 2j,
    object(),
)


def settings(cls: type = ExperimentConfig, prefix: str = "") -> dict[str, Any]:
    """The type of every setting, in a dict by its dotted key, such as ``model.n_layer``."""
    found: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint):
            found |= settings(typing.cast(type, hint), f"{prefix}{name}.")
        else:
            found[prefix + name] = hint
    return found


def drawn(rng: random.Random, hint: Any) -> Any:
    """A random value for a setting of type ``hint``; with probability 1/5, a value of any type."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if rng.random() < 0.2:
        return rng.choice(WRONG + INTEGERS + HUGE + FLOATS + EXTREME)
    if origin in (types.UnionType, typing.Union):
        inner = rng.choice(args)
        return None if inner is type(None) else drawn(rng, inner)
    if origin is typing.Literal:
        return rng.choice(args)
    if origin is tuple:
        items = [drawn(rng, args[0]) for _ in range(rng.choice((0, 1, 1, 2, 3, 5)))]
        return sorted(items, key=str) if rng.random() < 0.3 else items
    if origin is dict:
        return {"b1": rng.random(), rng.choice(("eps", "mask", "x y")): rng.choice(FLOATS)}
    if hint is bool:
        return rng.random() < 0.5
    if hint is int:
        size = int(10 ** rng.uniform(0, 7))
        low, high = rng.choice(((1, 3), (1, 50), (-3, 0), (size, 2 * size), (size, 2 * size)))
        return rng.choice((rng.choice(INTEGERS), rng.choice(HUGE), rng.randint(low, high)))
    if hint is float:
        return rng.choice((rng.choice(FLOATS), rng.choice(EXTREME), rng.random(), -rng.random()))
    return rng.choice(("", "a", "runs/a", "naïve — 日本", "-", "a,b", "[x]", "none", "x" * 5000))


def changes(rng: random.Random) -> dict[str, Any]:
    """One to three settings and their new values."""
    known = settings()
    return {key: drawn(rng, known[key]) for key in rng.sample(sorted(known), rng.randint(1, 3))}


def read(base: ExperimentConfig, changed: dict[str, Any], as_text: bool) -> ExperimentConfig:
    """Returns ``base`` with the settings ``changed``, read as text like flags or as JSON values."""
    if as_text:
        return override(base, {key: _text(value) for key, value in changed.items()})
    nested = base.to_dict()
    for key, value in changed.items():
        *sections, leaf = key.split(".")
        section = nested
        for name in sections:
            section = section[name]
        section[leaf] = value
    return ExperimentConfig.from_dict(nested)


def _text(value: Any) -> str:
    if isinstance(value, int) and abs(value) >= 10**300:
        return "1" + "0" * 400
    if isinstance(value, list | tuple):
        return ",".join(map(_text, value))
    return str(value)


def check(exp: ExperimentConfig) -> None:
    """Raises ConfigError if the devices or their memory do not suffice for the settings.

    The checks are those of training, of generation and of the analysis ``probe``.
    """
    check_training_memory(exp, *build_meshes(exp))
    if exp.generate.length:
        generate.check_generation_memory(exp.model, exp.generate)
    trained: Any = types.SimpleNamespace(config=exp)
    probe.check_probe_memory(trained)


# Programs, traced for shapes.

_traced: set[Any] = set()


def trace(exp: ExperimentConfig) -> None:
    """Traces all programs of an experiment; skips those that were traced before."""
    t = dataclasses.replace(
        exp.train,
        log_every=exp.train.steps_per_dispatch,
        eval_every=0,
        max_skipped=1,
        partial_shuffle=False,
        reset_every=0,
        start_from=None,
        num_seeds=1,
    )
    key = (exp.seed, exp.model, t, exp.loss, exp.optimizer, exp.average, exp.distil, exp.mesh)
    _once(key, lambda: train_step(exp))
    for protocol in (exp.validate, exp.evaluate):
        same = dataclasses.replace(
            protocol, split="test", baselines=(), max_segments=0, warm_start=0
        )
        _once((exp.model, same, exp.mesh), lambda same=same: scoring(exp, same))
    g = dataclasses.replace(exp.generate, prompt="", prompt_file=None, prompts_file=None)
    g = dataclasses.replace(g, stop=(), json=None, detokenise=False, length=1)
    _once((exp.model, g), lambda: generation(exp))


def _once(key: Any, work: Any) -> None:
    if key not in _traced:
        work()
        _traced.add(key)


def train_step(exp: ExperimentConfig) -> None:
    """Traces one dispatch of training, which is ``steps_per_dispatch`` updates."""
    if exp.model.n_layer > DEEP:
        exp = dataclasses.replace(exp, model=dataclasses.replace(exp.model, scan_layers=True))
    t = exp.train
    shardings = Shardings(make_mesh(exp.mesh, exp.model, t.batch_size, t.micro_batches))
    model, optimizer = TransformerXL(exp.model, shardings.mesh), make_optimizer(exp)
    state = jax.eval_shape(lambda: init_state(exp, model, optimizer))
    width = t.longest_seg_len
    lead = (t.steps_per_dispatch,) if t.steps_per_dispatch > 1 else ()
    shape: Any = jax.ShapeDtypeStruct
    fed: tuple[Any, ...] = (_batch(lead, t.batch_size, t.context_len, width),)
    if t.text_on_device:
        number = shape(lead, jnp.int32)
        places = BatchPosition(
            number, number, shape((*lead, t.batch_size), jnp.int32), shape(lead, jnp.bool_)
        )
        size = (t.batch_size, 2 * width)
        k = min(exp.distil.words, exp.model.vocab_size or 1)
        soft = None
        if exp.distil.teachers:
            soft = SoftTargets(shape((*size, k), jnp.uint16), shape((*size, k), jnp.float16))
        fed = (places, DeviceText(shape(size, jnp.int32), soft, width, t.context_len))
    jax.eval_shape(make_dispatch(exp, model, optimizer), state, *fed)


def _batch(lead: tuple[int, ...], rows: int, context_len: int, width: int) -> Batch:
    shape = lambda kind, *sides: jax.ShapeDtypeStruct((*lead, rows, *sides), kind)
    whole = context_len + width
    reset = shape(jnp.bool_, whole) if context_len else shape(jnp.bool_)
    return Batch(shape(jnp.int32, whole), shape(jnp.int32, width), shape(jnp.float32, width), reset)  # type: ignore[arg-type]


def scoring(exp: ExperimentConfig, protocol: ProtocolConfig) -> None:
    """Traces the scoring of one segment under a protocol."""
    deep = exp.model.n_layer > DEEP
    cfg = dataclasses.replace(exp.model, scan_layers=deep)
    mesh = make_mesh(exp.mesh, cfg, exp.train.batch_size)
    text = np.zeros(protocol.batch_size + 1, np.int32)
    evaluator = Evaluator(cfg, protocol, text, mesh, training=text)
    params = param_shapes(cfg)
    mems = evaluator.first_memory_shapes(params)
    batch = _batch((), evaluator.batches.rows, protocol.context_len, protocol.seg_len)
    if protocol.dynamic.rule == "none":
        jax.eval_shape(evaluator._score, params, batch, mems, evaluator._temperature)
        return
    copies = (params, params) if protocol.dynamic.rule == "rms" else ()
    jax.eval_shape(evaluator._learn, Learner(params, *copies), batch, mems, evaluator._rates)


def generation(exp: ExperimentConfig) -> None:
    """Traces one step of generation: one token of every continuation of a prompt."""
    layers = min(exp.model.n_layer, DEEP)
    cfg = dataclasses.replace(exp.model, n_layer=layers, scan_layers=False, remat="none")
    c, rows = exp.generate, compiled_rows(exp.generate.samples)
    cfg = with_window(cfg)
    params, shape = param_shapes(cfg), typing.cast(Any, jax.ShapeDtypeStruct)
    cast, extend, _, project = generate._programs(cfg)
    ids = shape((rows,), jnp.int32)
    if cfg.memory_free:
        width = min(c.mem_len, cfg.n_positions or c.mem_len)
        past: Any = generate.LastTokens(shape((rows, width), jnp.int32), ids)
    else:
        mems = jax.eval_shape(lambda: TransformerXL(cfg).init_mems(rows, c.mem_len))
        past = jax.eval_shape(project, {"params": params}, mems)
    seen: Any = shape((rows, cfg.vocab_size or 0), jnp.bool_)
    state = generate.DecodeState(ids, past, seen, None)
    draws = generate._Draws(np.uint32(c.seed), ids, shape((64,), jnp.int32))
    jax.eval_shape(
        extend, jax.eval_shape(cast, params), state, draws, np.int32(1), sampling_of(c), None
    )


# The draws and their outcome.


@dataclasses.dataclass
class Outcome:
    """The results of the draws: how many had each outcome, the longest times, and the failures."""

    counts: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    slowest: dict[str, tuple[float, str]] = dataclasses.field(default_factory=dict)
    failures: list[str] = dataclasses.field(default_factory=list)

    def took(self, kind: str, seconds: float, what: str) -> None:
        """Notes the time of a draw if no earlier draw took longer for ``kind``, check or trace."""
        self.slowest[kind] = max(self.slowest.get(kind, (0.0, "")), (seconds, what))


def run(draws: int, seed: int, first: int = 0, traced: bool = True) -> Outcome:
    """Makes ``draws`` draws, from draw number ``first`` on, and returns their results.

    A draw depends only on the seed and on its number. If ``traced``, the programs of accepted
    settings are traced too.
    """
    base, outcome = ExperimentConfig.from_dict(BASE), Outcome()
    for number in range(first, first + draws):
        rng = random.Random(f"{seed} {number}")
        as_text, changed = rng.random() < 0.5, changes(rng)
        what = f"draw {number}, {'text' if as_text else 'values'}: {_short(changed)}"
        try:
            exp, stage = _checked(base, changed, as_text, what, outcome)
            outcome.counts[stage] += 1
            if exp is not None and traced:
                start = time.perf_counter()
                trace(exp)
                outcome.took("trace", time.perf_counter() - start, what)
        except Exception as error:
            outcome.failures.append(f"{what}: {type(error).__name__}: {str(error)[:300]}")
    return outcome


def _checked(
    base: ExperimentConfig, changed: dict[str, Any], as_text: bool, what: str, outcome: Outcome
) -> tuple[ExperimentConfig | None, str]:
    """Returns the experiment (None if refused) and its outcome; adds failures to ``outcome``."""
    start, stage, exp = time.thread_time(), "refused by the settings", None
    try:
        exp = read(base, changed, as_text)
        if exp.model.vocab_size is None:  # a run takes it from the text
            exp = override(exp, {"model.vocab_size": 30})
        stage = "refused by the devices or their memory"
        check(exp)
        stage = "accepted"
    except ConfigError as error:
        exp, message = None, str(error)
        if "\n" in message or not 0 < len(message) <= LONGEST_MESSAGE:
            outcome.failures.append(f"{what}: message of {len(message)}: {message[:300]!r}")
    seconds = time.thread_time() - start
    outcome.took("check", seconds, what)
    if seconds > HUNG_SECONDS:
        outcome.failures.append(f"{what}: the settings took {seconds:.1f} s to check")
    return exp, stage


def _short(changed: dict[str, Any]) -> str:
    return ", ".join(f"{key}={_text(value)[:60]!r}" for key, value in changed.items())


def main() -> int:
    """Prints counts, the slowest draws and every failure; returns 1 if any draw failed."""
    parser = argparse.ArgumentParser()
    for name, default in (("draws", 10_000), ("seed", 0), ("first", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    outcome = run(**vars(parser.parse_args()))
    print(", ".join(f"{count} {name}" for name, count in outcome.counts.most_common()))
    for kind, (seconds, what) in outcome.slowest.items():
        print(f"slowest {kind}: {seconds:.2f} s, {what}")
    print(f"{len(outcome.failures)} failures", *outcome.failures, sep="\n  ")
    return 1 if outcome.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
