"""With the same settings, methods of the library give the results of the command's modes."""

import contextlib
import dataclasses
import inspect
import io
import json
import logging
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest
import tensorboardX  # noqa: F401  (what it imports adds filters for its own warnings)
import tiny_runs
from places import ROOT
from tiers import rest_integration

import txl_jax
from txl_jax import modes, progress
from txl_jax.analysis import context
from txl_jax.checkpoint import trained_model
from txl_jax.checkpoint.errors import WorkdirError
from txl_jax.config import ConfigError, GenerateConfig, ProtocolConfig, ScoreConfig, override
from txl_jax.data.corpus import corpus_from_config
from txl_jax.data.errors import DataError
from txl_jax.evaluation import any_text as score_mode
from txl_jax.evaluation import baselines, evaluator
from txl_jax.evaluation.evaluator import segment_bar
from txl_jax.generation import generate
from txl_jax.generation.write import write_continuations
from txl_jax.library import language_model
from txl_jax.messages import arguments_as_flags
from txl_jax.training.trainer import Trainer

SETTINGS = {"temperature": 0.7, "top_k": 5, "length": 12, "seed": 3}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The workdir of a run that this process trained."""
    folder = tmp_path_factory.mktemp("library")
    tiny_runs.run_in_workdir(folder, folder / "run", **{"average.ema_decay": 0.5})
    return folder / "run"


@pytest.fixture(scope="module")
def trained(run):
    return txl_jax.load(str(run))


def with_settings(trained, section, **settings):
    exp = override(trained.config, {f"{section}.{key}": x for key, x in settings.items()})
    return language_model(txl_jax.LanguageModel(**{**vars(trained), "config": exp}))


def test_loading_a_model_warns_of_nothing(run, caplog):
    txl_jax.load(str(run))
    assert caplog.text == ""


def test_an_interrupted_generation_that_is_repeated_leaves_each_record_once(trained, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the dog\nthe cat\nit ran\n")
    settings = {"prompts_file": str(prompts), "batch_size": 1, **SETTINGS}
    asked, kept = with_settings(trained, "generate", **settings), tmp_path / "samples.jsonl"
    write_continuations(asked, str(tmp_path), lambda: kept.exists())
    assert len(kept.read_text().splitlines()) == 1
    write_continuations(asked, str(tmp_path))
    rows = [json.loads(line)["prompt"] for line in kept.read_text().splitlines()]
    assert rows == ["the dog", "the cat", "it ran"]
    shorter = {**settings, "length": 3}
    write_continuations(with_settings(trained, "generate", **shorter), str(tmp_path))
    assert len(kept.read_text().splitlines()) == 6


@pytest.mark.integration
def test_an_evaluation_that_is_repeated_is_kept_once_and_another_one_too(trained, tmp_path):
    corpus, kept = corpus_from_config(trained.config.data), tmp_path / "evaluations.jsonl"
    counts, dtypes = [], []
    for settings in ({}, {}, {"split": "valid"}, {}):
        tiny_runs.evaluate(with_settings(trained, "evaluate", **settings), corpus, tmp_path)
        counts.append(len(kept.read_text().splitlines()))
    assert counts == [1, 1, 2, 3]
    for dtype in ("float32", "bfloat16"):
        chosen = with_settings(trained, "model", dtype=dtype)
        tiny_runs.evaluate(checkpointed(chosen), corpus, tmp_path)
        dtypes.append(json.loads(kept.read_text().splitlines()[-1])["dtype"])
    assert dtypes == ["float32", "bfloat16"]


@pytest.mark.integration
def test_a_loss_that_is_not_finite_is_null_in_every_file(trained, tmp_path, capsys):
    huge = dataclasses.replace(trained, params=jax.tree.map(lambda x: x * np.inf, trained.params))
    tiny_runs.evaluate(huge, corpus_from_config(trained.config.data), tmp_path)
    write_continuations(with_settings(huge, "generate", **SETTINGS), str(tmp_path))
    (tmp_path / "x.txt").write_text("the cat\n")
    settings = {"path": str(tmp_path / "x.txt"), "json": str(tmp_path / "scores.jsonl")}
    score_mode.run(with_settings(huge, "score", **settings), str(tmp_path))
    for name in ("evaluation.json", "evaluations.jsonl", "samples.jsonl", "scores.jsonl"):
        text = (tmp_path / name).read_text()
        assert "null" in text
        assert "NaN" not in text, name


def checkpointed(trained):
    """Returns the model rebuilt with the settings of its config, as the modes rebuild it."""
    return trained_model.with_settings(trained, trained.config)


@pytest.mark.integration
def test_scores_say_what_they_were_computed_in(trained, tmp_path, capsys):
    """A score in bfloat16 differs in the fourth digit, so it must not look like one in float32."""
    corpus, products = corpus_from_config(trained.config.data), "float32 on a CPU"
    told = {"dtype": "bfloat16", "matmul_precision": "highest", "float32_products": products}
    settings = {"dtype": "bfloat16", "matmul_precision": "highest"}
    rounded = checkpointed(with_settings(trained, "model", **settings))
    plain = checkpointed(with_settings(trained, "model", dtype="float32"))
    results = [tiny_runs.evaluate(one, corpus, tmp_path) for one in (rounded, plain)]
    out = capsys.readouterr().out
    assert {key: results[0][key] for key in told} == told
    assert results[1]["dtype"] == "float32"
    assert [r["results"][0]["protocol"].endswith(", bfloat16") for r in results] == [True, False]
    assert out.count("memory 32, bfloat16:\n") == 1
    contexts = with_settings(rounded, "context", lengths=(4, 8), batch_size=4, max_tokens=40)
    text_scores = [str(language_model(one).score("the cat\n")) for one in (rounded, plain)]
    assert text_scores[0].startswith("note: computed in bfloat16\n")
    assert "computed in" not in text_scores[1]
    assert context.summary(contexts, corpus, measured(contexts, corpus)).items() >= told.items()


def measured(trained, corpus):
    with segment_bar("contexts") as progress:
        return context.measure(trained, corpus, trained.config.context, "model", progress)


def test_a_prompt_is_continued_as_the_mode_does(trained, tmp_path, capsys):
    for prompt, samples in (("the dog", 1), ("the cat", 2)):
        asked = with_settings(trained, "generate", prompt=prompt, samples=samples, **SETTINGS)
        write_continuations(asked, str(tmp_path))
        generated = trained.generate(prompt, samples=samples, **SETTINGS)
        text = (tmp_path / "sample.txt").read_text().removesuffix("\n")
        marks = re.sub(r"^\[1\.\d\] ", "", text, flags=re.MULTILINE)
        assert str(generated) == generated.text == (text if samples == 1 else marks)
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [one.continuation for one in generated] == [row["continuation"] for row in rows[1:]]
    assert [one.loss for one in generated] == [row["loss"] for row in rows[1:]]
    assert [one.sample for one in generated] == [0, 1]
    assert generated[0].nll.shape == (12,)
    assert generated[0].ids.dtype == np.int32
    capsys.readouterr()
    trained.generate(prompt, **SETTINGS)
    assert capsys.readouterr() == ("", ""), "the library prints nothing"


def test_without_arguments_the_settings_of_the_run_are_used(trained):
    c = trained.config.generate
    (one,) = trained.generate()
    assert (one.prompt, len(one.nll)) == (c.prompt, c.length)
    assert one.text == trained.generate(c.prompt).text
    assert trained.config.generate == c


def test_texts_and_ids_are_continued_alike(trained):
    texts = ["the cat", "a dog and", "it"]
    several = trained.generate(texts, batch_size=2, **SETTINGS)
    ids = [trained.vocab.encode(text) for text in texts]
    assert [one.text for one in trained.generate(ids, **SETTINGS)] == [x.text for x in several]
    for array in (ids[1], jnp.asarray(ids[1])):
        assert trained.generate(array, **SETTINGS).text == several[1].text
    assert repr(several).startswith("Generation(3 continuations: 'the cat")


def test_a_text_is_scored_as_the_mode_does(trained, tmp_path, capsys):
    text = "the cat saw a dog\n\nit ran"
    (tmp_path / "in.txt").write_text(text)
    for memory in ("carry", "line"):
        files = {"path": str(tmp_path / "in.txt"), "json": str(tmp_path / "out.jsonl")}
        score_mode.run(with_settings(trained, "score", memory=memory, **files), "unused")
        told = capsys.readouterr().err
        found = trained.score(text, memory=memory)
        assert f"{found}\n" == told
        rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        assert [line.nll.sum() for line in found.lines] == pytest.approx([r["nll"] for r in rows])
        assert [list(line.symbols) for line in found.lines] == [row["symbols"] for row in rows]
        assert found.nll == pytest.approx(sum(row["nll"] for row in rows))
        assert (found.tokens, found.unit, found.notes) == (25, "bpc", ())
        assert found.value == pytest.approx(found.bits_per_byte)
    assert capsys.readouterr() == ("", "")
    assert repr(found).startswith("TextScore(3 lines, 25 tokens, bpc ")


def test_lines_and_ids_are_scored_as_they_are(trained):
    lines = ["the cat\n", "a dog"]
    whole = trained.score("".join(lines))
    for given in (lines, [trained.vocab.encode(line) for line in lines]):
        found = trained.score(given)
        assert found.nll == whole.nll
        assert [line.text for line in found.lines] == lines
    assert trained.score(trained.vocab.encode("the cat\na dog")).nll == pytest.approx(whole.nll)


def test_a_split_is_evaluated_as_the_mode_does(trained, run, capsys):
    settings = {"mem_len": 48, "baselines": ["unigram", "bigram"], "max_segments": 3}
    for split in ("valid", "test"):
        asked = with_settings(trained, "evaluate", split=split, **settings)
        assert modes.evaluate(asked, str(run), asked.config) == 0
        told = capsys.readouterr().out
        found = trained.evaluate(split, **settings)
        assert told.startswith(f"{found}\n")
        assert told.endswith(f"\n{split} bpc {found.value:.4f} ({found.results[0].protocol})\n")
        assert capsys.readouterr().out == ""
        written = json.loads((run / "evaluation.json").read_text())
        timed = lambda record: [{**row, "seconds": 0} for row in record["results"]]
        assert timed(found.record) == timed(written)
    names = [row.name for row in found.results]
    assert names[-2:] == ["unigram", "bigram"]
    assert {"memory 48, raw weights", "memory 48, ema weights"} <= set(names), "as in the workdir"
    assert found.results[-1].seconds is None
    assert repr(found).startswith("Evaluation(bpc ")


def test_another_text_is_evaluated_with_the_vocabulary_of_the_model(trained, tmp_path):
    (tmp_path / "other.txt").write_text(tiny_runs.text(100, seed=5))
    found = trained.evaluate(data={"path": str(tmp_path / "other.txt")}, max_segments=2)
    assert found.record["label"].startswith(str(tmp_path / "other.txt"))
    assert found.value != trained.evaluate(max_segments=2).value
    dynamic = trained.evaluate(max_segments=2, dynamic={"rule": "sgd", "learning_rate": 0.1})
    assert "dynamic evaluation sgd, rate 0.1" in dynamic.results[0].protocol


WRONG = [
    (ConfigError, r"generate.top_k = -1: must be at least 0", "generate", {"top_k": -1}),
    (ConfigError, r"generate.length = 0: no token is generated", "generate", {"length": 0}),
    (ConfigError, r"evaluate.split = 'none': must be one of 'tr", "evaluate", {"split": "none"}),
    (DataError, r"prompt: .*'Z'", "generate", {"prompt": "Z"}),
    (DataError, r"text, line 2: .*'Z'", "score", {"text": "the\nZ"}),
    (DataError, r"text: has no token to score", "score", {"text": ""}),
    (DataError, r"ids\[1\] = 19: .* 0 to 18, .* 19 symbols", "score", {"text": np.array([0, 19])}),
    (DataError, r"ids\[0\] = -1: .* 0 to 18", "generate", {"prompt": np.array([-1])}),
    (DataError, r"ids must be 1-D integers, not float64", "score", {"text": np.ones(1)}),
    (
        DataError,
        r"ids must be 1-D integers, not int64 of shape \[1, 2\]",
        "score",
        {"text": np.eye(1, 2, dtype=int)},
    ),
    (
        DataError,
        r"^text = None: must be a text, bytes or ids .*, not None",
        "score",
        {"text": None},
    ),
    (
        DataError,
        r"^text = \{.*\}: must be .*, not a value of type dict",
        "score",
        {"text": {"a": 1}},
    ),
    (DataError, r"^prompt = 3: .* not a value of type int", "generate", {"prompt": 3}),
    (
        DataError,
        r"^prompt = PosixPath\('a'\): .* type PosixPath; read",
        "generate",
        {"prompt": pathlib.Path("a")},
    ),
    (
        DataError,
        r"^prompt 2 of 2 = None: must be .*, not None",
        "generate",
        {"prompt": ["a", None]},
    ),
    (DataError, r"^prompt 1 of 2 = 1.5: .* type float", "generate", {"prompt": [1.5, 2.0]}),
    (DataError, r"^prompt 1 of 1 = True: .* type bool", "generate", {"prompt": [True]}),
    (DataError, r"^prompt = \[\]: has no text", "generate", {"prompt": []}),
    (DataError, r"^text = \(\): has no text", "score", {"text": ()}),
    (ConfigError, r"^data = 'a.txt': must be a dict of settings", "evaluate", {"data": "a.txt"}),
]


@pytest.mark.parametrize(("error", "message", "method", "arguments"), WRONG)
def test_wrong_arguments_are_refused_by_name(trained, error, message, method, arguments):
    with pytest.raises(error, match=message) as caught:
        getattr(trained, method)(**arguments)
    assert "--" not in str(caught.value), "Python's users have no flags"


def test_bytes_are_a_text_and_lists_of_ids_are_texts(trained):
    text = "the cat"
    ids, want = trained.vocab.encode(text).tolist(), trained.generate(text, **SETTINGS).text
    for one in (text.encode(), bytearray(b"the cat"), np.str_(text), ids, tuple(ids)):
        assert trained.generate(one, **SETTINGS).text == want
        assert trained.score(one).nll == pytest.approx(trained.score(text).nll)
    assert trained.generate(iter(ids), **SETTINGS).text == want
    several = trained.generate([text.encode(), ids, np.array(ids), text], **SETTINGS)
    assert [one.text for one in several] == [want] * 4
    assert len(trained.score(b"the cat\na dog").lines) == 2
    numpy = {"temperature": np.float64(0.7), "top_k": np.int64(5), "length": np.uint8(12)}
    assert trained.generate(text, **numpy, seed=np.array(3)).text == want


def test_settings_of_data_may_have_a_path(trained, tmp_path):
    (tmp_path / "other.txt").write_text(tiny_runs.text(100, seed=5))
    score = lambda path: trained.evaluate(data={"path": path}, max_segments=np.int64(2)).loss
    path = tmp_path / "other.txt"
    assert score(path) == score(bytes(path)) == score(str(path))


def test_a_folder_may_be_a_path_or_bytes_and_nothing_else(trained, run, tmp_path):
    txl_jax.save(trained, tmp_path / "exported")
    load: Callable[[Any], Any] = txl_jax.load
    for source in (tmp_path / "exported", bytes(tmp_path / "exported"), bytes(run)):
        assert load(source).vocab == trained.vocab
    request = txl_jax.convert.Request(source=tmp_path / "exported", workdir=tmp_path / "new")
    txl_jax.convert.to_workdir(request)
    assert txl_jax.load(tmp_path / "new").step == trained.step
    train, save = lambda x: txl_jax.train({}, x), lambda x: txl_jax.save(trained, x)
    for call in (load, train, save):
        for wrong in (None, 3, ["runs"]):
            with pytest.raises(ConfigError, match=r" = .*: must be a path, .* not a value of type"):
                call(wrong)
        with pytest.raises(ConfigError, match=r" = '': names no file or folder; give a path"):
            call("")
        with pytest.raises(ConfigError, match=r"no path has the character NUL"):
            call("runs/a\0b")


def test_a_step_may_be_a_number(run):
    assert txl_jax.load(run, step=8).step == 8
    load: Callable[..., Any] = txl_jax.load
    assert load(run, step=np.int64(8)).step == 8
    for wrong in (True, 8.0, None):
        with pytest.raises(ConfigError, match=r"^step = .*: must be best, latest or an integer"):
            load(run, step=wrong)


def test_integers_of_jax_are_ids_and_an_array_of_texts_is_a_list_of_them(trained):
    ids = jax.numpy.array(trained.vocab.encode("the cat"))
    for same in (list(ids), ids.tolist(), list(np.asarray(ids))):
        assert trained.generate(same, length=2).text == trained.generate(ids, length=2).text
    texts = ["the ", "a cat"]
    for array in (np.array(texts), np.array(texts, object), np.array([t.encode() for t in texts])):
        generation = trained.generate(array, length=2)
        assert [one.prompt for one in generation] == texts


# --------------------------------------------------------------------------------------
# Training.


SMALL = {"train.steps": 6, "train.eval_every": 3, "checkpoint.every": 3}


def state_of_the_process():
    """Returns the state of the process that a command changes, but the library must restore."""
    return {
        "handlers": [signal.getsignal(n) for n in signal.valid_signals()],
        "loggers": [(x.handlers[:], x.level, x.propagate) for x in LOGGERS],
        "hooks": (sys.unraisablehook, sys.excepthook, warnings.filters[:]),
        "jax": jax.config.values["jax_compilation_cache_dir"],
        "stdout": sys.stdout.errors,
    }


LOGGERS = [logging.getLogger(name) for name in (None, "absl", "asyncio", "jax")]


@pytest.mark.integration
def test_training_is_that_of_the_command_and_the_process_stays_as_it_was(tmp_path, capsys):
    config = tiny_runs.write_config(tmp_path, **SMALL)
    done = tiny_runs.call(f"--config={config}", f"--workdir={tmp_path / 'command'}")
    assert done.returncode == 0, done.stderr
    before = state_of_the_process()
    exp = tiny_runs.experiment(tmp_path, **SMALL)
    trained = txl_jax.train(exp, tmp_path / "library")
    assert state_of_the_process() == before
    assert isinstance(trained, txl_jax.LanguageModel)
    assert trained.generate().text == (tmp_path / "command/sample.txt").read_text().rstrip("\n")
    for name in ("params", "step"):
        theirs = getattr(txl_jax.load(str(tmp_path / "command")), name)
        jax.tree.map(np.testing.assert_array_equal, getattr(trained, name), theirs)
    files = lambda name: sorted(x.name for x in (tmp_path / name).iterdir())
    assert files("library") == files("command")
    out = capsys.readouterr().out
    assert done.stdout.startswith(out[:20])
    assert "the cat" in out


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dict", "config_dict", "file", "experiment"])
def test_a_run_is_described_by_a_file_a_dict_or_an_experiment(kind, tmp_path):
    exp = tiny_runs.experiment(tmp_path)
    given = {
        "dict": exp.to_dict(),
        "config_dict": ml_collections.ConfigDict(exp.to_dict()),
        "file": tiny_runs.write_config(tmp_path),
        "experiment": exp,
    }[kind]
    trained = txl_jax.train(given, str(tmp_path / "run"), {**SMALL, "seed": 7})
    assert (trained.config.train.steps, trained.config.seed, trained.step) == (6, 7, 6)
    assert exp.train.steps == 12, "the given settings are not changed"


@pytest.mark.integration
def test_training_runs_in_a_thread_and_restores_the_handlers(tmp_path):
    before, found = state_of_the_process(), []
    exp = tiny_runs.experiment(tmp_path, **SMALL)
    work = lambda: found.append(txl_jax.train(exp, tmp_path / "run"))
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert [trained.step for trained in found] == [6]
    assert state_of_the_process() == before


@pytest.mark.parametrize(
    "sent",
    [
        signal.SIGUSR1,
        pytest.param(signal.SIGINT, marks=pytest.mark.integration),
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, marks=pytest.mark.slow),
    ],
)
def test_an_interrupt_saves_the_state_and_the_same_call_resumes(tmp_path, monkeypatch, sent):
    taken: list[int] = []
    handler = lambda number, frame: taken.append(number)
    before = signal.signal(sent, handler)
    exp = tiny_runs.experiment(tmp_path, **SMALL)
    stopped: list[int] = []
    step_done = Trainer.step_done

    def interrupted(self, step, *arguments):
        step_done(self, step, *arguments)
        if step == 4 and not stopped:
            stopped.append(step)
            signal.raise_signal(sent)

    monkeypatch.setattr(Trainer, "step_done", interrupted)
    with pytest.raises(
        KeyboardInterrupt, match=f"{sent.name}, and the state is saved; call the function again to"
    ):
        txl_jax.train(exp, tmp_path / "run")
    assert signal.signal(sent, before) is handler
    assert taken == [sent] * (sent != signal.SIGINT), "other signals have their usual effect"
    assert txl_jax.load(str(tmp_path / "run"), "latest").step == 4
    assert txl_jax.train(exp, tmp_path / "run").step == 6
    steps = [json.loads(x)["step"] for x in (tmp_path / "run/metrics.jsonl").open()]
    assert steps == sorted(steps)


REFUSED = [
    ({"train.stepz": 1}, "unknown config key 'train.stepz'"),
    ({"train.steps": 10, "optimizer.warmup_steps": 20}, "example optimizer.warmup_steps=1"),
    ({"data.path": "nowhere.txt"}, "data.path = 'nowhere.txt': there is no such file or folder"),
    ({"mesh.data": 3}, "mesh"),
    ({"generate.prompt": "Z"}, "generate.prompt: "),
    ({"seed": 3}, r"(?s)workdir=.*: is the folder of another run\nname another.*\nseed: 0 -> 3$"),
    ({"train.steps": 60}, r"another folder: workdir=.*-60, train.start_from=.*, train.steps=48"),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED)
def test_wrong_settings_of_training_are_refused_by_the_names_of_arguments(run, overrides, message):
    exp = txl_jax.load(str(run)).config
    with pytest.raises((ConfigError, DataError, WorkdirError), match=message) as caught:
        txl_jax.train(exp, str(run), overrides)
    assert "--" not in str(caught.value)
    for wrong in (3, None, ["train"]):
        with pytest.raises(ConfigError, match=r"^config=.*: must be the name of a recipe, a file"):
            txl_jax.train(wrong, str(run))


@pytest.mark.parametrize(("mem_len", "told"), [(32, False), (33, True), (640, True)])
def test_evaluate_tells_of_a_longer_memory_as_the_command_does(trained, capsys, mem_len, told):
    trained.evaluate(mem_len=mem_len, max_segments=1)
    shown = capsys.readouterr().err
    start = (
        f"note: evaluate.mem_len = {mem_len} is longer than 32, the longest memory in the settings"
    )
    assert shown.startswith(start) == told
    assert shown.count("\n") == told


class Cell(io.StringIO):
    """Standard error of a notebook's cell."""

    __module__ = "ipykernel.iostream"


