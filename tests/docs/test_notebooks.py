"""All cells of the notebooks run in plain Python, with few steps, and print what they should."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib

import pytest
from places import DOCS, ROOT

from notebooks import keep_outputs

FOLDER = ROOT / "notebooks"


def code_of(name):
    """Returns the code cells of a notebook as one program."""
    cells = json.loads((FOLDER / name).read_text(encoding="utf-8"))["cells"]
    return "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")


def execute(name, after, cwd, **environment):
    """Runs a notebook, then the code ``after`` with its variables; returns what was printed."""
    program = f"{code_of(name)}\n\n{after}\n"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=600,
        check=False,
        env={**os.environ, "MPLBACKEND": "agg", **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


NAMES = sorted(path.name for path in FOLDER.glob("*.ipynb"))


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_keeps_the_outputs_of_its_own_cells(name):
    """Run notebooks/keep_outputs.py after a change of a cell."""
    notebook = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(line.startswith(("%", "!")) for cell in cells for line in cell["source"])
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    for cell in cells:
        assert cell["metadata"]["source_hash"] == keep_outputs.source_hash(cell)
        printed = re.search(r"\b(print|txl)\(|plt\.show", "".join(cell["source"]))
        defines = re.search(r"^(def|class) ", "".join(cell["source"]), re.MULTILINE)
        assert bool(cell["outputs"]) or not printed or defines
        assert not any(output["output_type"] == "error" for output in cell["outputs"])
    assert sum(bool(cell["outputs"]) for cell in cells) >= 3


@pytest.mark.parametrize("name", NAMES)
def test_an_output_names_no_folder_of_the_machine_that_ran_it(name):
    notebook = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        for output in cell.get("outputs", ()):
            assert not re.search(
                r"/(home|root|tmp|work|Users|mnt)/", "".join(output.get("text", ""))
            )


def test_the_outputs_of_a_cell_are_its_text_and_its_figures_in_order(tmp_path):
    cells = ["import matplotlib.pyplot as plt\nprint('a')", "plt.plot([1, 2])\nplt.show()", "x = 1"]
    keys: dict = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None}
    notebook = {"cells": [{**keys, "source": [cell]} for cell in cells], "metadata": {}}
    (tmp_path / "one.ipynb").write_text(json.dumps(notebook))
    keep_outputs.keep_outputs(tmp_path / "one.ipynb")
    found = json.loads((tmp_path / "one.ipynb").read_text())["cells"]
    kinds = [[output["output_type"] for output in cell["outputs"]] for cell in found]
    assert kinds == [["stream"], ["display_data"], []]
    assert found[0]["outputs"][0]["text"] == ["a\n"]
    assert found[1]["outputs"][0]["data"]["image/png"].startswith("iVBOR")
    assert [cell["execution_count"] for cell in found] == [1, 2, 3]


@pytest.mark.parametrize("name", keep_outputs.PAGES)
def test_a_notebook_of_a_page_has_the_text_and_the_code_of_the_page(name):
    cells = json.loads((FOLDER / name).read_text(encoding="utf-8"))["cells"]
    page = (DOCS / keep_outputs.PAGES[name]).read_text("utf-8")
    title, _, rest = page.partition("\n")
    assert cells[0]["source"][0].strip() == title
    said = [(cell["cell_type"], "".join(cell["source"])) for cell in cells[2:]]
    blocks = re.findall(r"^```python\n(.*?)\n```$", rest, re.MULTILINE | re.DOTALL)
    assert [text for kind, text in said if kind == "code"] == blocks
    for kind, text in said:
        links = re.findall(r"\]\((\.\./.+?)\)", text)
        assert all((FOLDER / link).exists() for link in links)
        assert kind == "code" or ("[](" not in text and text.split()[0] in rest)


@pytest.mark.slow
def test_eight_tokens_shows_what_memory_does(tmp_path):
    said = execute(
        "eight_tokens.ipynb",
        "print('figures', difference_carried, difference_alone, difference_reset)\n"
        "print('diagonal', [int(shifted[i, 4 + i]) for i in range(4)])",
        tmp_path,
    )
    carried, alone, reset = map(float, said.split("figures ")[1].splitlines()[0].split())
    assert carried < 1e-5
    assert reset < 1e-5
    assert alone > 1e-3
    assert "diagonal [0, 0, 0, 0]" in said


@pytest.mark.slow
def test_the_equations_give_the_numbers_of_the_model_before_and_after_training(tmp_path):
    """The notebook and the model compute in float32, but in a different order."""
    said = execute("equations.ipynb", "print('figures', difference, *scores)", tmp_path, STEPS="10")
    difference, by_hand, library = map(float, said.split("figures ")[1].split())
    assert difference < 1e-5
    assert abs(by_hand - library) < 1e-5
    assert said.count("def read_lines(path):") == 2


@pytest.mark.slow
@pytest.mark.parametrize("corpus", ["stdlib", pytest.param("ptb", marks=pytest.mark.slow)])
def test_ten_minutes_notebook_trains_and_shows_everything(tmp_path, corpus):
    environment = {"STEPS": "6"}
    if corpus == "ptb":
        words = ["the", "company", "said", *(f"w{n}" for n in range(40))]
        for split in ("train", "valid", "test"):
            lines = [" ".join(words[n % 37 : n % 37 + 4]) for n in range(4000)]
            (tmp_path / f"ptb.{split}.txt").write_text("\n".join(lines) + "\n")
        environment["PTB"] = str(tmp_path)
    after = (
        "print('pieces', len(rows) >= 4, os.path.exists(os.path.join(WORKDIR, 'attention.png')))"
    )
    said = execute("ptb_colab.ipynb", after, tmp_path, **environment)
    assert "effective context" in said
    assert "widest heads" in said
    assert "20 tokens" in said
    assert "pieces True True" in said


@pytest.mark.slow
def test_a_text_of_ones_own_is_trained_on_scored_continued_and_left_for_another(tmp_path):
    after = "print('scored', score['line'], evaluation['results'][0]['targets'], STEPS)"
    said = execute("own_text.ipynb", after, tmp_path, STEPS="6")
    length = (tmp_path / "text.txt").stat().st_size
    number, targets, steps = map(int, said.split("scored ")[1].split())
    assert (number, steps) == (2, 6)
    assert 0.04 * length < targets < 0.06 * length
    assert "nats a token" in said
    assert (tmp_path / "runs" / "mine" / "sample.txt").read_text("utf-8").startswith("def ")
    start = json.loads((tmp_path / "runs" / "tuned" / "start.json").read_text("utf-8"))
    assert start["step"] == 6


@pytest.mark.slow
def test_an_agent_with_enough_memory_answers_and_one_with_less_guesses(tmp_path):
    said = execute("agent.ipynb", "print('difference', difference)", tmp_path)
    shares = dict(re.findall(r"memory (\d+): (\d+)% of the last answers", said))
    assert int(shares["16"]) > 95
    assert 40 < int(shares["2"]) < 60
    assert float(said.split("difference ")[-1]) < 1e-5


# --------------------------------------------------------------------------------------
# The first cell, which installs the package.


def first_cell(name="ptb_colab.ipynb"):
    cells = json.loads((FOLDER / name).read_text(encoding="utf-8"))["cells"]
    return next("".join(c["source"]) for c in cells if c["cell_type"] == "code")


def test_every_notebook_begins_with_the_same_cell():
    assert len({first_cell(path.name) for path in FOLDER.glob("*.ipynb")}) == 1


def test_the_first_cell_keeps_the_versions_of_jax_that_the_package_takes():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    (jax,) = [line for line in project["dependencies"] if line.startswith("jax>")]
    words = re.search(r"JAX_FROM, JAX_BELOW = \((\d+), (\d+)\), \((\d+), (\d+)\)", first_cell())
    assert words is not None
    assert jax == "jax>={}.{},<{}.{}".format(*words.groups())


FAKE_PIP = """
import json, pathlib, shutil, sys
here = pathlib.Path(__file__).parents[1]
with open(here / "calls", "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")

