"""Lists the kernels of a compiled program from its HLO: bytes, FLOPs, part of the model.

A kernel is assumed to read each operand once and to write each result once. If a kernel reads only
slices of an operand, only the slices count. If it updates a result in place, only the written part
counts. A kernel in a loop counts once for each iteration. The caches of a GPU are ignored: an array
that two kernels read one after the other counts twice. On a TPU, arrays that the compiler keeps on
the chip do not count, and a copy to or from the chip counts once. Of a conditional, only the branch
that moves the most bytes counts.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence

from txl_jax.planning.costs import KINDS, branches, longest, trip_count

_FREE = frozenset(
    (
        *("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all"),
        *("partition-id", "replica-id", "optimization-barrier"),
    )
)
_VIEWS = frozenset(("bitcast", "reshape", "copy", "convert", "transpose"))
_SLICES = frozenset(("dynamic-slice", "slice", "gather"))
_PRODUCTS = frozenset(("dot", "convolution"))
# Targets of custom calls that run no kernel on a TPU.
_NO_KERNEL = ("AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound")


WAIT = "wait"
"""The kind of a :class:`Kernel` that is only a wait for the end of the collective ``name``."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel that a program runs ``times`` times; bytes and ``flops`` are those of one run.

    ``kind`` is ``elementwise``, ``product`` (of matrices), ``library`` (any other custom call), or
    the name of a collective operation. ``source`` is the part of the model that the kernel belongs
    to, from the name of its operation. ``results`` are the shapes of the results. ``target`` and
    ``config`` are the name and the configuration of a library call. ``cycles`` is the number of
    cycles that the TPU compiler expects, or 0 if the compiler gives none. ``sent`` is the number of
    bytes that each device sends in a collective operation, if many devices form a ring.
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
    cycles: float = 0
    target: str = ""
    sent: int = 0

    @property
    def moved(self) -> int:
        """The bytes that are read and written in all runs."""
        return self.times * (self.read + self.written)


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    opcode: str
    operands: tuple[str, ...]
    rest: str
    root: bool
    line: str
    on_chip: tuple[bool, ...]

    @property
    def size(self) -> int:
        """The bytes of the results in device memory, without the workspace of a library call."""
        of_library = self.opcode == "custom-call" and len(self.shapes) > 1
        return sum(
            x
            for x, (kind, _) in zip(self.sizes, self.shapes, strict=True)
            if not (of_library and kind == "s8")
        )

    @property
    def sizes(self) -> list[int]:
        """The bytes of each result in device memory; 0 if a TPU keeps the result on the chip."""
        return [0 if on else _size(x) for x, on in zip(self.shapes, self.on_chip, strict=True)]

    def called(self) -> str:
        """Returns the name of the computation that a fusion or a call runs."""
        found = re.search(r"(?:calls|to_apply)=%?([\w.\-]+)", self.rest)
        return found[1] if found else ""


_Computation = dict[str, _Instruction]


def kernels(text: str) -> list[Kernel]:
    """Returns the kernels of a program in their order; ``text`` is ``compiled.as_text()``."""
    return [k for k in schedule(text) if k.kind != WAIT]


def schedule(text: str) -> list[Kernel]:
    """Returns the kernels of a program in their order, and among them its waits.

    An entry of kind :data:`WAIT` stands where the program waits for a collective to end.
    """
    computations, entry = _computations(text)
    return list(_run(computations, entry, 1))


def iterations(text: str) -> list[list[Kernel]]:
    """Returns for each loop of a program the kernels of one iteration.

    A loop inside of another loop has no entry; its kernels are in that of the outer loop.
    """
    computations, entry = _computations(text)
    loops = (x for x in computations[entry].values() if x.opcode == "while")
    bodies = (re.findall(r"body=%?([\w.\-]+)", x.rest)[0] for x in loops)
    return [[k for k in _run(computations, body, 1) if k.kind != WAIT] for body in bodies]


