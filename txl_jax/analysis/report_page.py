"""Writes an HTML page about a run: settings, curves, evaluations, analyses, a sample, environment.

    python -m txl_jax.main --mode=report --workdir=runs/quickstart
    python -m txl_jax.main --mode=report --workdir=OUT --config.report.workdirs=runs/a,runs/b

``report.html`` needs no network and no other file. The page shows the results in the workdir, and
compares the run with those in ``report.workdirs``. The folder OUT need not be a run's workdir.
"""

import base64
import dataclasses
import json
import os
import statistics
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
from txl_jax.paths import absolute, names, path, read_text
from txl_jax.standard_streams import say
from txl_jax.units import UNIT_NAMES, Unit, format_value

TEMPLATE = "report_page.html.jinja"
LARGEST_JSON, LARGEST_SVG = 200_000, 300_000
"""Sizes in characters. Longer JSON texts are not shown, and larger SVGs are replaced by PNGs."""
LONGEST_NAME = 50
"""The largest number of characters of a run's name in a figure."""

_SIDE_PANELS = {
    "learning_rate": "learning rate",
    "grad_norm": "gradient norm",
    "tokens_per_second": "tokens per second",
}

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
    folder: str = ""  # the last parts of the workdir's path, as many as tell it from other runs

    @property
    def name(self) -> str:
        """The name of the experiment, followed by the name of the folder if this is different."""
        name = self.config.get("name", "")
        return name if name in (self.folder, "") else f"{name} ({self.folder})"

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
        name = argument("config.report.workdirs", "RUN,RUN")
        fix = f"give the runs to compare: {name}"
        if path(workdir, "sweep.csv").exists():
            fix = f"sweep.csv in this folder lists the runs of a sweep; {fix}"
        raise WorkdirError(f"{argument('workdir', workdir)}: this folder has no {CONFIG}; {fix}")
    register_outputs(workdir, "report")
    runs = with_distinct_folders(runs)
    main, runs = runs[0] if is_run else None, with_shared_protocol(runs)
    several = " and ".join(one.name for one in runs) if len(runs) < 4 else "runs compared"
    names = main.name if main else several
    content = {
        "title": exp.report.title or names,
        "headline": headline(main) if main else shared_protocol(runs),
        "comparison": comparison(runs) if len(runs) > 1 else None,
        "main": main,
        "results": results(main) if main else [],
        "training": curves([(names, main.metrics)], main.unit) if main and main.metrics else None,
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
    folder = os.path.basename(absolute(workdir))
    return RunRecord(workdir, read_record(workdir), metrics, evaluations, text, folder)


def with_distinct_folders(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Returns the runs with as many parts of their paths in ``folder`` as make these distinct."""
    parts = [absolute(one.workdir).split("/") for one in runs]
    for n in range(1, max(map(len, parts)) + 1):
        folders = ["/".join(each[-n:]) for each in parts]
        if len(set(folders)) == len({one.workdir for one in runs}):
            break
    return [dataclasses.replace(r, folder=f) for r, f in zip(runs, folders, strict=True)]


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


def shared_protocol(runs: Sequence[RunRecord]) -> str:
    """Returns a line about several runs: the text and the protocol that their results share."""
    found = [result for one in runs if (result := one.main_result)]
    about = {(r.get("label", ""), r["results"][0].get("protocol", "")) for r in found}
    if len(about) != 1:
        return f"{len(runs)} runs"
    ((label, protocol),) = about
    return f"{len(runs)} runs, {label}: {protocol}"


def with_shared_protocol(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Returns the runs with only the evaluations of a text and protocol that all of them share.

    If they share several, those of the first run's main result are kept; if none, all evaluations.
    """
    evaluated = [one for one in runs if one.evaluations]
    shared = [{_compared(result) for result in one.evaluations} for one in evaluated]
    common = set.intersection(*shared) if shared else set()
    kept = lambda one, keys: dataclasses.replace(
        one, evaluations=[x for x in one.evaluations if _compared(x) in keys]
    )
    if not common or (first := kept(evaluated[0], common).main_result) is None:
        return list(runs)
    return [kept(one, {_compared(first)}) for one in runs]


def seed_groups(runs: Sequence[RunRecord]) -> list[list[RunRecord]]:
    """Returns the groups of two or more evaluated runs that differ only in their seed."""
    groups: dict[str, list[RunRecord]] = {}
    for one in runs:
        if one.main_result:
            own = {key: value for key, value in one.settings.items() if key != "seed"}
            groups.setdefault(json.dumps(own, sort_keys=True), []).append(one)
    return [group for group in groups.values() if len({r.settings["seed"] for r in group}) > 1]


def seeds_row(group: Sequence[RunRecord], first: tuple[Any, ...]) -> dict[str, Any] | None:
    """Returns a row with mean and standard deviation over seeds; or ``None`` if not comparable.

    ``first`` is the :func:`_compared` of the table's first result.
    """
    found = [result for one in group if (result := one.main_result)]
    values = [result["results"][0][result["unit"]] for result in found]
    if len(set(map(_compared, found))) > 1 or None in values:
        return None
    unit, common = found[0]["unit"], os.path.commonpath([one.folder for one in group])
    mean, spread = (format_value(f(values), unit) for f in (statistics.fmean, statistics.stdev))
    row = table_row(found[0], found[0]["results"][0], marked=_compared(found[0]) != first)
    about = f"mean ± standard deviation of {len(group)} seeds"
    name = f"{common or group[0].config.get('name', '')}, {about}"
    return row | {"name": name, "value": f"{mean} ± {spread} {unit}"}


def _compared(result: Mapping[str, Any]) -> tuple[Any, ...]:
    return (result.get("source_hash"), result["unit"], result["results"][0].get("protocol", ""))


def results(one: RunRecord) -> list[dict[str, Any]]:
    """Returns the latest result of each text and protocol, first those comparable with the main.

    Results on another text, another split or a part of it are marked.
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
    last_seeds = {group[-1].workdir: group for group in seed_groups(runs)}
    for one in runs:
        if (result := one.main_result) is None:
            rows.append({"name": one.folder, "protocol": "not evaluated", "marked": False})
            continue
        seen.append(_compared(result))
        marked = seen[-1] != seen[0]
        rows.append(table_row(result, result["results"][0], name=one.folder, marked=marked))
        if group := last_seeds.get(one.workdir):
            rows += filter(None, [seeds_row(group, seen[0])])
    kinds = {"texts or units": {x[:2] for x in seen}, "protocols": {x[2] for x in seen}}
    values = [one.settings for one in runs]
    keys = sorted({key for each in values for key in each})
    settings = [(key, *(each.get(key, "") for each in values)) for key in keys]
    metrics = [(one.folder, one.metrics) for one in runs]
    return {
        "runs": [one.folder for one in runs],
        "differing": [what for what, found in kinds.items() if len(found) > 1],
        "results": rows,
        "curves": curves(metrics, runs[0].unit) if len({r.unit for r in runs}) == 1 else None,
        "settings": [row for row in settings if len({str(value) for value in row[1:]}) > 1],
    }


def analyses(workdir: str) -> list[dict[str, Any]]:
    """Returns heading, caption, images and JSON of each analysis whose files are in the workdir."""
    sections = []
    for name, row in ANALYSES.items():
        if row.page is None:
            continue
        file, text = os.path.join(workdir, f"{name}.json"), ""
        if path(file).exists():
            try:
                text = json.dumps(read_json(file), indent=1, ensure_ascii=False)
            except WorkdirError:
                say(f"warning: {file}: the file is damaged, so the page leaves it out")
        text = text if len(text) < LARGEST_JSON else ""
        if (images := saved_figures(workdir, name)) or text:
            section = {"heading": row.page[0], "caption": row.page[1], "images": images}
            sections.append({**section, "file": os.path.basename(file), "json": text})
    return sections


def saved_figures(workdir: str, prefix: str) -> list[dict[str, str]]:
    """Reads the figures whose names start with ``prefix``. Small figures are SVGs, others PNGs."""
    images = []
    found = sorted(names(workdir))
    for png in (name for name in found if name.startswith(prefix) and name.endswith(".png")):
        svg = png.removesuffix(".png") + ".svg"
        small = svg in found and len(drawn := path(workdir, svg).read_bytes()) <= LARGEST_SVG
        name, kind = (svg, "svg+xml") if small else (png, "png")
        images.append(_image(drawn if small else path(workdir, png).read_bytes(), kind, name))
    return images


def curves(runs: Sequence[tuple[str, list[dict[str, Any]]]], unit: Unit) -> dict[str, str]:
    """Plots loss, learning rate, gradient norm and tokens per second over steps, where recorded.

    ``runs`` has the names and the records of the runs. Each run has its own colour.
    """
    figure = new_figure(10, 7)
    recorded = {key for _, found in runs for r in found for key in {**r, **r.get("timing", {})}}
    keys = [key for key in _SIDE_PANELS if key in recorded]
    grid = figure.add_gridspec(
        2 if keys else 1, max(1, len(keys)), height_ratios=(2, 1)[: 1 + bool(keys)]
    )
    sides = [figure.add_subplot(grid[1, n], ylabel=_SIDE_PANELS[key]) for n, key in enumerate(keys)]
    loss = figure.add_subplot(grid[0, :], ylabel=f"{UNIT_NAMES[unit]} ({unit})")
    for n, (name, found) in enumerate(runs):
        colour, label = f"C{n % 10}", "training" if len(runs) == 1 else _short(name)
        train = [{**r, **r.get("timing", {})} for r in found if r["kind"] == "train"]
        valid = [r for r in found if r["kind"] == "valid"]
        _line(loss, train, unit, "-", color=colour, alpha=0.6, label=label)
        if any(r.get(unit) is not None for r in valid):
            own, label = (colour, "") if len(runs) > 1 else ("C1", "validation")
            _line(loss, valid, unit, "o-", color=own, markersize=4, label=label)
        for key, axes in zip(keys, sides, strict=True):
            _line(axes, train, key, "-", color=colour)
    if unit == "ppl":
        loss.set_yscale("log")
    what = f"{_short(runs[0][0])}: loss in training and validation"
    if len(runs) > 1:
        what = f"{len(runs)} runs: loss in training (line) and validation (with points)"
    loss.set_title(what, parse_math=False)
    loss.legend(fontsize="small")
    for axes in (loss, *sides):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    return _image(figure_bytes(figure, "svg", "curves"), "svg+xml", "training curves")


def _line(axes: Any, found: list[dict[str, Any]], key: str, style: str, **more: Any) -> None:
    points = [(r["step"], r[key]) for r in found if r.get(key) is not None]
    axes.plot([step for step, _ in points], [y for _, y in points], style, linewidth=1, **more)


def _short(name: str) -> str:
    """Shortens the name of a run for a figure. It keeps the end, in which names often differ."""
    return name if len(name) <= LONGEST_NAME else f"{name[:24]}…{name[25 - LONGEST_NAME :]}"


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