class Terminal(io.StringIO):
    """Standard error of a terminal."""

    def isatty(self):
        return True


@pytest.fixture(params=rest_integration(1, [Cell, Terminal, io.StringIO]))
def watched_stream(request, monkeypatch):
    """A function that replaces standard error by a notebook's cell, a terminal, or a file."""
    monkeypatch.setattr(progress, "DELAY", 0)
    monkeypatch.setattr(progress, "PATIENCE", 0)

    def make() -> io.StringIO:
        stream = request.param()
        monkeypatch.setattr(sys, "stderr", stream)
        return stream

    return make


@pytest.mark.few(1)
def test_long_work_is_shown_on_a_terminal_and_in_a_notebook_only(run, watched_stream, monkeypatch):
    """The output shows loading, compiling, baselines, and the share of tokens scored."""
    unigram = baselines.unigram

    def slow(*about):
        time.sleep(0.1)
        return unigram(*about)

    for programs in (score_mode._program, evaluator._programs, generate._programs):
        programs.cache_clear()
    stream = watched_stream()
    trained = txl_jax.load(run)
    trained.score("the dog ran\n" * 40, seg_len=8)
    trained.generate("the ", length=2)
    monkeypatch.setattr(baselines, "unigram", slow)
    trained.evaluate(max_segments=2, baselines=("unigram",))
    shown = stream.getvalue()
    if type(stream) is io.StringIO:
        assert shown == ""
        return
    of_each = [
        f"compiling the program of {what}, once" for what in ("scoring", "generation", "evaluation")
    ]
    of_each += ["scoring the baseline unigram ..."]
    for line in (f"loading {run} ...", *of_each, "scoring: 100%", "test split, memory 32"):
        assert line in shown