def _run(computations: dict[str, _Computation], name: str, times: int) -> Iterator[Kernel]:
    computation = computations[name]
    for x in computation.values():
        if x.opcode == "while":
            called = dict(re.findall(r"(body|condition)=%?([\w.\-]+)", x.rest))
            condition = [y.line for y in computations[called["condition"]].values()]
            yield from _run(computations, called["body"], times * trip_count(x.rest, condition))
        elif x.opcode in ("call", "async-start") and x.called() in computations:
            yield from _run(computations, x.called(), times)
        elif x.opcode == "conditional":
            runs = [list(_run(computations, branch, times)) for branch in branches(x.line)]
            yield from longest(runs, lambda run: sum(k.moved for k in run))
        elif x.opcode.endswith("-done"):
            started = computation.get(x.operands[0])
            if started and started.opcode.removesuffix("-start") in KINDS:
                yield Kernel(started.name, WAIT, "", times, 0, 0)
        elif not _is_free(computations, x):
            yield _kernel(computations, computation, x, times)


def _is_free(computations: dict[str, _Computation], x: _Instruction) -> bool:
    """Tells whether an instruction runs no kernel, because it only names memory or waits."""
    inner = computations.get(x.called(), {}).values() if x.opcode == "fusion" else ()
    return (
        x.opcode in _FREE
        or x.opcode.endswith("-done")
        or any(f'custom_call_target="{name}"' in x.rest for name in _NO_KERNEL)
        or any('custom_call_target="AsyncCollectiveDone"' in y.rest for y in inner)
    )


def _kernel(
    computations: dict[str, _Computation], here: _Computation, x: _Instruction, times: int
) -> Kernel:
    operands = [here[name] for name in x.operands if name in here]
    kind, flops, sent = "elementwise", 0, 0
    read, written = sum(y.size for y in operands), x.size
    if x.opcode.removesuffix("-start") in KINDS:
        kind, written = x.opcode.removesuffix("-start"), 0
        result = x.size - read if x.opcode.endswith("-start") else x.size
        sent = {"all-reduce": 2 * read, "all-gather": result}.get(kind, read)
    elif x.opcode == "fusion" and (started := _started(computations[x.called()])):
        kind, written = started, 0
    elif x.opcode == "fusion":
        inner = computations[x.called()]
        read = _reads(computations, inner, operands)
        written = _writes(computations, inner, x.on_chip)
        flops = _all_flops(computations, inner)
        library = any(y.opcode == "custom-call" for y in inner.values())
        kind = "product" if flops else "library" if library else "elementwise"
    elif x.opcode == "custom-call" or x.opcode in _PRODUCTS:
        flops = _flops(x, here)
        kind = "product" if flops else "library"
    elif x.opcode in ("copy-start", "slice-start"):  # the results include the operand
        copied = 0 if x.opcode == "copy-start" else 1
        read = min(read, _size(x.shapes[copied]))
        written = x.sizes[copied]
    config = re.search(r'backend_config="((?:[^"\\]|\\.)*)"', x.rest)
    shapes = tuple(sides for _, sides in x.shapes)
    about = x.name, kind, _source(x.rest), times
    cycles = re.search(r'"estimated_cycles":"(\d+)"', x.rest)
    target = re.search(r'custom_call_target="([^"]*)"', x.rest)
    number, found = (int(cycles[1]) if cycles else 0), (target[1] if target else "")
    counted = read, written, flops, shapes
    return Kernel(*about, *counted, config[1] if config else "", number, found, sent)


def _started(inner: _Computation) -> str | None:
    """Returns the kind of the collective that a fusion starts on a TPU, or ``None``."""
    starts = any('custom_call_target="AsyncCollectiveStart"' in y.rest for y in inner.values())
    return next(y.opcode for y in inner.values() if y.opcode in KINDS) if starts else None


def _reads(
    computations: dict[str, _Computation], inner: _Computation, operands: Sequence[_Instruction]
) -> int:
    """Returns the bytes that a fused computation reads from its operands."""
    total = 0
    for number, parameter in _parameters(inner).items():
        whole = operands[number].size if number < len(operands) else parameter.size
        total += min(whole, _read_of(computations, inner, parameter.name, whole))
    return total


def _parameters(inner: _Computation) -> dict[int, _Instruction]:
    found = (y for y in inner.values() if y.opcode == "parameter")
    return {int(re.findall(r"^(\d+)\)", y.rest)[0]): y for y in found}


def _read_of(
    computations: dict[str, _Computation], inner: _Computation, name: str, whole: int
) -> int:
    total = 0
    for user in (y for y in inner.values() if name in y.operands):
        if user.opcode in _SLICES and user.operands[0] == name:
            total += user.size
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == name:
            continue  # updated in place, not read
        elif user.opcode in _VIEWS and not user.root:
            total += _read_of(computations, inner, user.name, whole)
        elif user.opcode == "fusion":  # a fusion inside of a fusion, on a TPU
            nested = computations[user.called()]
            if all(y.opcode in (*_VIEWS, "parameter") for y in nested.values()):
                total += _read_of(computations, inner, user.name, whole)
                continue
            known = _parameters(nested)
            places = (n for n, operand in enumerate(user.operands) if operand == name)
            total += sum(_read_of(computations, nested, known[n].name, whole) for n in places)
        else:
            return whole
    return total


