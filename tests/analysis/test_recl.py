"""The relative effective context length (RECL) equals its definition (paper, appendix C).

The definition is computed for an example by hand, and otherwise in plain loops.
"""

import csv
import dataclasses
import hashlib
import json
import math
import pathlib
import shutil

import numpy as np
import pytest
import tiny_models
import tiny_runs

import txl_jax
from txl_jax.analysis import context, recl_table
from txl_jax.analysis.context import losses_by_context
from txl_jax.analysis.recl import Gains, Losses, gains
from txl_jax.analysis.results import AnalysisError
from txl_jax.checkpoint.trained_model import TrainedModel
from txl_jax.checkpoint.workdir import init_workdir
from txl_jax.data.corpus import corpus_from_config
from txl_jax.data.vocab import Vocab


def losses(name="ours", contexts=(1, 2), nll=((1.0, 2.0), (0.5, 1.5))):
    return Losses(name, contexts, np.array(nll, np.float32))


def test_a_hand_worked_example():
    """With two tokens and r = 0.5, one token is hard: the one with the larger baseline loss.

    A token's baseline is the least loss of all models at context c. f(c, d) is a model's mean loss
    over the hard tokens at context d; where the baseline is smaller, it replaces the loss.
    """
    ours = losses("ours", (1, 2), [[1.0, 3.0], [0.2, 2.0]])
    theirs = losses("theirs", (1, 2), [[2.0, 2.5], [1.0, 2.4]])
    # c = 1: baseline (1.0, 2.5), the second token is hard, f(1,1) = 2.5
    #        ours f(1,2) = min(2.5, 2.0), theirs f(1,2) = min(2.5, 2.4)
    # c = 2: baseline (0.2, 2.0), the second token is hard, f(2,2) = 2.0
    #        then at c = 1: ours 3.0, theirs 2.5, both above f(2,2), so there is no gain
    of_ours, of_theirs = gains([ours, theirs], r=0.5)
    step = math.exp(2.5) - math.exp(2.0)
    np.testing.assert_allclose(of_ours.absolute, np.array([[0, step], [0, 0]]), atol=1e-6)
    np.testing.assert_allclose(of_ours.relative[0, 1], step / math.exp(2.5), rtol=1e-6)
    np.testing.assert_allclose(
        of_theirs.absolute, np.array([[0, math.exp(2.5) - math.exp(2.4)], [0, 0]]), atol=1e-5
    )
    assert of_ours.recl() == 2
    assert of_theirs.recl(threshold=0.1) == 1  # a gain of 9.5%


def written_out(group, r, c, c_new, i):
    """Returns model i's relative gain in perplexity from context c to c_new, in plain loops.

    ``r`` is the share of tokens that count: those with the largest baseline losses.
    """
    n = len(group[0].nll[0])
    baseline = [min(float(m.nll[c][t]) for m in group) for t in range(n)]
    hard = sorted(range(n), key=lambda t: -baseline[t])[: round(r * n)]
    f = lambda at: sum(min(baseline[t], float(group[i].nll[at][t])) for t in hard) / len(hard)
    return (math.exp(f(c)) - math.exp(f(c_new))) / math.exp(f(c))


@pytest.mark.parametrize("r", [0.1, 0.5, 1.0])
def test_gains_are_the_definition_written_out(r):
    rng = np.random.default_rng(0)
    contexts = (100, 200, 300, 400)
    group = [Losses(f"m{i}", contexts, rng.gamma(2.0, 1.0, (4, 50))) for i in range(3)]
    for i, found in enumerate(gains(group, r)):
        for c in range(4):
            for c_new in range(4):
                want = written_out(group, r, c, c_new, i)
                assert found.relative[c, c_new] == pytest.approx(want, abs=1e-9)
        floor = found.absolute[0, 1] / found.relative[0, 1]
        np.testing.assert_allclose(found.absolute[0], found.relative[0] * floor)


def test_the_length_is_where_the_next_gain_first_falls_short():
    relative = np.zeros((5, 5))
    relative[np.arange(4), np.arange(1, 5)] = [0.05, 0.01, 0.0099, 0.5]
    found = Gains("m", (100, 200, 300, 400, 500), relative, relative)
    assert found.recl() == 300  # 1% is enough, less is not, and a later gain does not count
    assert found.recl(threshold=0.02) == 200
    assert found.recl(threshold=0.06) == 100
    assert found.recl(threshold=0.0) == 500


