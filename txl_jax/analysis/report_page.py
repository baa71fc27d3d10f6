"""Writes an HTML page about a run: settings, curves, evaluations, analyses, a sample, environment.

    python -m txl_jax.main --mode=report --workdir=runs/quickstart
    python -m txl_jax.main --mode=report --workdir=OUT --config.report.workdirs=runs/a,runs/b

``report.html`` needs no network and no other file. The page shows the results in the workdir, and
compares the run with the runs in ``report.workdirs``. The folder OUT can be any folder, not only a
run's workdir.
"""

import base64
import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2

from txl_jax import records
from txl_jax.analysis.results import figure_bytes, new_figure
from txl_jax.checkpoint.errors import WorkdirError
from txl_jax.checkpoint.workdir import read_json, read_record
from txl_jax.checkpoint.workdir_files import CONFIG, register_outputs
from txl_jax.config import ANALYSES, ExperimentConfig, flatten
from txl_jax.config.nested import path_fields
from txl_jax.evaluation.baselines import DESCRIPTIONS
from txl_jax.evaluation.protocols import is_part
from txl_jax.evaluation.split import is_evaluation
from txl_jax.files import atomic_write
from txl_jax.messages import argument, shown_path
from txl_jax.paths import names, path, read_text
from txl_jax.standard_streams import say
from txl_jax.units import UNIT_NAMES, Unit, format_value

TEMPLATE = "report_page.html.jinja"
LONGEST_NAME = 50
"""A figure shows at most this many characters of a run's name: its last ones."""

_SIDE_PANELS = ("learning_rate", "grad_norm", "tokens_per_second")
DEFAULTS = flatten(ExperimentConfig().to_dict())
PATHS = dict(path_fields(ExperimentConfig))


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """The settings and results in the workdir of a run. A field is empty if its file is missing."""

    workdir: str
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]  # oldest first
    sample: str

    @property
    def name(self) -> str:
        """The name of the experiment, followed by the workdir."""
        return f"{self.config.get('name', '')} ({shown_path(self.workdir)})"

    @property
    def settings(self) -> dict[str, Any]:
        """All settings by dotted key. Settings that are not recorded have their default values."""
        own = {k: v for k, v in self.config.items() if k not in ("corpus", "provenance")}
        found = DEFAULTS | flatten(own)
        return found | {key: shown_path(found[key]) for key in PATHS if isinstance(found[key], str)}

    @property
    def changed_settings(self) -> dict[str, Any]:
        """The settings with values other than the defaults."""
        given = {k: v for k, v in self.settings.items() if k != "report.workdirs"}
        return {k: v for k, v in given.items() if DEFAULTS.get(k) != v}

    @property
    def environment(self) -> dict[str, Any]:
        """The versions, the revision, the device, the text and its hash."""
        recorded = flatten({k: self.config.get(k, {}) for k in ("provenance", "corpus")})
        return {k: v for k, v in recorded.items() if v not in ({}, None)}

    @property
    def unit(self) -> Unit:
        """The unit in which losses are shown."""
        if self.evaluations:
            return self.evaluations[-1]["unit"]
        return next((u for u in UNIT_NAMES if any(u in record for record in self.metrics)), "ppl")

    @property
    def main_result(self) -> dict[str, Any] | None:
        """The latest evaluation, preferably of the run's own text, and of a whole split."""
        own = self.config.get("corpus", {}).get("source_hash")
        whole = lambda result: not is_part(result["results"][0].get("protocol", ""))
        rank = lambda result: (result.get("source_hash") == own, whole(result))
        return max(reversed(self.evaluations), key=rank, default=None)


def run(exp: ExperimentConfig, workdir: str) -> str:
    """Writes ``report.html`` in ``workdir``. Raises WorkdirError if there is no run to show."""
    is_run = path(workdir, CONFIG).exists()
    runs = [read_run(folder) for folder in ([workdir] * is_run + [*exp.report.workdirs])]
    if not runs:
        fix = f"give the runs to compare: {argument('config.report.workdirs', 'RUN,RUN')}"
        raise WorkdirError(f"{argument('workdir', workdir)}: this folder has no {CONFIG}; {fix}")
    register_outputs(workdir, "report")
    main = runs[0] if is_run else None
    content = {
        "title": exp.report.title or (main.name if main else f"{len(runs)} runs compared"),
        "headline": headline(main) if main else "",
        "comparison": comparison(runs) if len(runs) > 1 else None,
        "main": main,
        "results": results(main) if main else [],
        "training": curves([main], main.unit) if main and main.metrics else None,
        "analyses": analyses(workdir),
    }
    page = os.path.join(workdir, "report.html")
    atomic_write(page, render(content))
    return f"written: {page}"


