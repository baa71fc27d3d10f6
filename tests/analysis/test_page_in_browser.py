"""In a browser, the report page of a run fits a narrow window and a wide window."""

import dataclasses
import html
import json
import pathlib
import shutil
import subprocess

import pytest
import tiny_runs

from txl_jax.analysis import attention_maps, context
from txl_jax.analysis import report_page as page
from txl_jax.checkpoint.loading import load
from txl_jax.config import ExperimentConfig, override
from txl_jax.data.corpus import corpus_from_config

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), "")
LONG = "a-run-with-a-very-long-name_seed-17_learning-rate-0.00025_memory-640_without-any-space"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not BROWSER, reason=f"none of {', '.join(NAMES)} is installed"),
]

# A browser window cannot be narrower than 500 px, so the test shows the page in a frame.
FRAME = """<!doctype html><body style="margin:0">
<iframe id="frame" style="width:{width}px;height:900px;border:0" srcdoc="{page}"></iframe>
<pre id="found"></pre>
<script>
onload = () => {{
  const page = frame.contentDocument, all = (what) => [...page.querySelectorAll(what)];
  const lines = (cell) => {{
    const range = page.createRange();
    range.selectNodeContents(cell);
    return new Set([...range.getClientRects()].map((one) => one.top)).size;
  }};
  const cells = all(".results tr:not(.under) :is(td, th):not(:first-child)");
  found.textContent = JSON.stringify({{
    width: page.documentElement.scrollWidth,
    numbers: cells.map((cell) => [cell.textContent, lines(cell)]),
    images: all("img").map((one) => one.naturalWidth),
    keys: all(".settings td:first-child").map(lines),
    rows: all(".results tr:not(.under)").map((row) => row.clientHeight),
  }});
}};
</script>
"""


def shown(path, width, folder):
    """Returns what the browser measures on a page in a window that is ``width`` pixels wide."""
    frame = folder / f"frame-{width}.html"
    frame.write_text(FRAME.format(width=width, page=html.escape(path.read_text("utf-8"))), "utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'browser'}"]
    done = subprocess.run(
        [BROWSER, *flags, "--dump-dom", frame.as_uri()], capture_output=True, text=True, timeout=120
    )
    found = done.stdout.partition('<pre id="found">')[2].partition("</pre>")[0]
    assert found, done.stderr
    return json.loads(html.unescape(found))


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Returns the report pages of two runs, of which one is compared with the other.

    The name of this other run's folder is long.
    """
    folder = tmp_path_factory.mktemp("browser")
    run, other = folder / "one", folder / LONG
    tiny_runs.run_in_workdir(folder, run)
    trained = load(str(run))
    corpus = corpus_from_config(trained.config.data, trained.vocab)
    tiny_runs.evaluate(trained, corpus, run)
    shutil.copytree(run, other)
    small = {"context.lengths": (4, 8), "context.stride": 4, "context.max_tokens": 64}
    small |= {"attention.mem_len": 16, "attention.seg_len": 8, "attention.position": 30}
    asked = dataclasses.replace(trained, config=override(trained.config, small))
    for analysis in (context, attention_maps):
        analysis.run(asked, str(run))
    page.run(override(ExperimentConfig(), {"report.workdirs": (str(other),)}), str(run))
    page.run(ExperimentConfig(), str(other))
    return {"compared": run / "report.html", "long name": other / "report.html"}


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize(("kind", "images"), [("compared", 6), ("long name", 1)])
def test_the_page_fits_its_window(pages, kind, images, width, tmp_path: pathlib.Path):
    found = shown(pages[kind], width, tmp_path)
    assert found["width"] <= width
    assert len(found["images"]) == images
    assert min(found["images"]) > 0
    assert max(found["keys"]) == 1
    numbers = {text: lines for text, lines in found["numbers"] if text}
    assert any("bpc" in text for text in numbers)
    assert set(numbers.values()) == {1}, numbers
