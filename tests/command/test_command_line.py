"""Commands in the output are spelled as the user typed them, and they run."""

import os
import shlex
import sys

import pytest
from tiny_runs import call, write_config

from txl_jax.command_line import command_for, command_with, typed_command


@pytest.fixture
def typed(monkeypatch):
    """Returns a function that pretends that the user typed a command.

    ``before`` are the words that start the program, such as python -m NAME; ``arguments`` follow.
    """
    monkeypatch.delenv("TXL_LAUNCHED_BY", raising=False)

    def typed(before, *arguments, **variables):
        script = before[-1] if "-m" not in before else "main.py"
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        monkeypatch.setattr(sys, "orig_argv", [*before, *arguments])
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return typed


FLAGS = ("--config=my_text", "--config.data.path=a b.txt", "--config.train.steps=70")


@pytest.mark.parametrize("python", [["python3"], ["/opt/a b/python", "-X", "dev"]])
def test_python_is_called_as_it_was_typed(typed, python):
    typed([*python, "-m", "txl_jax.main"], *FLAGS)
    assert shlex.split(typed_command()) == [*python, "-m", "txl_jax.main", *FLAGS]


def test_the_command_txl_is_named_as_the_shell_finds_it(typed, tmp_path, monkeypatch):
    (tmp_path / "txl").touch(0o755)
    typed(["python", str(tmp_path / "txl")], *FLAGS)
    assert shlex.split(typed_command()) == [str(tmp_path / "txl"), *FLAGS]
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert shlex.split(typed_command()) == ["txl", *FLAGS]


def test_a_script_of_launch_is_named_without_the_flags_that_it_adds(typed):
    script, added = "COORDINATOR=a:1 launch/gpu_node.sh", "--distributed --coordinator=a:1"
    given = [*shlex.split(added), *FLAGS]
    typed(["python", "-m", "x"], *given, TXL_LAUNCHED_BY=script, TXL_ADDED=added)
    assert shlex.split(typed_command()) == [*shlex.split(script), *FLAGS]


@pytest.mark.parametrize(
    "old", [(), ("--workdir=old",), ("--workdir", "old"), ("-workdir=old", "--workdir", "x")]
)
def test_new_values_of_flags_replace_the_typed_ones(typed, old):
    typed(["txl"], "--config=x", *old, "--config.train.steps=70")
    words = shlex.split(command_with({"--workdir": "new one", "--config.train.steps": "90"}))
    assert words[1:] == ["--config=x", "--workdir=new one", "--config.train.steps=90"]


def test_a_mode_is_run_in_the_folder_as_seen_from_here(typed, tmp_path, monkeypatch):
    typed(["txl"])
    monkeypatch.chdir(tmp_path)
    words = lambda folder: shlex.split(command_for("generate", str(folder)))[1:]
    assert words(tmp_path / "runs" / "a b") == ["--workdir=runs/a b", "--mode=generate"]
    assert words("/else/where") == ["--workdir=/else/where", "--mode=generate"]


@pytest.mark.slow
def test_a_run_ends_with_folder_files_and_commands_and_gets_more_steps_by_a_command(tmp_path):
    """A run prints commands at its end, and a shell runs these commands unchanged."""
    config = write_config(tmp_path)
    first = ("--config", config, "--workdir=runs/a")
    done = call(*first, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder, files, following = done.stderr.splitlines()[-3:]
    assert folder == "folder  runs/a"
    names = files.removeprefix("files   ").split("  ")
    assert {"evaluation.json", "sample.txt", "metrics.jsonl", "checkpoints/"} <= {*names}
    assert all((tmp_path / "runs" / "a" / name).exists() for name in names)
    shell = ["bash", "-c", following.removeprefix("next    ").partition("  (")[0]]
    assert run(shell, tmp_path).returncode == 0

    longer = call("--workdir=runs/a", "--config.train.steps=13", cwd=tmp_path)
    assert longer.returncode == 2
    assert "the run in this folder has ended after 12 steps" in longer.stderr
    command = longer.stderr.rstrip().rpartition("in another folder: ")[2]
    done = run(["bash", "-c", command], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "starting from the parameters of runs/a" in done.stderr
    assert (tmp_path / "runs" / "a-13" / "sample.txt").exists()


def run(words, folder):
    import subprocess

    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}
    return subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
