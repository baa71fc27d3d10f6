"""The command's modes work, and its error messages come before it changes any file."""

import json
import pathlib
import re
import signal
import subprocess
import sys

import pytest
import tiny_runs
from places import ROOT
from tiers import rest_integration, rest_slow
from tiny_runs import call, corpus_and_experiment, lm1b, write_config

import txl_jax
from txl_jax import modes, usage
from txl_jax.checkpoint.loading import load
from txl_jax.checkpoint.workdir_files import FILES
from txl_jax.config import DataConfig, describe_settings
from txl_jax.data.corpus import DataError, corpus_from_config
from txl_jax.data.vocab import Vocab
from txl_jax.evaluation.split import vocab_note
from txl_jax.training.events import Logger
from txl_jax.training.preemption import PreemptionGuard
from txl_jax.training.run import evaluate_and_generate

QUICKSTART = "configs/quickstart.py"
CONSOLE = "from txl_jax import main; main.console()"


@pytest.fixture(scope="module")
def trained(trained_run, tmp_path_factory):
    """A finished run of the command: its folder, config file, workdir, and the ``TrainedRun``."""
    workdir = trained_run.copied(tmp_path_factory.mktemp("trained") / "run")
    return trained_run.folder, trained_run.config, workdir, trained_run


@pytest.mark.parametrize("words", [[], ["-h"], ["help"], ["--config=quickstart", "--help"]])
def test_the_command_says_how_it_is_used(words):
    done = call(*words)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: ")
    for mode in usage.MODES:
        assert re.search(rf"^  {mode}  +\w", done.stdout, re.MULTILINE), mode
    assert "--config=quickstart\n" in done.stdout
    assert "quickstart, siblings, table10" in done.stdout


@pytest.mark.parametrize("mode", usage.MODES)
def test_the_help_of_a_mode_has_the_settings_that_it_reads(mode):
    told = usage.help_text([f"--mode={mode}"])
    assert usage.MODES[mode] in told
    own = [s.key for s in describe_settings() if s.key.startswith(f"{mode}.")]
    assert [key for key in own if f"{key} = " not in told] == []


@pytest.mark.parametrize(
    "words", ["--help --mode=probe", "--mode probe -h", "-mode=probe -h", "probe --help"]
)
def test_the_mode_of_a_help_is_given_as_any_flag_is_or_as_a_word(words):
    done = call(*words.split())
    assert done.returncode == 0
    assert f"--mode=probe: {usage.MODES['probe']}\nusage: " in done.stdout


@pytest.mark.parametrize("words", ["--help --mode", "--config --help", "--mode -h"])
def test_a_help_with_an_unfinished_flag_is_the_whole_help(words):
    done = call(*words.split())
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == call("--help").stdout


def test_the_help_of_a_mode_shows_the_values_of_the_config_and_refuses_what_the_mode_does():
    words = ["--mode=train", "--help", "--config=quickstart", "--config.train.steps=700"]
    told = call(*words).stdout
    assert "model.n_layer = 3  (default: 12)" in told
    assert "train.steps = 700  (default: 1000)" in told
    refused = call("--mode=trian", "--help")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == "error: --mode=trian: no such mode; the nearest is 'train'\n"
    assert "'train.stepps'" in call("--help", "--mode=train", "--config.train.stepps=1").stderr


def test_the_version_is_printed():
    done = call("--version")
    assert (done.returncode, done.stdout) == (0, f"txl_jax {txl_jax.__version__}\n")


SHELL = """
source <("$0" --completion=bash)
COMP_LINE=$1 COMP_POINT=${#1} COMP_TYPE=9
read -ra COMP_WORDS <<< "${1//=/ = }"  # as bash splits words
[[ $1 == *= ]] && COMP_WORDS+=("")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_python_argcomplete "$0" "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
echo "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    ("typed", "completions"),
    rest_integration(
        4,
        [
            ("txl --mode=", " ".join(usage.MODES)),
            ("txl --config=enwik8_2", "enwik8_24l"),
            ("txl --config.model.same_length=", "False pytorch tf"),
            ("txl --workdir=tests/he", "tests/helpers/"),
            ("txl --mode=sw", "sweep"),
            ("txl --mode sw", "sweep"),
            ("txl --config=configs/enwik8_2", "configs/enwik8_24l.py"),
            ("txl --config.generate.detok", "--config.generate.detokenise"),
        ],
    ),
)
def test_bash_completes_flags_and_values_as_they_are_typed(typed, completions, tmp_path):
    """To complete a line, bash runs the line's first word, which here is a script of this test."""
    program = tmp_path / "txl"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{CONSOLE}" "$@"\n')
    program.chmod(0o755)
    words = ["bash", "-c", SHELL, program, typed]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == completions.split(), done.stderr


