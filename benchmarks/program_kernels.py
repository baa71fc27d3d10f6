"""Kernels of a compiled GPU program, read from its text: bytes moved, matrix products, sources.

A kernel reads its operands and writes its results once; of an operand that is only sliced, the
slices, and of a result that is updated in place, the part that is written. A kernel in a loop
counts once for each iteration. Caches are not modelled: what is read twice in a row counts twice.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence

from txl_jax.planning.costs import KINDS, trip_count

_FREE = frozenset(
    (
        *("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all"),
        *("partition-id", "replica-id", "optimization-barrier"),
    )
)
_VIEWS = frozenset(("bitcast", "reshape", "copy", "convert", "transpose"))
_SLICES = frozenset(("dynamic-slice", "slice", "gather"))


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel that a program runs ``times`` times; ``read``, ``written`` and ``flops`` are of one.

    ``kind`` is ``elementwise``, ``product``, ``library`` (another custom call), or the collective.
    ``source`` is the place in the model, from the name of the operation. ``results`` are the shapes
    of the results, and ``config`` is the text that configures a library call.
    """

    name: str
    kind: str
    source: str
    times: int
    read: int
    written: int
    flops: int = 0
    results: tuple[tuple[int, ...], ...] = ()
    config: str = ""

    @property
    def moved(self) -> int:
        """Bytes in all runs."""
        return self.times * (self.read + self.written)


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    opcode: str
    operands: tuple[str, ...]
    rest: str
    root: bool

    @property
    def size(self) -> int:
        """Bytes of the results, without the workspace of a library."""
        of_library = self.opcode == "custom-call" and len(self.shapes) > 1
        return sum(_size(x) for x in self.shapes if not (of_library and x[0] == "s8"))

    def called(self) -> str:
        """The computation of a fusion or a call."""
        found = re.search(r"(?:calls|to_apply)=%?([\w.\-]+)", self.rest)
        return found[1] if found else ""


_Computation = dict[str, _Instruction]


def kernels(text: str) -> list[Kernel]:
    """Returns the kernels of a program, from its text ``compiled.as_text()``, in their order."""
    computations, entry = _computations(text)
    return list(_run(computations, entry, 1))


def iterations(text: str) -> list[list[Kernel]]:
    """Returns the kernels of one iteration of each loop that is not inside of another one."""
    computations, entry = _computations(text)
    loops = (x for x in computations[entry].values() if x.opcode == "while")
    bodies = (re.findall(r"body=%?([\w.\-]+)", x.rest)[0] for x in loops)
    return [list(_run(computations, body, 1)) for body in bodies]


def _run(computations: dict[str, _Computation], name: str, times: int) -> Iterator[Kernel]:
    computation = computations[name]
    for x in computation.values():
        if x.opcode == "while":
            called = dict(re.findall(r"(body|condition)=%?([\w.\-]+)", x.rest))
            condition = [_line(y) for y in computations[called["condition"]].values()]
            yield from _run(computations, called["body"], times * trip_count(x.rest, condition))
        elif x.opcode in ("call", "async-start") and x.called() in computations:
            yield from _run(computations, x.called(), times)
        elif x.opcode == "conditional":
            for branch in re.findall(
                r"(?:true_computation|false_computation)=%?([\w.\-]+)", x.rest
            ):
                yield from _run(computations, branch, times)
        elif x.opcode not in _FREE and not x.opcode.endswith("-done"):
            yield _kernel(computations, computation, x, times)


def _kernel(
    computations: dict[str, _Computation], here: _Computation, x: _Instruction, times: int
) -> Kernel:
    operands = [here[name] for name in x.operands if name in here]
    kind, flops = "elementwise", 0
    read, written = sum(y.size for y in operands), x.size
    if x.opcode.removesuffix("-start") in KINDS:
        kind, written = x.opcode.removesuffix("-start"), 0
    elif x.opcode == "fusion":
        inner = computations[x.called()]
        read, written = _reads(inner, operands), _writes(inner)
        flops = sum(_flops(y, inner) for y in inner.values())
        library = any(y.opcode == "custom-call" for y in inner.values())
        kind = "product" if flops else "library" if library else "elementwise"
    elif x.opcode in ("custom-call", "dot"):
        flops = _flops(x, here)
        kind = "product" if flops else "library"
    elif x.opcode == "copy-start":
        written = read
    config = re.search(r'backend_config="((?:[^"\\]|\\.)*)"', x.rest)
    shapes = tuple(sides for _, sides in x.shapes)
    about = x.name, kind, _source(x.rest), times
    return Kernel(*about, read, written, flops, shapes, config[1] if config else "")