def test_a_weak_model_does_not_gain_where_the_group_is_good_already():
    """The weak model's loss falls, but not below the best model's with the shorter context."""
    strong = losses("strong", (1, 2), [[1.0, 1.0], [1.0, 1.0]])
    weak = losses("weak", (1, 2), [[5.0, 5.0], [2.0, 2.0]])
    alone = gains([weak], r=1.0)[0]
    among = gains([strong, weak], r=1.0)[1]
    assert alone.recl() == 2
    assert among.recl() == 1
    assert among.relative[0, 1] == 0


def test_losses_are_kept_in_a_file_without_pickle(tmp_path):
    kept = dataclasses.replace(losses(), targets="abc")
    kept.save(tmp_path / "ours.npz")
    again = Losses.load(tmp_path / "ours.npz")
    assert (again.name, again.contexts, again.targets) == ("ours", (1, 2), "abc")
    np.testing.assert_array_equal(again.nll, kept.nll)


def test_losses_that_another_program_recorded_are_read(tmp_path):
    nll = np.array([[3.0, 2.0, 1.0], [2.0, 1.0, 0.5]])
    np.savez(tmp_path / "lstm.npz", name="LSTM", contexts=[100, 200], nll=nll)
    found = Losses.load(tmp_path / "lstm.npz")
    assert (found.name, found.contexts, found.targets) == ("LSTM", (100, 200), "")
    np.testing.assert_array_equal(found.nll, nll)
    np.testing.assert_allclose(found.mean(), [2.0, 3.5 / 3], rtol=1e-6)


@pytest.mark.parametrize("content", [b"", b"no zip", None])
def test_a_file_without_losses_is_named(tmp_path, content):
    path = tmp_path / "other.npz"
    if content is None:
        np.savez(path, contexts=np.array([1, 2]))
    else:
        path.write_bytes(content)
    with pytest.raises(
        AnalysisError, match=r"other\.npz: must be an \.npz file with name, contexts"
    ):
        Losses.load(path)


@pytest.mark.parametrize(
    "wrong",
    [
        {"contexts": (2, 1)},
        {"contexts": (1,), "nll": [[1.0]]},
        {"nll": [[1.0, 2.0]]},
        {"nll": [[1.0, math.nan], [1.0, 1.0]]},
    ],
)
def test_impossible_losses_are_refused(wrong):
    with pytest.raises(AnalysisError, match=r"ours: losses .* must be finite numbers \[C,N\]"):
        losses(**wrong)


def test_a_group_that_cannot_be_compared_is_refused():
    other = losses("other", (1, 3))
    with pytest.raises(AnalysisError, match=r"ours, other: .* same contexts"):
        gains([losses(), other], 0.5)
    elsewhere = [dataclasses.replace(losses(n), targets=n) for n in ("here", "there")]
    with pytest.raises(AnalysisError, match="here, there: must have losses of the same targets"):
        gains(elsewhere, 0.5)
    gains([elsewhere[0], losses("unknown")], 0.5)


def test_contexts_may_be_a_list():
    given = [losses(name, [1, 2]) for name in ("ours", "theirs")]
    assert gains(given, 0.5)[0].contexts == (1, 2)


@pytest.mark.parametrize("r", [0, 50, math.nan])
def test_another_share_of_hard_targets_is_refused(r):
    with pytest.raises(AnalysisError, match=r"must be above 0 and at most 1"):
        gains([losses()], r)


# --------------------------------------------------------------------------------------
# The table: --mode=recl.


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with two workdirs of one text, ``ours`` and ``shaw``, without checkpoints."""
    folder = tmp_path_factory.mktemp("runs")
    shaw = {"model.attention": "shaw", "model.n_positions": "8"}
    for name, changes in (("ours", {}), ("shaw", shaw)):
        (folder / name).mkdir()
        corpus, exp = tiny_runs.corpus_and_experiment(folder, **changes)
        init_workdir(str(folder / name), exp, corpus)
    return folder


@pytest.fixture(autouse=True)
def loaded(monkeypatch):
    """Replaces loading: each model gets random parameters, drawn with its experiment's seed."""
    monkeypatch.setattr(recl_table, "load", load)


