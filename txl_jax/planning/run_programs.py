"""The programs that a run executes, lowered for its devices, in the order of the run.

    initialise            makes parameters, optimizer state and memory from the seed
    stack, unstack        stack a checkpoint's layers for the run, and unstack them again
    self-check            runs the fused attention of another program
    train                 runs one call of the train step, exactly as training compiles it
    validate, evaluate    score a segment; make the cache, or squared gradients (dynamic evaluation)
    generate              reads a part of a prompt; makes its memory a cache; draws up to 64 tokens

No text is read and no workdir is created: a text of zeros gives the batch its shape.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from txl_jax.checkpoint.trained_model import param_shapes
from txl_jax.config import DataConfig, ExperimentConfig, ProtocolConfig, TransformerXLConfig
from txl_jax.data.batch import SoftTargets
from txl_jax.data.on_device import check_single_process, device_text
from txl_jax.data.pieces import Pieces, Split
from txl_jax.data.vocab import Vocab
from txl_jax.evaluation.evaluator import Evaluator
from txl_jax.evaluation.protocols import (
    compared_protocols,
    describe,
    keeps_cache,
    memory_slots,
    under_protocol,
)
from txl_jax.generation.generate import PREFILL, lower_programs, read_attention
from txl_jax.generation.utf8 import Automaton, free_automaton
from txl_jax.model import flops, self_check
from txl_jax.model.attention import fuses_cache, may_fuse_cache, planned_attention
from txl_jax.model.layout import stack_layers, unstack_layers
from txl_jax.parallel.compile_cache import compiled_rows
from txl_jax.parallel.device_memory import array_bytes
from txl_jax.parallel.mesh import one_device, scoring_mesh
from txl_jax.parallel.shardings import Shardings
from txl_jax.planning.vocabulary import has_bytes
from txl_jax.training.plan import (
    StepSetup,
    attention_program,
    attention_sizes,
    check_seeds,
    training_mesh,
    unchecked_streams,
)
from txl_jax.training.state import state_shardings
from txl_jax.training.step import dispatch_shapes


class Flops(NamedTuple):
    """The operations of one call of a program, by formula.

    ``model`` and ``recomputed`` are the operations on all devices together. ``device`` is the sum
    of both on one device.
    """

    model: float
    recomputed: float
    device: float


class RunProgram(NamedTuple):
    """A program of a run, not compiled yet.

    ``attention`` says how attention is computed; it is empty for a program without attention.
    ``resident`` is the size in bytes of other arrays that each device holds while the program runs.
    ``flops`` is ``None`` for small programs.
    """

    name: str
    description: str
    lower: Callable[[], jax.stages.Lowered]
    attention: str = ""
    flops: Flops | None = None
    resident: int = 0


def run_programs(exp: ExperimentConfig, devices: Sequence[jax.Device]) -> Iterator[RunProgram]:
    """Yields every program of an experiment on these devices."""
    t = exp.train
    if t.text_on_device:
        check_single_process(devices)
    mesh = training_mesh(exp, devices)
    check_seeds(exp, mesh)
    setup, n = StepSetup.on(mesh, exp), t.steps_per_dispatch
    state = setup.abstract
    yield RunProgram("initialise", "the state before the first update", setup.lower_initialise)
    yield from _layouts(setup)
    program = attention_program(t, training_text(exp))
    yield from _self_check("train", exp.model, mesh, *attention_sizes(t), **program)

    rows = -(-t.batch_size // setup.shardings.row_devices)
    of_device = sum(flops.update_flops(exp, rows)) / mesh.shape["tensor"]
    updates = n * t.num_seeds
    per_call = Flops(*(count * updates for count in (*flops.update_flops(exp), of_device)))
    description = f"{n} update(s) of {t.batch_size} x {t.seg_len} targets, memory {t.mem_len}"
    description += f", {t.num_seeds} seeds" * (t.num_seeds > 1)
    lower: Any = functools.partial(lower_update, setup)
    yield RunProgram("train", description, lower, setup.attention.describe(), per_call)

    resident = array_bytes((state.opt_state, state.mems))
    if t.num_seeds > 1:  # the scored copy of one seed's state comes on top of all states
        resident += t.num_seeds * array_bytes(state)
    yield from _scoring("validate", exp.data, exp.model, exp.validate, mesh, resident)
    loaded = dataclasses.replace(exp.model, scan_layers=False, remat="none")
    for index, (about, protocol) in enumerate(compared_protocols(exp.evaluate)):
        on = scoring_mesh(exp.mesh, loaded, protocol.batch_size, devices)
        name = f"evaluate{f', {about}' * (index > 0)}"
        yield from _scoring(name, exp.data, loaded, protocol, on)
    if exp.generate.length:
        yield from _generation(exp, loaded, mesh)


def _layouts(setup: StepSetup) -> Iterator[RunProgram]:
    """Yields the programs that change the layout of the layers for a checkpoint, and back."""
    if not setup.exp.model.scan_layers:
        return
    state = setup.abstract
    stack = jax.jit(stack_layers, out_shardings=state_shardings(setup.shardings, state))
    lower, unstack = functools.partial(stack.lower, setup.on_disk), jax.jit(unstack_layers)
    yield RunProgram("stack", "a checkpoint's layers", lower)
    yield RunProgram("unstack", "layers for a checkpoint", functools.partial(unstack.lower, state))


def _self_check(
    name: str, c: TransformerXLConfig, mesh: Mesh, *sizes: int, **program: bool
) -> Iterator[RunProgram]:
    """Yields the self-check of the attention of a program, if a fused kernel computes it."""
    attention = self_check.planned(c, mesh, *sizes, **program)
    if kernel := attention.fused():
        lower = functools.partial(self_check.lower, attention, kernel)
        yield RunProgram(f"self-check, {name}", "values and gradients", lower, f"{kernel} (fused)")


def lower_update(setup: StepSetup) -> jax.stages.Lowered:
    """Lowers the train step with a text of zeros, but does not compile it."""
    exp, t = setup.exp, setup.exp.train
    text, soft, streams = None, None, training_text(exp)
    if t.text_on_device:
        if exp.distil.teachers:
            n_tokens = streams.batch_size * (streams.targets_per_stream + 1)
            size = n_tokens, min(exp.distil.words, exp.model.vocab_size or 1)
            soft = SoftTargets(np.zeros(size, np.uint16), np.zeros(size, np.float16))
        text = device_text(streams, soft)
    shapes = dispatch_shapes(t, streams)
    if t.num_seeds > 1:
        return _lower_seeds(setup, shapes, text)
    return setup.update(text).lower(setup.abstract, shapes, *filter(None, [text]))


def training_text(exp: ExperimentConfig) -> Any:
    """Returns the training streams of a text of zeros."""
    t = exp.train
    zeros = _zeros(exp.data, t.batch_size, t.context_len + t.longest_seg_len)
    return unchecked_streams(exp, zeros)


def _lower_seeds(setup: StepSetup, shapes: Any, text: Any) -> jax.stages.Lowered:
    n, whole = setup.exp.train.num_seeds, setup.shardings.replicated()
    place = lambda lead, x: jax.ShapeDtypeStruct((*lead, *x.shape), x.dtype, sharding=whole)
    one, of_seeds = (functools.partial(place, lead) for lead in ((), (n,)))
    seeds = of_seeds(jax.ShapeDtypeStruct((), np.uint32))
    placed = jax.tree.map(of_seeds, (setup.abstract, shapes)), jax.tree.map(one, text)
    return setup.update(text).lower(*placed[0], placed[1], seeds)


def _scoring(
    name: str,
    data: DataConfig,
    model: TransformerXLConfig,
    protocol: ProtocolConfig,
    mesh: Mesh,
    resident: int = 0,
) -> Iterator[RunProgram]:
    text = _zeros(data, protocol.batch_size, protocol.context_len + protocol.seg_len)
    evaluator, shardings = Evaluator(model, protocol, text, mesh, training=text), Shardings(mesh)
    cfg, shapes = evaluator.model.cfg, param_shapes(model)
    passes, cached = 1 if protocol.dynamic.rule == "none" else 3, keeps_cache(model, protocol)

    slots = memory_slots(model, protocol)
    sizes = evaluator.batches.rows, protocol.context_len + protocol.seg_len, slots
    # A fused kernel computes the scores of all distances (model/ring.py).
    fused = cached and fuses_cache(cfg, *sizes, mesh)
    counted = dataclasses.replace(cfg, clamp_len=-1) if fused else cfg

    def count(rows: int) -> float:
        layers = flops.layer_flops(counted, protocol, rows, cached)
        return passes * (layers + flops.vocabulary_flops(cfg, protocol, rows))

    device = count(-(-protocol.batch_size // shardings.row_devices)) / mesh.shape["tensor"]
    place = lambda x, sharding: x.update(sharding=sharding)
    params = jax.tree.map(place, shapes, shardings.parameters(shapes))
    if not cached or may_fuse_cache(cfg, mesh):
        for episodes in evaluator.batches.episodes():
            program = {"train": False, "episodes": episodes, "cached": cached}
            yield from _self_check(name, cfg, mesh, *sizes, **program)
    for part, lower in evaluator.lower_before(params).items():
        yield RunProgram(f"{name}, {part}", "before the first segment", lower, resident=resident)
    description = f"one segment; {describe(protocol, model, mesh)}"
    per_call = Flops(count(protocol.batch_size), 0.0, device)
    lower = functools.partial(evaluator.lower, params)
    attention = _scoring_attention(model, protocol, evaluator.batches.rows, mesh)
    yield RunProgram(name, description, lower, attention, per_call, resident)


def _scoring_attention(
    model: TransformerXLConfig, protocol: ProtocolConfig, rows: int, mesh: Mesh
) -> str:
    seg_len, cfg = protocol.context_len + protocol.seg_len, under_protocol(model, protocol)
    cached, slots = keeps_cache(model, protocol), memory_slots(model, protocol)
    if cached and not may_fuse_cache(cfg, mesh):
        return "to a cache of projected memory (not fused: no fused kernel reads a cache)"
    chosen = planned_attention(cfg, rows, seg_len, slots, False, mesh)
    if cached and chosen.reason:
        return f"to a cache of projected memory (not fused: {chosen.reason})"
    return chosen.describe()


def _generation(
    exp: ExperimentConfig, model: TransformerXLConfig, mesh: Mesh
) -> Iterator[RunProgram]:
    """Yields the programs of generation, which runs on the first device."""
    one = one_device(mesh.devices.flat[0])
    c, grammar = exp.generate, None
    # The settings might not name the tokenizer of a trained model; its vocabulary does.
    if has_bytes(exp.data) and (model.vocab_size or 0) <= 256:
        whole = free_automaton(Vocab.all_bytes())
        grammar = Automaton(*(x[:, : model.vocab_size] for x in whole))
    sizes, program = read_attention(model, c, compiled_rows(c.samples))
    yield from _self_check("generate", model, one, *sizes, train=False, **program)
    how = f"{c.samples} sample(s) of a prompt, memory {c.mem_len}"
    for name, lower in lower_programs(model, c, grammar, one).items():
        attention = ""
        if name == "read":
            attention = planned_attention(
                model, c.samples, PREFILL, c.mem_len, False, one
            ).describe()
        yield RunProgram(f"generate, {name}", how, lower, attention)


def _zeros(data: DataConfig, batch_size: int, length: int) -> Split:
    """Returns a text of zeros with two segments for every stream.

    If the settings split the text into documents, the text of each stream is a document. Files with
    the starts of documents, and folders of arrays, are not read.
    """
    ids = np.zeros(batch_size * (2 * length + 1) + 1, np.int32)
    if data.document_separator is None and not data.document_files:
        return ids
    starts = np.arange(batch_size) * (2 * length + 1)
    return Pieces(ids, starts, shared=data.document_separator is not None)
