"""What each ``--mode`` does, phase by phase: check, load, work, tell."""

import dataclasses
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from absl import logging

from txl_jax.config import ConfigError, ExperimentConfig, differing_keys, override
from txl_jax.data.corpus import Corpus, DataError, corpus_from_config
from txl_jax.evaluation import baselines
from txl_jax.evaluation.report import report
from txl_jax.generation.text import continue_text, encode_prompt, prompt_of
from txl_jax.training.checkpoint import CheckpointError
from txl_jax.training.loop import NonFiniteError, check_fit
from txl_jax.training.loop import train as train_loop
from txl_jax.training.stopping import Stop
from txl_jax.workdir import Trained, WorkdirError, check_writable, claim, load, with_vocab

KNOWN_ERRORS = (ConfigError, DataError, CheckpointError, NonFiniteError, WorkdirError)


def train(exp: ExperimentConfig, workdir: str, command: str) -> int:
    """Trains to the last step, then scores, compares and continues the prompt.

    Every check of what the run needs comes before the first step. ``command`` is what to type
    to go on after an interruption. Returns the exit code.
    """
    logging.set_verbosity(logging.ERROR)
    with Stop() as stop:
        check_writable(workdir)
        corpus = corpus_from_config(exp.data)
        exp = with_vocab(exp, corpus)
        baselines.check(exp.evaluate.baselines, corpus.vocab)
        encode_prompt(corpus.vocab, prompt_of(exp.generate))
        check_fit(exp, corpus)
        claim(workdir, exp, corpus)
        outcome = train_loop(exp, corpus, workdir, stop)
        if outcome.finished:
            trained = dataclasses.replace(load(workdir), config=exp)
            last_line = finish(trained, corpus, workdir, stop)
    if stop.signal is None:
        print(last_line, flush=True)
        return 0
    what = "saved" if int(outcome.state.step) else "before the first step, nothing to save"
    text = f"stopped by {stop.signal.name}, {what}; to go on:\n  {command}"
    print(text, file=sys.stderr, flush=True)
    return stop.exit_code


def finish(trained: Trained, corpus: Corpus, workdir: str, stop: Stop) -> str:
    """The report, the sample, and the line with the held-out number; or less, if told to stop."""
    result = report(trained, corpus, workdir, stop.requested)
    if result is None:
        return ""
    if trained.config.generate.length:
        write_sample(trained, workdir, stop.requested)
    return f"held-out {_headline(result)}"


def with_trained(
    mode: str, exp: ExperimentConfig | None, overrides: Mapping[str, str], workdir: str, step: str
) -> int:
    """``evaluate`` or ``generate`` with the model of a workdir.

    The workdir's own config holds, and ``overrides`` on it; a config that is given as well
    replaces all but the model and the text.
    """
    logging.set_verbosity(logging.ERROR)
    trained = load(workdir, step)
    if exp is None:
        exp = override(trained.config, overrides)
    exp = dataclasses.replace(exp, model=_same_model(exp, trained))
    trained = dataclasses.replace(trained, config=exp)
    if mode == "generate":
        write_sample(trained, workdir)
        return 0
    corpus = corpus_from_config(exp.data, trained.vocab)
    baselines.check(exp.evaluate.baselines, corpus.vocab)
    result = report(trained, corpus, workdir)
    assert result is not None
    print(f"{exp.evaluate.split} {_headline(result)}", flush=True)
    return 0


def write_sample(trained: Trained, workdir: str, stop: Callable[[], bool] = lambda: False) -> None:
    """Prints prompt and continuation as it is made, and keeps them as ``sample.txt``."""
    c = trained.config.generate
    prompt = prompt_of(c)
    print(prompt, end="", flush=True)
    text = prompt
    for piece in continue_text(trained, c):
        print(piece, end="", flush=True)
        text += piece
        if stop():
            return
    print(flush=True)
    with open(os.path.join(workdir, "sample.txt"), "w", encoding="utf-8") as file:
        file.write(text + "\n")


def _headline(result: dict[str, Any]) -> str:
    unit, first = result["unit"], result["results"][0]
    return f"{unit} {first[unit]:.4f} ({first['protocol']})"


def _same_model(exp: ExperimentConfig, trained: Trained):
    """The trained model's shape, once the config is known not to name another."""
    run = {key: getattr(trained.config.model, key) for key in ("scan_layers", "remat")}
    model = dataclasses.replace(exp.model, **run)
    if model.vocab_size is None:
        model = dataclasses.replace(model, vocab_size=trained.config.model.vocab_size)
    asked = {"model": dataclasses.asdict(model)}
    different = differing_keys({"model": dataclasses.asdict(trained.config.model)}, asked)
    if different:
        raise WorkdirError(f"the workdir's model is of another shape: {'; '.join(different)}")
    return model