def test_the_command_says_in_a_file_what_it_waits_for_for_long(watched_stream, monkeypatch):
    stream = watched_stream()
    watched = type(stream) is not io.StringIO
    for seconds, as_command in ((0, False), (0, True), (1000, True)):
        monkeypatch.setattr(progress, "LINES", seconds)
        flags = arguments_as_flags() if as_command else contextlib.nullcontext()
        with flags, progress.waiting_for(f"{seconds} {as_command}"):
            time.sleep(0.1)
    said = ["0 False ...", "0 True ...", "1000 True ..."] if watched else ["0 True ..."]
    assert stream.getvalue().replace("\r", "\n").split("\n")[: len(said)] == said


@pytest.mark.few(1)
def test_training_says_what_it_waits_for(tmp_path, watched_stream):
    config = tiny_runs.experiment(tmp_path, **{"train.steps": 2, "generate.length": 0})
    stream = watched_stream()
    txl_jax.train(config, tmp_path / "run")
    said = "compiling the step ...\n" in stream.getvalue().replace("\r", "\n")
    assert said == (type(stream) is not io.StringIO)


def test_a_byte_order_mark_of_bytes_is_left_out_as_of_a_file(trained):
    text = "the dog ran\n"
    marked = "\ufeff".encode() + text.encode()
    want = trained.score(text)
    for given in (marked, bytearray(marked), [marked]):
        found = trained.score(given)
        assert (found.tokens, found.nll) == (want.tokens, want.nll)
    assert trained.generate(marked, length=3).text == trained.generate(text, length=3).text


