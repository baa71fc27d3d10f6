"""Configuration of Sphinx for the documentation site.

    pip install -e '.[test]'
    python -m sphinx -W -b html docs FOLDER

In that command, which a test runs, a warning is an error. Pages are Markdown (MyST). The reference
is made from docstrings, which are reStructuredText with sections in Google's style.
"""

import json
import pathlib
import pkgutil
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # documents this checkout, whatever is installed

project = "txl_jax"
author = "the authors of txl_jax"
project_copyright = "Apache-2.0"
html_title = "txl_jax: Transformer-XL in JAX"
html_theme = "furo"  # folds its menu on a telephone
html_css_files = ["site.css"]
html_static_path = ["site.css"]
html_show_sourcelink = False

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
myst_heading_anchors = 3
source_suffix = {".md": "markdown", ".ipynb": "markdown"}  # docs/notebooks links to notebooks/
exclude_patterns = ["notebooks/own_loop.ipynb"]  # it has the text of own_loop.md
# A reference to a name that txl_jax does not have is an error. Names of other libraries are not
# looked up, since that would need a network.
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r"(?!txl_jax\.).*")]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_inherit_docstrings = False
python_maximum_signature_line_length = 88
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Attributes", "params_style")]

SECTIONS = ("Args:", "Attributes:", "Returns:", "Raises:", "Yields:", "Example:", "Examples:")


def pictures_as_they_are(app, what, name, obj, options, lines: list[str]) -> None:
    """Changes a docstring's lines in place, so that indented drawings are literal blocks."""
    lines[:] = literal_blocks(lines)


def literal_blocks(lines: list[str]) -> list[str]:
    """Returns the lines with ``::`` before indented paragraphs outside of sections and lists."""
    done: list[str] = []
    inside = False  # inside of a section, list or literal block, to which indented text belongs
    for at, line in enumerate(lines):
        if line and not line.startswith(" "):
            inside = line in SECTIONS or line.startswith(("- ", "* ", ".. ")) or line.endswith("::")
        elif line.startswith("    ") and not inside and at and not lines[at - 1].strip():
            done += ["::", ""]
            inside = True
        done.append(line)
    return done


def plain_where_not_shown(app, env, node, contnode):
    """Returns a reference's text without a link, if txl_jax has the name and no page shows it."""
    target = node.get("reftarget", "")
    if node.get("refdomain") != "py" or not target.startswith("txl_jax."):
        return None
    try:
        pkgutil.resolve_name(target)
    except (ImportError, AttributeError):
        return None
    return contnode


def notebooks_as_pages(app, name: str, source: list[str]) -> None:
    """Turns a notebook into Markdown: text, code (without the cell that installs) and outputs."""
    if str(app.env.doc2path(name)).endswith(".ipynb"):
        cells = json.loads(source[0])["cells"]
        source[0] = "\n\n".join(part for cell in cells for part in parts_of(cell))


def parts_of(cell: dict) -> list[str]:
    """Returns the Markdown of a cell; its figures are embedded in the page."""
    text = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [text]
    if text.startswith("# Installs txl_jax"):
        return []
    parts = [f"````python\n{text}\n````"]
    for output in cell["outputs"]:
        if image := output.get("data", {}).get("image/png"):
            parts.append(f"![what the cell draws](data:image/png;base64,{image.strip()})")
        else:
            parts.append(f"````text\n{''.join(output['text'])}\n````")
    return parts


def setup(app) -> None:
    """Registers the functions above; drawings are handled before napoleon reads docstrings."""
    app.connect("source-read", notebooks_as_pages)
    app.connect("autodoc-process-docstring", pictures_as_they_are, priority=400)
    app.connect("missing-reference", plain_where_not_shown)
