"""Runs notebooks and keeps what their cells print and draw.

    python notebooks/keep_outputs.py [NAME.ipynb ...]

The cells run in order in one process of plain Python, in an empty folder. A cell keeps its text,
its figures, and a hash of its source, which shows a test that the outputs belong to the cell. The
variables of the environment that a notebook reads (``STEPS=100``) are written to its metadata.
The cells of a notebook in ``PAGES`` are first made from its page.
"""

import base64
import contextlib
import hashlib
import io
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import warnings
from typing import Any

FOLDER = pathlib.Path(__file__).resolve().parent
VARIABLES = ("STEPS", "UPDATES")
"""Variables of the environment that shorten a notebook."""
PAGES = {"own_loop.ipynb": "own_loop.md"}
"""The notebooks whose text and code are those of a page in docs/."""


def source_hash(cell: dict[str, Any]) -> str:
    """Returns the hash that a cell keeps of its source."""
    return hashlib.sha256("".join(cell["source"]).encode()).hexdigest()[:16]


def keep_outputs(file: pathlib.Path) -> None:
    """Runs a notebook in a process and folder of its own, and writes it with its outputs."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(FOLDER / "keep_outputs.py"), "--run", str(file.resolve())]
        environment = {**os.environ, "MPLBACKEND": "agg", "PYTHONPATH": str(FOLDER.parent)}
        environment["TXL_LAUNCHED_BY"] = (
            "python -m txl_jax.main"  # without a folder of this machine
        )
        done = subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
        text = done.stdout.decode()
        for place in (folder, str(FOLDER.parent), os.path.expanduser("~") + "/"):
            assert place not in text, f"{file.name}: an output names the folder {place}"
    file.write_text(text, encoding="utf-8")


def page_cells(page: str) -> list[dict[str, Any]]:
    """Returns the cells of a page: its code, and between that its text with links that work."""
    cells: list[dict[str, Any]] = []
    parts = re.split(r"^```python\n(.*?)^```\n", page, flags=re.MULTILINE | re.DOTALL)
    for number, part in enumerate(parts):
        text = re.sub(r"\[\]\((.+?)\.md\)", r"[\1](../docs/\1.md)", part).strip()
        keys = {"outputs": [], "execution_count": None} if number % 2 else {}
        kind = "code" if number % 2 else "markdown"
        cell = {"cell_type": kind, "metadata": {}, **keys}
        cells += [{**cell, "source": text.splitlines(keepends=True)}] * bool(text)
    return cells


def run(file: pathlib.Path) -> str:
    """Runs a notebook in this process. Returns it with its outputs, as JSON."""
    notebook, names = json.loads(file.read_text("utf-8")), {"__name__": "__main__"}
    if page := PAGES.get(file.name):
        text = (FOLDER.parent / "docs" / page).read_text("utf-8")
        notebook["cells"][2:] = page_cells(text.partition("\n")[2])  # the title stays
    used = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    notebook["metadata"]["txl_jax"] = {"environment": used}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, 1):
        cell["execution_count"], cell["outputs"] = (
            number,
            outputs_of("".join(cell["source"]), names),
        )
        cell["metadata"]["source_hash"] = source_hash(cell)
    return json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def outputs_of(source: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs a cell, and returns its text and figures in order."""
    import matplotlib.pyplot as plt

    outputs: list[dict[str, Any]] = []
    printed = io.StringIO()

    def flush() -> None:
        if text := printed.getvalue():
            lines = text.splitlines(keepends=True)
            outputs.append({"name": "stdout", "output_type": "stream", "text": lines})
        printed.seek(0)
        printed.truncate()

    def show(*_: Any, **__: Any) -> None:
        flush()
        for number in plt.get_fignums():
            image = io.BytesIO()
            plt.figure(number).savefig(image, format="png", dpi=72)
            data = {"image/png": base64.b64encode(image.getvalue()).decode()}
            outputs.append({"data": data, "metadata": {}, "output_type": "display_data"})
        plt.close("all")

    plt.show = show
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        exec(compile(source, "<cell>", "exec"), names)
    flush()
    return outputs


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        sys.stdout.write(run(pathlib.Path(sys.argv[2])))
    else:
        for name in sys.argv[1:] or sorted(path.name for path in FOLDER.glob("*.ipynb")):
            keep_outputs(FOLDER / name)
