"""``--mode=compile``: compiles and describes an experiment's programs without running any.

    train       one call of the train step, exactly as training compiles it
    validate    one segment scored during training, while the training state is held
    evaluate    one segment scored by a trained model, with layers that are not scanned

The devices are those at hand, or TPUs or GPUs that are not at hand. No text is read and no workdir
is created: a text of zeros gives the batch its shape.
"""

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from jax.sharding import Mesh

from txl_jax.checkpoint.trained_model import param_shapes
from txl_jax.config import ExperimentConfig, ProtocolConfig, TransformerXLConfig
from txl_jax.data.batch import SoftTargets
from txl_jax.data.feed import training_batch
from txl_jax.data.on_device import device_text, training_position
from txl_jax.evaluation.evaluator import Evaluator
from txl_jax.evaluation.protocols import describe, keeps_cache, under_protocol
from txl_jax.model.attention import planned_attention
from txl_jax.model.transformer_xl import TransformerXL
from txl_jax.parallel.device_memory import GIB, program_bytes
from txl_jax.parallel.shardings import Shardings
from txl_jax.planning import flops
from txl_jax.planning.costs import Collective, collectives, library_calls
from txl_jax.planning.machines import CHIPS
from txl_jax.planning.topologies import topology_devices
from txl_jax.planning.vocabulary import with_vocab_size
from txl_jax.training.multi_seed import check_one_device, seeds_step
from txl_jax.training.optimizer import make_optimizer
from txl_jax.training.setup import training_attention, training_mesh, unchecked_streams
from txl_jax.training.state import abstract_state
from txl_jax.training.step import compiled_step


