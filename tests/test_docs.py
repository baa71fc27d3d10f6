"""The documentation site builds without a warning, and what its pages name is real."""

import importlib.util
import os
import pathlib
import re
import shlex
import subprocess
import sys
from typing import get_args

import pytest
from absl import flags

import txl_jax
from txl_jax.config import ExperimentConfig, load_config, override
from txl_jax.config.reading import flatten
from txl_jax.convert.__main__ import parse
from txl_jax.convert.conversion import Format
from txl_jax.main import _MODES  # and the import defines the flags

ROOT = pathlib.Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]

MISSING = [name for name in ("sphinx", "myst_parser") if not importlib.util.find_spec(name)]


@pytest.mark.skipif(
    bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (pip install -e .[test])"
)
def test_the_site_builds_without_a_warning(tmp_path):
    """Warnings are links and references that lead nowhere, pages in no contents, broken markup."""
    site, kept = tmp_path / "site", tmp_path / "doctrees"
    strictly = ["-W", "--keep-going", "-q", "-b", "html", "-d", str(kept)]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *strictly, str(DOCS), str(site)],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for page in DOCS.glob("*.md"):
        assert (site / page.with_suffix(".html").name).is_file(), page.name
    reference = (site / "api.html").read_text()
    for name in txl_jax.__all__:
        shown = re.search(rf'id="(module-)?txl_jax\.(\w+\.)*{name}"', reference)
        assert shown, f"{name} is not in the reference"
    assert "<blockquote" not in reference, "a drawing of a docstring is set as running text"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_relative_links_lead_to_files(page):
    for target in links(page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_settings_and_modes_that_are_named_exist(page):
    text = page.read_text()
    known = flatten(ExperimentConfig().to_dict())
    for key in re.findall(r"--config\.(\w[\w.]*\w)", text):
        assert key in known, key
    for mode in re.findall(r"--mode=(\w+)", text):
        assert mode in _MODES.split(), mode


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_are_accepted(page):
    """Known flags, and a config that passes every check with the command's settings."""
    for command in commands(page.read_text()):
        config, settings = None, {}
        for argument in command:
            name, _, value = argument.removeprefix("--").partition("=")
            if name.startswith("config."):
                settings[name.removeprefix("config.")] = value
            else:
                assert name in flags.FLAGS, f"{argument} in {command}"
                config = value if name == "config" else config
        if config is None:
            override(ExperimentConfig(), settings)
        else:
            load_config(str(ROOT / config), settings)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_conversions_are_accepted(page):
    """Flags that go together, of the command's own parser, and settings that pass the checks."""
    for arguments in calls(page.read_text(), r"txl_jax\.convert$"):
        given, settings = parse(arguments)
        assert (given.source is None) == bool(given.export), arguments
        override(ExperimentConfig(), settings)


def test_all_ways_of_converting_are_on_their_page():
    found = calls((DOCS / "converting.md").read_text(), r"txl_jax\.convert$")
    formats = {parse(arguments)[0].format for arguments in found}
    assert formats == {None, *get_args(Format)} - {"txl_jax", "tensorflow", "huggingface"}
    sources = " ".join(parse(arguments)[0].source or "" for arguments in found)
    for source in ("transfo-xl", ".pt", ".safetensors", ".ckpt-"):
        assert source in sources
    assert any(parse(arguments)[0].export for arguments in found)


@pytest.mark.parametrize("page", PAGES[1:], ids=NAMES[1:])  # the README's: test_readme.py
def test_python_on_the_pages_runs_but_for_what_needs_a_trained_run(page):
    names: dict = {}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL):
        if "runs/" in block:
            compile(block, page.name, "exec")
        else:
            exec(compile(block, page.name, "exec"), names)


def links(text: str) -> list[str]:
    """Targets of Markdown links that are neither addresses nor anchors of the page itself."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    targets = re.findall(r"\]\(([^()\s]+)\)", prose)
    paths = [t.partition("#")[0] for t in targets if "://" not in t]
    return [path for path in paths if path]


def commands(text: str) -> list[list[str]]:
    """Flags of every call of txl_jax.main, by itself or through launch/, in ``sh`` blocks."""
    found = calls(text, r"txl_jax\.main$|launch/(?!test\.sh)|^\$M$")
    return [[word for word in words if word.startswith("--")] for words in found]


def calls(text: str, program: str) -> list[list[str]]:
    """Arguments of every call of a program (an expression for a word) in ``sh`` blocks."""
    found = []
    for block in re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.partition(" < ")[0], comments=True)
            starts = [n for n, word in enumerate(words) if re.search(program, word)]
            if starts:
                found.append(words[starts[-1] + 1 :])
    return found