SECTIONS = {"generate": GenerateConfig, "score": ScoreConfig, "evaluate": ProtocolConfig}


@pytest.mark.parametrize("method", SECTIONS)
def test_the_arguments_of_a_method_are_the_settings_of_its_section(method):
    """A method has no ``path`` and no ``json``: they name files that the command uses."""
    arguments = {*inspect.signature(getattr(txl_jax.LanguageModel, method)).parameters}
    settings = {field.name for field in dataclasses.fields(SECTIONS[method])}
    own = {"self", "text", "data"}
    assert arguments - own == settings - {"path", "json"}


SCRIPT = """
import txl_jax

trained = txl_jax.load("runs/a")
txl_jax.train("quickstart", "runs/b", {"train.steps": 3})
txl_jax.sweep("quickstart", "runs/c", {"optimizer.learning_rate": [1e-3]}, seeds=2)
trained.generate("the", temperature=0.5, length=3)
trained.score("the", memory="line")
trained.evaluate("valid", mem_len=3, same_length=None)
trained.model(1, 2, train=True, reset=None, context_len=0)
"""
MISTAKES = """
txl_jax.load("runs/a", trian=True)
txl_jax.train("quickstart", "runs/b", setps=3)
txl_jax.sweep("quickstart", "runs/c", {}, seed=2)
txl_jax.load_corpus("text", pth="x")
trained.generate("the", temprature=0.5)
trained.generate("the", length="long")
trained.score("the", memory="lines")
trained.evaluate("validation")
trained.model(1, 2, trian=True)
trained.model.nll(1, 2, 3, trian=True)
txl_jax.TransformerXLConfig(n_layers=2)
"""


@pytest.mark.integration
def test_a_type_checker_refuses_every_wrong_argument_and_no_right_one(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + MISTAKES)
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", str(script)]
    checked = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    first = len(SCRIPT.splitlines()) + 1
    found = {int(line.split(":")[1]) for line in checked.stdout.splitlines() if ": error:" in line}
    assert found == {*range(first + 1, first + len(MISTAKES.splitlines()))}, checked.stdout
