"""``--mode=compile``: compiles and describes the programs of a run without running any.

The programs are those of run_programs.py. The devices are those of this machine, or TPUs or GPUs
that this machine does not have.
"""

import collections
import contextlib
import dataclasses
import pathlib
import tempfile
import time
from collections.abc import Container, Iterator, Sequence
from concurrent import futures
from typing import Any

import jax
from jax.sharding import Mesh

from txl_jax.checkpoint.trained_model import param_shapes
from txl_jax.config import ExperimentConfig
from txl_jax.model.precision import float32_products, resolved
from txl_jax.parallel.device_memory import GIB, gpu_share, memory_of_each, program_bytes
from txl_jax.parallel.mesh import idle_devices
from txl_jax.planning.costs import (
    Collective,
    collectives,
    float_atomics,
    library_calls,
    matrix_products,
)
from txl_jax.planning.gpus import GPUS
from txl_jax.planning.machines import CHIPS, PlanningError
from txl_jax.planning.run_programs import Flops, RunProgram, run_programs
from txl_jax.planning.topologies import topology_devices
from txl_jax.planning.vocabulary import with_vocab_size
from txl_jax.training.fine_tuning import resolve_experiment
from txl_jax.training.plan import seed_runs, training_mesh


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program in numbers.

    ``resident`` is the size in bytes of other arrays that each device holds while the program runs.
    ``memory`` is jaxlib's ``memory_analysis``, or ``None`` if the compiler refused the program with
    ``error``. ``compiler_flops`` is the compiler's count for one device, in which a loop's body
    counts once; it is ``None`` if the compiler does not count. ``collectives`` and ``calls`` (of
    kernels and libraries) are ``None`` if jaxlib cannot read the program. ``attention`` says how
    attention is computed, and ``products`` the types and the precision of matrix products.
    ``atomics`` is the number of atomic additions of floats in the machine code; their order is
    undefined.
    """

    name: str
    description: str
    attention: str
    flops: Flops | None
    resident: int
    seconds: float
    memory: Any = None
    compiler_flops: float | None = None
    collectives: tuple[Collective, ...] | None = ()
    calls: dict[str, int] | None = None
    products: tuple[str, ...] = ()
    atomics: int = 0
    error: str = ""

    def fits(self, limit: int | None) -> bool:
        """Returns whether a device of ``limit`` bytes (``None``: unknown) holds the program."""
        m = self.memory
        return m is not None and (limit is None or program_bytes(m) + self.resident <= limit)


def compile_ahead(exp: ExperimentConfig, topology: str | None, workdir: str = "") -> int:
    """Compiles and prints every program of ``exp``; returns 0, or 1 if one does not fit.

    ``topology`` is for example ``v5e:4x4`` or ``h200:1x1x8``; ``None`` means this machine's
    devices. ``workdir`` is the folder of the run, which might have the settings of
    ``train.start_from``.
    """
    _, folder = seed_runs(exp, workdir)[0]
    exp = with_vocab_size(resolve_experiment(exp, folder)[0])
    devices = topology_devices(topology) if topology else list(jax.devices())
    mesh = training_mesh(exp, devices)
    exp = dataclasses.replace(exp, model=resolved(exp.model, mesh))
    limit = _memory_of(topology) if topology else memory_of_each(devices)
    sizes = exp.train.batch_size, exp.train.micro_batches, len(devices)
    idle = idle_devices(mesh, exp.mesh, *sizes)
    print("\n".join(filter(None, (_heading(exp, mesh, topology), idle))), flush=True)
    fitting = []
    for program in programs(exp, devices):
        print(format_program(program, limit), flush=True)
        fitting.append(program.fits(limit))
    return 0 if all(fitting) else 1


def _memory_of(topology: str) -> int:
    """Returns the bytes of a described device that a command may use."""
    kind = topology.partition(":")[0]
    return int(CHIPS[kind].memory * (gpu_share() if kind in GPUS else 1))


def programs(
    exp: ExperimentConfig, devices: Sequence[jax.Device], names: Container[str] | None = None
) -> Iterator[Program]:
    """Yields the programs with these names, or all, in the order of the run.

    Two threads compile programs while the next ones are traced.
    """
    threads, waiting = futures.ThreadPoolExecutor(2), collections.deque[Any]()
    with _no_cache(), contextlib.ExitStack() as at_the_end:
        at_the_end.callback(threads.shutdown, cancel_futures=True)
        for program in run_programs(exp, devices):
            if names is None or program.name in names:
                traced = program.lower()
                waiting.append(threads.submit(compile_program, program, traced, devices[0]))
            while waiting and waiting[0].done():
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def compile_program(
    program: RunProgram, lowered: jax.stages.Lowered, device: jax.Device
) -> Program:
    """Compiles a program and reads its numbers; raises PlanningError if the compiler cannot.

    The compilation cache must be off, because a program from it has no memory analysis.
    """
    about = program.name, program.description, program.attention, program.flops, program.resident
    on_gpu = device.platform in ("gpu", "cuda")
    start, took = time.perf_counter(), lambda: time.perf_counter() - start
    with tempfile.TemporaryDirectory() as dump:
        options = {**compiler_options(device), **({"xla_dump_to": dump} if on_gpu else {})}
        try:
            compiled, seconds = _compile(lowered, options), took()
        except jax.errors.JaxRuntimeError as refused:
            if "RESOURCE_EXHAUSTED" in str(refused):
                return Program(*about, took(), error=str(refused).splitlines()[0])
            if "ptxas too old" in str(refused):
                raise PlanningError(
                    "the installed ptxas does not compile for this GPU; CUDA 13 does not support a"
                    " V100 (compute capability 7.0), so name another GPU"
                ) from refused
            raise
        atomics = float_atomics(pathlib.Path(dump))
    read = compiled.memory_analysis(), (compiled.cost_analysis() or {}).get("flops")
    calls = _exchanges_and_calls(compiled)
    return Program(*about, seconds, *read, *calls, matrix_products(lowered.as_text()), atomics)


def _compile(lowered: jax.stages.Lowered, options: dict[str, Any]) -> jax.stages.Compiled:
    """Compiles a program; if the GPU is absent and XLA's Triton tiles fail, compiles with cuBLAS.

    Without a GPU there is no autotuner, so XLA's first choice of tiles for a matrix product is
    final. What the autotuner of a GPU does with such a product is *not run*.
    """
    try:
        return lowered.compile(options)
    except jax.errors.JaxRuntimeError as refused:
        absent = jax.default_backend() != "gpu"
        untuned = ("find output tile sizes", "Failed to get configs")  # jax 0.10, 0.11
        if not absent or not any(text in str(refused) for text in untuned):
            raise
        return lowered.compile({**options, "xla_gpu_enable_triton_gemm": False})


def compiler_options(device: jax.Device) -> dict[str, Any]:
    """Returns the options with which a program is compiled for a device that can be absent."""
    if device.platform in ("gpu", "cuda") and jax.default_backend() != "gpu":
        # For CUB's sort on an H100, the compiler would need a CUDA device to ask for its memory.
        return {"xla_gpu_enable_cub_radix_sort": False}
    return {}


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
    if f is not None:
        recomputed = f", and {f.recomputed:.3e} recomputed" if f.recomputed else ""
        add("FLOPs", f"by formula {f.model:.3e}{recomputed}; {f.device:.3e} on each device")
    if f is not None and count is not None:
        add("", f"the compiler counts {count:.3e} on each device, each loop once")
    if program.collectives is None:
        add("collectives", "unknown: this jaxlib cannot read the program of libtpu")
    elif m is not None:
        found = [f"{x.count} {x.kind} ({_size(x.size)})" for x in program.collectives]
        add("collectives", ", ".join(found) or "none")
    if program.attention:
        add("attention", program.attention)
    if program.products:
        add("products", "; ".join(program.products))
    if m is not None:
        add("atomics", f"floating-point atomics: {program.atomics or 'none'}")
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
        f"float32 products: {float32_products(c.matmul_precision, mesh)}\n"
        f"{where}{')' if topology else ''}, mesh {axes}\n"
        f"jax {jax.__version__}, {device.client.platform_version.replace(chr(10), ' ')}"
    )


def _size(size: int) -> str:
    return f"{size:,} bytes" if size < 1e5 else f"{size / 1e6:,.1f} MB"


def _gib(size: int) -> str:
    return f"{size / GIB:.3f} GiB"
