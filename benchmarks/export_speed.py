"""Times exported programs in turn with the library's own; also measures the export itself.

    python -m benchmarks.export_speed --size=12l_512 [--batch-size=1] [--set export.mem_len=512]

An export writes the model as programs that run without txl_jax; its seconds and the sizes of its
files are reported. The program ``nll`` scores a segment, and the program ``step`` processes one
token. Each call
continues with the memory or the cache that the previous call returned. The exported programs and
those of the library compute the same functions: both get the lengths of the segments, and both
update the cache in place.
"""

import argparse
import pathlib
import runpy
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.interleaved import add_flags, changes, report_of, tell, write
from benchmarks.sizes import experiment
from txl_jax.analysis.speed import random_params, time_alternating
from txl_jax.checkpoint.export import export
from txl_jax.checkpoint.trained_model import TrainedModel
from txl_jax.data.vocab import Vocab
from txl_jax.model.transformer_xl import TransformerXL

STEPS = 8
"""The number of tokens in one timing of ``step``."""


def main(argv: list[str] | None = None) -> None:
    """Exports a model, times its programs, prints the results and writes them to ``--out``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_flags(parser)
    parser.add_argument("--batch-size", type=int, default=1)
    flags = parser.parse_args(argv)
    exp = experiment(flags.size, {"model.scan_layers": False, **changes(flags)})
    model, params = TransformerXL(exp.model), random_params(exp.model)
    trained = TrainedModel(model, params, Vocab.from_ids(exp.model.vocab_size or 0), exp, 0)
    with tempfile.TemporaryDirectory() as parent:
        folder = pathlib.Path(parent) / "programs"
        began = time.perf_counter()
        export(trained, folder, exp.export)
        seconds = time.perf_counter() - began
        n_bytes = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
        run = runpy.run_path(str(folder / "run.py"))
        loaded = run["parameters"](), {name: run["program"](name)[0] for name in PROGRAMS}
    print(f"exported in {seconds:.1f} s, {sum(n_bytes.values()) / 2**20:.1f} MiB: {n_bytes}")
    report: dict[str, Any] = {
        "benchmark": "export_speed",
        "size": flags.size,
        "settings": changes(flags),
        "export": {"seconds": seconds, "bytes": n_bytes},
    }
    b, c = flags.batch_size, exp.export
    for name, tokens in (("nll", b * c.seg_len), ("step", b)):
        both = {
            "txl_jax": timed(name, own(model, params), b, model, c),
            "exported": timed(name, exported(*loaded), b, model, c),
        }
        print(f"{name}, batch {b}, T {c.seg_len}, M {c.mem_len}")
        report[name] = report_of(time_alternating(both, flags.rounds), tokens=tokens)
        tell(report[name])
    write(flags.out, report)


PROGRAMS = ("nll", "cache", "step")


def own(model: TransformerXL, params: Any) -> dict[str, Callable]:
    """Returns the library's programs by name; ``nll`` and ``step`` also return the next state."""
    variables = {"params": params}
    project = jax.jit(lambda v, mems: model.apply(v, mems, seg_len=1, method="init_cache"))
    nll = jax.jit(
        lambda v, ids, lengths, mems: model.apply(v, ids, ids, mems, lengths=lengths, method="nll")
    )
    step = jax.jit(lambda v, token, cache: model.apply(v, token[:, None], cache), donate_argnums=2)
    return {
        "nll": lambda ids, lengths, mems: nll(variables, ids, lengths, mems),
        "cache": lambda mems: project(variables, mems),
        "step": lambda token, cache: step(variables, token, cache),
    }


def exported(params: dict[str, jax.Array], programs: dict[str, Callable]) -> dict[str, Callable]:
    """Returns the exported programs by name, with the same arguments as those of :func:`own`."""
    return {
        "nll": lambda ids, lengths, mems: programs["nll"](
            params, ids, ids, lengths, vars(mems) if hasattr(mems, "filled") else mems
        ),
        "cache": lambda mems: programs["cache"](params, vars(mems)),
        "step": lambda token, cache: programs["step"](params, token, cache),
    }


def timed(name: str, programs: dict[str, Callable], b: int, model, c) -> Callable[[], float]:
    """Returns a function that calls the program ``name`` and returns the seconds of one call.

    ``step`` is called STEPS times in a row, and ``nll`` once. ``b`` is the number of texts; ``c``
    has the lengths of segment and memory.
    """
    ids, lengths = jnp.ones((b, c.seg_len), jnp.int32), jnp.full((b,), c.seg_len, jnp.int32)
    state = model.init_mems(b, c.mem_len)
    if name == "step":
        state = programs["cache"](state)

    def run() -> float:
        nonlocal state
        calls = STEPS if name == "step" else 1
        began = time.perf_counter()
        for _ in range(calls):
            arguments = (ids[:, 0],) if name == "step" else (ids, lengths)
            found, state = programs[name](*arguments, state)
        jax.block_until_ready((found, state))
        return (time.perf_counter() - began) / calls

    return run


if __name__ == "__main__":
    main()
