"""The documentation site.

    pip install -e '.[test]'
    python -m sphinx -W -b html docs FOLDER

A warning is an error in that command, which a test runs. Pages are Markdown (MyST); the reference
is made from the docstrings, which are reStructuredText with sections as Google writes them.
"""

import json
import pathlib
import pkgutil
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the text of this checkout, whatever is installed

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
exclude_patterns = ["notebooks/own_loop.ipynb"]  # has the text of own_loop.md
# A reference to a name of txl_jax that is not there is an error. Names of other libraries are not
# looked up, which would need a network.
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
    """Indented drawings and commands of a docstring, in place, as literal blocks."""
    lines[:] = literal_blocks(lines)


def literal_blocks(lines: list[str]) -> list[str]:
    """The lines, with ``::`` before each indented paragraph outside of a section or a list."""
    done: list[str] = []
    inside = False  # of a section, a list or a literal block: indented text belongs to it
    for at, line in enumerate(lines):
        if line and not line.startswith(" "):
            inside = line in SECTIONS or line.startswith(("- ", "* ", ".. ")) or line.endswith("::")
        elif line.startswith("    ") and not inside and at and not lines[at - 1].strip():
            done += ["::", ""]
            inside = True
        done.append(line)
    return done


def plain_where_not_shown(app, env, node, contnode):
    """The text of a reference to something that txl_jax has and these pages leave out, unlinked."""
    target = node.get("reftarget", "")
    if node.get("refdomain") != "py" or not target.startswith("txl_jax."):
        return None
    try:
        pkgutil.resolve_name(target)
    except (ImportError, AttributeError):
        return None
    return contnode


def notebooks_as_pages(app, name: str, source: list[str]) -> None:
    """A notebook as Markdown: its text, its code but for the cell that installs, its outputs."""
    if str(app.env.doc2path(name)).endswith(".ipynb"):
        cells = json.loads(source[0])["cells"]
        source[0] = "\n\n".join(part for cell in cells for part in parts_of(cell))


def parts_of(cell: dict) -> list[str]:
    """The Markdown of a cell; figures stay in the page, as they are in the notebook."""
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
    """Pictures before napoleon reads the docstrings; references when no page has the name."""
    app.connect("source-read", notebooks_as_pages)
    app.connect("autodoc-process-docstring", pictures_as_they_are, priority=400)
    app.connect("missing-reference", plain_where_not_shown)
