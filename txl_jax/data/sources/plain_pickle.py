"""Reads a vocabulary from a pickle without unpickling it, so that nothing in it is run.

nanoGPT's ``meta.pkl`` is a dict whose ``itos`` has the symbol of each id.
"""

import pickletools
from pathlib import Path
from typing import Any

from txl_jax.data.errors import DataError
from txl_jax.data.sources.source import opened

META = "meta.pkl"
LARGEST = 64 << 20  # the largest number of bytes of such a file
_VALUES = (
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
)
_CONSTANTS: dict[str, Any] = {"NONE": lambda: None, "NEWTRUE": lambda: True}
_CONSTANTS |= {"NEWFALSE": lambda: False, "EMPTY_TUPLE": tuple}
_CONSTANTS |= {"EMPTY_DICT": dict, "EMPTY_LIST": list}
_IGNORED = ("PROTO", "FRAME")
_KEPT, _FETCHED = ("PUT", "BINPUT", "LONG_BINPUT"), ("GET", "BINGET", "LONG_BINGET")
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def plain_pickle(data: bytes) -> Any:
    """Returns the value of a pickle of dicts, lists, tuples, texts, numbers, booleans and None.

    Raises ValueError for other content, such as an object of a class or a function.
    """
    try:
        return _value(data)
    except (ArithmeticError, AttributeError, LookupError, TypeError, EOFError) as error:
        raise ValueError("it is damaged") from error


def _value(data: bytes) -> Any:
    stack, marks, memo = list[Any](), list[int](), dict[Any, Any]()

    def since(start: int) -> list[Any]:
        items = stack[start:]
        del stack[start:]
        return items

    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if name in _VALUES:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name]())
        elif name == "MARK":
            marks.append(len(stack))
        elif name in ("SETITEM", "SETITEMS", "DICT"):
            items = since(len(stack) - 2 if name == "SETITEM" else marks.pop())
            if name == "DICT":
                stack.append({})
            stack[-1].update(zip(items[::2], items[1::2], strict=True))
        elif name in ("APPEND", "APPENDS", "LIST", "TUPLE"):
            items = since(len(stack) - 1 if name == "APPEND" else marks.pop())
            if name in ("LIST", "TUPLE"):
                stack.append(items if name == "LIST" else tuple(items))
            else:
                stack[-1].extend(items)
        elif name in _TUPLES:
            stack.append(tuple(since(len(stack) - _TUPLES[name])))
        elif name in _KEPT or name == "MEMOIZE":
            memo[len(memo) if name == "MEMOIZE" else argument] = stack[-1]
        elif name in _FETCHED:
            stack.append(memo[argument])
        elif name == "STOP":
            return stack.pop()
        elif name not in _IGNORED:
            raise ValueError(f"it has more than dicts, lists, texts and numbers: {name}")
    raise ValueError("it is damaged")


def read_meta(path: Path) -> list[str]:
    """Returns the symbols of nanoGPT's ``meta.pkl`` in the order of the ids, or raises DataError.

    The error has the lines of Python that write them to ``symbols.json``.
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
