"""All cells of the notebooks run in plain Python, with few steps, and print what they should."""

import inspect
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import packaging
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
    """If this test fails after you changed a cell, run notebooks/keep_outputs.py."""
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


PROJECT = (ROOT / "pyproject.toml").read_text("utf-8")
DEPENDENCIES = tomllib.loads(PROJECT)["project"]["dependencies"]


def put(site, name, version, needs):
    """Installs the metadata of a package into a folder; ``version`` None removes it."""
    for old in site.glob(f"{name.replace('-', '_')}-*.dist-info"):
        shutil.rmtree(old)
    if version is None:
        return
    if name == "jax":  # the requirements of jax on PyPI
        needs = [f"jaxlib>={version},<={version}", 'libtpu==0.0.50.*; extra == "tpu"']
        for cuda in ("cuda12", "cuda13"):
            needs += [f'jax-{cuda}-plugin[with-cuda]=={version}; extra == "{cuda}"']
    lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {need}" for need in needs)]
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("\n".join([*lines, "", ""]))


FAKE_PIP = f"""
import importlib.metadata, json, pathlib, shutil, sys
from packaging.requirements import Requirement
here, DEPENDENCIES = pathlib.Path(__file__).parents[1], {DEPENDENCIES}
{inspect.getsource(put)}
with open(here / "calls", "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
words = [word for word in sys.argv[2:] if not word.startswith("-")]
if sys.argv[1] == "uninstall":
    for name in words:
        put(here, name, None, [])
else:
    (here / "txl_jax.py").touch()
    put(here, "txl_jax", "0.1.0", DEPENDENCIES)
    extra = words[0].partition("[")[2].partition("]")[0]
    if len(words) == 1:
        for name in ("jax", "jaxlib", *([f"jax-{{extra}}-plugin"] if "cuda" in extra else [])):
            put(here, name, "0.12.0.1", [])
    if extra == "tpu":
        put(here, "libtpu", "0.0.50", [])
    here_are = importlib.metadata.distributions(path=[str(here)])
    have = {{each.metadata["Name"]: each.version for each in here_are}}
    for need in map(Requirement, DEPENDENCIES):
        if need.name not in have or not need.specifier.contains(have[need.name]):
            oldest, = [each for each in need.specifier if each.operator == ">="]
            put(here, need.name, oldest.version, [])
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
    """Returns a function that runs the first cell with fake packages, GPU and pip.

    The function returns the finished process and pip's calls. ``packages`` maps names to versions.
    ``gpu`` is what the fake nvidia-smi prints, or its shell program if ``gpu`` has several lines.
    ``before`` is code that runs first: with ``import IPython`` the cell runs as in a notebook.
    """
    site, tools = tmp_path / "site", tmp_path / "tools"
    for folder in (site / "pip", tools):
        folder.mkdir(parents=True)
    (site / "pip" / "__init__.py").touch()
    (site / "packaging").symlink_to(pathlib.Path(packaging.__file__).parent)
    (site / "pip" / "__main__.py").write_text(FAKE_PIP)
    (site / "jax.py").write_text(FAKE_JAX)
    (site / "IPython.py").write_text(FAKE_IPYTHON)

    def run(packages, gpu=None, backend="cpu", before="", cwd=None, **variables):
        for name, version in packages.items():
            put(site, name, version, DEPENDENCIES if name == "txl_jax" else [])
        if "txl_jax" in packages:
            (site / "txl_jax.py").touch()
        if gpu:
            program = gpu if "\n" in gpu else f"echo '{gpu}'\n"
            (tools / "nvidia-smi").write_text(f"#!/bin/sh\n{program}")
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
NEW = {"jax": "0.11.2", "jaxlib": "0.11.2", "numpy": "2.1.3"}
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
            NEW | {"jax-cuda12-plugin": "0.11.2"},
            "580.95.05, 7.5",
            {},
            "gpu",
            [["install", "txl_jax", "jax==0.11.2"]],
        ),
        (NEW | {"libtpu": "0.0.21"}, None, TPU, "tpu", [["install", "txl_jax[tpu]"]]),
        (
            NEW | {"libtpu": "0.0.50.1"},
            None,
            TPU,
            "tpu",
            [["install", "txl_jax", "jax==0.11.2"]],
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


def make_clone(folder):
    for name in ("txl_jax", "notebooks"):
        (folder / name).mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "txl_jax" / "__init__.py").touch()
    return folder


@pytest.mark.parametrize("at", [".", "notebooks", "beside"])
def test_the_first_cell_installs_the_clone_that_is_there(image, tmp_path, at):
    clone = make_clone(tmp_path / "clone" if at != "beside" else tmp_path / "beside" / "txl_jax")
    cwd = clone.parent if at == "beside" else clone / at
    done, asked = image({}, cwd=cwd, TXL_SOURCE="")
    assert done.returncode == 0, done.stderr
    assert asked == [["install", f"txl_jax @ {clone.as_uri()}"]]


OLDEST = dict(re.findall(r"^([\w-]+)>=([\w.]+)", "\n".join(DEPENDENCIES), re.MULTILINE))
FULL = {"txl_jax": "0.1.0"} | OLDEST | NEW
BARE = {name: version for name, version in FULL.items() if name != "txl_jax"}  # in a clone
GPU_12 = {"jax-cuda12-plugin": "0.11.2"}


@pytest.mark.parametrize(
    ("packages", "gpu", "before"),
    [
        (COLAB, None, ""),
        (COLAB, "570.86.15, 7.5", "import IPython, jax"),
        (BARE | COLAB, None, "import IPython, jax"),
        (BARE | {"flax": "0.11.2"}, None, ""),
        (BARE | {"optax": None}, None, ""),
        (BARE | {"jaxlib": "0.11.1"}, None, "import IPython, jax"),
        (BARE, "570.86.15, 7.5", ""),
        (BARE | {"jax-cuda12-plugin": "0.11.1"}, "570.86.15, 7.5", ""),
    ],
)
def test_in_a_clone_the_first_cell_installs_what_is_too_old_or_missing(
    image, tmp_path, packages, gpu, before
):
    """Runs in a clone (``!git clone``, ``%cd txl_jax``), from which Python imports txl_jax."""
    clone, backend = make_clone(tmp_path / "clone"), "gpu" if gpu else "cpu"
    done, asked = image(packages, gpu, backend, before, cwd=clone, TXL_SOURCE="")
    asked = [words for words in asked if words[0] == "install"]
    assert len(asked) == 1, done.stderr
    assert re.fullmatch(rf"txl_jax(\[\w+\])? @ {clone.as_uri()}", asked[0][1])
    assert (done.returncode, "run all cells again" in done.stderr) == (bool(before), bool(before))
    done, asked = image({}, gpu, backend, before, cwd=clone, TXL_SOURCE="")
    assert (done.returncode, asked) == (0, []), done.stderr


def test_in_a_clone_whose_needs_are_all_here_the_first_cell_installs_nothing(image, tmp_path):
    done, asked = image(BARE, cwd=make_clone(tmp_path / "clone"), TXL_SOURCE="")
    assert (done.returncode, asked, done.stdout) == (0, [], "cpu ['cpu']\n"), done.stderr


@pytest.mark.parametrize("editable", [False, True])
def test_an_editable_txl_jax_stays_editable(image, tmp_path, editable):
    """The cell replaces an installed copy by the clone, but keeps an editable installation."""
    clone, told = make_clone(tmp_path / "clone"), json.dumps({"dir_info": {"editable": editable}})
    file = tmp_path / "site" / "txl_jax-0.1.0.dist-info" / "direct_url.json"
    before = f"import pathlib; pathlib.Path({str(file)!r}).write_text({told!r})"
    done, asked = image(FULL | {"jax": "0.7.2"}, before=before, cwd=clone, TXL_SOURCE="")
    assert done.returncode == 0, done.stderr
    assert asked == [["install", "txl_jax" if editable else f"txl_jax @ {clone.as_uri()}"]]


def test_without_a_clone_a_txl_jax_that_is_installed_stays(image):
    done, asked = image(FULL | {"jax": "0.7.2"}, TXL_SOURCE="")
    assert (done.returncode, asked) == (0, [["install", "txl_jax"]]), done.stderr


@pytest.mark.parametrize(
    ("change", "gpu", "variables", "calls"),
    [
        ({}, None, {}, []),
        (GPU_12, "570.86.15, 7.5", {}, []),
        (GPU_12, "580.95.05, 7.5", {}, []),  # drivers for CUDA 13 run CUDA 12 too
        ({"jax-cuda13-plugin": "0.11.2"}, "580.95.05, 7.5", {}, []),
        ({"libtpu": "0.0.50.1"}, None, TPU, []),
        (GPU_12 | {"jax-cuda12-plugin": "0.7.2"}, None, {}, []),  # a CPU needs no plugin
        ({"jax": "0.7.2"}, None, {}, [["install", "txl_jax"]]),
        ({"jax": "0.13.0", "jaxlib": "0.13.0"}, None, {}, [["install", "txl_jax"]]),
        ({"jaxlib": "0.11.1"}, None, {}, [["install", "txl_jax"]]),
        ({"orbax-checkpoint": None}, None, {}, [["install", "txl_jax", "jax==0.11.2"]]),
        ({"flax": "0.11.2"}, None, {}, [["install", "txl_jax", "jax==0.11.2"]]),
        ({}, "580.95.05, 7.5", {}, [["install", "txl_jax[cuda13]"]]),
        ({}, "570.86.15, 7.5", {}, [["install", "txl_jax[cuda12]"]]),
        ({}, "535.104.05", {}, [["install", "txl_jax[cuda12]"]]),
        ({}, None, TPU, [["install", "txl_jax[tpu]"]]),
        (
            {"jax-cuda13-plugin": "0.11.2"},
            "570.86.15, 7.5",
            {},
            [DROP_13, ["install", "txl_jax[cuda12]"]],
        ),
        (
            {"jax-cuda12-plugin": "0.11.1"},
            "580.95.05, 7.5",
            {},
            [DROP_12, ["install", "txl_jax[cuda13]"]],
        ),
    ],
)
def test_a_txl_jax_that_is_installed_gets_what_does_not_fit_or_is_missing(
    image, change, gpu, variables, calls
):
    backend = "gpu" if gpu else "tpu" if variables else "cpu"
    done, asked = image(FULL | change, gpu, backend, **variables)
    assert done.returncode == 0, done.stderr
    assert [[word.partition(" @ ")[0] for word in words] for words in asked] == calls
    done, asked = image({}, gpu, backend, **variables)
    assert (done.returncode, asked) == (0, [])


NOT_LOADED = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that"
    " the latest NVIDIA driver is installed and running."
)
MISMATCH = "Failed to initialize NVML: Driver/library version mismatch"
NO_CAPABILITY = 'case "$*" in *compute_cap*) echo "Field is not a valid field"; exit 2;; esac\n'
ON_CPU = "or run %env JAX_PLATFORMS=cpu to use the CPU"


@pytest.mark.parametrize("packages", [COLAB, FULL], ids=["colab", "installed"])
@pytest.mark.parametrize(
    ("gpu", "told"),
    [
        (f'echo "{NOT_LOADED}"\nexit 9\n', f"nvidia-smi failed ({NOT_LOADED}): fix the driver"),
        (f"echo '{MISMATCH}' >&2\nexit 18\n", f"nvidia-smi failed ({MISMATCH}): fix the driver"),
        ("true\nexit 15\n", "nvidia-smi failed (15): fix the driver or restart the runtime, or"),
        ("470.82.01, 7.5", "The NVIDIA driver 470 is too old, JAX needs 525 or later: update it,"),
        (f"{NO_CAPABILITY}echo 470.82.01\n", "The NVIDIA driver 470 is too old, JAX needs 525"),
    ],
    ids=["not loaded", "mismatch", "silent", "old", "old, without the capability"],
)
def test_the_first_cell_stops_where_the_driver_does_not_work_and_changes_nothing(
    image, packages, gpu, told
):
    done, asked = image(packages, gpu, "cpu")
    assert (done.returncode, asked, done.stdout) == (1, [], "")
    assert done.stderr.startswith(told)
    assert done.stderr.endswith(f"{ON_CPU}\n")
    assert len(done.stderr.splitlines()) == 1
    done, asked = image({}, gpu, "cpu", JAX_PLATFORMS="cpu")
    assert (done.returncode, done.stdout) == (0, "cpu ['cpu']\n")


@pytest.mark.parametrize("code", [0, 6])
def test_an_nvidia_smi_that_finds_no_device_is_no_gpu(image, code):
    done, asked = image(NEW, f"echo 'No devices were found'\nexit {code}\n")
    assert done.returncode == 0, done.stderr
    assert asked == [["install", "txl_jax @ x", "jax==0.11.2"]]


def test_the_capability_of_a_gpu_may_be_unknown(image):
    done, asked = image(NEW, f"{NO_CAPABILITY}echo 535.104.05\n", "gpu")
    assert done.returncode == 0, done.stderr
    assert asked == [["install", "txl_jax[cuda12] @ x"]]


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
    assert "is installed but not used: JAX gives no reason" in done.stderr


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
    environment["TXL_SOURCE"] = "file:///absent"  # an installation would fail
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
