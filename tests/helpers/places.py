"""Where the files of the repository lie."""

import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
RECORDED = ROOT / "tests" / "recorded"
"""What other programs gave: see the README there."""