def _writes(
    computations: dict[str, _Computation], inner: _Computation, on_chip: Sequence[bool]
) -> int:
    """Returns the bytes that a fused computation writes: of an in-place update, the new part."""
    (root,) = (y for y in inner.values() if y.root)
    if root.opcode != "tuple" and len(root.shapes) > 1:  # such as a sort of keys and values
        return sum(size for size, on in zip(root.sizes, on_chip, strict=True) if not on)
    results = [inner[name] for name in root.operands] if root.opcode == "tuple" else [root]
    total = 0
    for result, on in zip(results, on_chip, strict=True):
        if on:
            continue
        while result.opcode in _VIEWS and result.operands[0] in inner:
            behind = inner[result.operands[0]]
            if behind.opcode not in (*_VIEWS, "dynamic-update-slice"):
                break
            result = behind
        if result.opcode == "fusion":
            nested = computations[result.called()]
            total += _writes(computations, nested, [False] * len(result.shapes))
            continue
        updated = result.opcode == "dynamic-update-slice"
        total += inner[result.operands[1]].size if updated else result.size
    return total


def _all_flops(computations: dict[str, _Computation], inner: _Computation) -> int:
    nested = (computations[y.called()] for y in inner.values() if y.opcode == "fusion")
    own = sum(_flops(y, inner) for y in inner.values())
    return own + sum(_all_flops(computations, each) for each in nested)


def _flops(x: _Instruction, here: _Computation) -> int:
    """Returns 2 m k n for a matrix product [m,k] x [k,n]; 0 for any other instruction."""
    if x.opcode == "convolution":
        return _convolution(x, here)
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


def _convolution(x: _Instruction, here: _Computation) -> int:
    """Returns the operations of a convolution, without those on padding.

    In programs for TPUs, matrix products are convolutions.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", x.rest)
    if not labels or any(name not in here for name in x.operands[:2]):
        return 0
    sides = (*(here[name].shapes[0][1] for name in x.operands[:2]), x.shapes[0][1])
    rows, matrix, out = (
        dict(zip(*pair, strict=True)) for pair in zip(labels.groups(), sides, strict=True)
    )
    found = re.search(r"window=\{([^}]*)\}", x.rest)
    window = dict(re.findall(r"(\w+)=(\S+)", found[1])) if found else {}
    of_window = lambda name, n, default: window[name].split("x")[n] if name in window else default
    total = 2 * out["b"] * out["f"] * matrix["i"]
    for n, name in enumerate(sorted(label for label in out if label.isdigit())):
        stride, apart, spread = (
            int(of_window(k, n, "1")) for k in ("stride", "rhs_dilate", "lhs_dilate")
        )
        low = int(of_window("pad", n, "0_0").split("_")[0])
        places = (
            o * stride + w * apart - low for o in range(out[name]) for w in range(matrix[name])
        )
        total *= sum(p % spread == 0 and 0 <= p // spread < rows[name] for p in places)
    return total


def _source(rest: str) -> str:
    """Returns the part of the model that an instruction computes, as ``attention, gradient``."""
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
    results = re.findall(r"\b([a-z]+\d*\w*)\[([\d,]*)\](\{[^}]*\})?", after[:end])
    shapes = tuple(
        (x, tuple(int(side) for side in sides.split(",") if side)) for x, sides, _ in results
    )
    on_chip = tuple(re.search(r"S\(\d", layout) is not None for _, _, layout in results)
    root = bool(head[1])
    return _Instruction(head[2], shapes, called[1], operands, rest, root, line, on_chip)


def _closing(text: str, start: int) -> int:
    """Returns the index of the parenthesis that closes the one at ``start``."""
    depth = 0
    for place in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if not depth:
            return place
    return len(text)


def _size(shape: tuple[str, tuple[int, ...]]) -> int:
    dtype, sides = shape
    bits = 8 if dtype == "pred" else int((re.search(r"\d+", dtype) or ["8"])[0])
    return math.prod(sides) * bits // 8
