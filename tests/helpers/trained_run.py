"""One finished run of the command, shared by all tests that only need a trained workdir."""

import dataclasses
import json
import os
import pathlib
import shutil

import pytest
from filelock import FileLock
from tiny_runs import call, write_config


@dataclasses.dataclass(frozen=True)
class TrainedRun:
    """A run of 12 steps. Many tests read ``workdir``, so a test must write only to a copy of it."""

    folder: pathlib.Path
    """The folder of the text, ``text.txt``."""
    config: str
    workdir: pathlib.Path
    stdout: str
    stderr: str

    def copied(self, to: pathlib.Path) -> pathlib.Path:
        """Copies the workdir; a test can change the copy."""
        return shutil.copytree(self.workdir, to)


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory):
    """The shared run; one worker of pytest-xdist makes it for all workers."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "trained_run"
    said = folder / "said.json"
    with FileLock(f"{folder}.lock"):
        folder.mkdir(exist_ok=True)
        config = write_config(folder, **{"evaluate.baselines": ("unigram", "bigram")})
        if not said.exists():
            done = call(f"--config={config}", f"--workdir={folder / 'run'}")
            assert done.returncode == 0, done.stderr
            said.write_text(json.dumps([done.stdout, done.stderr]))
    return TrainedRun(folder, config, folder / "run", *json.loads(said.read_text()))