AUTO = {"model.dtype": "auto", "model.scan_layers": "auto"}


@pytest.mark.integration
@pytest.mark.parametrize("seeds", rest_slow(1, [1, 2]))
def test_a_run_goes_on_by_its_folder_alone(seeds, tmp_path):
    """With ``auto``, the device decides dtype and scanned layers; config.json stays the same."""
    config = tiny_runs.write_config(tmp_path, **{**AUTO, "train.num_seeds": seeds})
    one, two = tmp_path / "one", tmp_path / "two"
    assert call(f"--config={config}", f"--workdir={one}").returncode == 0
    saved = lambda: [*two.glob("checkpoints/[48]"), *two.glob("*/checkpoints/[48]")]
    tiny_runs.interrupt(signal.SIGTERM, f"--config={config}", f"--workdir={two}", when=saved)
    done = call(f"--workdir={two}")
    assert done.returncode == 0, done.stderr
    folders = [f.relative_to(one).parent for f in one.rglob("config.json")]
    assert len(folders) == seeds
    for folder in folders:
        rows = [without_times(run / folder / "metrics.jsonl") for run in (one, two)]
        assert rows[0] == rows[1]
        records = [json.loads((run / folder / "config.json").read_text()) for run in (one, two)]
        for record in records:
            del record["provenance"]["date"]
        assert records[0] == records[1]


def without_times(metrics):
    rows = map(json.loads, metrics.read_text().splitlines())
    return [{key: value for key, value in row.items() if key != "timing"} for row in rows]


def refused(*arguments):
    """Runs a command, which must be refused; returns the error without the lines before it."""
    done = call(*arguments)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    return done.stderr[done.stderr.index("error: ") :].removesuffix("\n")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--step=2"], "--config=NAME or FILE is needed, for example --config=quickstart"),
        (
            ["--mode=evaluate"],
            "--mode=evaluate needs --workdir=DIR, the folder of a run, for example"
            " --workdir=runs/quickstart",
        ),
        (
            ["--mode=report", "--config.report.workdirs=a,b"],
            "--mode=report needs --workdir=DIR, the folder of a run, or a new one for the files of"
            " this mode",
        ),
        (
            ["--workdir=/tmp/no run"],
            "'--workdir=/tmp/no run': there is no such folder; start one with --config=NAME",
        ),
        (
            ["--completion=fishy"],
            "--completion=fishy: must be one of bash, zsh, tcsh, fish, powershell",
        ),
        (["--config=nope.py"], "--config=nope.py: there is no file 'nope.py'"),
        (
            ["--config=quikstart"],
            "--config=quikstart: there is no such file or recipe; the nearest is 'quickstart'",
        ),
        (
            [f"--config={QUICKSTART}", "--config.lr=0.1"],
            "unknown config key 'lr'; the nearest key is 'optimizer.learning_rate'",
        ),
        (
            [f"--config={QUICKSTART}", "--config.train.stepz=3"],
            "unknown config key 'train.stepz'; the nearest key is 'train.steps'",
        ),
        (
            [f"--config={QUICKSTART}", "--config.train.steps", "many"],
            "config key train.steps = 'many': must be of type int",
        ),
        (
            [f"--config={QUICKSTART}", "--config.model.d_model=33"],
            "config key model.d_model = 33: must be even, because half of a position encoding is"
            " sines and half cosines (paper, section 3.3)",
        ),
        (
            [f"--config={QUICKSTART}", "--wrkdir=x"],
            "Unknown command line flag 'wrkdir'. Did you mean: workdir ?",
        ),
        (
            ["--data.path=x"],
            "Unknown command line flag 'data.path'; the setting is --config.data.path=VALUE",
        ),
        (
            ["--lr=3"],
            "Unknown command line flag 'lr'; the setting is --config.optimizer.learning_rate=VALUE",
        ),
        (
            ["--batch_size=3"],
            "Unknown command line flag 'batch_size'; the setting is"
            " --config.train.batch_size=VALUE",
        ),
        (
            ["--config=my_text.py"],
            "--config=my_text.py: there is no file 'my_text.py'; for the recipe give"
            " --config=my_text",
        ),
        (
            [f"--config={QUICKSTART}", "--workdir=s3://b/r"],
            "--workdir = 's3://b/r': is a URL, and only local paths and gs:// addresses can be"
            " used; copy or mount the files, and name the local path (write ./s3:/... for a local"
            " folder of this name)",
        ),
        (
            [f"--config={QUICKSTART}", "more"],
            "unexpected argument 'more'; settings are --config.KEY=VALUE",
        ),
        (["evaluate", "--workdir=x"], "unexpected argument 'evaluate'; a mode is --mode=evaluate"),
        (["--mode=evalute"], "--mode=evalute: no such mode; the nearest is 'evaluate'"),
        (["--mode=", "--workdir=x"], f"--mode=: no such mode; there are {', '.join(usage.MODES)}"),
    ],
)
def test_flags_and_settings_are_refused_with_one_line(arguments, text):
    assert refused(*arguments) == f"error: {text}"


