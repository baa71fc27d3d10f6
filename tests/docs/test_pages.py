"""The documentation site builds without a warning; its links, commands and settings are valid."""

import ast
import dataclasses
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
import typing
from typing import get_args

import pytest
from absl import flags
from page_commands import calls, commands, links
from places import DOCS, ROOT

import txl_jax
import txl_jax.main  # defines the flags
from notebooks import keep_outputs
from txl_jax.checkpoint.workdir_files import FILES
from txl_jax.config import (
    ANALYSES,
    FREE_TO_CHANGE,
    ExperimentConfig,
    ScoreConfig,
    differing_keys,
    flatten,
    load_config,
    override,
)
from txl_jax.convert.__main__ import parse
from txl_jax.convert.conversion import Format
from txl_jax.convert.writing import Target
from txl_jax.model.kernels import choice
from txl_jax.usage import MODES

PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), ROOT / "CONTRIBUTING.md"]
README, LAUNCH = PAGES[0].read_text(), (DOCS / "launch.md").read_text()
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
LONG = dict.fromkeys(("quickstart.md", "own_loop.md", "agents.md"), pytest.mark.slow)
"""Pages whose code trains a model, so their tests are slow."""

MISSING = [name for name in ("sphinx", "myst_parser", "furo") if not importlib.util.find_spec(name)]


@pytest.mark.integration
@pytest.mark.skipif(
    bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (pip install -e .[test])"
)
def test_the_site_builds_without_a_warning(tmp_path):
    """Sphinx warns of links that lead nowhere, pages in no table of contents, and bad markup."""
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
    assert "In one minute" in (site / "results.html").read_text()
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        if notebook.name not in keep_outputs.PAGES:
            shown = (site / "notebooks" / notebook.with_suffix(".html").name).read_text()
            cells, figure = notebook.read_text(), "image/png"
            assert shown.count(f"data:{figure}") == cells.count(f'"{figure}"')
            assert shown.count("highlight-text") == cells.count('"stream"') - 1
            assert "JAX_BELOW" not in shown, "the cell that installs is on the page"
    reference = (site / "api.html").read_text()
    for name in txl_jax.__all__:
        shown = re.search(rf'id="(module-)?txl_jax\.(\w+\.)*{name}"', reference)
        assert shown, f"{name} is not in the reference"
    assert "<blockquote" not in reference, "a drawing of a docstring is set as running text"
    first = (site / "index.html").read_text()
    assert 'name="viewport"' in first, "a telephone shows the page of a wide screen"
    assert 'aria-label="Toggle site navigation sidebar"' in first, "the menu is always open"
    assert "site.css" in first
    for group in ("Tutorials", "How to", "Reference", "Explanation", "For contributors"):
        assert f">{group}<" in first


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_relative_links_lead_to_files(page):
    for target in links(page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_settings_and_modes_that_are_named_exist(page):
    text = page.read_text()
    known = flatten(ExperimentConfig().to_dict())
    for key in re.findall(r"--config\.(\w[\w.]*\w)", text):
        of_dict = known.get(".".join(key.split(".")[:2])) == {}
        assert key in known or of_dict, key
    for mode in re.findall(r"--mode=(\w+)", text):
        assert mode in MODES, mode


def test_pages_have_one_name_for_the_command_and_one_gpu_script_for_a_part_of_a_machine():
    assert [page.name for page in PAGES if "python -m txl_jax.main" in page.read_text()] == []
    assert "\nCUDA_VISIBLE_DEVICES=0,1,2,3 ./launch/gpu_node.sh --config=" in LAUNCH


def test_results_begin_with_a_screen_of_what_is_measured_before_what_was_never_run():
    whole = (ROOT / "RESULTS.md").read_text()
    first = whole.split("\n## ")[1]
    assert first.startswith("In one minute\n")
    assert len(first.splitlines()) <= 30
    order = ["Equal to the published", "Faster than", "On an H100", "Never run", "ten numbers"]
    assert [first.index(words) for words in order] == sorted(map(first.index, order))
    headings = re.findall(r"^##+ (.*)", whole, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in headings}
    rows = re.findall(r"^\| (?!ten numbers|---).*$", first, re.MULTILINE)
    assert len(rows) == 10
    for line in (*rows, *re.findall(r"^- .*?(?=\n-|\n\n)", first, re.MULTILINE | re.DOTALL)):
        names = re.findall(r"\]\(#([\w-]+)\)", line)
        assert names, line
        assert {*names} <= anchors, line


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_are_accepted(page):
    """Flags are known, and the config passes every check with the settings of the command."""
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
            is_path = config.partition(":")[0].endswith(".py")
            load_config(str(ROOT / config) if is_path else config, settings)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_conversions_are_accepted(page):
    """The command's own parser accepts the flags together, and the settings pass the checks."""
    for arguments in calls(page.read_text(), r"txl_jax\.convert$"):
        given, settings = parse(arguments)
        assert given.source, arguments
        override(ExperimentConfig(), settings)


def test_all_ways_of_converting_are_on_their_page():
    found = calls((DOCS / "converting.md").read_text(), r"txl_jax\.convert$")
    formats = {parse(arguments)[0].format for arguments in found}
    assert formats == {None, *get_args(Format)} - {"txl_jax", "tensorflow", "huggingface"}
    sources = " ".join(parse(arguments)[0].source or "" for arguments in found)
    for source in ("transfo-xl", ".pt", ".safetensors", ".ckpt-"):
        assert source in sources
    targets = {None, "safetensors", *get_args(Target)}
    assert {parse(arguments)[0].to for arguments in found} == targets


@pytest.fixture(scope="module")
def smoke_run(tmp_path_factory):
    """A folder with a short run of the quickstart."""
    folder = tmp_path_factory.mktemp("pages")
    quick: dict[str, object] = {
        "train.steps": 2,
        "train.batch_size": 2,
        "optimizer.warmup_steps": 1,
        "evaluate.baselines": (),
    }
    txl_jax.train("quickstart:smoke", folder / "runs" / "quickstart", quick)
    return folder


@pytest.mark.integration
@pytest.mark.parametrize(  # README.md and own_program.md have tests of their own
    "page",
    [
        pytest.param(page, marks=LONG.get(page.name, ()), id=page.name)
        for page in PAGES[1:]
        if page.name != "own_program.md"
    ],
)
def test_python_on_the_pages_runs_but_for_what_downloads_a_corpus(page, smoke_run, monkeypatch):
    monkeypatch.chdir(smoke_run)
    names: dict = {}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL):
        program = compile(block, page.name, "exec")
        if "download_and_prepare" not in block and "load_dataset" not in block:
            exec(program, names)


