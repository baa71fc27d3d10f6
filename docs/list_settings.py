"""Writes settings.md: every setting with its default, type, rule and meaning.

python docs/list_settings.py
"""

import itertools
import pathlib
import re

from txl_jax.config import format_settings

HEAD = """# Settings

The list of `txl --mode=settings`: each setting with its default, then type, rule and meaning. A
command gives settings as `--config.train.steps=2000`, a config file only those that differ.
`python docs/list_settings.py` writes this page.
"""


def page() -> str:
    """Returns the page, which has a section for each section of an experiment's settings."""
    parts, settings = [HEAD], re.split(r"\n(?=\S)", format_settings(None))
    section = lambda setting: re.findall(r"^(?:(\w+)\.)?", setting)[0] or "experiment"
    for name, found in itertools.groupby(settings, key=section):
        parts.append("\n".join([f"## {name}\n\n```text", *found, "```\n"]))
    return "\n".join(parts)


if __name__ == "__main__":
    (pathlib.Path(__file__).parent / "settings.md").write_text(page(), encoding="utf-8")
