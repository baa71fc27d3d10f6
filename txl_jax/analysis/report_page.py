"""One HTML page of a run: what it is of, how it was trained, what it is worth, what it wrote.

    python -m txl_jax.main --mode=report --workdir=runs/quickstart
    python -m txl_jax.main --mode=report --workdir=OUT --config.report.workdirs=runs/a,runs/b

``report.html`` needs no network and no other file: pictures and style lie within. It shows what
the workdir has: settings, curves, every evaluation, the analyses that were made, a sample, the
environment. With other runs named, they are compared on it; OUT itself need not be a run then.
"""

import dataclasses
import html
import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from txl_jax import records
from txl_jax.analysis.report_pictures import curves, embedded
from txl_jax.analysis.report_style import STYLE
from txl_jax.checkpoint.errors import WorkdirError
from txl_jax.checkpoint.workdir import read_json, read_record
from txl_jax.checkpoint.workdir_files import CONFIG, check_outputs, register_outputs
from txl_jax.config import ExperimentConfig, flatten
from txl_jax.evaluation.baselines import TOLD
from txl_jax.evaluation.evaluate import is_part
from txl_jax.files import atomic_write
from txl_jax.units import UNIT_NAMES, Unit, format_value

PAGE = "report.html"

ANALYSES = (
    ("ablation", "Table of rows", "Every row at every attention length, best marked."),
    ("context", "Loss and context", "Loss against how much text before a token is seen."),
    ("recl", "Relative effective context length", "Paper, appendix C."),
    ("attention", "Where heads look", "Attention by distance; paper, appendix D."),
    ("probe", "Long-range probe", "How far back an answer is found."),
    ("speed", "Speed of evaluation", "With memory, and by sliding windows; paper, table 9."),
)
"""Analyses by the start of their files' names, with a heading and a line about each."""


@dataclasses.dataclass(frozen=True)
class Found:
    """What a workdir has: its folder, and what was read there (empty where there is nothing)."""

    workdir: str
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    sample: str
    skipped: tuple[str, ...] = ()
    """A sentence about each file with lines that cannot be used."""

    @property
    def folder(self) -> str:
        """The workdir's own name, by which runs of one experiment are told apart."""
        return os.path.basename(os.path.abspath(self.workdir))

    @property
    def name(self) -> str:
        """Of the experiment, and the folder's."""
        named = self.config.get("name", "")
        return named if named == self.folder or not named else f"{named} ({self.folder})"

    @property
    def unit(self) -> Unit:
        """In which its text's losses are given."""
        if self.evaluations:
            return self.evaluations[-1]["unit"]
        return "bpc" if any("bpc" in record for record in self.metrics) else "ppl"

    @property
    def main_result(self) -> dict[str, Any] | None:
        """The latest evaluation, if there is one: of the run's own text before another, and of
        a whole split before a part."""
        own = self.config.get("corpus", {}).get("source_hash")

        def rank(numbered: tuple[int, dict[str, Any]]) -> tuple[bool, bool, int]:
            n, one = numbered
            whole = not is_part(_protocol(one["results"][0]))
            return one.get("source_hash") == own, whole, n

        return max(enumerate(self.evaluations), key=rank, default=(0, None))[1]


def run(exp: ExperimentConfig, workdir: str) -> str:
    """Writes ``report.html`` in ``workdir``; the line that says where it is.

    Raises:
      WorkdirError: there is no run in it, nor another one named; or a named one is none.
    """
    settings = exp.report
    main = found_in(workdir) if os.path.exists(os.path.join(workdir, CONFIG)) else None
    others = [found_in(folder) for folder in settings.workdirs]
    if main is None and not others:
        raise WorkdirError(
            f"--workdir={workdir}: there is no {CONFIG} in it; train first, or name runs to compare"
            " with --config.report.workdirs=RUN,RUN"
        )
    check_outputs(workdir, "report")
    register_outputs(workdir, "report")
    runs = [*([main] if main else []), *others]
    for one in runs:
        for sentence in one.skipped:
            _warn(sentence)
    title = settings.title or (main.name if main else " and ".join(one.name for one in others))
    parts = [comparison(runs)] if len(runs) > 1 else []
    if main:
        parts += [results(main), training(main)]
    parts += list(analyses(workdir))
    if main:
        parts += [sample(main), configuration(main), environment(main)]
    path = os.path.join(workdir, PAGE)
    atomic_write(path, whole(title, headline(runs[0]), [p for p in parts if p]).encode())
    return f"written: {path}"