@pytest.mark.integration
def test_settings_that_do_not_fit_the_data_are_refused_and_the_workdir_stays_free(tmp_path):
    config, workdir = write_config(tmp_path), tmp_path / "run"
    flags = (f"--config={config}", f"--workdir={workdir}")
    size = len(corpus_and_experiment(tmp_path)[0].train)
    assert refused(*flags, "--config.train.batch_size=100000") == (
        f"error: config key train.batch_size = 100000: the train split has {size:,} tokens, too"
        f" few for a target in each stream; use a batch of at most {size // 2:,}, or a longer text"
    )
    assert refused(*flags, "--config.train.mem_len=100000") == (
        "error: config key train.mem_len = 100000: a stream of the train split has only"
        f" {size // 4} of its {size:,} tokens at train.batch_size 4; use a shorter memory, a"
        " lower train.batch_size, or a text with 400,000 tokens or more in its train split"
    )
    assert refused(*flags, "--config.model.vocab_size=5").endswith(
        " symbols; leave the key out to use these"
    )
    assert refused(*flags, "--config.mesh.data=3") == (
        "error: config key mesh = data 3 x fsdp 1 x tensor 1 = 3: must be at most 1, the number of"
        " devices"
    )
    assert refused(*flags, "--config.generate.prompt=THE").startswith("error: generate.prompt: ")
    assert not (workdir / "config.json").exists()


@pytest.mark.integration
def test_text_that_is_missing_empty_or_not_utf8_is_refused(tmp_path):
    config = write_config(tmp_path)
    flags = (f"--config={config}", f"--workdir={tmp_path / 'run'}")
    assert refused(*flags, "--config.data.path=/nowhere/text.txt") == (
        "error: data.path = '/nowhere/text.txt': there is no such file or folder"
    )
    empty, latin = tmp_path / "empty.txt", tmp_path / "latin.txt"
    empty.write_text("")
    latin.write_bytes(b"caf\xe9 au lait\n" * 100)
    assert "the train split is empty" in refused(*flags, f"--config.data.path={empty}")
    message = refused(*flags, f"--config.data.path={latin}")
    assert "UTF-8" in message
    assert "byte" in message


def test_a_workdir_that_cannot_be_written_is_refused(tmp_path):
    config = write_config(tmp_path)
    (tmp_path / "file").write_text("")
    assert refused(f"--config={config}", f"--workdir={tmp_path}/file/run") == (
        f"error: --workdir={tmp_path}/file/run: cannot be written (Not a directory); name"
        " another workdir, or make the folder writable"
    )