# --------------------------------------------------------------------------------------
# Statements that the code can confirm.


def config_classes(kind: type) -> set[type]:
    """Returns a settings class and the classes of all its sections."""
    hints = typing.get_type_hints(kind)
    inner = [
        hints[f.name] for f in dataclasses.fields(kind) if dataclasses.is_dataclass(hints[f.name])
    ]
    return {kind}.union(*map(config_classes, inner))


def test_every_section_of_settings_is_public_and_documented():
    reference = (DOCS / "api.md").read_text()
    for kind in config_classes(ExperimentConfig):
        assert hasattr(txl_jax.config, kind.__name__)
        assert re.search(rf"autoclass:: txl_jax(\.config)?\.{kind.__name__}\n", reference), kind


def test_the_page_of_settings_is_current():
    program = importlib.util.spec_from_file_location("list_settings", DOCS / "list_settings.py")
    assert program
    assert program.loader
    module = importlib.util.module_from_spec(program)
    program.loader.exec_module(module)
    message = "run: python docs/list_settings.py"
    assert (DOCS / "settings.md").read_text(encoding="utf-8") == module.page(), message


def test_every_label_of_a_number_is_explained():
    """Labels are the words in italics beside numbers, which say where a number comes from."""
    pages = [ROOT / "README.md", ROOT / "RESULTS.md", *(ROOT / "configs").glob("*.py")]
    used = {
        label
        for page in pages
        for label in re.findall(r"(?<!\*)\*([a-z ]+)\*(?!\*)", page.read_text())
    }
    explained = re.search(r"Each number has a label:.*?\n\n", pages[1].read_text(), re.DOTALL)
    assert explained
    assert used == set(re.findall(r"\*([a-z\s]+)\*", explained.group()))


def test_the_table_of_shared_work_says_what_may_change_on_resume():
    rows = re.findall(r"^\| `--config\.([\w.]+)=(\w+)`.*\| (\w+) \|$", LAUNCH, re.MULTILINE)
    assert len(rows) == 7
    before = override(ExperimentConfig(), {"train.steps": "1000"})
    for key, value, said in rows:
        after = override(before, {key: value})
        refused = differing_keys(before.to_dict(), after.to_dict())
        assert said == ("no" if refused else "yes"), key


