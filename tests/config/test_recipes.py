"""Every shipped config has the expected settings, size and header, and its smoke run works.

``golden/defaults.json`` holds the default of every setting. Another file per experiment holds the
settings that differ from the defaults. After you change a config or a default, rewrite these files
and read their diff:

    PYTHONPATH=tests/helpers python tests/config/test_recipes.py
"""

import json
import pathlib
import random
import re

import jax
import numpy as np
import pytest
from places import ROOT
from recipe_sizes import parameter_counts

import txl_jax
from txl_jax import modes
from txl_jax.config import ConfigError, ExperimentConfig, config_rows, flatten
from txl_jax.planning.vocabulary import with_vocab_size
from txl_jax.training.optimizer import make_optimizer
from txl_jax.training.state import init_state

CONFIGS = sorted((ROOT / "configs").glob("[a-z]*.py"))
GOLDEN = ROOT / "tests" / "config" / "golden"

PARAMETERS = parameter_counts()
"""The number of parameters of each recipe, as RESULTS.md states it."""

OWN_SIZE = {"my_text": 100, "my_tokens": 388, "ptb_small": 10_000, "quickstart": 256}
OWN_SIZE |= {"probe-memory": 11, "probe-no_memory": 11}
OWN_SIZE |= {
    f"siblings-{corpus}_{sibling}": size
    for corpus, size in (("ptb", 10_000), ("stdlib", 256))
    for sibling in ("ours", "shaw", "no_recurrence", "absolute")
}
"""Configs whose number of parameters is not checked, and a vocabulary size for each."""


def variants() -> dict[str, tuple[pathlib.Path, str]]:
    """Returns ``{name: (file, variant)}`` of all experiments in ``configs/``.

    A file with rows (named variants) has one experiment per row. A file without rows is one
    experiment, with the variant "".
    """
    found: dict[str, tuple[pathlib.Path, str]] = {}
    for path in CONFIGS:
        rows = config_rows(str(path))
        found |= {f"{path.stem}-{row}": (path, row) for row in rows}
        if not rows:
            found[path.stem] = (path, "")
    return found


VARIANTS = variants()


def load(name, smoke=False, **overrides):
    """Returns the experiment ``name``, or its smoke variant."""
    path, row = VARIANTS[name]
    variant = "-".join(filter(None, (row, "smoke" if smoke else "")))
    return txl_jax.load_config(f"{path}:{variant}" if variant else str(path), overrides)


def golden_files() -> dict[str, dict[str, object]]:
    """Returns what the golden files must contain for the current configs, by file name.

    ``defaults`` is the default of every setting. The entry of an experiment is its settings that
    differ from these defaults.
    """
    defaults = flatten(ExperimentConfig().to_dict())
    resolved = {name: flatten(load(name).to_dict()) for name in VARIANTS}
    differences = {
        name: {key: value for key, value in settings.items() if value != defaults[key]}
        for name, settings in resolved.items()
    }
    return {"defaults": defaults, **differences}


# --------------------------------------------------------------------------------------
# Settings and sizes.


def test_every_experiment_has_its_size_here_and_no_other_has():
    assert set(VARIANTS) == set(PARAMETERS) | set(OWN_SIZE)
    for name in VARIANTS:
        assert load(name).name == name
        assert load(name, smoke=True).name == name


@pytest.mark.integration
@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.few(12)
def test_full_size_has_exactly_the_published_number_of_parameters(name):
    state = state_shapes(with_vocab_size(load(name)))
    assert sum(leaf.size for leaf in jax.tree.leaves(state.params)) == PARAMETERS[name]


@pytest.mark.integration
@pytest.mark.parametrize("name", OWN_SIZE)
def test_configs_of_other_texts_have_a_state(name):
    for smoke in (False, True):
        exp = load(name, smoke)
        exp = txl_jax.config.override(exp, {"model.vocab_size": OWN_SIZE[name]})
        assert state_shapes(exp).mems.mem_len == exp.train.mem_len


def state_shapes(exp):
    """Returns the shapes of the training state's arrays, without allocating the arrays."""
    model = txl_jax.TransformerXL(exp.model)
    optimizer = make_optimizer(exp)
    return jax.eval_shape(lambda: init_state(exp, model, optimizer))


