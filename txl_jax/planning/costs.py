"""Memory, operations and collectives of a compiled program, read from the program itself."""

import dataclasses
import math
import re
from typing import Any

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)
"""The collective operations of XLA."""


@dataclasses.dataclass(frozen=True)
class MemoryUse:
    """Bytes on each device while a program runs."""

    arguments: int
    output: int
    alias: int  # the part of the output that reuses the memory of donated arguments
    temporaries: int  # the peak of what is held in between
    program: int  # the code

    @classmethod
    def of(cls, compiled: Any) -> "MemoryUse":
        """From ``memory_analysis`` of a compiled function."""
        m = compiled.memory_analysis()
        kinds = ("argument", "output", "alias", "temp", "generated_code")
        return cls(*(getattr(m, f"{kind}_size_in_bytes") for kind in kinds))

    @property
    def total(self) -> int:
        """All of it together."""
        return self.arguments + self.output - self.alias + self.temporaries + self.program


@dataclasses.dataclass(frozen=True)
class Collective:
    """Number of all collectives of one of :data:`KINDS`, and bytes of their results on a device."""

    kind: str
    count: int
    size: int


def collectives(text: str) -> list[Collective]:
    """The collectives in one run of a compiled program, from its text (``compiled.as_text()``).

    Those in a loop count as often as it runs, or once where its length is unknown.
    """
    computations: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in text.splitlines():
        if match := _HEADER.match(line):
            lines = computations[match[2]] = []
            entry = match[2] if match[1] else entry
        else:
            lines.append(line)
    found = dict.fromkeys(KINDS, (0, 0))

    def visit(name: str, times: int) -> None:
        for line in computations.get(name, ()):
            if match := _COLLECTIVE.search(line):
                shapes, kind, started = match.groups()
                count, size = found[kind]
                found[kind] = count + times, size + times * _size(shapes, kind, bool(started))
            elif " while(" in line:
                called = dict(_LOOP.findall(line))
                condition = computations.get(called["condition"], [])
                visit(called["body"], times * _trip_count(line, condition))
            else:
                for called_name in _CALLED.findall(line):
                    visit(called_name, times)

    visit(entry, 1)
    return [Collective(kind, *sums) for kind, sums in found.items() if sums[0]]


_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_COLLECTIVE = re.compile(rf" = (\(.*?\)|\S+) ({'|'.join(KINDS)})(-start)?\(")
_LOOP = re.compile(r"(body|condition)=%?([\w.\-]+)")
_CALLED = re.compile(r"(?:calls|true_computation|false_computation)=%?([\w.\-]+)")
_CONSTANT = re.compile(r"%?([\w.\-]+) = s32\[\]\S* constant\((\d+)\)")
_COMPARED = re.compile(r"compare\([^,]*, (?:s32\[\]\S* )?%?([\w.\-]+)\)")


def _trip_count(line: str, condition: list[str]) -> int:
    """How often a loop runs: as its line says, or the constant its counter is compared with."""
    if known := re.search(r'known_trip_count":\{"n":"(\d+)"', line):
        return int(known[1])
    limits = {m[1]: m[2] for at in condition if (m := _CONSTANT.search(at))}
    for at in condition:
        if "ROOT" in at and "direction=LT" in at and (compared := _COMPARED.search(at)):
            return int(limits.get(compared[1], 1))
    return 1


def _size(shapes: str, kind: str, started: bool) -> int:
    """Bytes of a result; the type of an asynchronous one also names operands or counters."""
    sizes = [_bytes(*shape) for shape in re.findall(r"(\w+?\d*)\[([\d,]*)\]", shapes)]
    if started and kind == "all-gather":
        sizes = sizes[len(sizes) // 2 :]
    elif started and kind == "collective-permute":
        sizes = sizes[1:2]
    return sum(sizes)


def _bytes(dtype: str, dims: str) -> int:
    bits = 8 if dtype == "pred" else int((re.search(r"\d+", dtype) or ["8"])[0])
    return math.prod(int(side) for side in dims.split(",") if side) * bits // 8
