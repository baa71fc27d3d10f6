"""The code of README.md runs as written, and its commands run with smaller settings."""

import re
import shlex
import string

import jax
import numpy as np
import pytest
from places import ROOT
from tiny_runs import call, text

import txl_jax
from txl_jax import agents

README = ROOT / "README.md"


@pytest.mark.integration
@pytest.mark.parametrize(
    "settings",
    [
        '{"train.steps": 2, "optimizer.warmup_steps": 1, "evaluate.baselines": ()}',
        pytest.param("", marks=pytest.mark.slow, id="as written"),
    ],
)
def test_the_readmes_python_runs(settings, tmp_path, monkeypatch):
    """The run of the slow test takes a minute, so the other one trains with fewer steps."""
    monkeypatch.chdir(tmp_path)
    run = '"quickstart:smoke", "runs/smoke"'
    text = README.read_text()
    assert text.count(run) == 1
    text = text.replace(run, f"{run}, {settings}")
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert blocks
    names: dict = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert names["logits"].shape == (2, 8, 256)
    assert names["nll"].shape == (2, 8)
    assert names["learnt"].shape == (3, 10, 64)


@pytest.mark.integration
def test_the_readmes_agent_learns_on_every_window_what_it_acted():
    """The agent acts 50 steps with random ends of episodes, then learns on all 41 windows of 10."""
    block = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)[-1]
    keep = "states.append(state)"
    assert block.count(keep) == 1
    names: dict = {"jax": jax, "txl_jax": txl_jax, "agents": agents, "acted": []}
    exec(block.replace(keep, f"{keep}; acted.append(outputs)"), names)
    acted, begins, steps, window = np.stack(names["acted"], 1), names["begins"], names["T"], 10
    assert acted.shape == (3, 50, 64)
    assert begins[:, 1:].any(axis=1).all()
    np.testing.assert_allclose(names["learnt"], acted[:, -window:], atol=1e-5)

    @jax.jit
    def learn(start):
        part = lambda x: jax.lax.dynamic_slice_in_dim(x, start, window, axis=1)
        mems = names["buffer"].memory(names["M"], before=names["M"] + start)
        inputs, reset = part(names["observed"]), part(begins)
        apply = names["model"].apply
        return apply(names["variables"], inputs, mems, method="core", reset=reset)[0]

    for start in range(steps - window + 1):
        want = acted[:, start : start + window]
        np.testing.assert_allclose(learn(start), want, atol=1e-5, err_msg=str(start))


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_the_files_that_it_names_exist(name):
    text = (ROOT / name).read_text()
    for path in re.findall(r"(?:configs|txl_jax|tests|launch|benchmarks|docs)/[\w/.]*\w", text):
        assert any(ROOT.glob(f"{path}*")), path


def test_the_readme_says_when_to_take_this_and_runs_do_not_share_a_folder():
    text = README.read_text()
    (why,) = re.findall(r"^- \*\*Instead of\*\* .*?(?=\n\n)", text, re.MULTILINE | re.DOTALL)
    assert all(words in why for words in ("the authors' code", "a GPT", "memory layers"))
    assert "primed with the training files, which is better | 1.717; 3.475; 1.391" in text
    begun = re.findall(r"--config=\S+.* --workdir=(\S+)|train\([^)]*, \"(runs/\w+)\"", text)
    folders = [shell or python for shell, python in begun]
    twice = [folder for folder in folders if folders.count(folder) > 1]
    assert twice == ["runs/e"] * 2  # the same run, on one machine or on several


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
    "--topology=h200:1x1x8": [],  # would need the extra compile-cuda
}
"""Arguments that replace an argument of README.md in the test, so that each run is small."""


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
