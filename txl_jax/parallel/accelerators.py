"""Starts JAX's devices, and says why a GPU or TPU of this machine is not among them.

JAX catches every error of a CUDA plugin, such as a missing cuDNN or a driver that is too old, and
continues on the CPU. It does so even with ``JAX_PLATFORMS=cuda,cpu`` if no GPU is visible.
"""

import functools
import glob
import logging
import os
import pathlib
import re
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

from txl_jax.config import ConfigError
from txl_jax.library_errors import installed_version
from txl_jax.messages import one_line
from txl_jax.standard_streams import say

ROOT = "/"
"""The folder that contains ``proc``, ``dev`` and ``sys``."""

_GPU_FILES = ("dev/nvidia[0-9]*", "usr/lib/wsl/lib/libcuda.so*", "proc/driver/nvidia/gpus/*")
_GOOGLE = "0x1ae0\n"  # the vendor of TPUs; other devices have files in /dev/vfio too
_TPU_VARIABLES = ("TPU_ACCELERATOR_TYPE", "TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID")
_CUDA = {"cuda13": (580, (7, 5)), "cuda12": (525, (0, 0))}
"""The package's extras for GPUs, newest first, with the lowest driver and compute capability."""
_SCHEDULER = "--xla_cpu_enable_concurrency_optimized_scheduler"
_THREADS = 64  # the fewest threads of XLA for several CPU devices
_ON_PURPOSE = "; to use the CPU, set JAX_PLATFORMS=cpu"


@functools.cache
def start_devices() -> None:
    """Starts JAX's devices, once per process; warns if JAX does not use the machine's GPU or TPU.

    With several processes, call this after they are connected.

    Raises ConfigError if ``JAX_PLATFORMS`` begins with a platform that does not start. The message
    names the driver, the plugin and the fix. One of several processes exits with code 2 instead of
    raising the error, because JAX needs devices to count the processes.
    """
    order_collectives()
    asked = (jax.config.values["jax_platforms"] or "").split(",")[0].strip()
    if asked == "cpu":
        return
    with _library_messages() as said:
        try:
            started = jax.default_backend()
        except (RuntimeError, AssertionError) as error:  # an assertion if no platform is left
            said.append((logging.ERROR, str(error)))
            started = ""
    if started == "" or (asked and started == "cpu"):
        failure = _failure(asked, said)
        if not jax.distributed.is_initialized():
            raise ConfigError(failure)
        say(f"error: {one_line(failure)}")
        os._exit(2)
    found = find_accelerator() if started == "cpu" else None
    if found:
        kind, sign = found
        what = f"this machine has {_NAMES[kind]} ({sign}), but JAX uses the CPU"
        said = [(logging.WARNING, f"{what}: {_explain(kind, said)}")]
    for level, text in said:
        if level >= logging.WARNING:
            say(f"warning: {one_line(text)}")


_NAMES = {"gpu": "an NVIDIA GPU", "tpu": "a TPU"}


def order_collectives() -> None:
    """Keeps a program's collectives from waiting for ever on several CPU devices.

    By default, XLA can start independent collectives in a different order on each CPU device. The
    devices then wait for each other until XLA aborts after 40 seconds.

    Devices also wait for ever if waiting collectives block all threads of XLA. By default, XLA has
    only one thread for each core or device, but a collective in a loop and another one after the
    loop can wait at the same time.

    Environment variables prevent both problems. A compiler option could not: it has no effect on a
    program that comes from the compilation cache. Variables and flags that the user has set are
    kept.
    """
    flags, settings = os.environ.get("XLA_FLAGS", ""), jax.config.values
    several = (
        settings["jax_num_cpu_devices"] > 1
        or "--xla_force_host_platform_device_count" in flags
        or (jax.distributed.is_initialized() and settings["jax_platforms"] == "cpu")
    )
    if several and _SCHEDULER not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_SCHEDULER}=false".strip()
    if several and "NPROC" not in os.environ:
        os.environ.setdefault("PJRT_NPROC", str(max(_THREADS, os.cpu_count() or 1)))


def find_accelerator() -> tuple[str, str] | None:
    """Returns ``gpu`` or ``tpu`` and a sign that this machine has one, or ``None`` without a sign.

    A sign is for example a file in /dev. JAX is not asked.
    """
    for kind, files in (("gpu", _files(_GPU_FILES)), ("tpu", _tpu_files())):
        if files:
            return kind, files[0]
    listed, fault = _nvidia_smi("-L")
    if listed:
        return "gpu", "nvidia-smi lists it"
    for name in _TPU_VARIABLES:  # libtpu sets them to "WARNING…" if it finds no TPU
        if not (os.environ.get(name) or "WARNING").startswith("WARNING"):
            return "tpu", name
    return ("gpu", f"nvidia-smi fails: {fault}") if fault else None