def found_in(workdir: str) -> Found:
    """What a run left in its workdir.

    Raises:
      WorkdirError: it is no run's.
    """
    at = lambda name: os.path.join(workdir, name)
    if not os.path.exists(at(CONFIG)):
        raise WorkdirError(f"{workdir}: there is no {CONFIG} in it; name the workdir of a run")
    metrics, skipped = _lines(at("metrics.jsonl"), records.is_record)
    evaluations, more = _lines(at("evaluations.jsonl"), is_evaluation)
    single = at("evaluation.json")
    if not evaluations and os.path.exists(single):
        one = _object(single)
        if one is not None and is_evaluation(one):
            evaluations = [one]
        else:
            more = (*more, f"{single}: is damaged or no evaluation, and skipped")
    text = ""
    if os.path.exists(at("sample.txt")):
        with open(at("sample.txt"), encoding="utf-8", errors="replace") as file:
            text = file.read()
    return Found(workdir, read_record(workdir), metrics, evaluations, text, (*skipped, *more))


def _lines(
    path: str, accepts: Callable[[Any], bool]
) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """The accepted objects of a file, and a sentence if lines of it are skipped."""
    if not os.path.exists(path):
        return [], ()
    found, skipped = records.read_counted(path, accepts)
    return found, (records.skipped_lines(path, skipped),) if skipped else ()


def _object(path: str) -> dict[str, Any] | None:
    try:
        return read_json(path)
    except WorkdirError:
        return None


def is_evaluation(value: Any) -> bool:
    """Whether a JSON value is what :func:`~txl_jax.evaluation.report.report` writes."""
    if not isinstance(value, dict) or value.get("unit") not in ("bpc", "ppl"):
        return False
    rows, unit = value.get("results"), value["unit"]
    if type(value.get("step")) is not int or not isinstance(rows, list) or not rows:
        return False
    return all(
        isinstance(row, dict)
        and isinstance(row.get("name"), str)
        and isinstance(row.get("protocol", ""), str)
        and type(row.get("targets", 0)) is int
        and isinstance(row.get(unit, ""), int | float | None)
        for row in rows
    )


def value_of(row: Mapping[str, Any], unit: Unit) -> str:
    """The result of a row as text; one that is not finite is stored as null."""
    return "not finite" if row[unit] is None else format_value(row[unit], unit)


# --------------------------------------------------------------------------------------
# Sections.


def headline(one: Found) -> str:
    """The run's best-known number, in a line."""
    about = one.config.get("corpus", {}).get("label", one.config.get("data", {}).get("name", ""))
    result = one.main_result
    if result is None:
        return about
    about = result.get("label", about)
    first = result["results"][0]
    value = value_of(first, result["unit"])
    return f"{about}: {value} {UNIT_NAMES[result['unit']]} ({_protocol(first)})"


def results(one: Found) -> str:
    """Every evaluation of the run, the latest of each protocol, by split and protocol."""
    rows: dict[tuple[str, str], Sequence[Any]] = {}
    for result in one.evaluations:
        unit: Unit = result["unit"]
        for row in result["results"]:
            name, protocol = row["name"], _protocol(row)
            count = f"{row['targets']:,}" if "targets" in row else ""
            step = "" if name in TOLD else result["step"]  # a baseline is not trained in steps
            rows[name, protocol] = (name, value_of(row, unit), unit, count, step, protocol)
    head = ("what", "value", "unit", "targets", "step", "protocol")
    return section("Results", table(head, rows.values())) if rows else ""


def training(one: Found) -> str:
    """Loss, learning rate, gradient norm and speed over steps."""
    return section("Training", curves([one.metrics], [one.name], one.unit)) if one.metrics else ""


def comparison(runs: Sequence[Found]) -> str:
    """Runs beside one another: settings that differ, last results, curves in one picture."""
    rows: list[tuple[str, ...]] = []
    texts: set[tuple[Any, str]] = set()
    for one in runs:
        result = one.main_result
        first = result["results"][0] if result else {}
        value = value_of(first, result["unit"]) if result else "not evaluated"
        unit = UNIT_NAMES[result["unit"]] if result else ""
        rows.append((one.folder, value, unit, _protocol(first)))
        texts |= {(result.get("source_hash"), unit)} if result else set()
    protocols = {protocol for _, _, unit, protocol in rows if unit}
    plain = flatten(ExperimentConfig().to_dict())  # a setting that came later has its default
    flat = [{**plain, **flatten(settings_of(one))} for one in runs]
    keys = sorted({key for one in flat for key in one})
    differing = [key for key in keys if len({str(one.get(key)) for one in flat}) > 1]
    body = warning("texts or units", texts) + warning("protocols", protocols)
    body += table(("run", "value", "unit", "protocol"), rows)
    if len({one.unit for one in runs}) == 1:
        body += curves([one.metrics for one in runs], [one.folder for one in runs], runs[0].unit)
    body += "<h3>Settings that differ</h3>"
    body += table(("setting", *(one.folder for one in runs)), compared(differing, flat))
    return section("Runs compared", body)


