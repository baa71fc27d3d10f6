"""Where the files of the repository lie."""

import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
RECORDED = ROOT / "tests" / "recorded"
"""Recorded results of other programs; see the README there."""
