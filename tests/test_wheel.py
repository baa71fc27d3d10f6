"""The package as others install it: a wheel, in another environment, outside of a checkout."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv

import pytest

import txl_jax

ROOT = pathlib.Path(__file__).resolve().parents[1]
PARTS = ("txl_jax", "configs", "pyproject.toml", "README.md", "LICENSE")


def run(command, cwd=None):
    """Output of a command that must not see the checkout, where PYTHONPATH leads."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    pipe = subprocess.PIPE
    done = subprocess.run(command, env=env, cwd=cwd, stdout=pipe, stderr=pipe, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder of programs of an environment with the wheel, and this one's dependencies."""
    folder = tmp_path_factory.mktemp("wheel")
    for part in PARTS:
        if (ROOT / part).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / part, folder / "source" / part, ignore=ignored)
        else:
            shutil.copy(ROOT / part, folder / "source" / part)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run([*pip, "wheel", "-q", "--no-deps", "-w", str(folder / "built"), str(folder / "source")])
    (wheel,) = (folder / "built").iterdir()
    assert wheel.name == f"txl_jax-{txl_jax.__version__}-py3-none-any.whl"
    venv.create(folder / "env", with_pip=False)
    python = folder / "env" / "bin" / "python"
    run([*pip, "--python", str(python), "install", "-q", "--no-deps", str(wheel)])
    site = run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"])
    # Dependencies come from this environment. A path in a .pth file runs no other .pth file, so
    # an editable install of the checkout there is not seen.
    (pathlib.Path(site.strip()) / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return python.parent


@pytest.mark.integration
def test_the_command_trains_a_recipe_by_name_and_lists_settings(installed, tmp_path):
    where = run([installed / "python", "-c", "import txl_jax; print(txl_jax.__file__)"], tmp_path)
    assert where.startswith(str(installed.parent))
    printed = run([installed / "txl", "--config=quickstart:smoke"], tmp_path)
    assert "held-out bpb" in printed
    assert (tmp_path / "runs" / "quickstart-smoke" / "evaluation.json").exists()
    printed = run([installed / "txl", "--mode=settings", "train.steps"], tmp_path)
    assert printed.startswith("train.steps = 1000\n")


def test_every_package_is_in_the_wheel():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = {f.parent.relative_to(ROOT) for p in PARTS[:2] for f in (ROOT / p).rglob("*.py")}
    names = {".".join(folder.parts) for folder in folders}
    expected = {re.sub("^configs", "txl_jax_configs", name) for name in names}
    assert set(settings["tool"]["setuptools"]["packages"]) == expected