def test_defaults_are_those_of_the_golden_file():
    assert golden("defaults") == flatten(ExperimentConfig().to_dict())


@pytest.mark.parametrize("name", VARIANTS)
def test_settings_are_the_golden_defaults_and_differences(name):
    assert flatten(load(name).to_dict()) == golden("defaults") | golden(name)


def test_golden_files_are_of_these_experiments_and_repeat_no_default():
    assert {path.stem for path in GOLDEN.glob("*.json")} == {"defaults", *VARIANTS}
    defaults = golden("defaults")
    for name in VARIANTS:
        assert [key for key, value in golden(name).items() if defaults[key] == value] == []


def golden(name) -> dict[str, object]:
    return json.loads((GOLDEN / f"{name}.json").read_text())


RATE_AT_THE_END = {"nvidia_wt103_base": 1e-3, "nvidia_wt103_large": 1e-4, "ptb_authors": 1e-4}


@pytest.mark.parametrize("name", RATE_AT_THE_END)
def test_the_rate_falls_to_what_is_published(name):
    o = load(name).optimizer
    np.testing.assert_allclose(o.learning_rate * o.min_ratio, RATE_AT_THE_END[name], rtol=1e-12)


TABLE6 = [name for name in VARIANTS if name.startswith("table6")]


@pytest.mark.parametrize("name", TABLE6)
def test_rows_of_table_6_differ_from_wt103_base_only_as_their_names_say(name):
    changed = txl_jax.config.differing_keys(load("wt103_base").to_dict(), load(name).to_dict())
    keys = {line.partition(":")[0] for line in changed}
    expected = {"model.n_layer", "train.seg_len", "train.mem_len"}
    if "half" in name:
        expected.add("loss.positions")
    if "ours" not in name:
        expected.add("model.attention")
    if "shaw" in name or "per_layer" in name:
        expected.add("model.n_positions")
    assert keys == expected


def test_a_row_that_is_not_there_is_refused_naming_those_that_are():
    with pytest.raises(ConfigError, match=r"no row 'shaw_half'.*shaw_no_recurrence_half"):
        txl_jax.load_config(f"{ROOT}/configs/table6.py:shaw_half")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_a_variant_that_is_not_there_is_refused_naming_those_that_are(path):
    rows = config_rows(str(path))
    known = f"rows: {', '.join(rows)}" if rows else r"variants: (fine_tune, )?smoke$"
    with pytest.raises(ConfigError, match=rf"no (row|variant) 'finetune'; {known}"):
        txl_jax.load_config(f"{path}:finetune")


def test_configs_load_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT / "configs")
    beside = txl_jax.load_config("table10.py:no_recurrence_full")
    monkeypatch.chdir(tmp_path)
    assert beside == load("table10-no_recurrence_full")


# --------------------------------------------------------------------------------------
# Headers.


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_header_has_the_command_and_rows_by_name(path):
    header = path.read_text().split('"""')[1]
    assert f"python -m txl_jax.main --config=configs/{path.name}" in header
    for row in config_rows(str(path)):
        assert row in header


@pytest.mark.parametrize("name", PARAMETERS)
def test_header_says_size_score_and_hardware(name):
    """A config's header gives the number of parameters in millions; RESULTS.md has it exactly."""
    path, row = VARIANTS[name]
    header = " ".join(path.read_text().split('"""')[1].split())
    assert not re.search(r"\d,\d{3},\d{3} parameters", header)
    if not row:
        assert f" {PARAMETERS[name] / 1e6:.1f}M parameters" in header
    for word in ("Score", "Hardware: "):
        assert word in header


@pytest.mark.parametrize("name", VARIANTS)
def test_header_says_where_a_batch_leaves_some_of_eight_devices_idle(name):
    exp = load(name)
    header = " ".join(VARIANTS[name][0].read_text().split('"""')[1].split())
    rows, sizes = exp.train.batch_size // exp.train.micro_batches, exp.train.batch_size // 8 * 8
    words = f"a batch of {exp.train.batch_size} uses"
    if rows % 8:
        used = max(n for n in range(1, 8) if rows % n == 0)
        chips = max(n for n in (1, 2, 4) if rows % n == 0)
        number = ("", "one", "two", "three", "four", "five", "six", "seven")
        words = f"Of eight {'devices' if chips == used else 'GPUs'}, {words} {number[used]}"
        words += f", and of eight TPU chips {number[chips]}" * (chips != used)
        words += f"; a train.batch_size of {sizes} or {sizes + 8} uses all."
    assert (words in header) == bool(rows % 8)


