"""What README shows runs as it stands there."""

import pathlib
import re
import shlex
import string

import pytest
from tiny_runs import call, text

README = pathlib.Path(__file__).parents[1] / "README.md"


@pytest.mark.integration
def test_the_readmes_python_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert blocks
    names: dict = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert names["logits"].shape == (2, 8, 256)
    assert names["nll"].shape == (2, 8)
    assert names["hidden"].shape == (2, 8, 64)


def test_the_readmes_files_exist():
    text = README.read_text()
    for path in re.findall(r"(?:configs|txl_jax|tests|launch|benchmarks)/[\w/.]*\w", text):
        assert (README.parent / path).exists(), path


def test_the_readme_is_short():
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 140
    assert max(map(len, lines)) <= 120


FEW = ["--config.train.steps=4", "--config.optimizer.warmup_steps=2"]
SMALLER = {
    "--config=quickstart": ["--config=quickstart:smoke", "--workdir=runs/quickstart"],
    "--config=my_text": ["--config=my_text:smoke"],
    "--config=my_text:fine_tune": ["--config=my_text:fine_tune", *FEW],
    "--config=enwik8_24l": ["--config=enwik8_24l:smoke"],
    "--topology=v5e:4x4": [],  # would need libtpu
}
"""What the test gives instead of an argument of README, so that each run is small."""


@pytest.mark.slow
def test_the_readmes_commands_run_in_order(tmp_path):
    for name in ("FILE_OR_FOLDER", "OTHER_TEXT", "ENWIK8"):
        (tmp_path / name).write_text(string.printable + text(2000), encoding="utf-8")
    blocks = re.findall(r"```sh\n(.*?)```", README.read_text(), flags=re.DOTALL)
    lines = [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]
    commands = [words[1:] for words in lines if words and words[0] in ("txl", "./launch/local.sh")]
    assert len(commands) == 9
    for command in commands:
        given = [new for argument in command for new in SMALLER.get(argument, [argument])]
        done = call(*given, cwd=tmp_path)
        assert done.returncode == 0, (command, done.stderr)
        assert done.stdout, command
    assert (tmp_path / "runs" / "quickstart" / "report.html").exists()
