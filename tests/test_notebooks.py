"""Every cell of the notebooks runs, in order, and says what it should; few steps, plain Python."""

import json
import os
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

FOLDER = pathlib.Path(__file__).parents[1] / "notebooks"


def code_of(name):
    """The code cells as one program; shell lines are comments."""
    cells = json.loads((FOLDER / name).read_text(encoding="utf-8"))["cells"]
    return "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")


def execute(name, after, cwd, **environment):
    """Runs a notebook and then ``after``, which sees its names; what was printed."""
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


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("*.ipynb")))
def test_a_notebook_is_kept_without_what_it_printed(name):
    notebook = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None
            assert not any(line.startswith(("%", "!")) for line in cell["source"])


@pytest.mark.integration
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


@pytest.mark.integration
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


@pytest.mark.integration
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


@pytest.mark.integration
def test_an_agent_with_enough_memory_answers_and_one_with_less_guesses(tmp_path):
    said = execute("agent.ipynb", "print('difference', difference)", tmp_path)
    shares = dict(re.findall(r"memory (\d+): (\d+)% of the last answers", said))
    assert int(shares["16"]) > 95
    assert 40 < int(shares["2"]) < 60
    assert float(said.split("difference ")[-1]) < 1e-5


def test_every_address_of_the_repository_is_that_of_the_package():
    """The one that pyproject.toml names, and a button that opens this notebook."""
    root = FOLDER.parent
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
        assert f"git+{urls['Source']}" in text
    for page in (root / "README.md", *FOLDER.glob("*.ipynb"), *(root / "docs").glob("*.md")):
        text = page.read_text("utf-8")
        assert "YOUR_REPOSITORY" not in text
        assert set(re.findall(r"github(?:\.com)?/([\w-]+/txl_jax)\b", text)) <= {home}, page
