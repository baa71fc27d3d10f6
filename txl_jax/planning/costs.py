"""Collectives, library calls, matrix products and atomics, read from the code of a program."""

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

Branch = TypeVar("Branch")

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
class Collective:
    """All collectives of one kind in a program.

    ``kind`` is one of :data:`KINDS`, ``count`` is the number of these collectives, and ``size`` is
    the number of bytes of their results on each device.
    """

    kind: str
    count: int
    size: int


def collectives(text: str) -> list[Collective]:
    """Returns the collectives of one run of a program, from its text ``compiled.as_text()``.

    A collective in a loop counts once for each iteration, or only once if the number of iterations
    is unknown.
    """
    found = dict.fromkeys(KINDS, (0, 0))
    for line, times in _executed(text):
        if match := _COLLECTIVE.search(line):
            shapes, kind, started = match.groups()
            count, size = found[kind]
            found[kind] = count + times, size + times * _size(shapes, kind, bool(started))
    return [Collective(kind, *sums) for kind, sums in found.items() if sums[0]]


def library_calls(text: str) -> dict[str, int]:
    """Returns the calls of kernels and libraries in one run of a program, from its text.

    A key is the target of custom calls, such as ``__cublas$lt$matmul``, or the kind of a generated
    matrix product, such as ``__triton_gemm``. Calls in a loop count as in :func:`collectives`.
    """
    found: collections.Counter[str] = collections.Counter()
    for line, times in _executed(text):
        if match := _CALL.search(line):
            found[match[1] or match[2]] += times
    return dict(sorted(found.items()))


def matrix_products(text: str) -> tuple[str, ...]:
    """Returns the kinds of matrix products of a lowered program, from its text ``as_text()``.

    A kind is for example ``bfloat16``, ``float32 at default`` or ``float32 at highest``: the dtype
    of the factors, and for float32 the requested precision. ``default`` is float32 on a
    CPU, TF32 on a GPU from Ampere on, and bfloat16 on a TPU.
    """
    found = set()
    for line in text.splitlines():
        if match := _PRODUCT.search(line):
            name = _DTYPES.get(match[1], match[1])
            asked = next((x for x in ("HIGHEST", "HIGH") if x in line), "DEFAULT").lower()
            found.add(f"{name} at {asked}" if name == "float32" else name)
    return tuple(sorted(found))


_PRODUCT = re.compile(r"stablehlo\.dot_general .*: \(tensor<(?:\d+x)*([a-z]\w*)>")
_DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}


def float_atomics(folder: Path) -> int:
    """Returns the number of atomic additions of floats in the PTX that XLA dumped to a folder.

    A compare-and-swap of any type counts too. Without PTX, the result is 0.
    """
    instructions = (
        name for file in folder.glob("*.ptx") for name in _ATOMIC.findall(file.read_text())
    )
    return sum("cas" in x.split(".") or bool(_ADDS_FLOATS.search(x)) for x in instructions)


_ATOMIC = re.compile(r"^\s*(?:@!?%p\d+\s+)?((?:atom|red)\.[\w.]+)", re.MULTILINE)
_ADDS_FLOATS = re.compile(r"\.add\b.*\.b?f\d|\.b?f\d.*\.add\b")


def _executed(text: str) -> Iterator[tuple[str, int]]:
    """Yields the lines of a program with the number of times that one run executes each."""
    computations: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in text.splitlines():
        if match := _HEADER.match(line):
            lines = computations[match[2]] = []
            entry = match[2] if match[1] else entry
        else:
            lines.append(line)

    def visit(name: str, times: int) -> Iterator[tuple[str, int]]:
        for line in computations.get(name, ()):
            yield line, times
            if " while(" in line:
                called = dict(_LOOP.findall(line))
                condition = computations.get(called["condition"], [])
                yield from visit(called["body"], times * trip_count(line, condition))
            elif names := branches(line):
                lines_of = lambda name: sum(count for _, count in visit(name, 1))
                yield from visit(longest(names, lines_of), times)
            elif not _COLLECTIVE.search(line):
                for called_name in (*_CALLED.findall(line), *_WHOLE.findall(line)):
                    yield from visit(called_name, times)

    yield from visit(entry, 1)


_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_COLLECTIVE = re.compile(rf" = (\(.*?\)|\S+) ({'|'.join(KINDS)})(-start)?\(")
_CALL = re.compile(r'custom_call_target="([^"]+)"|"kind":"(__triton[^"]*)"')
_LOOP = re.compile(r"(body|condition)=%?([\w.\-]+)")
_CALLED = re.compile(r"calls=%?([\w.\-]+)")
_WHOLE = re.compile(r" call\(.*to_apply=%?([\w.\-]+)")
_CONSTANT = re.compile(r"%?([\w.\-]+) = s32\[\]\S* constant\((\d+)\)")
_COMPARED = re.compile(r"compare\([^,]*, (?:s32\[\]\S* )?%?([\w.\-]+)\)")


def branches(line: str) -> list[str]:
    """Returns the names of a conditional's branches; an empty list for another instruction."""
    listed = re.search(r" conditional\(.*branch_computations=\{([^}]*)\}", line)
    names = r"[\w.\-]+" if listed else r"(?:true|false)_computation=%?([\w.\-]+)"
    return re.findall(names, listed[1] if listed else line)


def longest(branches: list[Branch], length: Callable[[Branch], int]) -> Branch:
    """Returns the longest branch of a conditional, or the last of several equally long branches.

    For example, model/cross_entropy.py has a branch for each quarter of a block of rows. The
    longest branch computes all rows of the block.
    """
    return max(reversed(branches), key=length)


def trip_count(line: str, condition: list[str]) -> int:
    """Returns the number of iterations of a loop, or 1 if it is unknown.

    The ``line`` of the loop can name the number. Otherwise it is the constant with which the lines
    of ``condition`` compare the loop's counter.
    """
    if known := re.search(r'known_trip_count":\{"n":"(\d+)"', line):
        return int(known[1])
    limits = {m[1]: m[2] for at in condition if (m := _CONSTANT.search(at))}
    for at in condition:
        if "ROOT" in at and "direction=LT" in at and (compared := _COMPARED.search(at)):
            return int(limits.get(compared[1], 1))
    return 1


def _size(shapes: str, kind: str, started: bool) -> int:
    """Returns the bytes of a collective's result, from the shapes in its type.

    If the collective is asynchronous (``started``), its type can also have the shapes of operands
    or counters, which are left out.
    """
    sizes = [_bytes(*shape) for shape in re.findall(r"(\w+?\d*)\[([\d,]*)\]", shapes)]
    if started and kind == "all-gather":
        sizes = sizes[len(sizes) // 2 :]
    elif started and kind == "collective-permute":
        sizes = sizes[1:2]
    return sum(sizes)


def _bytes(dtype: str, dims: str) -> int:
    bits = 8 if dtype == "pred" else int((re.search(r"\d+", dtype) or ["8"])[0])
    return math.prod(int(side) for side in dims.split(",") if side) * bits // 8
