"""Parameter counts of the recipes, as the tables of RESULTS.md state them."""

import re

from places import ROOT


def parameter_counts() -> dict[str, int]:
    """Parameters of each experiment by its name, such as ``wt103_base`` or ``table7-ours``."""
    text = (ROOT / "RESULTS.md").read_text().split("## The paper's tables")[1].split("\n## ")[0]
    counts: dict[str, int] = {}
    for name, row, cells in re.findall(r"^\| `(\w+)(?:\.py:(\w+))?`(.*)$", text, re.MULTILINE):
        (count,) = re.findall(r"\| (\d+(?:,\d{3}){2}) \|", cells)
        key, number = f"{name}-{row}" if row else name, int(count.replace(",", ""))
        assert counts.setdefault(key, number) == number, f"two counts of {key}"
    return counts