@pytest.mark.integration
def test_the_workdir_of_another_run_is_refused_and_left_as_it_was(trained):
    _, config, workdir, _ = trained
    known = lambda: [p for p in pathlib.Path(workdir).rglob("*") if p.name != ".lock"]
    before = {p: p.stat().st_mtime_ns for p in known()}
    flags = (f"--config={config}", f"--workdir={workdir}")
    assert refused(*flags, "--config.model.n_head=4", "--config.train.steps=13") == (
        f"error: --workdir={workdir}: is the folder of another run\n"
        f"  name another workdir, or resume that run by --workdir={workdir} alone; what differs:\n"
        "  model.n_head: 2 -> 4\n"
        "  train.steps: 12 -> 13"
    )
    after = {p: p.stat().st_mtime_ns for p in known()}
    assert {p: t for p, t in after.items() if p != workdir} == {
        p: t for p, t in before.items() if p != workdir
    }


@pytest.mark.integration
def test_a_workdir_trained_on_other_text_is_refused(trained, tmp_path):
    _, config, workdir, _ = trained
    other = tmp_path / "other.txt"
    other.write_text("the cat saw a dog\n" * 300)
    flags = (f"--config={config}", f"--workdir={workdir}")
    assert "hash of the text: " in refused(*flags, f"--config.data.path={other}")


def test_training_leaves_the_files_of_the_readme_and_ends_with_the_held_out_number(trained):
    _, _, workdir, done = trained
    there = {p.name for p in workdir.iterdir()}
    assert there >= {
        "config.json",
        "vocab.json",
        "metrics.jsonl",
        "loss.png",
        "sample.txt",
        "tensorboard",
        "checkpoints",
        "evaluation.json",
    }
    assert there <= set(FILES)
    last = done.stdout.splitlines()[-1]
    scores = json.loads((workdir / "evaluation.json").read_text())["results"]
    assert [s["name"] for s in scores] == ["memory 32", "no memory", "unigram", "bigram"]
    assert last == f"held-out bpc {scores[0]['bpc']:.4f} ({scores[0]['protocol']})"
    assert scores[0]["targets"] == scores[1]["targets"]
    record = json.loads((workdir / "config.json").read_text())
    assert {"jax", "flax", "optax", "numpy"} <= set(record["provenance"]["versions"])
    assert "revision" in record["provenance"]
    assert record["provenance"]["attention"] in done.stderr.split("attention by ")[1]
    first = json.loads((workdir / "metrics.jsonl").read_text().splitlines()[0])
    assert first["timing"]["attention"] == "xla"
    assert len(record["corpus"]["source_hash"]) == 64
    assert (workdir / "sample.txt").read_text().startswith("the cat")


@pytest.mark.integration
def test_a_finished_run_started_again_gives_the_same_number(trained):
    _, config, workdir, done = trained
    again = call(f"--config={config}", f"--workdir={workdir}")
    assert again.returncode == 0, again.stderr
    assert again.stdout == done.stdout


@pytest.mark.slow
def test_the_same_command_on_eight_devices_gives_the_same_number(trained, tmp_path):
    _, _, workdir, _ = trained
    changes = {"evaluate.baselines": ("unigram", "bigram"), "mesh.data": -1}
    config, other = write_config(tmp_path, **changes), tmp_path / "run"
    eight = call(f"--config={config}", f"--workdir={other}", JAX_NUM_CPU_DEVICES="8")
    assert eight.returncode == 0, eight.stderr
    assert "4 cpu device(s)" in eight.stderr
    one, more = (
        json.loads((w / "evaluation.json").read_text())["results"] for w in (workdir, other)
    )
    for a, b in zip(one, more, strict=True):
        assert a["bpc"] == pytest.approx(b["bpc"], abs=1e-3)


def test_a_run_stopped_during_its_report_prints_no_number_and_resumes(trained, tmp_path):
    folder, _, workdir, _ = trained
    corpus, _ = corpus_and_experiment(folder)
    stop = PreemptionGuard()
    stop.signal = signal.SIGTERM
    model, logger = load(str(workdir)), Logger()
    assert evaluate_and_generate(model, corpus, str(tmp_path), stop, logger) == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_layers_under_scan_are_trained_scored_and_continued(tmp_path):
    config, workdir = write_config(tmp_path), tmp_path / "run"
    done = call(f"--config={config}", f"--workdir={workdir}", "--config.model.scan_layers=True")
    assert done.returncode == 0, done.stderr
    assert "held-out" in done.stdout
    assert (workdir / "sample.txt").read_text().startswith("the cat")
    again = call(f"--workdir={workdir}", "--mode=evaluate")
    assert again.returncode == 0, again.stderr
    of = lambda text: re.findall(r"bpc ([\d.]+)", text.splitlines()[-1])
    assert of(again.stdout) == of(done.stdout) != []


