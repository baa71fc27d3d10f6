"""The links of a documentation page and the commands in it."""

import re
import shlex


def links(text: str) -> list[str]:
    """The files that Markdown links name; web addresses and anchors of the page are left out."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    targets = re.findall(r"\]\(([^()\s]+)\)", prose)
    paths = [t.partition("#")[0] for t in targets if "://" not in t]
    return [path for path in paths if path]


def commands(text: str) -> list[list[str]]:
    """The flags of each call of ``txl`` in ``sh`` blocks, directly or by a script of launch/."""
    found = calls(text, r"txl_jax\.main$|launch/(?!test\.sh)|^txl$")
    return [[word for word in words if word.startswith("--")] for words in found]


def calls(text: str, program: str) -> list[list[str]]:
    """The arguments of each call, in ``sh`` blocks, of a program whose name matches ``program``."""
    found = []
    for block in re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.partition(" < ")[0], comments=True)
            starts = [n for n, word in enumerate(words) if re.search(program, word)]
            if starts:
                found.append(words[starts[-1] + 1 :])
    return found