def render(content: Mapping[str, Any]) -> bytes:
    """Renders the page as UTF-8. The template escapes every value."""
    loader = jinja2.PackageLoader("txl_jax", "analysis")
    options: dict[str, Any] = {"autoescape": True, "trim_blocks": True, "lstrip_blocks": True}
    environment = jinja2.Environment(loader=loader, **options)
    environment.filters["text"] = _text
    page = environment.get_template(TEMPLATE).render(content)
    return f"{page.strip()}\n".encode(errors="backslashreplace")


def read_run(workdir: str) -> RunRecord:
    """Reads the record of a run. Raises WorkdirError if the folder is not the workdir of a run."""
    of = lambda name: os.path.join(workdir, name)
    if not path(of(CONFIG)).exists():
        raise WorkdirError(f"config key report.workdirs: {workdir}: has no {CONFIG}; name a run")
    metrics = _read_lines(of("metrics.jsonl"), records.is_record)
    evaluations = _read_lines(of("evaluations.jsonl"), is_evaluation)
    sample = of("sample.txt")
    text = read_text(sample, "replace") if path(sample).exists() else ""
    return RunRecord(workdir, read_record(workdir), metrics, evaluations, text)


def _read_lines(file: str, accepts: Callable[[Any], bool]) -> list[Any]:
    """Returns the accepted objects of a file, and warns if lines are skipped."""
    if not path(file).exists():
        return []
    found, skipped = records.read_counted(file, accepts)
    if skipped:
        say(f"warning: {records.skipped_lines(file, skipped)}")
    return found


def headline(one: RunRecord) -> str:
    """Formats the main result of a run as one line."""
    label = one.config.get("corpus", {}).get("label", one.config.get("data", {}).get("name", ""))
    if (result := one.main_result) is None:
        return label
    first, unit = result["results"][0], result["unit"]
    value = f"{_value(first, unit)} {UNIT_NAMES[unit]}"
    return f"{result.get('label', label)}: {value} ({first.get('protocol', '')})"


def results(one: RunRecord) -> list[dict[str, Any]]:
    """Returns the latest result of each model, text and protocol, first the comparable results.

    A result is marked if it cannot be compared with the main result, because it is on another text,
    on another split or on a part of the split.
    """
    main, latest = one.main_result, {}
    for result in one.evaluations:
        for row in result["results"]:
            latest[result.get("source_hash"), row["name"], row.get("protocol", "")] = result, row
    rows = []
    for result, row in latest.values():
        marked = main is not None and _targets(result, row) != _targets(main, main["results"][0])
        rows.append(table_row(result, row, marked=marked))
    return sorted(rows, key=lambda row: row["marked"])