# --------------------------------------------------------------------------------------
# Smoke variants train, score and generate, on a small text in the format of their corpus.

WORDS = [a + b for a in ("the", "cat", "saw", "red", "dog", "ran") for b in ("", *"abcdefg")]


def lines(n, seed) -> str:
    """Returns n lines of 6 words. If n is at least 8, each of the 48 words occurs."""
    rng = random.Random(seed)
    words = WORDS + rng.choices(WORDS, k=max(0, 6 * n - len(WORDS)))
    return "".join(" ".join(words[6 * i : 6 * i + 6]) + "\n" for i in range(n))


def write_corpus(name, folder: pathlib.Path) -> str:
    """Writes a small corpus in the format of the published files; returns its ``data.path``."""
    folder.mkdir()
    if name == "enwik8":
        (folder / "enwik8").write_text("The page\n" + lines(200, 0))
    elif name == "text8":
        (folder / "text8").write_text("the page " + lines(200, 0).replace("\n", " "))
    elif name == "lm1b":
        write_sentences(folder)
    else:
        pattern = {"wt103": "wiki.{}.tokens", "ptb": "ptb.{}.txt"}[name]
        for seed, split in enumerate(("train", "valid", "test")):
            text = lines(40 if split == "train" else 16, seed)
            (folder / pattern.format(split)).write_text(f" \n = the = \n{text}")
    return str(folder)


def write_sentences(folder: pathlib.Path) -> None:
    base = folder / "1-billion-word-language-modeling-benchmark-r13output"
    train = base / "training-monolingual.tokenized.shuffled"
    held_out = base / "heldout-monolingual.tokenized.shuffled"
    train.mkdir(parents=True)
    held_out.mkdir()
    for shard in (1, 2):
        (train / f"news.en-{shard:05}-of-00100").write_text(lines(40, shard))
    (held_out / "news.en.heldout-00000-of-00050").write_text(lines(16, 0))
    words = ["<S>", "</S>", "<UNK>", *WORDS]
    (folder / "1b_word_vocab.txt").write_text("".join(f"{word}\n" for word in words))


IN_INTEGRATION = {
    "enwik8_12l",
    "ptb_authors",
}
"""Recipes that together run each kind of code; the other recipes run with ``-m slow``."""

SMOKE = [
    name if name in IN_INTEGRATION else pytest.param(name, marks=pytest.mark.slow)
    for name in PARAMETERS
]


@pytest.mark.integration
@pytest.mark.parametrize("name", SMOKE)
def test_smoke_variant_trains_scores_and_continues(name, tmp_path, capsys):
    exp = load(name, smoke=True)
    path = write_corpus(exp.data.name, tmp_path / "text")
    small = {"data.path": path, "mesh.data": 1, "model.n_layer": 1}
    exp = load(name, smoke=True, **small)
    workdir = tmp_path / "run"
    assert modes.train(exp, str(workdir)) == 0
    assert "held-out" in capsys.readouterr().out
    report = json.loads((workdir / "evaluation.json").read_text())
    result = report["results"][0]
    streams = exp.evaluate.batch_size
    assert f"{streams} stream{'s' * (streams > 1)}, segment 8" in result["protocol"]
    assert result["targets"] > 0
    assert np.isfinite(result[report["unit"]])
    assert (workdir / "sample.txt").read_text()


def write_golden() -> None:
    """Rewrites every golden file and removes those of configs that no longer exist."""
    GOLDEN.mkdir(exist_ok=True)
    for path in GOLDEN.glob("*.json"):
        path.unlink()
    for name, settings in golden_files().items():
        text = json.dumps(settings, indent=1, sort_keys=True) + "\n"
        (GOLDEN / f"{name}.json").write_text(text)


if __name__ == "__main__":
    write_golden()
