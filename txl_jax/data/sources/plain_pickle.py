"""Reads a vocabulary from a pickle without unpickling it, so no code in the pickle is run.

nanoGPT's ``meta.pkl`` is a dict whose ``itos`` has the symbol of each id.
"""

import pickletools
from pathlib import Path
from typing import Any

from txl_jax.data.errors import DataError
from txl_jax.data.sources.source import opened

META = "meta.pkl"
LARGEST = 64 << 20  # the largest number of bytes of such a file
_VALUES = ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE")


def plain_pickle(data: bytes) -> Any:
    """Returns the value of a pickle (protocol 2 to 5) of dicts, lists, texts, numbers, bools, None.

    Raises ValueError for other content, such as an object of a class or a function.
    """
    try:
        return _value(data)
    except (AttributeError, LookupError, TypeError, EOFError) as error:
        raise ValueError("it is damaged") from error


def _value(data: bytes) -> Any:
    stack, marks, memo = list[Any](), list[int](), dict[Any, Any]()
    for opcode, argument, _ in pickletools.genops(data):
        match opcode.name:
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_LIST":
                stack.append([])
            case "NEWTRUE" | "NEWFALSE" | "NONE" as name:
                stack.append({"NEWTRUE": True, "NEWFALSE": False}.get(name))
            case "MARK":
                marks.append(len(stack))
            case "SETITEM" | "SETITEMS" | "APPEND" | "APPENDS" as name:
                alone = {"SETITEM": 2, "APPEND": 1}
                start = len(stack) - alone[name] if name in alone else marks.pop()
                items, stack[start:] = stack[start:], []
                if name.startswith("APPEND"):
                    stack[-1].extend(items)
                else:
                    stack[-1].update(zip(items[::2], items[1::2], strict=True))
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "STOP":
                return stack.pop()
            case name if name in _VALUES:
                stack.append(argument)
            case name if name not in ("PROTO", "FRAME"):
                raise ValueError(f"it has more than dicts, lists, texts and numbers: {name}")
    raise ValueError("it is damaged")


def read_meta(path: Path) -> list[str]:
    """Returns the symbols of nanoGPT's ``meta.pkl`` in the order of the ids, or raises DataError.

    The error shows lines of Python that write the symbols to ``symbols.json``.
    """
    with opened(path) as file:
        data = file.read(LARGEST + 1)
    try:
        if len(data) > LARGEST:
            raise ValueError(f"it has more than {LARGEST:,} bytes")
        found = plain_pickle(data)
        itos = found.get("itos") if isinstance(found, dict) else None
        if isinstance(itos, dict):
            if set(itos) != set(range(len(itos))):
                raise ValueError("the ids of its itos are not 0, 1, 2, …")
            itos = [itos[i] for i in range(len(itos))]
        if not isinstance(itos, list) or not all(isinstance(symbol, str) for symbol in itos):
            raise ValueError("it has no itos with a text for each id")
    except ValueError as error:
        lines = (
            "import json, pickle; itos = pickle.load(open('meta.pkl', 'rb'))['itos']; "
            "json.dump([itos[i] for i in range(len(itos))], open('symbols.json', 'w'))"
        )
        why = f"is not unpickled, because a pickle can run any code, and {error}"
        fix = f"if you trust the file, run in its folder: {lines}  -- or move the file away"
        raise DataError(f"{path}: {why}; {fix}") from None
    return itos
