"""What a compiled program holds, computes and exchanges, read from the program itself."""

import dataclasses
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
"""What devices do together."""


@dataclasses.dataclass(frozen=True)
class Held:
    """Bytes on each device while a program runs.

    Attributes:
      arguments, output: what it is given and gives.
      alias: of the output, what takes the place of arguments (donated).
      temporaries: the most that is held in between at once.
      program: its own code.
    """

    arguments: int
    output: int
    alias: int
    temporaries: int
    program: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.arguments + self.output - self.alias + self.temporaries + self.program


def held_by(compiled: Any) -> Held:
    """From ``memory_analysis`` of a compiled function."""
    m = compiled.memory_analysis()
    return Held(
        m.argument_size_in_bytes,
        m.output_size_in_bytes,
        m.alias_size_in_bytes,
        m.temp_size_in_bytes,
        m.generated_code_size_in_bytes,
    )


def compiler_flops(compiled: Any) -> float | None:
    """Operations of one device by the compiler's count: a loop's body counts once."""
    found = compiled.cost_analysis()
    if isinstance(found, list):
        found = found[0] if found else {}
    return (found or {}).get("flops")


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Collectives of one kind in a program.

    Attributes:
      kind: of :data:`KINDS`.
      count: how often one run of the program does it; in a loop of unknown length, once.
      size: bytes of their results on one device, all together.
    """

    kind: str
    count: int
    size: int


def exchanges(text: str) -> list[Exchange]:
    """The collectives of a compiled program, from its text (``compiled.as_text()``).

    One in a loop counts as often as the loop runs (a scan over layers, micro-batches, updates).
    """
    computations, entry = _computations(text)
    found = dict.fromkeys(KINDS, (0, 0))

    def visit(name: str, times: int) -> None:
        for line in computations.get(name, ()):
            if match := _COLLECTIVE.search(line):
                shapes, kind, started = match.groups()
                count, size = found[kind]
                found[kind] = count + times, size + times * _size(shapes, kind, bool(started))
            elif " while(" in line:
                called = dict(_LOOP.findall(line))
                visit(called["body"], times * _trips(line, computations.get(called["condition"])))
            else:
                for called_name in _CALLED.findall(line):
                    visit(called_name, times)

    visit(entry, 1)
    return [Exchange(kind, *what) for kind, what in found.items() if what[0]]


_COLLECTIVE = re.compile(rf" = (\(.*?\)|\S+) ({'|'.join(KINDS)})(-start)?\(")
_LOOP = re.compile(r"(body|condition)=%?([\w.\-]+)")
_CALLED = re.compile(r"(?:calls|true_computation|false_computation)=%?([\w.\-]+)")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_BITS = {"pred": 8, "s4": 4, "u4": 4}


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Lines of every computation by its name, and the name of the first that runs."""
    found: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in text.splitlines():
        if match := _HEADER.match(line):
            lines = found[match[2]] = []
            entry = match[2] if match[1] else entry
        else:
            lines.append(line)
    return found, entry


def _trips(line: str, condition: list[str] | None) -> int:
    """How often a loop runs: as its line says, or the constant its counter is compared with."""
    if known := re.search(r'known_trip_count":\{"n":"(\d+)"', line):
        return int(known[1])
    condition = condition or []
    limits = {m[1]: m[2] for at in condition if (m := _CONSTANT.search(at))}
    for at in condition:
        if "ROOT" in at and "direction=LT" in at and (compared := _COMPARED.search(at)):
            return int(limits.get(compared[1], 1))
    return 1


_CONSTANT = re.compile(r"%?([\w.\-]+) = s32\[\]\S* constant\((\d+)\)")
_COMPARED = re.compile(r"compare\([^,]*, (?:s32\[\]\S* )?%?([\w.\-]+)\)")


def _size(shapes: str, kind: str, started: bool) -> int:
    """Bytes of a result; one that is started also names its operands, or counters, in its type."""
    sizes = [_bytes(*shape) for shape in re.findall(r"(\w+?\d*)\[([\d,]*)\]", shapes)]
    if started and kind == "all-gather":
        sizes = sizes[len(sizes) // 2 :]
    elif started and kind == "collective-permute":
        sizes = sizes[1:2]
    return sum(sizes)


def _bytes(kind: str, dims: str) -> int:
    bits = _BITS.get(kind) or int((re.search(r"\d+", kind) or ["8"])[0])
    n = 1
    for side in filter(None, dims.split(",")):
        n *= int(side)
    return n * bits // 8