def load(workdir):
    record = json.loads((pathlib.Path(workdir) / "config.json").read_text())
    settings = {k: v for k, v in record.items() if k not in ("corpus", "provenance")}
    exp = txl_jax.ExperimentConfig.from_dict(settings)
    vocab = Vocab.from_json(json.loads((pathlib.Path(workdir) / "vocab.json").read_text()))
    params = tiny_models.variables(exp.model, exp.seed)["params"]
    return TrainedModel(txl_jax.TransformerXL(exp.model), params, vocab, exp, 7)


def experiment(*models, **changes):
    settings = {
        "context": {"stride": 4, "max_tokens": 60, "batch_size": 8},
        "recl": {"models": models, "first": 4, "delta": 4, "longest": 14},
    }
    return txl_jax.config.override(txl_jax.ExperimentConfig.from_dict(settings), changes)


def own_losses(workdir, exp):
    trained = load(workdir)
    c = dataclasses.replace(exp.context, lengths=(4, 8, 12))
    corpus = corpus_from_config(trained.config.data)
    nll = losses_by_context(trained.config.model, trained.params, corpus.valid, c)
    symbols = [corpus.vocab.symbols[i] for i in corpus.valid[12:72]]
    return nll, hashlib.sha256("\n".join(symbols).encode()).hexdigest()


@pytest.mark.integration
def test_the_table_has_two_groups_of_workdirs_and_recorded_losses(runs, tmp_path, capsys):
    exp = experiment(
        f"a:ours={runs}/ours",
        f"a:shaw={runs}/shaw",
        f"b:ours={runs}/ours",
        f"b:LSTM={tmp_path}/l.npz",
    )
    (ours, targets), (shaw, _) = (own_losses(runs / name, exp) for name in ("ours", "shaw"))
    lstm = np.random.default_rng(0).gamma(3.0, 1.0, (4, 60)).astype(np.float32)
    Losses("what it says", (2, 4, 8, 12), lstm, targets).save(tmp_path / "l.npz")
    last = recl_table.run(exp, str(tmp_path / "out"))
    assert last.splitlines()[0] == "RECL of 4 models from contexts up to 12 tokens"
    groups = {
        "a": [Losses("ours", (4, 8, 12), ours), Losses("shaw", (4, 8, 12), shaw)],
        "b": [Losses("ours", (4, 8, 12), ours), Losses("LSTM", (4, 8, 12), lstm[1:])],
    }
    result = json.loads((tmp_path / "out" / "recl.json").read_text())
    with open(tmp_path / "out" / "recl.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(m["group"], m["name"]) for m in result["models"]] == [
        ("a", "ours"),
        ("a", "shaw"),
        ("b", "ours"),
        ("b", "LSTM"),
    ]
    assert (result["kind"], result["stride"], result["targets"]) == ("window", 4, 60)
    assert (result["lengths"], result["first_target"]) == ([4, 8, 12], 12)
    for place, m in enumerate(result["models"]):
        for column, (r, share) in enumerate(zip((0.1, 0.5, 1.0), m["shares"], strict=True)):
            (want,) = (g for g in gains(groups[m["group"]], r) if g.name == m["name"])
            np.testing.assert_allclose(share["gain_in_perplexity"], want.absolute)
            np.testing.assert_allclose(share["relative_gain"], want.relative)
            assert (share["recl"], share["at_least"]) == (want.recl(), want.recl() == 12)
            row = rows[3 * place + column]
            assert (row["group"], row["model"], row["r"]) == (m["group"], m["name"], str(r))
            assert (int(row["recl"]), row["stride"]) == (want.recl(), "4")
    for name in ("recl.png", "recl_loss.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")
    svg = (tmp_path / "out" / "recl.svg").read_text()
    assert svg.startswith("<?xml")
    printed = capsys.readouterr().out
    assert "r = 0.1" in printed
    assert "-- b" in printed
    assert ("at least 12" in printed) == any(
        s["at_least"] for m in result["models"] for s in m["shares"]
    )