def table_row(result: Mapping[str, Any], row: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Returns a row of an evaluation for a table. A baseline has no step and no parameters.

    ``marked`` says that the value cannot be compared with that of the table's first row.
    """
    unit, protocol, parameters = result["unit"], row.get("protocol", ""), ""
    if row["name"] not in DESCRIPTIONS:
        protocol += f", step {result['step']:,}"
        parameters = result.get("parameters", "")
    shown = {"name": row["name"], "protocol": protocol, "value": f"{_value(row, unit)} {unit}"}
    return shown | {"targets": row.get("targets", ""), "parameters": parameters} | more


def _targets(result: Mapping[str, Any], row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns what comparable results must share: text, unit, split, part and targets."""
    protocol = row.get("protocol", "")
    part = protocol.partition(" split")[0], is_part(protocol), row.get("targets")
    return result.get("source_hash"), result["unit"], *part


def comparison(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """Compares results, settings and curves of runs, and lists differences in text or protocol.

    A result on another text or under another protocol than the first result is marked.
    """
    rows, seen = [], list[tuple[Any, ...]]()
    folders = [shown_path(one.workdir) for one in runs]
    for one, name in zip(runs, folders, strict=True):
        if (result := one.main_result) is None:
            rows.append({"name": name, "protocol": "not evaluated", "marked": False})
            continue
        first = result["results"][0]
        seen.append((result.get("source_hash"), result["unit"], first.get("protocol", "")))
        rows.append(table_row(result, first, name=name, marked=seen[-1] != seen[0]))
    kinds = {"texts or units": {x[:2] for x in seen}, "protocols": {x[2] for x in seen}}
    values = [one.settings for one in runs]
    keys = sorted({key for each in values for key in each})
    settings = [(key, *(each.get(key, "") for each in values)) for key in keys]
    return {
        "runs": folders,
        "differing": [what for what, found in kinds.items() if len(found) > 1],
        "results": rows,
        "curves": curves(runs, runs[0].unit) if len({r.unit for r in runs}) == 1 else None,
        "settings": [row for row in settings if len({str(value) for value in row[1:]}) > 1],
    }


def analyses(workdir: str) -> list[dict[str, Any]]:
    """Returns heading, caption, images and JSON of each analysis whose files are in the workdir."""
    sections, files = [], sorted(names(workdir))
    for mode, row in ANALYSES.items():
        pngs = [file for file in files if file.startswith(mode) and file.endswith(".png")]
        images = [_image(path(workdir, file).read_bytes(), "png", file) for file in pngs]
        file, text = f"{mode}.json", ""
        if file in files:
            try:
                content = read_json(os.path.join(workdir, file))
                text = json.dumps(content, indent=1, ensure_ascii=False)
            except WorkdirError as error:
                say(f"warning: left out of the page: {error}")
        if row.page and (images or text):
            heading, caption = row.page
            found = {"heading": heading, "caption": caption, "images": images}
            sections.append({**found, "file": file, "json": text})
    return sections


def curves(runs: Sequence[RunRecord], unit: Unit) -> dict[str, str]:
    """Plots loss, learning rate, gradient norm and tokens per second. Each run has one colour."""
    figure = new_figure(10, 7)
    grid = figure.add_gridspec(2, len(_SIDE_PANELS), height_ratios=(2, 1))
    loss = figure.add_subplot(grid[0, :], ylabel=f"{UNIT_NAMES[unit]} ({unit})")
    sides = [figure.add_subplot(grid[1, n], ylabel=key) for n, key in enumerate(_SIDE_PANELS)]
    for n, one in enumerate(runs):
        colour, name = f"C{n % 10}", shown_path(one.workdir)
        if len(name) > LONGEST_NAME or name.startswith("_"):  # a legend leaves out names with "_"
            name = f"…{name[-LONGEST_NAME:]}"
        train = [{**r, **r.get("timing", {})} for r in one.metrics if r["kind"] == "train"]
        valid = [r for r in one.metrics if r["kind"] == "valid"]
        _line(loss, train, unit, "-", color=colour, alpha=0.6, label=name)
        _line(loss, valid, unit, "o-", color=colour, markersize=4)
        for key, axes in zip(_SIDE_PANELS, sides, strict=True):
            _line(axes, train, key, "-", color=colour)
    if unit == "ppl":
        loss.set_yscale("log")
    loss.set_title("loss in training (line) and validation (with points)")
    loss.legend(fontsize="small")
    for axes in (loss, *sides):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    return _image(figure_bytes(figure, "svg", "curves"), "svg+xml", "training curves")


def _line(axes: Any, found: list[dict[str, Any]], key: str, style: str, **more: Any) -> None:
    points = [(r["step"], r[key]) for r in found if r.get(key) is not None]
    axes.plot([step for step, _ in points], [y for _, y in points], style, linewidth=1, **more)


def _image(data: bytes, kind: str, name: str) -> dict[str, str]:
    """Returns ``alt`` and ``src`` of an image that is embedded in the page."""
    return {"alt": name, "src": f"data:image/{kind};base64,{base64.b64encode(data).decode()}"}


def _value(row: Mapping[str, Any], unit: Unit) -> str:
    """Formats the result of a row. A result that is not finite is stored as null."""
    return "not finite" if row[unit] is None else format_value(row[unit], unit)


def _text(value: Any) -> str:
    """Formats a value of a table as text."""
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return f"{value:,}" if type(value) is int else str(value)
