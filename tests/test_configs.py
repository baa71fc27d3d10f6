"""Every shipped config is the experiment it says: settings, size, header and smoke run.

After a change of a config or of a default, write the golden files anew and read their diff:

    python tests/test_configs.py
"""

import json
import pathlib
import random

import jax
import numpy as np
import pytest

import txl_jax
from txl_jax import modes
from txl_jax.config import ConfigError, config_rows
from txl_jax.planning.vocabulary import with_known_size
from txl_jax.training.optimizer import make_optimizer
from txl_jax.training.state import init_state

ROOT = pathlib.Path(__file__).resolve().parents[1]
CONFIGS = sorted((ROOT / "configs").glob("[a-z]*.py"))
GOLDEN = ROOT / "tests" / "golden"

PARAMETERS = {
    "enwik8_12l": 41_055_436,
    "enwik8_18l": 87_781_244,
    "enwik8_24l": 277_231_820,
    "text8_12l": 40_964_635,
    "text8_24l": 277_050_395,
    "wt103_base": 151_107_538,
    "wt103_large": 285_170_506,
    "lm1b_base": 357_812_082,
    "lm1b_large": 841_295_982,
    "wt103_base_tf": 151_119_838,
    "wt103_large_tf": 285_205_322,
    "lm1b_base_tf": 355_749_746,
    "lm1b_large_tf": 838_078_062,
    "nvidia_wt103_base": 191_950_298,
    "nvidia_wt103_large": 285_167_482,
    "ptb_authors": 24_040_400,
}
"""Of the published code at the shapes of the recipes."""

SEVEN_LAYERS = PARAMETERS["wt103_base"] - 9 * (5 * 410**2 + 2 * 410 * 2100 + 2100 + 5 * 410)
NO_R = 7 * 410**2 + 2 * 410  # the position projection of seven layers; u and v
TWENTY_LAYERS = PARAMETERS["lm1b_base"] + 20 * (5 * 1024**2 + 2 * 1024 * 2048 + 2048 + 5 * 1024)
TWENTY_LAYERS -= 18 * (5 * 1024**2 + 2 * 1024 * 4096 + 4096 + 5 * 1024)
of_shaw = lambda layers, rows, heads, width: layers * (rows * (width + heads) + width)
PARAMETERS |= {
    **{
        f"table6-ours_{kind}": SEVEN_LAYERS
        for kind in (
            "recurrence_full",
            "recurrence_half",
            "no_recurrence_full",
            "no_recurrence_half",
        )
    },
    "table6-shaw_recurrence_full": SEVEN_LAYERS - NO_R + of_shaw(7, 256, 10, 410),
    "table6-shaw_no_recurrence_full": SEVEN_LAYERS - NO_R + of_shaw(7, 128, 10, 410),
    "table6-shaw_no_recurrence_half": SEVEN_LAYERS - NO_R + of_shaw(7, 128, 10, 410),
    "table6-absolute_no_recurrence_half": SEVEN_LAYERS - NO_R,
    "table6-absolute_per_layer_no_recurrence_half": SEVEN_LAYERS - NO_R + 7 * 128 * 410,
    "table7-ours": TWENTY_LAYERS,
    "table7-no_recurrence": TWENTY_LAYERS,
    "table7-shaw": TWENTY_LAYERS - 20 * 1024**2 - 2 * 1024 + of_shaw(20, 64, 8, 1024),
    "table10-recurrence_full": SEVEN_LAYERS,
    "table10-recurrence_half": SEVEN_LAYERS,
    "table10-no_recurrence_full": SEVEN_LAYERS,
    "table10-no_recurrence_half": SEVEN_LAYERS,
}
"""Of the tables' rows, by the formula per layer and what each encoding has of its own."""
PARAMETERS["ptb"] = 12 * (5 * 400**2 + 2 * 400 * 1024 + 1024 + 5 * 400) + 2 * 400 + 10_000 * 401
"""Of our own recipe, by the same formula; it must be below 24.1M."""

OWN_SIZE = {"my_text": 100, "ptb_small": 10_000, "quickstart": 256}
OWN_SIZE |= {"probe-memory": 11, "probe-no_memory": 11}
OWN_SIZE |= {
    f"siblings-{corpus}_{sibling}": size
    for corpus, size in (("ptb", 10_000), ("stdlib", 256))
    for sibling in ("ours", "shaw", "no_recurrence", "absolute")
}
"""Configs that are no recipe, and a vocabulary for each."""


def variants() -> dict[str, tuple[pathlib.Path, str]]:
    """Every experiment that ``configs/`` has, by its name: the file and the variant."""
    found: dict[str, tuple[pathlib.Path, str]] = {}
    for path in CONFIGS:
        rows = config_rows(str(path))
        found |= {f"{path.stem}-{row}": (path, row) for row in rows}
        if not rows:
            found[path.stem] = (path, "")
    return found


VARIANTS = variants()


def load(name, smoke=False, **overrides):
    """The experiment of that name, or its smoke variant."""
    path, row = VARIANTS[name]
    variant = "-".join(filter(None, (row, "smoke" if smoke else "")))
    return txl_jax.load_config(f"{path}:{variant}" if variant else str(path), overrides)