@pytest.mark.parametrize(
    ("models", "changes", "words"),
    [
        ((), {}, "recl.models is empty"),
        (("ours",), {}, "has 'ours'; give NAME=WORKDIR"),
        (("=x",), {}, "give NAME=WORKDIR"),
        (("a/b={runs}/ours",), {}, "give NAME=WORKDIR"),
        (("ours={runs}/none",), {}, "the folder has no config.json"),
        (("ours={runs}/none.npz",), {}, "no such file"),
        (("m={runs}/ours", "m={runs}/shaw"), {}, "two models with the name m"),
        (("m={runs}/ours",), {"recl.longest": "6"}, "give 1 context lengths"),
        (
            ("m={runs}/ours",),
            {"context.stride": "5"},
            "context.stride=5: must be at most recl.delta=4",
        ),
        (("m={runs}/ours",), {"recl.longest": "900"}, r"m \(.*ours\): a context of 900 tokens"),
    ],
)
def test_unusable_models_are_refused_before_any_is_measured(
    runs, tmp_path, monkeypatch, models, changes, words
):
    monkeypatch.setattr(context, "measure", lambda *_: pytest.fail("a model was measured"))
    models = [m.format(runs=runs) for m in models]
    with pytest.raises(AnalysisError, match=words):
        recl_table.run(experiment(*models, **changes), str(tmp_path / "out"))


def rewritten(workdir, name, change):
    path = pathlib.Path(workdir) / name
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("what", ["vocabulary", "recorded", "short"])
def test_models_that_cannot_be_compared_are_refused_before_any_is_measured(
    runs, tmp_path, monkeypatch, what
):
    monkeypatch.setattr(context, "measure", lambda *_: pytest.fail("a model was measured"))
    other = tmp_path / "other"
    shutil.copytree(runs / "shaw", other)
    words = "different vocabularies"
    if what == "vocabulary":
        rewritten(other, "vocab.json", lambda v: v["symbols"].__setitem__(0, "ß"))
        rewritten(other, "config.json", lambda v: v["corpus"].pop("vocab_hash"))
    else:
        other = tmp_path / "other.npz"
        n, words = (
            (60, "do not predict the same text") if what == "recorded" else (59, "59 targets")
        )
        Losses("other", (4, 8, 12), np.ones((3, n), np.float32), "of other text").save(other)
    with pytest.raises(AnalysisError, match=words):
        recl_table.run(experiment(f"m={runs}/ours", f"o={other}"), str(tmp_path / "out"))


def test_recorded_losses_without_a_length_are_refused(tmp_path):
    Losses("m", (4, 8), np.ones((2, 3), np.float32)).save(tmp_path / "m.npz")
    with pytest.raises(AnalysisError, match=r"no losses at contexts \[12\]"):
        recl_table.run(experiment(f"m={tmp_path}/m.npz"), str(tmp_path / "out"))


def test_recorded_losses_alone_make_a_table_and_a_rising_loss_is_told(tmp_path, capsys):
    """By the definition, two tokens that swap their losses give a gain at every length."""
    low, high = [0.5, 3.0], [4.0, 0.5]
    Losses("m", (4, 8, 12), np.array([low, high, [0.5, 5.0]])).save(tmp_path / "m.npz")
    recl_table.run(experiment(f"m={tmp_path}/m.npz", **{"recl.shares": "1.0"}), str(tmp_path))
    share = json.loads((tmp_path / "recl.json").read_text())["models"][0]["shares"][0]
    # From context 4 to 8, the baseline b = 0.5 3.0 falls to min(b, loss) = 0.5 0.5; from 8 to 12,
    # 4.0 0.5 falls to 0.5 0.5.
    assert (share["recl"], share["at_least"], share["loss_rises"]) == (12, True, True)
    want = math.exp(1.75) - math.exp(0.5), math.exp(2.25) - math.exp(0.5)
    found = np.array(share["gain_in_perplexity"])
    np.testing.assert_allclose([found[0, 1], found[1, 2]], want, rtol=1e-6)
    assert "at least 12*" in capsys.readouterr().out
