"""Runs small enough for tests: a text, an experiment, a workdir, and the command as a process."""

import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import numpy as np
from places import ROOT

import txl_jax
from txl_jax.checkpoint.workdir import init_workdir, with_vocab
from txl_jax.checkpoint.workdir_files import check_writable
from txl_jax.data.corpus import corpus_from_config
from txl_jax.evaluation.split import score_split, write_evaluation
from txl_jax.training import loop
from txl_jax.training.plan import build_plan
from txl_jax.training.preemption import PreemptionGuard


def text(n_lines=400, seed=0):
    """Lines of 8 words, each word drawn at random from the same 15."""
    rng = random.Random(seed)
    words = [
        "the",
        "cat",
        "saw",
        "a",
        "dog",
        "and",
        "then",
        "it",
        "ran",
        "to",
        "some",
        "red",
        "house",
        "by",
        "night",
    ]
    return "".join(" ".join(rng.choices(words, k=8)) + "\n" for _ in range(n_lines))


def experiment(folder, **changes):
    """An experiment on a small text in ``folder``; ``changes`` has settings by dotted key."""
    path = pathlib.Path(folder) / "text.txt"
    if not path.exists():
        path.write_text(text(), encoding="utf-8")
    settings = {
        "model": {"n_layer": 2, "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 32},
        "data": {"name": "text", "path": str(path), "vocab": "char"},
        "optimizer": {"learning_rate": 5e-3, "warmup_steps": 2},
        "train": {
            "steps": 12,
            "batch_size": 4,
            "seg_len": 16,
            "mem_len": 16,
            "log_every": 3,
            "eval_every": 6,
        },
        "validate": {"batch_size": 4, "seg_len": 16, "mem_len": 16, "max_segments": 4},
        "evaluate": {"batch_size": 4, "seg_len": 16, "mem_len": 32},
        "generate": {"prompt": "the cat", "length": 8, "mem_len": 16},
        "checkpoint": {"every": 4},
        "mesh": {"data": 1},
    }
    exp = txl_jax.ExperimentConfig.from_dict(settings)
    return txl_jax.config.override(exp, changes)


def evaluate(trained, corpus, workdir):
    """Scores a split and writes the result, as the command does; returns its JSON record."""
    result = score_split(trained, corpus)
    assert result is not None
    write_evaluation(result, str(workdir))
    return result.record


def corpus_and_experiment(folder, **changes):
    """The prepared corpus, and the experiment, which gets the corpus's vocabulary size."""
    exp = experiment(folder, **changes)
    corpus = corpus_from_config(exp.data)
    return corpus, with_vocab(exp, corpus)


def train(exp, corpus, workdir, guard=None):
    """Trains one seed in a workdir without writing its settings there; returns the outcome."""
    plan = build_plan(exp, corpus, str(workdir))
    (outcome,) = loop.train(plan, guard or PreemptionGuard())
    return outcome


def run(folder, workdir, **changes):
    """Trains in this process; returns the outcome."""
    corpus, exp = corpus_and_experiment(folder, **changes)
    return train(exp, corpus, workdir)


def run_in_workdir(folder, workdir, **changes):
    """Trains like :func:`run`, but writes settings and vocabulary, so the model can be loaded."""
    corpus, exp = corpus_and_experiment(folder, **changes)
    claimed(workdir, exp, corpus)
    return train(exp, corpus, workdir)


def claimed(workdir, exp, corpus):
    """Makes a workdir with the settings and vocabulary of an experiment; returns its path."""
    check_writable(str(workdir), create=True)
    init_workdir(str(workdir), exp, corpus)
    return str(workdir)


CONFIG = '''"""A config for tests."""

from ml_collections import ConfigDict


def get_config():
    return ConfigDict({settings!r})
'''

TABLE = '''"""A table for tests."""

from ml_collections import ConfigDict

ROWS = {{"memory": ("relative", 16), "none": ("relative", 0), "table": ("absolute_per_layer", 0)}}


def get_config(variant="memory"):
    config = ConfigDict({settings!r})
    attention, memory = ROWS[variant or "memory"]
    config.model.update({{"attention": attention}})
    if attention != "relative":
        config.model.n_positions = 24
    config.train.mem_len = config.validate.mem_len = memory
    if memory:
        config.evaluate.update({{"seg_len": 8, "mem_len": 16}})
    else:
        config.evaluate.update({{"seg_len": 8, "mem_len": 0, "context_len": 8}})
    config.ablation.update({{"lengths": (24, 32), "split": "valid", "max_tokens": 96}})
    return config
'''


def write_config(folder, **changes):
    """Writes the experiment as a config file; returns its path."""
    path = pathlib.Path(folder) / "tiny.py"
    path.write_text(CONFIG.format(settings=experiment(folder, **changes).to_dict()))
    return str(path)


def command(*arguments):
    """``python -m txl_jax.main`` with arguments."""
    return [sys.executable, "-m", "txl_jax.main", *map(str, arguments)]


def call(*arguments, timeout=300, cwd=ROOT, **environment):
    """Runs the command to its end; returns the completed process, with its output as text."""
    return subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=timeout,
        check=False,
        env={**os.environ, **environment},
    )


def interrupt(sent, *arguments, when, timeout=120):
    """Runs the command, sends a signal when ``when()`` is true; returns exit code and output."""
    ignored = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # else nohup makes it ignore SIGHUP
    process = subprocess.Popen(
        command(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )
    signal.signal(signal.SIGHUP, ignored)
    limit = time.monotonic() + timeout
    while not when() and process.poll() is None:
        assert time.monotonic() < limit, "what was waited for did not come"
        time.sleep(0.01)
    if process.poll() is None:
        os.kill(process.pid, sent)
    output, _ = process.communicate(timeout=timeout)
    return process.returncode, output


KILL = signal.SIGKILL


def arrays(tree, prefix=""):
    """Every leaf of a state as a flat dict of numpy arrays."""
    import jax

    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {prefix + jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def lm1b(folder):
    """Writes a small One Billion Word corpus with the authors' file names; returns its folder."""
    root = pathlib.Path(folder) / "lm1b"
    base = "1-billion-word-language-modeling-benchmark-r13output"
    shards = root / base / "training-monolingual.tokenized.shuffled"
    if shards.exists():
        return root
    shards.mkdir(parents=True)
    lines = sentences(90)
    for n in (1, 2):
        part = lines[(n - 1) * 40 : n * 40]
        (shards / f"news.en-0000{n}-of-00100").write_text("".join(part))
    for split, part in (("valid", lines[80:]), ("test", lines[70:])):
        (root / f"{split}.txt").write_text("".join(part))
    words = sorted({word for line in lines for word in line.split()} - {"night"})
    vocab = "".join(f"{word} 1\n" for word in ["<S>", "<UNK>", *words])
    (root / "1b_word_vocab.txt").write_text(vocab)
    return root


def sentences(n):
    """Lines of :func:`text`, each cut to 1 to 8 words."""
    rng = random.Random(1)
    return [" ".join(line.split()[: rng.randint(1, 8)]) + "\n" for line in text(n).splitlines()]
