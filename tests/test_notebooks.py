"""Every cell of the notebooks runs, in order, and says what it should; few steps, plain Python."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import tiny_runs

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
    environment = {"TXL_CONFIGS": str(tiny_runs.ROOT / "configs"), "STEPS": "6"}
    if corpus == "ptb":
        words = ["the", "company", "said", *(f"w{n}" for n in range(40))]
        for split in ("train", "valid", "test"):
            lines = [" ".join(words[n % 37 : n % 37 + 4]) for n in range(4000)]
            (tmp_path / f"ptb.{split}.txt").write_text("\n".join(lines) + "\n")
        environment["PTB"] = str(tmp_path)
    after = "print('pieces', len(rows), os.path.exists(os.path.join(WORKDIR, 'attention.png')))"
    said = execute("ptb_colab.ipynb", after, tmp_path, **environment)
    assert "effective context" in said
    assert "widest heads" in said
    assert "20 tokens" in said
    assert "pieces 4 True" in said