def _reads(inner: _Computation, operands: Sequence[_Instruction]) -> int:
    """Bytes that a fused computation reads of the operands."""
    total = 0
    for parameter in (y for y in inner.values() if y.opcode == "parameter"):
        (number,) = re.findall(r"^(\d+)\)", parameter.rest)
        whole = operands[int(number)].size if int(number) < len(operands) else parameter.size
        total += min(whole, _read_of(inner, parameter.name, whole))
    return total


def _read_of(inner: _Computation, name: str, whole: int) -> int:
    total = 0
    for user in (y for y in inner.values() if name in y.operands):
        if user.opcode in _SLICES and user.operands[0] == name:
            total += user.size
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == name:
            continue  # in place
        elif user.opcode in _VIEWS and not user.root:
            total += _read_of(inner, user.name, whole)
        else:
            return whole
    return total


def _writes(inner: _Computation) -> int:
    """Bytes that a fused computation writes; of an array that is updated in place, the update."""
    (root,) = (y for y in inner.values() if y.root)
    results = [inner[name] for name in root.operands] if root.opcode == "tuple" else [root]
    total = 0
    for result in results:
        while result.opcode in _VIEWS and result.operands[0] in inner:
            behind = inner[result.operands[0]]
            if behind.opcode not in (*_VIEWS, "dynamic-update-slice"):
                break
            result = behind
        updated = result.opcode == "dynamic-update-slice"
        total += inner[result.operands[1]].size if updated else result.size
    return total


def _flops(x: _Instruction, here: _Computation) -> int:
    """Operations of a matrix product, 2 m n k of each; 0 for any other instruction."""
    if x.opcode == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", x.rest)
    elif x.opcode == "custom-call" and re.search(r'custom_call_target="__cublas', x.rest):
        contracted = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', x.rest)
    else:
        return 0
    if not contracted or x.operands[0] not in here:
        return 0
    sides = here[x.operands[0]].shapes[0][1]
    inner = math.prod(sides[int(n)] for n in re.findall(r"\d+", contracted[1]))
    return 2 * inner * math.prod(x.shapes[0][1])


def _source(rest: str) -> str:
    """The place in the model, such as ``attention, gradient``."""
    found = re.search(r'op_name="([^"]*)"', rest)
    name = found[1] if found else ""
    parts = [part for part in re.split(r"[/()]", name) if part]
    known = ("norm_attention", "norm_feed_forward", "attention", "feed_forward", "vocabulary")
    where = next((k for part in parts for k in known if part.startswith(k)), "")
    if not where:
        inside = "TransformerXL" in name or "layers" in name
        where = "rest of the model" if inside else "optimizer and rest"
    return f"{where}, gradient" if "transpose" in parts else where


def _computations(text: str) -> tuple[dict[str, _Computation], str]:
    found: dict[str, _Computation] = {}
    entry, here = "", {}
    for line in text.splitlines():
        if header := re.match(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            here = found[header[2]] = {}
            entry = header[2] if header[1] else entry
        elif instruction := _instruction(line):
            here[instruction.name] = instruction
    return found, entry


def _instruction(line: str) -> _Instruction | None:
    head = re.match(r"^\s+(ROOT )?%?([\w.\-]+) = ", line)
    if not head:
        return None
    after = line[head.end() :]
    end = _closing(after, 0) + 1 if after.startswith("(") else after.index(" ")
    called = re.match(r"\s*([\w\-]+)\(", after[end:])
    if not called:
        return None
    start = end + called.end()
    close = _closing(after, start - 1)
    arguments = after[start:close]
    operands = tuple(re.findall(r"%([\w.\-]+)", arguments))
    rest = arguments + after[close:] if called[1] == "parameter" else after[close:]
    shapes = tuple(
        (dtype, tuple(int(side) for side in sides.split(",") if side))
        for dtype, sides in re.findall(r"\b([a-z]+\d*\w*)\[([\d,]*)\]", after[:end])
    )
    return _Instruction(head[2], shapes, called[1], operands, rest, bool(head[1]))


def _closing(text: str, start: int) -> int:
    """The place of the parenthesis that closes the one at ``start``."""
    depth = 0
    for place in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if not depth:
            return place
    return len(text)


def _line(x: _Instruction) -> str:
    return f"{'ROOT ' if x.root else ''}%{x.name} = {x.opcode}({', '.join(x.operands)}{x.rest}"


def _size(shape: tuple[str, tuple[int, ...]]) -> int:
    dtype, sides = shape
    bits = 8 if dtype == "pred" else int((re.search(r"\d+", dtype) or ["8"])[0])
    return math.prod(sides) * bits // 8
