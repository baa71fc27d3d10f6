"""``--mode=compile``: the programs of an experiment, compiled and described; none is run.

    train       one call of the train step, as training compiles it: donation, micro-batches,
                updates of a dispatch, mesh
    validate    one segment scored while training goes on, beside the state that it holds
    evaluate    one segment scored by a trained model (layers one by one)

For the devices at hand, or for those of a TPU slice that is not there. No text is read and no
workdir is made: a text of zeros, just long enough, gives the batch its shape.
"""

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh

from txl_jax.config import ExperimentConfig, ProtocolConfig, TransformerXLConfig
from txl_jax.data.batch import SoftTargets
from txl_jax.data.feed import training_batch
from txl_jax.data.on_device import device_text, training_position
from txl_jax.data.sentences import shuffled_streams
from txl_jax.evaluation.evaluator import Evaluator
from txl_jax.evaluation.protocols import describe, keeps_cache
from txl_jax.model.transformer_xl import TransformerXL
from txl_jax.parallel.shardings import Shardings, make_mesh
from txl_jax.planning import products
from txl_jax.planning.chips import CHIPS, GIB
from txl_jax.planning.costs import Exchange, Held, compiler_flops, exchanges, held_by
from txl_jax.planning.topology import devices_of, kind_of
from txl_jax.planning.vocabulary import with_known_size
from txl_jax.training.optimizer import make_optimizer
from txl_jax.training.state import init_state, state_shardings
from txl_jax.training.step import compiled_step


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program in numbers.

    Attributes:
      name: ``train``, ``validate``, ``evaluate``.
      about: what one call does, in words.
      seconds: that compiling took.
      held: bytes on each device; ``None``: the compiler refused, and ``refused`` is its reason.
      beside: bytes on each device that something else holds meanwhile.
      flops_model: of one call, by formula, all devices together (products.py).
      flops_again: the same, of what is computed a second time to save memory.
      flops_device: both, of one device: its rows, and what every device computes for itself.
      flops_compiler: of one call on one device by the compiler's count, each loop's body once.
      exchanged: what devices exchange in one call; ``None``: jaxlib cannot read the program of
        this libtpu back (its memory and time are known all the same).
    """

    name: str
    about: str
    seconds: float
    held: Held | None
    beside: int
    flops_model: float
    flops_again: float
    flops_device: float
    flops_compiler: float | None = None
    exchanged: tuple[Exchange, ...] | None = ()
    refused: str = ""

    def fits(self, limit: int | None) -> bool:
        """Whether a device of so many bytes holds it; ``None``: no limit is known."""
        if self.held is None:
            return False
        return limit is None or self.held.total + self.beside <= limit


def compile_ahead(exp: ExperimentConfig, topology: str | None) -> int:
    """Compiles and describes every program of ``exp`` on stdout; 0, or 1 if one does not fit.

    Args:
      exp: any experiment; its vocabulary's size is its own or the published corpus's.
      topology: such as ``v5e:4x4``; ``None``: the devices at hand.

    Raises:
      ConfigError, PlanningError: a mesh, slice or vocabulary that cannot be.
    """
    exp = with_known_size(exp)
    devices = devices_of(topology) if topology else jax.devices()
    mesh = mesh_of(exp, devices)
    limit = memory_of(devices[0], topology)
    print(_heading(exp, mesh, topology), flush=True)
    fit = True
    for program in programs(exp, mesh):
        print(described(program, limit), flush=True)
        fit = fit and program.fits(limit)
    return 0 if fit else 1


def mesh_of(exp: ExperimentConfig, devices: Sequence[jax.Device]) -> Mesh:
    """The mesh that training would have on these devices."""
    t = exp.train
    return make_mesh(exp.mesh, exp.model, t.batch_size, t.micro_batches, devices)


def memory_of(device: jax.Device, topology: str | None) -> int | None:
    """Bytes that a program may use on a device, ``None`` where that is not known (CPU)."""
    if topology:
        return CHIPS[kind_of(topology)].memory
    return (device.memory_stats() or {}).get("bytes_limit")


def programs(exp: ExperimentConfig, mesh: Mesh) -> Iterator[Program]:
    """Every program of an experiment on a mesh, one after the other as they are compiled."""
    shardings, t = Shardings(mesh), exp.train
    state = abstract_state(exp, shardings)
    model, again = products.of_update(exp)
    own = products.on_a_device(products.cut_of_training(exp), shardings.row_devices)
    on_device = sum(products.of_update(exp, own)) / mesh.shape["tensor"]
    updates = t.steps_per_dispatch
    yield _compiled(
        "train",
        f"{updates} update(s) of {t.batch_size} x {t.seg_len} targets, memory {t.mem_len}",
        lower_update(exp, shardings, state),
        flops=(model * updates, again * updates, on_device * updates),
    )
    beside = _bytes_on_a_device((state.opt_state, state.mems))
    yield _scoring("validate", exp.model, exp.validate, mesh, beside)
    one_by_one = dataclasses.replace(exp.model, scan_layers=False, remat="none")
    yield _scoring("evaluate", one_by_one, exp.evaluate, mesh, beside=0)


def abstract_state(exp: ExperimentConfig, shardings: Shardings) -> Any:
    """Shapes of the whole training state, with where each leaf lies."""
    model = TransformerXL(exp.model, shardings.mesh)
    optimizer = make_optimizer(exp)
    shapes = jax.eval_shape(lambda: init_state(exp, model, optimizer))
    return _placed(shapes, state_shardings(shardings, shapes))


def lower_update(exp: ExperimentConfig, shardings: Shardings, state: Any) -> jax.stages.Lowered:
    """The train step of the training loop for these shapes, not compiled yet.

    A text that lies on the device is counted with the length of one segment.
    """
    t = exp.train
    model = TransformerXL(exp.model, shardings.mesh)
    optimizer = make_optimizer(exp)
    length = t.context_len + t.longest_seg_len
    streams = shuffled_streams(
        _zeros(t.batch_size, length),
        t.batch_size,
        t.seg_len,
        seed=exp.seed,
        context_len=t.context_len,
        seg_len_std=t.seg_len_std,
        partial_shuffle=t.partial_shuffle,
    )
    text, of_step = None, cast(Any, training_batch)
    if t.text_on_device:
        text, of_step = device_text(streams, _soft_zeros(exp, streams)), training_position
    fed = of_step(streams, 0, t.epoch_memory, t.reset_every)
    lead = (t.steps_per_dispatch,) if t.steps_per_dispatch > 1 else ()
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((*lead, *x.shape), x.dtype), fed)
    step: Any = compiled_step(exp, model, optimizer, shardings, state, text)
    return step.lower(state, shapes, *filter(None, [text]))


def _soft_zeros(exp: ExperimentConfig, streams: Any) -> SoftTargets | None:
    """What teachers say, as it lies beside the text; ``None``: there are none."""
    if not exp.distil.teachers:
        return None
    shape = streams.stream_tokens().size, min(exp.distil.words, exp.model.vocab_size or 1)
    return SoftTargets(np.zeros(shape, np.uint16), np.zeros(shape, np.float16))


def _scoring(
    name: str, model: TransformerXLConfig, protocol: ProtocolConfig, mesh: Mesh, beside: int
) -> Program:
    text = _zeros(protocol.batch_size, protocol.context_len + protocol.seg_len)
    evaluator = Evaluator(model, protocol, text, mesh, training=text)
    shardings = Shardings(mesh)
    mems = evaluator.model.init_mems  # needs no parameters
    shapes = jax.eval_shape(
        lambda: evaluator.model.init(
            jax.random.key(0),
            jax.numpy.zeros((1, 1), "int32"),
            mems(1, 0 if model.memory_free else 1),
        )
    )["params"]
    params = _placed(shapes, shardings.parameters(shapes))
    cut = products.cut_of_protocol(protocol)
    own = products.on_a_device(cut, shardings.row_devices)
    passes = 1 if protocol.dynamic.rule == "none" else 3
    cfg = evaluator.model.cfg
    cached = keeps_cache(cfg, protocol)
    whole, part = (
        passes * (products.of_layers(cfg, x, cached) + products.of_words(cfg, x))
        for x in (cut, own)
    )
    flops = (whole, 0.0, part / mesh.shape["tensor"])
    about = f"one segment; {describe(protocol, model)}"
    return _compiled(name, about, evaluator.lower(params), flops, beside)


def _compiled(
    name: str,
    about: str,
    lowered: jax.stages.Lowered,
    flops: tuple[float, float, float],
    beside: int = 0,
) -> Program:
    start = time.perf_counter()
    try:
        with _no_cache():
            compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        seconds, said = time.perf_counter() - start, str(error).splitlines()[0]
        return Program(name, about, seconds, None, beside, *flops, refused=said)
    seconds = time.perf_counter() - start
    counted = compiler_flops(compiled)
    return Program(
        name, about, seconds, held_by(compiled), beside, *flops, counted, _exchanged(compiled)
    )


def _exchanged(compiled: jax.stages.Compiled) -> tuple[Exchange, ...] | None:
    try:
        return tuple(exchanges(compiled.as_text() or ""))
    except jax.errors.JaxRuntimeError:  # of a TPU v5p, with jaxlib 0.10.2 and libtpu 0.0.52
        return None


@contextlib.contextmanager
def _no_cache() -> Iterator[None]:
    """A program from the compilation cache took no time to compile, and its memory is not told."""
    settings: Any = jax.config
    before = settings.jax_enable_compilation_cache
    settings.update("jax_enable_compilation_cache", False)
    try:
        yield
    finally:
        settings.update("jax_enable_compilation_cache", before)


def described(program: Program, limit: int | None) -> str:
    """A program in a few lines."""
    lines = [f"{program.name}: {program.about}"]
    say = lambda label, text: lines.append(f"  {label:<12}{text}")
    if program.held is None:
        say("memory", f"DOES NOT FIT: {program.refused}")
    else:
        h = program.held
        say(
            "memory",
            f"on each device: arguments {_gib(h.arguments)}, output {_gib(h.output)} (of which"
            f" {_gib(h.alias)} in the arguments' place), temporaries {_gib(h.temporaries)},"
            f" program {_gib(h.program)}",
        )
        with_state = f" + {_gib(program.beside)} of the training state" if program.beside else ""
        verdict = "(this device tells no limit)"
        if limit is not None:
            verdict = "fits" if program.fits(limit) else "DOES NOT FIT"
            verdict = f"of {_gib(limit)}: {verdict}"
        say("total", f"{_gib(h.total)}{with_state} {verdict}")
    again = program.flops_again
    by_formula = f"by formula {program.flops_model:.3e}"
    by_formula += f", and {again:.3e} computed again" if again else ""
    say("FLOPs", f"{by_formula}; {program.flops_device:.3e} on each device")
    if program.flops_compiler is not None:
        say("", f"the compiler counts {program.flops_compiler:.3e} there, each loop once")
    if program.exchanged is None:
        say("exchanges", "not known: this jaxlib cannot read the program that libtpu made")
    elif program.held is not None:
        told = [f"{x.count} {x.kind} ({x.size / 1e6:,.1f} MB)" for x in program.exchanged]
        say("exchanges", ", ".join(told) or "none")
    say("compiled in", f"{program.seconds:.1f} s")
    return "\n".join(lines)


def _heading(exp: ExperimentConfig, mesh: Mesh, topology: str | None) -> str:
    parameters = sum(x.size for x in jax.tree.leaves(abstract_state(exp, Shardings(mesh)).params))
    kind = mesh.devices.flat[0].device_kind
    where = f"{mesh.size} of {topology} ({kind})" if topology else f"{mesh.size} x {kind}"
    axes = " x ".join(f"{axis} {n}" for axis, n in mesh.shape.items())
    c = exp.model
    how = f"{c.dtype}, layers {'scanned' if c.scan_layers else 'one by one'}, remat {c.remat}"
    built = mesh.devices.flat[0].client.platform_version.replace("\n", " ")
    return (
        f"{exp.name}: {parameters:,} parameters, vocabulary {c.vocab_size:,}; {how}\n"
        f"{where}, mesh {axes}\n"
        f"jax {jax.__version__}, {built}"
    )


def _placed(shapes: Any, shardings: Any) -> Any:
    place = lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at)
    return jax.tree.map(place, shapes, shardings)


def _bytes_on_a_device(placed: Any) -> int:
    size = lambda x: int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize
    return sum(size(leaf) for leaf in jax.tree.leaves(placed))


def _zeros(batch_size: int, length: int) -> np.ndarray:
    """A text of zeros that gives every stream two segments."""
    return np.zeros(batch_size * (2 * length + 1) + 1, np.int32)


def _gib(size: int) -> str:
    return f"{size / GIB:.3f} GiB"
