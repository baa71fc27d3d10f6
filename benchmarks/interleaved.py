"""Code that the benchmarks share: flags, reports, and programs that run in another Python.

The benchmarks time several programs in turn (txl_jax/analysis/speed.py). A :class:`Peer` is a
program in another process, which runs the PyTorch code of the authors or of NVIDIA.
"""

import contextlib
import datetime
import json
import os
import pathlib
import platform
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import jax

from benchmarks.sizes import experiment
from txl_jax.analysis.speed import ratio, summary
from txl_jax.config import ExperimentConfig
from txl_jax.planning.machines import CHIPS

T = TypeVar("T")

ROOT = pathlib.Path(__file__).resolve().parents[1]
_GENERATION = {"family": "cpu family", "model": "model"}  # names here and in /proc/cpuinfo


def report_of(
    seconds: Mapping[str, list[float]], tokens: int, needed: float = 0, peak: float | None = None
) -> dict[str, Any]:
    """Returns a report with each program's times, its tokens a second, and its ratio to txl_jax.

    A ratio above 1 means that txl_jax is faster.

    Args:
      seconds: times of a unit of work (an update, segment or token), by name of the program.
      tokens: number of tokens in a unit.
      needed: operations that the model needs for a unit; used for the share of ``peak``.
      peak: peak operations a second of the machine; ``None`` leaves this share out.
    """
    programs, ratios = {}, {}
    for name, found in seconds.items():
        took = summary(found)
        programs[name] = {**took, "tokens_per_second": tokens / took["median"]}
        if peak and needed:
            programs[name]["utilisation"] = needed / took["median"] / peak
        if name != "txl_jax":
            ratios[name] = ratio(found, seconds["txl_jax"])
    return {
        "machine": machine(),
        "tokens": tokens,
        "operations": needed,
        "peak_memory": peak_memory(),
        "programs": programs,
        "ratios": ratios,
    }


def tell(report: dict[str, Any]) -> None:
    """Prints for each program a line with its times, its tokens a second, and its ratio."""
    for name, row in report["programs"].items():
        used = f", {row['utilisation']:.1%} of the peak" if "utilisation" in row else ""
        times = f"  {report['ratios'][name]['median']:.2f}x" if name in report["ratios"] else ""
        print(
            f"{name:<22} {1e3 * row['median']:9.2f} ms ({1e3 * row['lower_quartile']:.2f} to"
            f" {1e3 * row['upper_quartile']:.2f})  {row['tokens_per_second']:,.0f} tokens/s"
            f"{used}{times}",
            flush=True,
        )


def published_peak() -> float | None:
    """Returns the device's published peak, in bfloat16 operations a second; ``None`` if unknown."""
    kind = jax.devices()[0].device_kind.lower()
    return next((chip.flops for name, chip in CHIPS.items() if name in kind), None)


def machine() -> dict[str, Any]:
    """Returns the machine, the date, the versions, and how busy the machine is."""
    device = jax.devices()[0]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device.device_kind,
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "waited_for_a_core": _waited(),
        "python": platform.python_version(),
        "jax": jax.__version__,
    }


def peak_memory() -> int:
    """Returns the peak memory of the accelerator in bytes; without one, that of this process."""
    held = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return held or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def write(path: str | None, report: dict[str, Any]) -> None:
    """Writes the report as JSON if a path is given."""
    if path:
        pathlib.Path(path).write_text(json.dumps(report, indent=1) + "\n")


class Peer:
    """A PyTorch program in a process of its own, which runs benchmarks/original_speed.py."""

    def __init__(self, folder: str, python: str, job: dict[str, Any]):
        command = [python, "-m", "benchmarks.original_speed", f"--original={folder}"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        self._units = job["steps"]
        self.about = self._ask(job)

    def __call__(self) -> float:
        """Makes one call of the job; returns its seconds per update, segment or token."""
        return float(self._ask({})["seconds"]) / self._units

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()

    def _ask(self, what: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit("the peer ended; what it said stands above")
        return json.loads(answer)


@contextlib.contextmanager
def peers(flags: Any, job: dict[str, Any]) -> Iterator[dict[str, Peer]]:
    """Yields by name the programs of ``--original`` and ``--nvidia``, each in all ``--forms``."""
    found: dict[str, Peer] = {}
    folders = {"authors": flags.original, "nvidia": flags.nvidia}
    names = {"authors": "original", "nvidia": "NVIDIA's"}
    try:
        for code, folder in folders.items():
            for form in flags.forms.split(",") if folder else []:
                peer = Peer(folder, flags.original_python, {**job, "code": code, "form": form})
                found[f"{names[code]}, {form}"] = peer
        yield found
    finally:
        for peer in found.values():
            peer.close()


def add_flags(parser: Any) -> None:
    """Adds ``--size``, ``--set``, ``--rounds``, ``--out``, ``--dtypes`` and the flags of a peer."""
    add = parser.add_argument
    add("--size", default="12l_512", help="of benchmarks/sizes.py, or a recipe of configs/")
    add("--set", action="append", default=[], metavar="KEY=JSON", help="a setting of the size")
    add("--rounds", type=int, default=10)
    add("--out", help="JSON file to write")
    add("--original", help="the authors' pytorch/ folder, edited for this torch")
    add("--nvidia", help="the pytorch/ folder of NVIDIA's Transformer-XL")
    add("--original-python", default=sys.executable, help="a Python that has torch")
    add("--forms", default="eager", help="of both codes: eager, compile, or both by comma")
    add("--dtypes", default="", help="time ours in these dtypes too, such as float32,bfloat16")


def in_dtypes(
    flags: Any,
    program: Callable[[ExperimentConfig], T],
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, T]:
    """Returns by name txl_jax's program in the experiment's dtype, and in those of ``--dtypes``.

    ``program`` makes it from an experiment, which has the settings ``defaults`` unless ``--set``
    changes them.
    """
    settings = {**defaults, **changes(flags)}
    found = {"txl_jax": program(experiment(flags.size, settings))}
    for dtype in filter(None, flags.dtypes.split(",")):
        of_dtype = experiment(flags.size, {**settings, "model.dtype": dtype})
        found[f"txl_jax, {dtype}"] = program(of_dtype)
    return found


def changes(flags: Any) -> dict[str, Any]:
    """Returns the settings of ``--set``, such as ``{"train.batch_size": 16}``."""
    pairs = (text.partition("=") for text in flags.set)
    return {key: _value(value) for key, _, value in pairs}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def cpu_name(info: pathlib.Path = pathlib.Path("/proc/cpuinfo")) -> str:
    """Returns the name of this machine's processor, such as ``AMD EPYC (family 25, model 1)``.

    The model name alone can mean several generations: a virtual machine often says ``AMD EPYC``.
    """
    lines = info.read_text().splitlines() if info.is_file() else []
    fields = {key.strip(): value.strip() for key, _, value in (x.partition(":") for x in lines)}
    name = fields.get("model name", platform.processor())
    known = [f"{key} {fields[line]}" for key, line in _GENERATION.items() if line in fields]
    return f"{name} ({', '.join(known)})" if known else name


def _waited() -> float | None:
    """Returns the percentage of the last minute in which a task waited for a core, or ``None``."""
    file = pathlib.Path("/proc/pressure/cpu")
    if not file.is_file():
        return None
    return float(file.read_text().split("avg60=")[1].split()[0])