def put(name, version):
    for old in here.glob(f"{name.replace('-', '_')}-*.dist-info"):
        shutil.rmtree(old)
    if version:
        folder = here / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: {name}\\nVersion: {version}\\n")

words = [word for word in sys.argv[2:] if not word.startswith("-")]
if sys.argv[1] == "uninstall":
    for name in words:
        put(name, None)
else:
    (here / "txl_jax.py").touch()
    extra = words[0].partition("[")[2].partition("]")[0]
    if len(words) == 1:
        for name in ("jax", "jaxlib", *([f"jax-{extra}-plugin"] if "cuda" in extra else [])):
            put(name, "0.12.0.1")
    if extra == "tpu":
        put("libtpu", "0.0.50")
"""
FAKE_JAX = """
import pathlib
here = pathlib.Path(__file__).parent
def default_backend():
    return (here / "backend").read_text()
def devices():
    return [default_backend()]
"""
FAKE_IPYTHON = """
class Kernel:
    def do_shutdown(self, again):
        print("the kernel restarts", again)
class Shell:
    kernel = Kernel()
get_ipython = Shell
"""


@pytest.fixture
def image(tmp_path):
    """A function that runs the first cell with fake packages, GPU and pip; returns pip's calls too.

    ``before`` is code that runs first: with ``import IPython`` the cell runs as in a notebook.
    """
    site, tools = tmp_path / "site", tmp_path / "tools"
    for folder in (site / "pip", tools):
        folder.mkdir(parents=True)
    (site / "pip" / "__init__.py").touch()
    (site / "pip" / "__main__.py").write_text(FAKE_PIP)
    (site / "jax.py").write_text(FAKE_JAX)
    (site / "IPython.py").write_text(FAKE_IPYTHON)

    def run(packages, gpu=None, backend="cpu", before="", cwd=None, **variables):
        for name, version in packages.items():
            folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
            folder.mkdir()
            (folder / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
        if gpu:
            (tools / "nvidia-smi").write_text(f"#!/bin/sh\necho '{gpu}'\n")
            (tools / "nvidia-smi").chmod(0o755)
        (site / "backend").write_text(backend)
        (site / "calls").write_text("")
        done = subprocess.run(
            [sys.executable, "-S", "-c", f"{before}\n{first_cell()}"],
            env={"PATH": str(tools), "PYTHONPATH": str(site), "TXL_SOURCE": "x", **variables},
            cwd=cwd or tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        calls = [json.loads(line) for line in (site / "calls").read_text().splitlines()]
        return done, [[word for word in words if word not in ("-q", "-y")] for words in calls]

    return run


COLAB = {"jax": "0.7.2", "jaxlib": "0.7.2", "jax-cuda12-plugin": "0.7.2", "libtpu": "0.0.21.1"}
NEW = {"jax": "0.11.2", "jaxlib": "0.11.2"}
TPU = {"TPU_ACCELERATOR_TYPE": "v5litepod-1"}
DROP_12 = ["uninstall", "jax-cuda12-plugin", "jax-cuda12-pjrt"]
DROP_13 = ["uninstall", "jax-cuda13-plugin", "jax-cuda13-pjrt"]


@pytest.mark.parametrize(
    ("packages", "gpu", "variables", "backend", "calls"),
    [
        (COLAB, "570.86.15, 7.5", {}, "gpu", [["install", "txl_jax[cuda12]"]]),
        (COLAB, "580.95.05, 7.5", {}, "gpu", [DROP_12, ["install", "txl_jax[cuda13]"]]),
        (COLAB, "580.95.05, 7.0", {}, "gpu", [["install", "txl_jax[cuda12]"]]),
        (COLAB, "GPU 0: a GPU", {}, "gpu", [["install", "txl_jax[cuda12]"]]),
        (COLAB, None, TPU, "tpu", [DROP_12, ["install", "txl_jax[tpu]"]]),
        (COLAB, None, {}, "cpu", [DROP_12, ["install", "txl_jax"]]),
        (COLAB, "580.1, 9.0", {"JAX_PLATFORMS": "cpu"}, "cpu", [DROP_12, ["install", "txl_jax"]]),
        ({}, "550.54.14, 8.0", {}, "gpu", [["install", "txl_jax[cuda12]"]]),
        ({}, None, {}, "cpu", [["install", "txl_jax"]]),
        (
            NEW | {"jax-cuda12-plugin": "0.11.2"},
            "570.86.15, 7.5",
            {},
            "gpu",
            [["install", "txl_jax", "jax==0.11.2"]],
        ),
        (
            NEW | {"jax-cuda12-plugin": "0.11.1"},
            "570.86.15, 7.5",
            {},
            "gpu",
            [["install", "txl_jax[cuda12]"]],
        ),
        (
            NEW | {"jax-cuda13-plugin": "0.11.2"},
            "570.86.15, 7.5",
            {},
            "gpu",
            [DROP_13, ["install", "txl_jax[cuda12]"]],
        ),
        (
            NEW | {"libtpu": "0.0.21"},
            None,
            TPU,
            "tpu",
            [["install", "txl_jax[tpu]", "jax==0.11.2"]],
        ),
        (NEW, None, {}, "cpu", [["install", "txl_jax", "jax==0.11.2"]]),
        ({"jax": "0.13.0", "jaxlib": "0.13.0"}, None, {}, "cpu", [["install", "txl_jax"]]),
        ({"jax": "0.11.2", "jaxlib": "0.11.1"}, None, {}, "cpu", [["install", "txl_jax"]]),
    ],
)
def test_the_first_cell_installs_what_fits_beside_or_in_place_of_what_is_there(
    image, packages, gpu, variables, backend, calls
):
    done, asked = image(packages, gpu, backend, **variables)
    assert done.returncode == 0, done.stderr
    assert [[word.partition(" @ ")[0] for word in words] for words in asked] == calls
    assert done.stdout == f"{backend} ['{backend}']\n"
    done, asked = image({}, gpu, backend, **variables)  # everything is installed now
    assert (done.returncode, asked) == (0, [])


@pytest.mark.parametrize("at", [".", "notebooks", "beside"])
def test_the_first_cell_installs_the_clone_that_is_there(image, tmp_path, at):
    clone = tmp_path / "clone" if at != "beside" else tmp_path / "beside" / "txl_jax"
    for folder in (clone / "txl_jax", clone / "notebooks"):
        folder.mkdir(parents=True)
    (clone / "pyproject.toml").touch()
    (clone / "txl_jax" / "__init__.py").touch()
    cwd = clone.parent if at == "beside" else clone / at
    done, asked = image({}, cwd=cwd, TXL_SOURCE="")
    assert done.returncode == 0, done.stderr
    assert asked == [["install", f"txl_jax @ {clone.as_uri()}"]]


def test_the_placeholder_of_the_account_stops_nothing_that_is_there_and_is_named_else(image):
    done, asked = image({}, TXL_SOURCE="")
    assert (done.returncode, asked) == (1, [])
    assert 'write the account into this cell: REPOSITORY = "account/txl_jax"' in done.stderr
    assert "Traceback" not in done.stderr
    done, asked = image({}, TXL_SOURCE="git+https://github.com/name/txl_jax")
    assert asked == [["install", "txl_jax @ git+https://github.com/name/txl_jax"]]
    done, asked = image({}, TXL_SOURCE="")  # the package is installed now
    assert (done.returncode, asked) == (0, [])


def test_the_account_is_one_line_of_the_first_cell(image, monkeypatch):
    cell = first_cell().replace("OWNER/txl_jax", "name/txl_jax")
    monkeypatch.setitem(globals(), "first_cell", lambda: cell)
    _, asked = image({}, TXL_SOURCE="")
    assert asked == [["install", "txl_jax @ git+https://github.com/name/txl_jax"]]


@pytest.mark.parametrize(("gpu", "variables"), [("570.86.15, 7.5", {}), (None, TPU)])
def test_the_first_cell_fails_where_jax_does_not_use_the_accelerator(image, gpu, variables):
    done, _ = image(COLAB, gpu, "cpu", **variables)
    assert done.returncode == 1
    assert "is installed but not used" in done.stderr


@pytest.mark.parametrize(
    ("packages", "before", "restarts"),
    [
        (COLAB, "import IPython, jax", True),
        (COLAB, "import IPython, sys; sys.modules['numpy'] = sys", True),
        (COLAB, "import IPython", False),
        (NEW, "import IPython, sys; sys.modules['numpy'] = sys", False),
        (NEW, "import IPython, jax", True),
    ],
)
def test_the_kernel_restarts_where_it_holds_a_jax_that_was_replaced(
    image, packages, before, restarts
):
    done, asked = image(packages, before=before)
    assert asked[-1][0] == "install"
    assert ("the kernel restarts True" in done.stdout) == restarts
    assert (done.returncode == 1) == restarts
    if restarts:
        assert "run all cells again" in done.stderr
        done, asked = image({}, before=before)
        assert (done.returncode, asked, done.stdout) == (0, [], "cpu ['cpu']\n")


@pytest.mark.slow
def test_colabs_versions_agree_after_the_first_cell(tmp_path):
    """Installs packages of Colab's GPU image of August 2026, for a CUDA 12 driver: about 7 GB."""
    source, venv = tmp_path / "source", tmp_path / "venv"
    source.mkdir()
    for name in ("txl_jax", "configs"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    python = str(venv / "bin" / "python")
    pins = ["jax==0.7.2", "jaxlib==0.7.2", "jax-cuda12-plugin==0.7.2", "flax==0.11.2"]
    install = [python, "-m", "pip", "install", "-q", *pins, "numpy==2.1.3"]
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    subprocess.run(install, check=True, env=os.environ | {"PYTHONPATH": ""})
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho '570.86.15, 7.5'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    told = (
        "import importlib.metadata as m\n"
        "names = ('jax', 'jaxlib', 'jax-cuda12-plugin', 'jax-cuda12-pjrt')\n"
        "import json; print(json.dumps([m.version(name) for name in names]))\n"
        "from packaging.requirements import Requirement\n"
        "for line in m.requires('txl_jax'):\n"
        "    need = Requirement(line)\n"
        "    if need.marker is None:\n"
        "        assert m.version(need.name) in need.specifier, line\n"
    )
    cell = first_cell().partition("# In a process of its own")[0]  # the rest looks for a GPU
    environment = {key: value for key, value in os.environ.items() if not key.startswith("JAX_")}
    environment |= {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "TXL_SOURCE": source.as_uri(),
        "PYTHONPATH": "",
    }
    run = lambda code: subprocess.run(
        [python, "-c", code],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    done = run(f"import jax\n{cell}")
    assert (done.returncode, "run all cells again" in done.stderr) == (1, True), done.stderr
    done = run(f"{cell}\n{told}")
    assert done.returncode == 0, done.stderr
    versions = set(json.loads(done.stdout))
    assert len(versions) == 1
    assert versions != {"0.7.2"}
    done = run(first_cell())
    assert done.returncode == 1
    assert "cuda12 is installed but not used" in done.stderr
    assert "not compatible" not in done.stderr


def test_every_address_of_the_repository_is_that_of_the_package():
    """pyproject.toml names the repository; a button in each notebook opens it in Colab."""
    root = ROOT
    urls = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]["urls"]
    home = urls["Source"].removeprefix("https://github.com/")
    assert re.fullmatch(r"[\w-]+/[\w-]+", home)
    for name in ("Homepage", "Documentation", "Changelog"):
        path = urls[name].removeprefix(urls["Source"])
        assert path != urls[name]
        assert (root / path.removeprefix("/blob/main/")).exists(), name
    for notebook in FOLDER.glob("*.ipynb"):
        text = notebook.read_text("utf-8")
        colab = f"https://colab.research.google.com/github/{home}/blob/main/notebooks"
        assert f"({colab}/{notebook.name})" in text
        # Before publication, the button finds no notebook.
        assert "If the button finds no notebook, open [Colab]" in text
        assert f'REPOSITORY = \\"{home}\\"' in text
    for page in (root / "README.md", *FOLDER.glob("*.ipynb"), *(root / "docs").glob("*.md")):
        text = page.read_text("utf-8")
        assert "YOUR_REPOSITORY" not in text
        assert set(re.findall(r"github(?:\.com)?/([\w-]+/txl_jax)\b", text)) <= {home}, page