def warning(what: str, found: Collection[Any]) -> str:
    """A paragraph where results differ in what they are of; else nothing."""
    if len(found) < 2:
        return ""
    told = f"Warning: these results have different {what}, so their values do not compare."
    return f"<p class=warning>{html.escape(told)}</p>"


def compared(keys: Iterable[str], flat: Sequence[dict[str, Any]]) -> Iterable[Sequence[Any]]:
    """A row for each setting."""
    return [(key, *(shown(one.get(key, "")) for one in flat)) for key in keys]


def analyses(workdir: str) -> Iterable[str]:
    """A section for each analysis whose files are in the workdir."""
    for name, heading, about in ANALYSES:
        body = embedded(workdir, name)
        report = os.path.join(workdir, f"{name}.json")
        if os.path.exists(report):
            body += _figures(report)
        if body:
            yield section(heading, f"<p>{html.escape(about)}</p>{body}")


def _figures(path: str) -> str:
    """The JSON of an analysis, folded; nothing of a damaged file, and a large one stays a file."""
    figures = _object(path)
    if figures is None:
        _warn(f"{path}: is damaged and left out of the page")
        return ""
    text = json.dumps(figures, indent=1, ensure_ascii=False)
    return folded(os.path.basename(path), f"<pre>{html.escape(text)}</pre>") * (len(text) < 200_000)


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)


def sample(one: Found) -> str:
    """The continuation that the run wrote last."""
    return (
        section("Sample", f"<pre class=text>{html.escape(one.sample)}</pre>") if one.sample else ""
    )


def configuration(one: Found) -> str:
    """Settings that are not the defaults; all of them, folded."""
    plain = flatten(ExperimentConfig().to_dict())
    mine = {**plain, **flatten(settings_of(one))}
    own = [
        (key, shown(value))
        for key, value in mine.items()
        if plain.get(key) != value and key != "report.workdirs"
    ]
    every = table(("setting", "value"), [(key, shown(value)) for key, value in mine.items()])
    body = table(("setting", "value"), own) + folded("all settings", every)
    return section("Configuration", body)


def environment(one: Found) -> str:
    """Versions, revision and device; the text and its hash."""
    said = flatten({k: one.config.get(k, {}) for k in ("provenance", "corpus")})
    rows = [(key, shown(value)) for key, value in said.items() if value not in ({}, None)]
    return section("Environment and text", table(("what", "value"), rows)) if rows else ""


def _protocol(row: Mapping[str, Any]) -> str:
    return row.get("protocol", "")


def settings_of(one: Found) -> dict[str, Any]:
    """The run's settings, without what was recorded beside them."""
    return {k: v for k, v in one.config.items() if k not in ("corpus", "provenance")}


# --------------------------------------------------------------------------------------
# HTML.


def shown(value: Any) -> str:
    """A setting's value as text."""
    if isinstance(value, list):
        return ", ".join(map(shown, value))
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def section(heading: str, body: str) -> str:
    """A part of the page."""
    return f"<section><h2>{html.escape(heading)}</h2>{body}</section>"


def folded(summary: str, body: str) -> str:
    """What opens at a click."""
    return f"<details><summary>{html.escape(summary)}</summary>{body}</details>"


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table; every cell is text."""
    line = lambda cells, kind: (
        "<tr>" + "".join(f"<{kind}>{html.escape(str(c))}</{kind}>" for c in cells) + "</tr>"
    )
    body = "".join(line(row, "td") for row in rows)
    head_row = f"<thead>{line(head, 'th')}</thead>"
    return f"<div class=wide><table>{head_row}<tbody>{body}</tbody></table></div>"


def whole(title: str, line: str, parts: Sequence[str]) -> str:
    """The page."""
    return (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head><body><main>"
        f"<h1>{html.escape(title)}</h1><p class=headline>{html.escape(line)}</p>"
        f"{''.join(parts)}</main></body></html>\n"
    )