@pytest.mark.integration
def test_evaluate_scores_a_workdir_under_another_protocol(trained):
    _, _, workdir, done = trained
    flags = ("--mode=evaluate", f"--workdir={workdir}")
    same = call(*flags)
    assert same.stdout.splitlines()[-1] == done.stdout.splitlines()[-1].replace("held-out", "test")
    other = call(*flags, "--config.evaluate.split=valid", "--config.evaluate.mem_len=8")
    assert other.returncode == 0, other.stderr
    assert "valid split, 4 streams, segment 16, memory 8" in other.stdout.splitlines()[-1]


def evaluated(workdir, capsys, **overrides):
    """Runs ``--mode=evaluate`` in this process and returns the last line of its output."""
    assert modes.use_model("evaluate", None, overrides, str(workdir), "best") == 0
    return capsys.readouterr().out.splitlines()[-1]


def test_a_longer_memory_than_the_run_knows_is_told(trained, capsys):
    _, _, workdir, _ = trained
    note = "note: evaluate.mem_len = 33 is longer than 32, the longest memory in the settings"
    for length, told in ((32, ""), (33, note)):
        overrides = {"evaluate.mem_len": str(length), "evaluate.max_segments": "2"}
        assert modes.use_model("evaluate", None, overrides, str(workdir), "best") == 0
        assert capsys.readouterr().err.startswith(told)
        assert bool(told) == (length > 32)


def test_evaluate_encodes_another_text_with_the_models_vocabulary(trained, tmp_path, capsys):
    folder, _, workdir, _ = trained
    other, same = tmp_path / "other.txt", tmp_path / "same.txt"
    other.write_text("the cat saw a dog\n" * 300)  # fewer characters than the model knows
    same.write_text((folder / "text.txt").read_text()[:9000])
    last = evaluated(workdir, capsys, **{"data.path": str(other)})
    assert last.endswith("segment 16, memory 32, encoded with the model's vocabulary)")
    result = json.loads((workdir / "evaluation.json").read_text())
    assert result["results"][0]["targets"] == 270 - 1  # the test split is the last twentieth
    assert "encoded with a trained model's vocabulary, not its own" in result["label"]
    vocab = load(str(workdir)).vocab
    corpus = corpus_from_config(DataConfig(path=str(other), vocab="char"), vocab)
    assert corpus.vocab == vocab
    assert vocab.decode(corpus.test) == other.read_text()[-270:]
    # without the model, the text gets a smaller vocabulary of its own
    assert len(corpus_from_config(DataConfig(path=str(other), vocab="char")).vocab) < len(vocab)
    # no note if the text's own vocabulary equals the model's, also when the text is cached
    for _ in range(2):
        last = evaluated(workdir, capsys, **{"data.path": str(same)})
        assert last.endswith("segment 16, memory 32)")
        assert not corpus_from_config(DataConfig(path=str(same), vocab="char")).info[
            "foreign_vocab"
        ]


def test_a_symbol_that_the_model_does_not_know_is_named_with_its_line(trained, tmp_path, capsys):
    _, _, workdir, _ = trained
    other = tmp_path / "other.txt"
    other.write_text("the cat\nsaw a Dog\n" + "the cat saw a dog\n" * 300)
    with pytest.raises(DataError, match=r"train split, line 2, character 14: 'D' \(U\+0044\)"):
        evaluated(workdir, capsys, **{"data.path": str(other)})
    with pytest.raises(DataError, match="vocabulary of kind 'char', and the corpus 'text' is read"):
        evaluated(workdir, capsys, **{"data.vocab": "word"})


