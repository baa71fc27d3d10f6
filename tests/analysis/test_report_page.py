"""The report page of a run is complete, offline, well-formed, and has the run's own numbers."""

import dataclasses
import html.parser
import json
import os
import re
import shutil

import pytest
import tiny_runs
from tiny_runs import train

from txl_jax.analysis import report_page as page
from txl_jax.analysis import results
from txl_jax.checkpoint.errors import WorkdirError
from txl_jax.checkpoint.loading import load
from txl_jax.checkpoint.trained_model import parameter_count
from txl_jax.checkpoint.workdir import init_workdir, with_vocab
from txl_jax.config import ExperimentConfig, override
from txl_jax.data.corpus import corpus_from_config
from txl_jax.evaluation.baselines import DESCRIPTIONS
from txl_jax.training.preemption import PreemptionGuard


class Reader(html.parser.HTMLParser):
    """Collects the text, the tags and all addresses that a browser would fetch."""

    def __init__(self):
        super().__init__()
        self.text, self.open, self.fetched, self.images = [], [], [], 0
        self.tags = set()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        if tag not in ("meta", "img", "link"):
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href"):
                self.images += tag == "img"
                self.fetched += [] if value.startswith("data:image/") else [value]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def parsed(path):
    reader = Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    assert reader.open == []
    return reader, " ".join(" ".join(reader.text).split())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A trained and evaluated run with a sample that looks like HTML."""
    folder = tmp_path_factory.mktemp("page")
    exp = tiny_runs.experiment(folder, **{"train.steps": 4, "train.eval_every": 2, "name": "tiny"})
    exp = override(exp, {"train.log_every": 1, "checkpoint.every": 2})
    corpus = corpus_from_config(exp.data)
    exp = with_vocab(exp, corpus)
    workdir = folder / "one"
    workdir.mkdir()
    init_workdir(str(workdir), exp, corpus)
    train(exp, corpus, str(workdir), PreemptionGuard())
    tiny_runs.evaluate(load(str(workdir)), corpus, workdir)
    (workdir / "sample.txt").write_text("<b>the cat</b> & a dog\n")
    return workdir


def write(workdir, **settings):
    return page.run(override(ExperimentConfig(), settings), str(workdir))


@pytest.mark.integration
def test_the_page_has_the_runs_figures_and_needs_no_network(run):
    assert write(run) == f"written: {run / 'report.html'}"
    reader, text = parsed(run / "report.html")
    assert reader.fetched == []
    assert reader.images == 1  # the curves
    result = json.loads((run / "evaluation.json").read_text())
    for row in result["results"]:
        of_model = row["name"] not in DESCRIPTIONS
        parameters = f"{result['parameters']:,} " if of_model else ""
        step = ", step 4" if of_model else ""
        value = f"{row['bpc']:.3f} bpc {row['targets']:,} {parameters}{row['protocol']}{step}"
        assert f"{row['name']} {value}" in text
    assert result["parameters"] == parameter_count(load(str(run)).params)
    config = json.loads((run / "config.json").read_text())
    assert config["provenance"]["versions"]["jax"] in text
    assert config["corpus"]["source_hash"] in text
    assert "model.d_model 16" in text
    assert "<b>the cat</b> & a dog" in text  # as text, not as HTML


def test_settings_that_are_the_defaults_are_folded_away(run):
    write(run)
    source = (run / "report.html").read_text(encoding="utf-8")
    before, after = source.split("<summary>all settings")
    assert "optimizer.learning_rate" in before
    assert "optimizer.b2" not in before
    assert "optimizer.b2" in after


def test_pictures_of_analyses_are_on_the_page(run, tmp_path):
    write(run)
    before = parsed(run / "report.html")[0].images
    figure = results.new_figure()
    figure.add_subplot().plot([1, 2], [3, 4])
    results.save_figure(figure, str(run), "context")
    (run / "context.json").write_text('{"effective": 7777}')
    try:
        write(run)
        reader, text = parsed(run / "report.html")
        assert reader.images == before + 1
        assert "Loss and context" in text
        assert '"effective": 7777' in text
    finally:
        for name in ("context.png", "context.svg", "context.json"):
            os.remove(run / name)


def test_the_same_figure_gives_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        figure = results.new_figure()
        figure.add_subplot().plot([1, 2], [3, 4])
        results.save_figure(figure, str(tmp_path / name), "curve")
    for kind in ("png", "svg"):
        one, two = ((tmp_path / name / f"curve.{kind}").read_bytes() for name in ("a", "b"))
        assert one == two


@pytest.mark.parametrize(("values", "span"), [((1.99, 2.01), 0.1), ((1.0, 3.0), 2.2)])
def test_small_differences_do_not_fill_a_figure(values, span):
    axes = results.new_figure().add_subplot()
    axes.plot(values)
    results.show_share(axes)
    low, high = axes.get_ylim()
    assert high - low == pytest.approx(span)
    assert (low + high) / 2 == pytest.approx(2.0)


def test_every_evaluation_is_kept_and_the_latest_of_each_protocol_is_shown(run):
    trained = load(str(run))
    corpus = corpus_from_config(trained.config.data, trained.vocab)
    more = override(trained.config, {"evaluate.split": "valid"})
    tiny_runs.evaluate(dataclasses.replace(trained, config=more), corpus, run)
    lines = (run / "evaluations.jsonl").read_text().splitlines()
    assert len(lines) == 2
    write(run)
    _, text = parsed(run / "report.html")
    assert "test split, 4 streams" in text
    assert "valid split, 4 streams" in text


def test_runs_are_compared_by_what_differs(run, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    record = json.loads((run / "config.json").read_text())
    record["optimizer"]["learning_rate"] = 0.125
    del record["speed"]  # as in a run of an older version
    (other / "config.json").write_text(json.dumps(record))
    out = tmp_path / "out"
    write(out, **{"report.workdirs": f"{run},{other}", "report.title": "two rates"})
    reader, text = parsed(out / "report.html")
    assert text.startswith("two rates")
    assert "optimizer.learning_rate 0.005 0.125" in text
    assert "model.d_model" not in text
    assert "speed." not in text
    assert "other not evaluated" in text
    assert reader.fetched == []


def test_runs_are_named_by_their_folders(run, tmp_path):
    record, folders = json.loads((run / "config.json").read_text()), []
    for name, rate in (("a", 0.5), ("b", 0.25)):
        folder = tmp_path / name / "seed_0"
        folder.mkdir(parents=True)
        changed = {**record, "optimizer": {**record["optimizer"], "learning_rate": rate}}
        (folder / "config.json").write_text(json.dumps(changed))
        folders.append(str(folder))
    write(tmp_path / "out", **{"report.workdirs": ",".join(folders)})
    _, text = parsed(tmp_path / "out" / "report.html")
    assert text.startswith("2 runs compared")
    assert f"setting {' '.join(folders)} optimizer.learning_rate 0.5 0.25" in text


@pytest.mark.parametrize("name", ["_run", f"/a/b{'_' * page.LONGEST_NAME}"])
def test_a_run_of_any_name_is_in_the_legend(name, monkeypatch):
    drawn = []

    def keep(figure, *_):
        drawn.append(figure)
        return b""

    monkeypatch.setattr(page, "figure_bytes", keep)
    metrics = [{"kind": "train", "step": 1, "bpb": 3.0}]
    page.curves([dataclasses.replace(found(), workdir=name, metrics=metrics)], "bpb")
    (label,) = drawn[0].axes[0].get_legend().get_texts()
    assert label.get_text() == f"…{name[-page.LONGEST_NAME :]}"


def test_damaged_and_foreign_files_are_left_out_and_named(run, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    with open(copy / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "bpc": 1.0}\n{"kind": "train", "bpc": 1.0}\n')
    with open(copy / "evaluations.jsonl", "a") as file:
        file.write('{"step": 3}\n{"step": 3, "unit": "bpc", "results": [{"name": "a"}]}\n[]\n')
    (copy / "sample.txt").write_bytes(b"caf\xe9")
    write(copy)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith("metrics.jsonl: 2 lines were skipped (damaged, or no record of a run)")
    assert lines[1].endswith(
        "evaluations.jsonl: 3 lines were skipped (damaged, or no record of a run)"
    )
    reader, text = parsed(copy / "report.html")
    assert reader.images == 1
    assert "test split, 4 streams" in text
    assert "caf\ufffd" in text
    (copy / "context.json").write_text("[1]")
    write(copy)
    said = capsys.readouterr().err
    assert f"warning: left out of the page: {copy}/context.json: is JSON, but not an object" in said
    assert "context.json" not in parsed(copy / "report.html")[1]


@pytest.mark.parametrize("value", [b"{}", b"[]", b'{"step": 1, "unit": "ppl", "results": {}}'])
def test_an_invalid_evaluation_is_left_out_and_named(run, tmp_path, capsys, value):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    (copy / "evaluations.jsonl").write_bytes(value + b"\n")
    write(copy)
    said = "evaluations.jsonl: 1 line was skipped (damaged, or no record of a run)"
    assert said in capsys.readouterr().err
    assert "test split" not in parsed(copy / "report.html")[1]


TEST, VALID = "test split, 4 streams, segment 16, memory 32", "valid split, 4 streams, segment 16"
PART = f"{TEST}, first 3 segments only"


def evaluation(value, protocol=TEST, text="a", step=7, **baselines):
    rows = [{"name": "memory 32", "bpc": value, "targets": 1234, "protocol": protocol}]
    rows += [{"name": name, "bpc": bpc, "targets": 1234} for name, bpc in baselines.items()]
    about = {"step": step, "source_hash": text, "label": f"text {text}", "unit": "bpc"}
    return {**about, "results": rows}


def found(*evaluations, folder="one"):
    config = {"name": "tiny", "corpus": {"source_hash": "a", "label": "text a"}}
    return page.RunRecord(folder, config, [], list(evaluations), "")


@pytest.mark.parametrize(
    ("evaluations", "expected"),
    [
        ((evaluation(2.0), evaluation(3.0, PART)), f"text a: 2.000 bits per character ({TEST})"),
        ((evaluation(3.0, PART),), f"text a: 3.000 bits per character ({PART})"),
        ((evaluation(2.0), evaluation(1.0)), f"text a: 1.000 bits per character ({TEST})"),
        (
            (evaluation(2.0), evaluation(1.0, text="b")),
            f"text a: 2.000 bits per character ({TEST})",
        ),
        ((evaluation(1.0, text="b"),), f"text b: 1.000 bits per character ({TEST})"),
        ((), "text a"),
    ],
    ids=["whole first", "only a part", "latest", "own text", "only another text", "none"],
)
def test_the_headline_is_the_latest_score_of_the_whole_of_the_runs_text(evaluations, expected):
    assert page.headline(found(*evaluations)) == expected


def test_results_on_other_targets_than_the_headlines_come_last_and_are_marked():
    first = (evaluation(1.0, PART), evaluation(2.0), evaluation(3.0, VALID))
    rows = page.results(found(*first, evaluation(4.0, text="b"), evaluation(5.0)))
    assert [(row["value"], row["marked"]) for row in rows] == [
        ("5.000 bpc", False),
        ("1.000 bpc", True),
        ("3.000 bpc", True),
        ("4.000 bpc", True),
    ]
    text = page.render({"results": rows}).decode()
    assert re.findall(r"<td>(\S+ bpc)( †)?</td>", text) == [
        (row["value"], " †" if row["marked"] else "") for row in rows
    ]
    assert text.count("† other targets") == 1


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (evaluation(1.0), []),
        (evaluation(1.0, VALID), ["protocols"]),
        (evaluation(1.0, PART), ["protocols"]),
        (evaluation(1.0, text="b"), ["texts or units"]),
        (evaluation(1.0, VALID, text="b"), ["texts or units", "protocols"]),
    ],
)
def test_results_that_cannot_be_compared_carry_a_warning(other, expected, monkeypatch):
    monkeypatch.setattr(page, "curves", lambda *_: None)
    runs = [found(evaluation(2.0)), found(other, folder="two"), found(folder="three")]
    compared = page.comparison(runs)
    assert compared["differing"] == expected
    assert [row["marked"] for row in compared["results"]] == [False, bool(expected), False]
    html = page.render({"comparison": compared}).decode()
    assert re.findall(r'<p class="warning">(.*?)</p>', html) == [
        f"Warning: these results have different {what}, so their values cannot be compared."
        for what in expected
    ]


def test_a_baseline_has_no_step_of_training():
    rows = page.results(found(evaluation(2.0, unigram=4.0, **{"xz primed": 3.0})))
    assert [(row["name"], row["protocol"].partition(", step ")[2]) for row in rows] == [
        ("memory 32", "7"),
        ("unigram", ""),
        ("xz primed", ""),
    ]


def test_every_value_on_the_page_is_escaped(run, tmp_path):
    """HTML in names, settings, protocols, analyses and environment is shown as text."""
    bad = "<script>alert('&\"')</script>"
    copy = tmp_path / "<i>copy"
    shutil.copytree(run, copy)
    record = json.loads((run / "config.json").read_text())
    record["name"] = record["corpus"]["label"] = record["generate"]["prompt"] = bad
    record["provenance"]["versions"][bad] = bad
    (copy / "config.json").write_text(json.dumps(record))
    result = evaluation(1.0, protocol=bad)
    result["label"] = result["results"][0]["name"] = bad
    (copy / "evaluations.jsonl").write_text(json.dumps(result) + "\n")
    (copy / "context.json").write_text(json.dumps({"label": bad}))
    (copy / "context<b>.png").write_bytes(b"no picture")
    write(copy, **{"report.title": bad, "report.workdirs": (str(run),)})
    reader, text = parsed(copy / "report.html")
    assert reader.tags.isdisjoint({"script", "i", "b"})
    assert text.startswith(bad)
    assert text.count(bad) >= 9
    assert "<i>copy" in text


def test_a_folder_that_is_no_run_is_refused(tmp_path, run):
    with pytest.raises(
        WorkdirError, match=r"this folder has no config.json; give the runs to compare"
    ):
        write(tmp_path)
    with pytest.raises(
        WorkdirError, match=r"report.workdirs: .*nope: has no config.json; name a run"
    ):
        write(run, **{"report.workdirs": str(tmp_path / "nope")})