def cuda_extra(driver: str | None, capability: tuple[int, int] | None = None) -> str | None:
    """Returns the package's extra for a driver such as ``580.95.05``, or ``None`` if it is too old.

    ``capability`` is the lowest compute capability of the GPUs, if known. For an unknown driver,
    the result is ``cuda12``.
    """
    if driver is None:
        return "cuda12"
    for extra, (oldest, lowest) in _CUDA.items():
        if int(driver.partition(".")[0]) >= oldest and (capability or lowest) >= lowest:
            return extra
    return None


def _failure(asked: str, said: list[tuple[int, str]]) -> str:
    """Returns the message of the error for a platform that did not start."""
    platform, label = asked, f"JAX_PLATFORMS={asked}"
    if not asked:  # JAX found a plugin, which failed
        found = re.search(r"Unable to initialize backend '(\w+)'", said[-1][1])
        platform, label = found[1] if found else "", "JAX's devices do not start"
    kind = "gpu" if platform in ("cuda", "gpu", "") else platform
    return f"{label}: {_explain(kind, said)}"


def _explain(kind: str, said: list[tuple[int, str]]) -> str:
    """Returns reason, driver, plugin and fix for a kind of device that did not start."""
    other = {"gpu": "'tpu'", "tpu": "'cuda'"}.get(kind)  # drops messages about the other kind
    texts = [_brief(text) for _, text in said if not (other and other in text)]
    reason = "; ".join(dict.fromkeys(filter(None, texts)))
    if kind == "tpu":
        state, fix = _tpu_state()
    elif kind == "gpu":
        state, fix = _gpu_state()
    else:
        state, fix = "plugin not started", "install JAX's plugin for this platform"
    state = f"{state}, jax {jax.__version__}"
    return f"{reason or 'JAX finds no such device'}; {state}; {fix}{_ON_PURPOSE}"


def _brief(said: str) -> str:
    """Shortens a message of JAX to the part that says what failed."""
    said = re.sub(r"\(set JAX_PLATFORMS=''.*?\)|\(you may need to uninstall.*?\)", "", said)
    return one_line(said).strip(" .;")[:500]


def _gpu_state() -> tuple[str, str]:
    """Returns a description of the GPUs' driver and plugin, and the fix."""
    driver, capability = driver_of_gpus()
    versions = {extra: installed_version(f"jax-{extra}-plugin") for extra in _CUDA}
    plugins = {extra: version for extra, version in versions.items() if version}
    shown = ", ".join(f"jax-{extra}-plugin {version}" for extra, version in plugins.items())
    state = f"driver {driver or 'not found'}, plugin {shown or 'not installed'}"
    return state, _gpu_fix(driver, cuda_extra(driver, capability), plugins)


def _gpu_fix(driver: str | None, extra: str | None, plugins: dict[str, str]) -> str:
    install = f"pip install 'txl_jax[{extra}]' (launch scripts: TXL_EXTRAS={extra})"
    if extra is None:
        return "update the driver: CUDA 12 needs 525 or later, and CUDA 13 needs 580 or later"
    if fault := _nvidia_smi("-L")[1]:
        how = "load or update NVIDIA's driver, and reboot after an update"
        return f"nvidia-smi fails ({fault}): {how}"
    if not driver and (find_accelerator() or ("",))[0] != "gpu":
        return "install NVIDIA's driver, or start the container with --gpus=all"
    if not plugins:
        return f"install the plugin: {install}"
    wrong = [
        name
        for name in plugins
        if (driver and name > extra) or (len(plugins) > 1 and name != extra)
    ]
    if wrong:
        names = " ".join(f"jax-{name}-plugin jax-{name}-pjrt" for name in wrong)
        why = "JAX takes one CUDA plugin"
        if driver and max(wrong) > extra:
            why = f"only {extra} fits this driver and GPU"
        return f"{why}: run pip uninstall {names}, then {install}"
    (name, version), *_ = plugins.items()
    if version != jax.__version__:
        same = f"pip install 'jax[{name}]=={jax.__version__}'"
        return f"jax and its plugin need the same version: {same}"
    if _are_hidden(hidden := os.environ.get("CUDA_VISIBLE_DEVICES", "all")):
        return f"CUDA_VISIBLE_DEVICES={hidden} hides the GPUs: unset it"
    if not _files((*_GPU_FILES[:2], "dev/nvidiactl")):
        return "/dev/nvidia0 is missing: install the driver, or start the container with --gpus=all"
    return f"install CUDA's libraries again: pip install --force-reinstall 'txl_jax[{name}]'"


