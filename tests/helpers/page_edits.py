"""Reads the edits that a page shows in ``diff`` blocks, and applies them to copies of the files."""

import re
import shutil
from typing import NamedTuple

from places import ROOT


class Edit(NamedTuple):
    """A replacement of lines in a file; ``about`` is the text of the @@ line before them."""

    file: str
    about: str
    old: str
    new: str


def edits(text: str) -> dict[str, list[Edit]]:
    """The edits in the ``diff`` blocks of each section of a page, in a dict by the heading."""
    found = {}
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        blocks = re.findall(r"```diff\n(.*?)```", section, flags=re.DOTALL)
        if blocks:
            found[section.partition("\n")[0]] = [edit for block in blocks for edit in _of(block)]
    return found


def _of(block: str):
    for part in re.split(r"^\+\+\+ ", block, flags=re.MULTILINE)[1:]:
        file, _, lines = part.partition("\n")
        first, *others = re.split(r"^@@ (.*)\n", lines, flags=re.MULTILINE)
        for about, hunk in [("", first), *zip(others[::2], others[1::2], strict=True)]:
            if hunk:
                yield from _pieces(file, about, hunk.splitlines())


def _pieces(file: str, about: str, lines: list[str]):
    """Yields the edit of one hunk; it replaces the hunk's unchanged and removed lines."""
    before = [line[1:] for line in lines if line[:1] != "+"]
    after = [line[1:] for line in lines if line[:1] != "-"]
    yield Edit(file, about, "\n".join(before) + "\n", "\n".join(after) + "\n")


def copy_with(folder, chosen):
    """Copies the repository's Python files and applies the edits; each must fit just one place."""
    for name in ("txl_jax", "tests", "benchmarks", "configs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    for edit in chosen:
        text = (folder / edit.file).read_text(encoding="utf-8")
        assert text.count(edit.old) == 1, (edit.file, text.count(edit.old), edit.old)
        (folder / edit.file).write_text(text.replace(edit.old, edit.new), encoding="utf-8")
    return folder