def test_the_pages_say_what_auto_chooses():
    (said,) = re.findall(r"`--config\.model\.kernel=auto` takes.*?by\sname", LAUNCH, re.DOTALL)
    taken, _, by_name = said.partition("`reference` is used")
    assert set(re.findall(r"`(\w+)`", taken)) - {"auto"} == {*choice.BEST.values(), "xla"}
    assert by_name
    assert f" {choice.FUSED_MIN_QUERIES} tokens or more" in " ".join(taken.split())


def test_the_pages_name_the_files_of_the_analyses():
    text = " ".join((DOCS / "analyses.md").read_text().split())
    (modes,) = re.findall(r"((?:`\w+`,? (?:and )?)+)write JSON, CSV", text)
    written = {mode for mode in ANALYSES if f"{mode}.csv" in FILES}
    assert set(re.findall(r"`(\w+)`", modes)) == written
    for mode in written:
        assert {f"{mode}.{kind}" for kind in ("json", "csv", "png", "svg")} <= set(FILES)
    assert "`speed` writes JSON" in text
    assert [name for name in FILES if name.startswith("speed")] == ["speed.json"]


def test_files_of_a_workdir_that_are_named_are_written():
    table = (DOCS / "quickstart.md").read_text().partition("Files in the workdir")[2]
    rows = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    names = re.findall(r"`([\w./]+)`", " ".join(rows))
    assert len(names) >= 10
    for name in names:
        assert name.rstrip("/") in FILES, name


def test_memory_in_the_headers_of_configs_is_that_of_the_results():
    rows = (ROOT / "RESULTS.md").read_text().splitlines()
    checked = 0
    for config in (ROOT / "configs").glob("*.py"):
        header = " ".join((ast.get_docstring(ast.parse(config.read_text())) or "").split())
        (about,) = re.findall(r"(The train step fits.*?)\(\*compiled", header) or [""]
        of_recipe = " ".join(row for row in rows if row.startswith(f"| `{config.stem}` | v5"))
        for number in re.findall(r"\d+\.\d+", about):
            assert re.search(rf"(?<![\d.]){re.escape(number)}(?!\d)", of_recipe), (config, number)
            checked += 1
        if about and "unfused" in of_recipe:
            assert "with fused attention" in about, config
    assert checked == 10


def texts():
    """The pages, programs and scripts of the project."""
    yield from ROOT.glob("*.md")
    for folder in ("txl_jax", "configs", "docs", "tests", "benchmarks", "examples", "launch"):
        found = (ROOT / folder).rglob("*")
        yield from (path for path in found if path.suffix in (".py", ".md", ".sh"))


def test_no_text_refers_to_a_document_that_is_not_here():
    for path in texts():
        if path.name != "test_pages.py":
            assert not re.search(r"\b(SPEC|DESIGN|STACK)\b", path.read_text()), path


def test_files_of_tests_that_are_named_exist():
    said = {name for file in texts() for name in re.findall(r"tests/\w+/\w+\.py", file.read_text())}
    assert len(said) > 10
    assert not {name for name in said if not (ROOT / name).is_file()}


def test_no_module_of_tests_imports_another():
    for file in (ROOT / "tests").glob("*/test_*.py"):
        assert not re.findall(r"^ *(?:from|import) test_\w+", file.read_text(), re.MULTILINE), file


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_a_page_that_runs_tests_names_the_extra_with_pytest(page):
    text = page.read_text()
    assert "-m pytest" not in text or "'.[test]'" in text


def test_the_command_for_the_site_says_what_it_needs():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    (extra,) = [
        name for name, needs in extras.items() if any(n.startswith("sphinx") for n in needs)
    ]
    for text in ((ROOT / "CONTRIBUTING.md").read_text(), (DOCS / "conf.py").read_text()):
        before = text.partition("python -m sphinx")[0]
        assert f"pip install -e '.[{extra}]'" in before[-200:]


def test_the_settings_that_may_change_on_resume_are_all_named():
    faults = (DOCS / "faults.md").read_text()
    (said,) = re.findall(
        r"Some settings may change when a run resumes:.*?All are listed", faults, re.DOTALL
    )
    assert set(FREE_TO_CHANGE) - {*ANALYSES, "score"} == set(re.findall(r"`([\w.]+)`", said))
    assert "the analyses" in " ".join(said.split())


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_an_exported_folder_is_not_said_to_be_trained_in(page):
    text = " ".join(page.read_text().split())
    assert not re.search(r"such a folder in every mode(?! (but|except) training)", text)


def test_the_page_of_scoring_says_how_to_leave_tokens_out():
    assert ScoreConfig().tokens
    assert "--config.score.tokens=False" in (DOCS / "generation.md").read_text()


# --------------------------------------------------------------------------------------
