"""If a GPU or TPU is present but does not start, the CPU never replaces it silently.

No accelerator is needed: files under another root, a fake nvidia-smi and a plugin that fails
simulate the machines.
"""

import os
import pathlib
import subprocess
import sys
import types

import jax
import pytest
from places import ROOT
from tiny_runs import write_config

import txl_jax
from txl_jax import library
from txl_jax.config import ConfigError
from txl_jax.parallel import accelerators

IN_ORDER = "--xla_cpu_enable_concurrency_optimized_scheduler=false"
FORCED = "--xla_force_host_platform_device_count"
PLUGIN = """
def initialize():
    raise RuntimeError("Unable to load cuDNN. Is it installed?")
"""


def program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def nvidia_smi(folder, driver="580.95.05", capability="9.0"):
    """Writes a fake nvidia-smi; returns a value of PATH that starts with its folder."""
    answer = f'[ "$1" = -L ] && echo "GPU 0: a GPU" || echo "{driver}, {capability}"'
    program(folder / "nvidia-smi", answer)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


@pytest.fixture
def broken(tmp_path):
    """A function that runs Python with a fake nvidia-smi and a plugin that fails without cuDNN."""
    plugin = tmp_path / "plugin" / "jax_plugins" / "xla_broken" / "__init__.py"
    plugin.parent.mkdir(parents=True)
    plugin.write_text(PLUGIN)
    python_path = os.pathsep.join([str(plugin.parents[2]), str(ROOT)])

    def run(*words, platforms):
        environment = {**os.environ, "PATH": nvidia_smi(tmp_path), "PYTHONPATH": python_path}
        del environment["JAX_PLATFORMS"]
        if platforms is not None:
            environment["JAX_PLATFORMS"] = platforms
        return subprocess.run(
            [sys.executable, *words],
            env=environment,
            capture_output=True,
            text=True,
            cwd=tmp_path,
            check=False,
        )

    return run


@pytest.mark.integration
@pytest.mark.parametrize("platforms", ["cuda,cpu", "cuda", "gpu,cpu"])
def test_the_command_ends_in_one_line_where_the_plugin_that_was_asked_for_fails(
    broken, tmp_path, platforms
):
    config = write_config(tmp_path)
    done = broken("-m", "txl_jax.main", f"--config={config}", "--workdir=run", platforms=platforms)
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: JAX_PLATFORMS={platforms.split(',')[0]}: ")
    for part in ("Unable to load cuDNN", "driver 580.95.05", "plugin ", "JAX_PLATFORMS=cpu"):
        assert part in line
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run" / "config.json").exists()


STARTS = "from txl_jax.parallel.accelerators import *; start_devices(); start_devices()"


@pytest.mark.integration
@pytest.mark.parametrize(("platforms", "warns"), [(None, True), ("", True), ("cpu", False)])
def test_the_cpu_beside_a_gpu_is_a_warning_unless_it_was_asked_for(broken, platforms, warns):
    done = broken("-c", STARTS, platforms=platforms)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    assert len(lines) == warns
    for part in ("an NVIDIA GPU (nvidia-smi", "uses the CPU", "cuDNN", "driver 580.95.05"):
        assert all(part in line for line in lines)
    assert "Traceback" not in done.stderr


def test_training_and_loading_in_python_start_the_devices_first(monkeypatch, tmp_path):
    def refuse():
        raise ConfigError("no GPU")

    monkeypatch.setattr(library, "start_devices", refuse)
    with pytest.raises(ConfigError, match="no GPU"):
        txl_jax.train("quickstart", tmp_path / "run")
    with pytest.raises(ConfigError, match="no GPU"):
        txl_jax.load(tmp_path / "run")
    assert not list(tmp_path.iterdir())