def text_of(name) -> str:
    """The experiment as its golden file has it."""
    return json.dumps(load(name).to_dict(), indent=1, sort_keys=True) + "\n"


# --------------------------------------------------------------------------------------
# Settings and sizes.


def test_every_experiment_has_its_size_here_and_no_other_has():
    assert set(VARIANTS) == set(PARAMETERS) | set(OWN_SIZE)
    for name in VARIANTS:
        assert load(name).name == name
        assert load(name, smoke=True).name == name


@pytest.mark.parametrize("name", PARAMETERS)
def test_full_size_has_exactly_the_published_number_of_parameters(name):
    state = state_shapes(with_known_size(load(name)))
    assert sum(leaf.size for leaf in jax.tree.leaves(state.params)) == PARAMETERS[name]


@pytest.mark.parametrize("name", OWN_SIZE)
def test_configs_of_other_texts_have_a_state(name):
    for smoke in (False, True):
        exp = load(name, smoke)
        exp = txl_jax.config.override(exp, {"model.vocab_size": OWN_SIZE[name]})
        assert state_shapes(exp).mems.mem_len == exp.train.mem_len


def state_shapes(exp):
    """Shapes of the whole training state; nothing is allocated."""
    model = txl_jax.TransformerXL(exp.model)
    optimizer = make_optimizer(exp)
    return jax.eval_shape(lambda: init_state(exp, model, optimizer))


@pytest.mark.parametrize("name", VARIANTS)
def test_settings_are_those_of_the_golden_file(name):
    assert json.loads((GOLDEN / f"{name}.json").read_text()) == load(name).to_dict()


def test_no_golden_file_is_left_of_a_config_that_is_gone():
    assert {path.stem for path in GOLDEN.glob("*.json")} == set(VARIANTS)


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
# Headers, and the table of results.


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_header_has_the_command_and_rows_by_name(path):
    header = path.read_text().split('"""')[1]
    assert f"python -m txl_jax.main --config=configs/{path.name}" in header
    for row in config_rows(str(path)):
        assert row in header


@pytest.mark.parametrize("name", PARAMETERS)
def test_header_says_size_score_protocol_hardware_and_that_it_was_not_run(name):
    path, row = VARIANTS[name]
    header = path.read_text().split('"""')[1]
    if not row:
        assert f"{PARAMETERS[name]:,}" in header
    for word in ("Score", "Hardware: ", "*not run*"):
        assert word in header


@pytest.mark.parametrize("name", PARAMETERS)
def test_results_has_a_row_of_every_recipe(name):
    path, row = VARIANTS[name]
    what = f"`{path.stem}.py:{row}`" if row else f"`{name}`"
    assert any(line.startswith("|") and what in line for line in results().splitlines())


def results() -> str:
    """The section of RESULTS.md on the paper's tables."""
    text = (ROOT / "RESULTS.md").read_text()
    return text.split("## The paper's tables")[1].split("\n## ")[0]


# --------------------------------------------------------------------------------------
# Smoke variants run: a text in the corpus's format, a few updates, the score, a sample.

WORDS = [a + b for a in ("the", "cat", "saw", "red", "dog", "ran") for b in ("", *"abcdefg")]


def lines(n, seed) -> str:
    """n lines of 6 of 48 words, in which every word occurs once n is 8 or more."""
    rng = random.Random(seed)
    words = WORDS + rng.choices(WORDS, k=max(0, 6 * n - len(WORDS)))
    return "".join(" ".join(words[6 * i : 6 * i + 6]) + "\n" for i in range(n))


def write_corpus(name, folder: pathlib.Path) -> str:
    """A small corpus in the published files' form; the ``data.path`` of it."""
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


RUN_BY_DEFAULT = {
    "enwik8_12l",
    "lm1b_base",
    "ptb_authors",
}
"""A few that together run each kind of code; the others run with ``-m slow``."""

SMOKE = [
    name if name in RUN_BY_DEFAULT else pytest.param(name, marks=pytest.mark.slow)
    for name in PARAMETERS
]


@pytest.mark.parametrize("name", SMOKE)
def test_smoke_variant_trains_scores_and_continues(name, tmp_path, capsys):
    exp = load(name, smoke=True)
    path = write_corpus(exp.data.name, tmp_path / "text")
    small = {"data.path": path, "mesh.data": 1, "model.n_layer": 1}
    exp = load(name, smoke=True, **small)
    workdir = tmp_path / "run"
    assert modes.train(exp, str(workdir), command="") == 0
    assert "held-out" in capsys.readouterr().out
    report = json.loads((workdir / "evaluation.json").read_text())
    result = report["results"][0]
    streams = exp.evaluate.batch_size
    assert f"{streams} stream{'s' * (streams > 1)}, segment 8" in result["protocol"]
    assert result["targets"] > 0
    assert np.isfinite(result[report["unit"]])
    assert (workdir / "sample.txt").read_text()


def write_golden() -> None:
    """Writes every golden file anew and removes those of configs that are gone."""
    GOLDEN.mkdir(exist_ok=True)
    for path in GOLDEN.glob("*.json"):
        path.unlink()
    for name in VARIANTS:
        (GOLDEN / f"{name}.json").write_text(text_of(name))


if __name__ == "__main__":
    write_golden()
