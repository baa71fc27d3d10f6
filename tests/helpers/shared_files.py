"""Finds recorded fixtures and real texts in ``$TXL_SHARED``, else in ``../shared``.

They are not part of the repository. A test that needs a missing file is skipped with this reason.
"""

import json
import os
from pathlib import Path

import pytest
from places import ROOT

FOLDER = Path(os.environ.get("TXL_SHARED") or ROOT.parent / "shared")


def path(name: str) -> Path:
    """The shared file or folder ``name``; skips the test where it is missing."""
    found = FOLDER / name
    if not found.exists():
        pytest.skip(f"no shared file {found}; set $TXL_SHARED to the folder that has it")
    return found


def json_of(name: str) -> dict:
    """The content of a shared JSON file."""
    return json.loads(path(name).read_text())