def _are_hidden(visible: str) -> bool:
    """Tells whether the first GPU of ``CUDA_VISIBLE_DEVICES`` does not exist, which hides all."""
    index, listed = re.match("[0-9]+", visible), _nvidia_smi("-L")[0]
    if index is None:
        return re.match("GPU-|MIG-|all", visible) is None
    return 0 < len(re.findall("^GPU ", listed, re.MULTILINE)) <= int(index[0])


def _tpu_state() -> tuple[str, str]:
    """Returns a description of the TPUs' device files and plugin, and the fix."""
    version, files = installed_version("libtpu"), ", ".join(_tpu_files())
    state = f"driver {files or 'not found (/dev/accel0, /dev/vfio/0)'}"
    if version is None:
        fix = "install the plugin: pip install 'txl_jax[tpu]' (launch scripts: TXL_EXTRAS=tpu)"
        return f"{state}, plugin not installed (libtpu)", fix
    if not files:
        fix = "run the program on a TPU VM; a container there needs --privileged --net=host"
    else:
        fix = "end other processes that use the TPU; on a pod, start every worker with"
        fix += " --distributed; if this does not help, install the libtpu of this jax:"
        fix += f" pip install 'jax[tpu]=={jax.__version__}'"
    return f"{state}, plugin libtpu {version}", fix


def driver_of_gpus() -> tuple[str | None, tuple[int, int] | None]:
    """Returns the version of NVIDIA's driver, and the lowest compute capability of the GPUs."""
    text = _nvidia_smi("--query-gpu=driver_version,compute_cap", "--format=csv,noheader")[0]
    rows = re.findall(r"^([0-9]+\.[0-9.]+)(?:, *([0-9]+)\.([0-9]+))?", text, re.MULTILINE)
    if rows:
        capabilities = [(int(major), int(minor)) for _, major, minor in rows if major]
        return rows[0][0], min(capabilities, default=None)
    for file in _files(("proc/driver/nvidia/version",)):
        with open(file, encoding="utf-8", errors="replace") as opened:
            if found := re.search(r"Module.*?\s([0-9]+\.[0-9.]+)\s", opened.read()):
                return found[1], None
    return None, None


def _nvidia_smi(*flags: str) -> tuple[str, str]:
    """Returns what nvidia-smi prints, or an empty text and why nvidia-smi fails.

    Both texts are empty if nvidia-smi is not installed or finds no GPU. nvidia-smi fails if the
    driver is not loaded, or if the driver was updated without a reboot.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return "", ""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        done = subprocess.run([program, *flags], timeout=30, check=False, **pipes)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", one_line(error)
    said = done.stdout.decode(errors="replace").strip()
    if "No devices were found" in said:
        return "", ""
    return ("", one_line(said) or f"exit code {done.returncode}") if done.returncode else (said, "")


def _tpu_files() -> list[str]:
    files = _files(("dev/accel[0-9]*",))
    vendors = (pathlib.Path(file) for file in _files(("sys/bus/pci/devices/*/vendor",)))
    if any(vendor.read_text(errors="replace") == _GOOGLE for vendor in vendors):
        files += _files(("dev/vfio/[0-9]*",))
    return files


def _files(patterns: tuple[str, ...]) -> list[str]:
    return [file for pattern in patterns for file in sorted(glob.glob(ROOT + pattern))]


@contextmanager
def _library_messages() -> Iterator[list[tuple[int, str]]]:
    """Collects log messages and warnings of JAX and plugins, with levels, and prints none."""
    logger, handler = logging.getLogger("jax._src.xla_bridge"), _Collect()
    propagate, level = logger.propagate, logger.level
    logger.propagate = False
    logger.setLevel(logging.INFO)  # some failures are only logged as INFO
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            yield handler.said
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
        logger.setLevel(level)
    handler.said += [(logging.WARNING, str(warning.message)) for warning in caught]


class _Collect(logging.Handler):
    """Keeps the level and the text of each record; the text of an exception is its message."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
        except TypeError:  # JAX logs "plugin module %s could not be loaded" without the name
            text = str(record.msg)
        if record.exc_info and record.exc_info[1]:
            text = str(record.exc_info[1])
        self.said.append((record.levelno, text))