VENDOR = "sys/bus/pci/devices/0000:00:04.0/vendor"


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A function that simulates a machine with the given files, nvidia-smi and packages only."""
    for name in ("CUDA_VISIBLE_DEVICES", "TPU_LIBRARY_PATH", *accelerators._TPU_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    root, tools = tmp_path / "root", tmp_path / "tools"
    tools.mkdir()
    monkeypatch.setattr(accelerators, "ROOT", f"{root}/")
    monkeypatch.setenv("PATH", str(tools))

    def make(*files, smi=None, packages=()):
        for file in files:
            (root / file).parent.mkdir(parents=True, exist_ok=True)
            (root / file).write_text("0x1ae0\n" if file == VENDOR else "")
        if smi:
            nvidia_smi(tools, *smi)
        monkeypatch.setattr(accelerators, "installed_version", dict(packages).get)
        return root

    return make


def started(monkeypatch, platforms, backend):
    """Calls ``start_devices`` with a fake JAX that starts ``backend``, or raises it if an error."""

    def default_backend():
        if isinstance(backend, Exception):
            raise backend
        return backend

    one_device = {"jax_num_cpu_devices": 1}
    stand_in = types.SimpleNamespace(
        config=types.SimpleNamespace(values={"jax_platforms": platforms, **one_device}),
        default_backend=default_backend,
        distributed=jax.distributed,
        __version__="0.10.2",
    )
    monkeypatch.setattr(accelerators, "jax", stand_in)
    accelerators.start_devices.__wrapped__()


@pytest.mark.parametrize(
    ("files", "sign"),
    [
        (["dev/nvidia0", "dev/nvidiactl"], "an NVIDIA GPU (DEV/nvidia0)"),
        (["dev/nvidia3"], "an NVIDIA GPU (DEV/nvidia3)"),
        (["dev/dxg"], None),  # every WSL 2 has it
        (["usr/lib/wsl/lib/libcuda.so.1"], "an NVIDIA GPU ("),
        (["proc/driver/nvidia/gpus/0000:01:00.0/information"], "an NVIDIA GPU ("),
        (["dev/accel0"], "a TPU (DEV/accel0)"),
        (["dev/vfio/0", "dev/vfio/vfio", VENDOR], "a TPU (DEV/vfio/0)"),
        (["dev/vfio/0", "dev/vfio/vfio"], None),
        (["dev/vfio/vfio"], None),
        ([], None),
    ],
)
@pytest.mark.parametrize("platforms", [None, "", "cpu", "cpu,cuda"])
def test_each_sign_of_an_accelerator_is_warned_of(
    machine, monkeypatch, capsys, files, sign, platforms
):
    root = machine(*files)
    started(monkeypatch, platforms, "cpu")
    said = capsys.readouterr().err
    if sign is None or platforms in ("cpu", "cpu,cuda"):
        assert said == ""
    else:
        assert said.count("\n") == 1
        assert f"warning: this machine has {sign.replace('DEV', f'{root}/dev')}" in said
        assert said.endswith("to use the CPU, set JAX_PLATFORMS=cpu\n")


@pytest.mark.parametrize("name", ["TPU_ACCELERATOR_TYPE", "TPU_WORKER_HOSTNAMES"])
def test_the_variables_of_a_tpu_are_a_sign_but_not_what_libtpu_says_elsewhere(
    machine, monkeypatch, name
):
    machine()
    monkeypatch.setenv(name, "WARNING: could not determine TPU worker hostnames")
    assert accelerators.find_accelerator() is None
    monkeypatch.setenv(name, "")
    assert accelerators.find_accelerator() is None
    monkeypatch.setenv(name, "v5litepod-4")
    assert accelerators.find_accelerator() == ("tpu", name)


GPU = ["dev/nvidia0"]
PLUGIN_13, PLUGIN_12 = ("jax-cuda13-plugin", "0.10.2"), ("jax-cuda12-plugin", "0.10.2")


@pytest.mark.parametrize(
    ("files", "smi", "packages", "state", "fix"),
    [
        ([], None, [], "driver not found, plugin not installed", "install NVIDIA's driver"),
        (GPU, ("580.95.05", "9.0"), [], "driver 580.95.05, plugin not", "'txl_jax[cuda13]'"),
        (GPU, ("580.95.05", "7.0"), [], "driver 580.95.05, plugin not", "'txl_jax[cuda12]'"),
        (GPU, ("550.54.14", "9.0"), [], "driver 550.54.14, plugin not", "'txl_jax[cuda12]'"),
        (GPU, ("GPU 0: a", "GPU"), [], "driver not found, plugin not", "'txl_jax[cuda12]'"),
        ([], ("580.95.05", "9.0"), [], "driver 580.95.05, plugin not", "'txl_jax[cuda13]'"),
        (GPU, ("470.82.01", "7.5"), [], "driver 470.82.01", "CUDA 12 needs 525"),
        (
            GPU,
            ("550.54.14", "9.0"),
            [PLUGIN_13],
            "plugin jax-cuda13-plugin 0.10.2, jax 0.10.2",
            "only cuda12 fits this driver and GPU: run pip uninstall jax-cuda13-plugin"
            " jax-cuda13-pjrt, then pip install 'txl_jax[cuda12]'",
        ),
        (
            GPU,
            ("580.95.05", "9.0"),
            [PLUGIN_12, PLUGIN_13],
            "jax-cuda13-plugin 0.10.2, jax-cuda12-plugin 0.10.2",
            "JAX takes one CUDA plugin: run pip uninstall jax-cuda12-plugin jax-cuda12-pjrt",
        ),
        (
            GPU,
            ("580.95.05", "9.0"),
            [("jax-cuda12-plugin", "0.7.2")],
            "jax-cuda12-plugin 0.7.2, jax 0.10.2",
            "same version: pip install 'jax[cuda12]==0.10.2'",
        ),
        ([], ("580.95.05", "9.0"), [PLUGIN_13], "driver 580", "/dev/nvidia0 is missing"),
        (GPU, ("580.95.05", "9.0"), [PLUGIN_13], "driver 580", "install CUDA's libraries again"),
    ],
)
def test_the_error_names_driver_plugin_and_fix_of_a_gpu(
    machine, monkeypatch, files, smi, packages, state, fix
):
    machine(*files, smi=smi, packages=packages)
    for backend in ("cpu", RuntimeError("Unable to initialize backend 'cuda': no device")):
        with pytest.raises(ConfigError) as caught:
            started(monkeypatch, "cuda,cpu", backend)
        assert str(caught.value).startswith("JAX_PLATFORMS=cuda: ")
        assert state in str(caught.value)
        assert fix in str(caught.value)
    assert "no device" in str(caught.value)


def test_a_driver_is_also_read_where_there_is_no_nvidia_smi(machine):
    root = machine("proc/driver/nvidia/version")
    version = root / "proc" / "driver" / "nvidia" / "version"
    for driver, kind in (
        ("550.54.14", "x86_64 Kernel Module"),
        ("580.65.06", "Open Kernel Module"),
    ):
        version.write_text(f"NVRM version: NVIDIA UNIX {kind} for x86_64  {driver}  Thu Feb 22\n")
        assert accelerators.driver_of_gpus() == (driver, None)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (9, "NVIDIA-SMI has failed because it couldn't communicate with the driver"),
        (18, "Failed to initialize NVML: Driver/library version mismatch"),
        (6, "No devices were found"),
        (0, "No devices were found"),
    ],
)
@pytest.mark.parametrize("files", [[], GPU])
def test_a_failing_nvidia_smi_means_a_driver_that_is_not_loaded(
    machine, monkeypatch, capsys, tmp_path, code, said, files
):
    machine(*files, packages=[PLUGIN_13])
    program(tmp_path / "tools" / "nvidia-smi", f'echo "{said}"\nexit {code}')
    started(monkeypatch, None, "cpu")
    warned = capsys.readouterr().err
    fails = code in (9, 18)
    assert warned.startswith("warning: this machine has an NVIDIA GPU" if fails or files else "")
    assert (f"nvidia-smi fails ({said}): load or update NVIDIA's driver" in warned) == fails
    assert bool(warned) == (fails or bool(files))


def test_gpus_that_a_variable_hides_are_named(machine, monkeypatch):
    machine(*GPU, smi=("580.95.05", "9.0"), packages=[PLUGIN_13])
    hiding = [("", True), ("-1", True), ("1,0", True), ("0,1", False), ("GPU-8932", False)]
    for value, hides in hiding:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        with pytest.raises(ConfigError) as caught:
            started(monkeypatch, "cuda,cpu", "cpu")
        assert ("hides the GPUs" in str(caught.value)) == hides


@pytest.mark.parametrize(
    ("files", "packages", "fix"),
    [
        ([], [], "pip install 'txl_jax[tpu]'"),
        (["dev/accel0"], [], "pip install 'txl_jax[tpu]'"),
        (["dev/accel0"], [("libtpu", "0.0.21")], "pip install 'jax[tpu]==0.10.2'"),
        ([], [("libtpu", "0.0.42")], "run the program on a TPU VM"),
    ],
)
def test_the_error_names_plugin_and_fix_of_a_tpu(machine, monkeypatch, files, packages, fix):
    machine(*files, packages=packages)
    with pytest.raises(ConfigError, match="JAX_PLATFORMS=tpu: ") as caught:
        started(monkeypatch, "tpu,cpu", RuntimeError("Unable to initialize backend 'tpu': none"))
    assert fix in str(caught.value)
    assert f"plugin {'libtpu ' if packages else 'not installed'}" in str(caught.value)


@pytest.mark.parametrize("backend", ["gpu", "tpu"])
def test_an_accelerator_that_starts_is_no_message(machine, monkeypatch, capsys, backend):
    machine(*GPU)
    for platforms in (None, "cuda,cpu", "tpu,cpu"):
        started(monkeypatch, platforms, backend)
    assert capsys.readouterr() == ("", "")


@pytest.mark.integration
@pytest.mark.parametrize("extras", ["", "cuda13"])
def test_a_false_nvidia_smi_without_a_plugin_ends_gpu_node_with_the_reason(tmp_path, extras):
    """The fake virtual environment runs this Python, and its pip installs nothing."""
    venv = tmp_path / "venv"
    program(venv / "bin" / "python", f'[ "$2" = pip ] || exec {sys.executable} "$@"')
    environment = {**os.environ, "PATH": nvidia_smi(tmp_path / "tools")}
    del environment["JAX_PLATFORMS"]
    script = pathlib.Path(ROOT, "launch", "gpu_node.sh")
    done = subprocess.run(
        [script, "--config=quickstart:smoke", f"--workdir={tmp_path / 'run'}"],
        env=environment | {"TXL_VENV": str(venv), "TXL_EXTRAS": extras},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "error: JAX_PLATFORMS=cuda: " in done.stderr
    assert "driver 580.95.05, plugin " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("devices", "platforms", "flags", "joined", "expected"),
    [
        (8, "cpu", "--xla_a=1", False, f"--xla_a=1 {IN_ORDER}"),
        (1, "cpu", "--xla_a=1", False, "--xla_a=1"),
        (1, "cpu", f"{FORCED}=4", False, f"{FORCED}=4 {IN_ORDER}"),
        (1, "cpu", "", True, IN_ORDER),
        (1, None, "", True, ""),  # several GPUs or TPUs
        (8, "cpu", IN_ORDER.replace("false", "true"), False, IN_ORDER.replace("false", "true")),
    ],
)
def test_collectives_of_several_cpu_devices_have_an_order_and_enough_threads(
    monkeypatch, devices, platforms, flags, joined, expected
):
    """Otherwise devices sometimes wait in different collectives, and XLA aborts the process."""
    settings = {"jax_num_cpu_devices": devices, "jax_platforms": platforms}
    monkeypatch.setattr(type(jax.config), "values", settings)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: joined)
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.delenv("PJRT_NPROC")
    accelerators.order_collectives()
    assert os.environ["XLA_FLAGS"] == expected
    several = IN_ORDER.partition("=")[0] in expected
    assert (int(os.environ.get("PJRT_NPROC", 0)) >= 64) == several


@pytest.mark.parametrize("name", ["NPROC", "PJRT_NPROC"])
def test_the_users_number_of_threads_is_kept(monkeypatch, name):
    settings = {"jax_num_cpu_devices": 8, "jax_platforms": "cpu"}
    monkeypatch.setattr(type(jax.config), "values", settings)
    monkeypatch.delenv("PJRT_NPROC")
    monkeypatch.setenv(name, "3")
    accelerators.order_collectives()
    assert os.environ.get("PJRT_NPROC", "3") == "3"