def test_words_that_the_model_does_not_know_are_its_unknown_ones_and_are_counted(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text("the cat\n" * 90 + "the dog\n" * 10)
    data = DataConfig(path=str(path), vocab="word", test_fraction=0.1)
    corpus = corpus_from_config(data, Vocab("word", ["<eos>", "the", "<unk>", "cat"]))
    assert corpus.train[:3].tolist() == [1, 3, 0]
    assert corpus.test[-3:].tolist() == [1, 2, 0]
    assert vocab_note(corpus, "test") == ", encoded with the model's vocabulary (33.3% <unk>)"
    assert vocab_note(corpus_from_config(data), "test") == ""
    with pytest.raises(DataError, match=r"line \d+: the word 'dog' is not among the 3"):
        corpus_from_config(data, Vocab("word", ["<eos>", "the", "cat"]))


@pytest.mark.slow
def test_sentences_are_trained_on_scored_and_continued(tmp_path, capsys):
    """The command trains on lm1b, and evaluating the workdir again gives the same score."""
    config = write_config(
        tmp_path,
        **{
            "data.name": "lm1b",
            "data.path": str(lm1b(tmp_path)),
            "data.vocab": None,
            "generate.prompt": "",
            "evaluate.baselines": ("unigram", "bigram"),
            "evaluate.warm_start": 5,
        },
    )
    done = call(f"--config={config}", f"--workdir={tmp_path / 'run'}")
    assert done.returncode == 0, done.stderr
    shards = sorted((tmp_path / "lm1b").rglob("news.en-*"))
    words = [line.split() for path in shards for line in path.read_text().splitlines()]
    assert f"{sum(len(line) + 1 for line in words)} training tokens" in done.stderr
    lines = (tmp_path / "lm1b" / "test.txt").read_text().splitlines()
    scores = json.loads((tmp_path / "run" / "evaluation.json").read_text())["results"]
    assert [s["name"] for s in scores] == ["memory 32", "no memory", "unigram", "bigram"]
    assert scores[0]["targets"] == sum(len(line.split()) + 1 for line in lines)
    assert "warm start 5" in scores[0]["protocol"]
    assert done.stdout.splitlines()[-1].startswith("held-out ppl ")
    again = evaluated(tmp_path / "run", capsys)
    assert again == done.stdout.splitlines()[-1].replace("held-out", "test")
    sample = (tmp_path / "run" / "sample.txt").read_text()
    assert len(sample.replace("\n", " <S> ").split()) >= 8


@pytest.mark.integration
def test_generate_continues_a_prompt_the_same_for_the_same_seed(trained):
    _, _, workdir, _ = trained
    flags = ("--mode=generate", f"--workdir={workdir}", "--config.generate.prompt=a dog")
    first, again = call(*flags), call(*flags)
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("a dog")
    assert len(first.stdout) == len("a dog") + 8 + 1
    assert first.stdout == again.stdout
    other = call(*flags, "--config.generate.seed=1", "--config.generate.length=40")
    assert other.stdout != first.stdout


@pytest.mark.integration
def test_modes_on_a_workdir_without_a_model_say_what_to_do(tmp_path, trained):
    _, _, workdir, _ = trained
    assert refused("--mode=generate", f"--workdir={tmp_path}") == (
        f"error: --workdir={tmp_path}: there is no run in it; start one with --config=NAME"
    )
    assert refused("--mode=evaluate", f"--workdir={workdir}", "--step=7").startswith(
        f"error: there is no checkpoint 7 in {workdir}/checkpoints, only "
    )
    shape = refused("--mode=generate", f"--workdir={workdir}", "--config.model.n_layer=3")
    assert shape == (
        "error: the model of the workdir has another shape: model.n_layer: 2 -> 3; leave these keys"
        " out, or name another workdir"
    )


@pytest.mark.slow
def test_the_quickstart_runs_at_reduced_steps(tmp_path):
    workdir = tmp_path / "quickstart"
    done = call(
        f"--config={QUICKSTART}:smoke",
        f"--workdir={workdir}",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("held-out bpb ")
    names = [r["name"] for r in json.loads((workdir / "evaluation.json").read_text())["results"]]
    assert names[2:] == ["unigram", "bigram", "xz", "xz primed"]
    assert (workdir / "sample.txt").read_text().startswith("def ")
