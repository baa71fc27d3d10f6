"""What the documentation shows runs as it stands there."""

import pathlib
import re

import pytest

README = pathlib.Path(__file__).parents[1] / "README.md"


@pytest.mark.integration
def test_the_readmes_python_runs():
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