class Flops(NamedTuple):
    """The operations of a call by formula; ``device`` counts all those on one device."""

    model: float
    recomputed: float
    device: float


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program in numbers.

    ``resident`` is the size in bytes of other arrays that each device holds meanwhile. ``memory``
    is jaxlib's ``memory_analysis``, or ``None`` if the compiler refused with ``error``.
    ``compiler_flops`` is the compiler's count for one device, which counts a loop's body once;
    ``None`` if it does not count. ``collectives`` and ``calls`` (of kernels and libraries) are
    ``None`` if jaxlib cannot read the program. ``attention`` says how attention is computed.
    """

    name: str
    description: str
    attention: str
    seconds: float
    flops: Flops
    resident: int
    memory: Any = None
    compiler_flops: float | None = None
    collectives: tuple[Collective, ...] | None = ()
    calls: dict[str, int] | None = None
    error: str = ""

    def fits(self, limit: int | None) -> bool:
        """Returns whether a device of ``limit`` bytes (``None``: unknown) holds the program."""
        m = self.memory
        return m is not None and (limit is None or program_bytes(m) + self.resident <= limit)


def compile_ahead(exp: ExperimentConfig, topology: str | None) -> int:
    """Compiles and prints every program of ``exp``; returns 0, or 1 if one does not fit.

    ``topology`` is one such as ``v5e:4x4`` or ``h200:1x1x8``; ``None`` means the devices at hand.
    """
    exp = with_vocab_size(exp)
    devices = topology_devices(topology) if topology else jax.devices()
    mesh = training_mesh(exp, devices)
    limit = None if topology else (devices[0].memory_stats() or {}).get("bytes_limit")
    if topology:
        limit = CHIPS[topology.partition(":")[0]].memory
    print(_heading(exp, mesh, topology), flush=True)
    fitting = []
    for program in programs(exp, mesh):
        print(format_program(program, limit), flush=True)
        fitting.append(program.fits(limit))
    return 0 if all(fitting) else 1


def programs(exp: ExperimentConfig, mesh: Mesh) -> Iterator[Program]:
    """Yields every program of an experiment on a mesh as soon as it is compiled."""
    shardings, t = Shardings(mesh), exp.train
    model, optimizer, n = TransformerXL(exp.model, mesh), make_optimizer(exp), t.steps_per_dispatch
    state = abstract_state(exp, model, optimizer, shardings)
    rows = -(-t.batch_size // shardings.row_devices)
    of_device = sum(flops.update_flops(exp, rows)) / mesh.shape["tensor"]
    updates = n * t.num_seeds
    per_call = Flops(*(count * updates for count in (*flops.update_flops(exp), of_device)))
    description = f"{n} update(s) of {t.batch_size} x {t.seg_len} targets, memory {t.mem_len}"
    description += f", {t.num_seeds} seeds" * (t.num_seeds > 1)
    lowered = lower_update(exp, model, optimizer, shardings, state)
    attention = training_attention(exp, mesh).describe()
    yield _compile("train", description, attention, lowered, per_call)
    size = lambda x: math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    resident = sum(map(size, jax.tree.leaves((state.opt_state, state.mems))))
    if t.num_seeds > 1:  # a copy of one seed's state is scored beside all states
        resident += t.num_seeds * sum(map(size, jax.tree.leaves(state)))
    yield _scoring("validate", exp.model, exp.validate, mesh, resident)
    unrolled = dataclasses.replace(exp.model, scan_layers=False, remat="none")
    yield _scoring("evaluate", unrolled, exp.evaluate, mesh)


def lower_update(
    exp: ExperimentConfig, model: Any, optimizer: Any, shardings: Shardings, state: Any
) -> jax.stages.Lowered:
    """Lowers the train step with a text of zeros, but does not compile it."""
    t = exp.train
    zeros = _zeros(t.batch_size, t.context_len + t.longest_seg_len)
    text, soft, streams = None, None, cast(Any, unchecked_streams(exp, zeros))
    if t.text_on_device:
        if exp.distil.teachers:
            size = streams.stream_tokens().size, min(exp.distil.words, exp.model.vocab_size or 1)
            soft = SoftTargets(np.zeros(size, np.uint16), np.zeros(size, np.float16))
        text = device_text(streams, soft)
    read_step: Any = training_position if text else training_batch
    batch = read_step(streams, 0, t.epoch_memory, t.reset_every)
    lead = (t.steps_per_dispatch,) if t.steps_per_dispatch > 1 else ()
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((*lead, *x.shape), x.dtype), batch)
    if t.num_seeds > 1:
        return _lower_seeds(exp, model, optimizer, shardings, (state, shapes, text))
    step: Any = compiled_step(exp, model, optimizer, shardings, state, text)
    return step.lower(state, shapes, *filter(None, [text]))


def _lower_seeds(
    exp: ExperimentConfig, model: Any, optimizer: Any, shardings: Shardings, inputs: Any
) -> jax.stages.Lowered:
    check_one_device(shardings.mesh)
    state, shapes, text = inputs
    place = lambda lead, x: jax.ShapeDtypeStruct(
        (*lead, *x.shape), x.dtype, sharding=shardings.replicated()
    )
    one, of_seeds = (functools.partial(place, lead) for lead in ((), (exp.train.num_seeds,)))
    seeds = of_seeds(jax.ShapeDtypeStruct((), np.uint32))
    step: Any = seeds_step(exp, model, optimizer)
    placed = jax.tree.map(of_seeds, (state, shapes)), jax.tree.map(one, text)
    return step.lower(*placed[0], placed[1], seeds)


def _scoring(
    name: str, model: TransformerXLConfig, protocol: ProtocolConfig, mesh: Mesh, resident: int = 0
) -> Program:
    text = _zeros(protocol.batch_size, protocol.context_len + protocol.seg_len)
    evaluator, shardings = Evaluator(model, protocol, text, mesh, training=text), Shardings(mesh)
    cfg, shapes = evaluator.model.cfg, param_shapes(model)
    passes, cached = 1 if protocol.dynamic.rule == "none" else 3, keeps_cache(model, protocol)

    def count(rows: int) -> float:
        layers = flops.layer_flops(cfg, protocol, rows, cached)
        return passes * (layers + flops.vocabulary_flops(cfg, protocol, rows))

    device = count(-(-protocol.batch_size // shardings.row_devices)) / mesh.shape["tensor"]
    place = lambda x, sharding: x.update(sharding=sharding)
    params = jax.tree.map(place, shapes, shardings.parameters(shapes))
    description = f"one segment; {describe(protocol, model)}"
    per_call = Flops(count(protocol.batch_size), 0.0, device)
    lowered = evaluator.lower(params)
    attention = _scoring_attention(model, protocol, evaluator.batches.rows, mesh)
    return _compile(name, description, attention, lowered, per_call, resident)


def _scoring_attention(
    model: TransformerXLConfig, protocol: ProtocolConfig, rows: int, mesh: Mesh
) -> str:
    if keeps_cache(model, protocol):
        return "to a cache of projected memory (not fused: no fused kernel reads a cache)"
    seg_len, cfg = protocol.context_len + protocol.seg_len, under_protocol(model, protocol)
    return planned_attention(cfg, rows, seg_len, protocol.mem_len, False, mesh).describe()


def _compile(
    name: str,
    description: str,
    attention: str,
    lowered: jax.stages.Lowered,
    per_call: Flops,
    resident: int = 0,
) -> Program:
    about = name, description, attention
    start = time.perf_counter()
    try:
        with _no_cache():
            compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as refused:
        if "RESOURCE_EXHAUSTED" not in str(refused):
            raise
        seconds, error = time.perf_counter() - start, str(refused).splitlines()[0]
        return Program(*about, seconds, per_call, resident, error=error)
    seconds, costs = time.perf_counter() - start, compiled.cost_analysis() or {}
    read = compiled.memory_analysis(), costs.get("flops")
    return Program(*about, seconds, per_call, resident, *read, *_exchanges_and_calls(compiled))


def _exchanges_and_calls(compiled: jax.stages.Compiled) -> tuple[Any, Any]:
    try:
        text = compiled.as_text() or ""
    except jax.errors.JaxRuntimeError:  # for a TPU v5p, with jaxlib 0.10.2 and libtpu 0.0.52
        return None, None
    return tuple(collectives(text)), library_calls(text)


@contextlib.contextmanager
def _no_cache() -> Iterator[None]:
    """Turns off the compilation cache; a cached program has no compile time or memory analysis."""
    settings: Any = jax.config
    before = settings.jax_enable_compilation_cache
    settings.update("jax_enable_compilation_cache", False)
    try:
        yield
    finally:
        settings.update("jax_enable_compilation_cache", before)


def format_program(program: Program, limit: int | None) -> str:
    """Describes a program in a few lines; ``limit`` is the memory of a device in bytes."""
    m, f, count = program.memory, program.flops, program.compiler_flops
    lines = [f"{program.name}: {program.description}"]
    add = lambda label, text: lines.append(f"  {label:<12}{text}")
    if m is None:
        add("memory", f"DOES NOT FIT: {program.error}")
    else:
        parts = f"arguments {_gib(m.argument_size_in_bytes)}, output {_gib(m.output_size_in_bytes)}"
        parts += f" ({_gib(m.alias_size_in_bytes)} of it reuses the arguments' memory), temporaries"
        parts += f" {_gib(m.temp_size_in_bytes)}, program {_gib(m.generated_code_size_in_bytes)}"
        add("memory", f"on each device: {parts}")
        state = f" + {_gib(program.resident)} of the training state" if program.resident else ""
        verdict = "(the limit of this device is unknown)"
        if limit is not None:
            verdict = f"of {_gib(limit)}: {'fits' if program.fits(limit) else 'DOES NOT FIT'}"
        add("total", f"{_gib(program_bytes(m))}{state} {verdict}")
    recomputed = f", and {f.recomputed:.3e} recomputed" if f.recomputed else ""
    add("FLOPs", f"by formula {f.model:.3e}{recomputed}; {f.device:.3e} on each device")
    if count is not None:
        add("", f"the compiler counts {count:.3e} on each device, each loop once")
    if program.collectives is None:
        add("collectives", "unknown: this jaxlib cannot read the program of libtpu")
    elif m is not None:
        found = [f"{x.count} {x.kind} ({x.size / 1e6:,.1f} MB)" for x in program.collectives]
        add("collectives", ", ".join(found) or "none")
    add("attention", program.attention)
    if program.calls:
        add("calls", ", ".join(f"{n} {target}" for target, n in program.calls.items()))
    add("compiled in", f"{program.seconds:.1f} s")
    return "\n".join(lines)


def _heading(exp: ExperimentConfig, mesh: Mesh, topology: str | None) -> str:
    c, device = exp.model, mesh.devices.flat[0]
    parameters = sum(x.size for x in jax.tree.leaves(param_shapes(c)))
    where = f"{mesh.size} {f'of {topology} (' if topology else 'x '}{device.device_kind}"
    axes = " x ".join(f"{axis} {n}" for axis, n in mesh.shape.items())
    layers = "scanned" if c.scan_layers else "one by one"
    return (
        f"{exp.name}: {parameters:,} parameters, vocabulary {c.vocab_size:,}; {c.dtype},"
        f" layers {layers}, remat {c.remat}\n"
        f"{where}{')' if topology else ''}, mesh {axes}\n"
        f"jax {jax.__version__}, {device.client.platform_version.replace(chr(10), ' ')}"
    )


def _zeros(batch_size: int, length: int) -> np.ndarray:
    """Returns a text of zeros that gives every stream two segments."""
    return np.zeros(batch_size * (2 * length + 1) + 1, np.int32)


def _gib(size: int) -> str:
    return f"{size / GIB:.3f} GiB"
