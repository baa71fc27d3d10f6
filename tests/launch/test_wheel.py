"""The package works in a new environment, installed from a wheel or as an editable package."""

import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import venv

import pytest
from places import ROOT

import txl_jax

PARTS = ("txl_jax", "configs", "pyproject.toml", "README.md", "LICENSE")
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
SITE = "import sysconfig; print(sysconfig.get_path('purelib'))"


def run(command, cwd=None):
    """Runs a command without PYTHONPATH, which names the checkout; returns the output."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    pipe = subprocess.PIPE
    done = subprocess.run(command, env=env, cwd=cwd, stdout=pipe, stderr=pipe, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Returns the folder ``bin`` of a new environment in which the built wheel is installed.

    Other packages come from the environment that runs the tests.
    """
    folder = tmp_path_factory.mktemp("wheel")
    copy_source(folder / "source")
    run([*PIP, "wheel", "-q", "--no-deps", "-w", str(folder / "built"), str(folder / "source")])
    (wheel,) = (folder / "built").iterdir()
    assert wheel.name == f"txl_jax-{txl_jax.__version__}-py3-none-any.whl"
    return environment(folder / "env", str(wheel)).parent


def copy_source(folder):
    folder.mkdir()
    for part in PARTS:
        if (ROOT / part).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / part, folder / part, ignore=ignored)
        else:
            shutil.copy(ROOT / part, folder / part)


def environment(folder, *package):
    """Makes an environment in which a package is installed; returns the path of its Python.

    Other packages come from the environment that runs the tests.
    """
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    run([*PIP, "--python", str(python), "install", "-q", "--no-deps", *package])
    # A .pth file adds this environment's folder, so that dependencies are found. Python does not
    # read the .pth files in the added folder, so an editable install of the checkout is not found.
    site = pathlib.Path(run([str(python), "-c", SITE]).strip())
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return python


@pytest.mark.slow
def test_the_command_trains_a_recipe_by_name_and_lists_settings(installed, tmp_path):
    where = run([installed / "python", "-c", "import txl_jax; print(txl_jax.__file__)"], tmp_path)
    assert where.startswith(str(installed.parent))
    printed = run([installed / "txl", "--config=quickstart:smoke"], tmp_path)
    assert "held-out bpb" in printed
    assert (tmp_path / "runs" / "quickstart-smoke" / "evaluation.json").exists()
    printed = run([installed / "txl", "--mode=settings", "train.steps"], tmp_path)
    assert printed.startswith("train.steps = 1000\n")


@pytest.mark.integration
def test_every_file_is_in_the_wheel(installed):
    site = pathlib.Path(run([installed / "python", "-c", SITE]).strip())
    names = {"txl_jax": "txl_jax", "configs": "txl_jax_configs"}
    assert {f"{names[f]}/{n}" for f in names for n in files(ROOT / f)} == {
        f"{name}/{n}" for name in names.values() for n in files(site / name)
    }


def files(folder):
    """Returns the names of all files below a folder except those in ``__pycache__``."""
    found = (f.relative_to(folder) for f in folder.rglob("*") if f.is_file())
    return {str(name) for name in found if "__pycache__" not in name.parts}


@pytest.mark.slow
def test_an_editable_install_is_found_from_the_folder_above_and_by_a_type_checker(tmp_path):
    """From the parent folder, the clone ``txl_jax`` looks like a package without __init__.py."""
    clone = tmp_path / "txl_jax"
    copy_source(clone)
    python = environment(tmp_path / "env", "-e", str(clone))
    code = "import txl_jax; print(txl_jax.__file__, txl_jax.load.__name__)"
    assert run([python, "-c", code], tmp_path) == f"{clone}/txl_jax/__init__.py load\n"
    shown = run([python.parent / "txl", "--mode=settings", "train.steps"], tmp_path)
    assert shown.startswith("train.steps = 1000\n")
    script = tmp_path / "script.py"
    script.write_text("import txl_jax\n\nreveal_type(txl_jax.load('runs/a').step)\n")
    options = ["--python-executable", str(python), "--follow-imports=silent"]
    checked = run([sys.executable, "-m", "mypy", *options, str(script)], tmp_path)
    assert 'Revealed type is "int"' in checked.replace("builtins.", "")
