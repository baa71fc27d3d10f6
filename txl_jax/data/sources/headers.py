"""Recognises the header of a raw ``.bin`` file, whose words would otherwise be read as ids.

llm.c writes 256 words of int32 before the ids: a magic number, a version and the number of ids.
"""

from pathlib import Path

import numpy as np

from txl_jax.data.errors import DataError
from txl_jax.data.symbols import chunks
from txl_jax.file_kinds import file_kind
from txl_jax.messages import argument

HEADER = 1024
"""The number of bytes of llm.c's header, and of a file's start that may be another header."""
LLM_C: dict[int, tuple[int, np.dtype]] = {
    20240520: (1, np.dtype("<u2")),
    20240801: (7, np.dtype("<u4")),
}
"""The version and the type of the ids by the magic number (llm.c, dev/data/data_common.py)."""
LLM_C_OTHERS = {20240326: "a model", 20240327: "the state of a model", 20240328: "a tokenizer"}
LLM_C_OTHERS |= {20240522: "multiple-choice questions"}
CONTAINERS = {
    b"\x93NUMPY": "a NumPy array; name it .npy",
    b"PK\3\4": "a zip archive, as .npz and torch files are; write the ids with numpy.save",
    b"\x1f\x8b\x08": "a gzip file; unpack it",
    b"\x89HDF": "an HDF5 file; write the ids with numpy.save",
}
"""The kind of a file that begins with these bytes, and what to do."""
PICKLES = (b"\x80\4\x95", b"\x80\5\x95")  # the size of their first frame follows, in 8 bytes
SHORT = 64
"""The largest number of bytes of a short header, which has a count."""
LONG = 16
"""If a file is so many times as long as its start, even ids 5% above the rest seem a header's."""


def llm_c_type(path: Path, size: int) -> np.dtype | None:
    """Returns the type of the ids after llm.c's header, or ``None`` for a file without one.

    ``size`` is that of the file in bytes. Raises DataError if the header contradicts the file, or
    the file is another program's container.
    """
    with open(path, "rb") as file:
        start = file.read(512)
    first = start[:12]
    if kind := next((kind for magic, kind in CONTAINERS.items() if first.startswith(magic)), None):
        raise DataError(f"{path}: is {kind}")
    ids = start.startswith(b"\xff" * 4)  # may be ids, as may marks of other files below 4 bytes
    pickled = start[:3] in PICKLES and start[7:11] == bytes(4)
    if not ids and (kind := file_kind(start, least=2 if pickled else 4)):
        raise DataError(f"{path}: is {kind}, not raw ids; write the ids with numpy.save")
    magic, version, count = np.frombuffer(first.ljust(12, b"\0"), "<i4").tolist()
    if magic in LLM_C_OTHERS:
        fault = (
            f"is a file of llm.c (magic number {magic}) with {LLM_C_OTHERS[magic]}, not with ids"
        )
        raise DataError(f"{path}: {fault}; name a file of ids")
    if magic not in LLM_C:
        return None
    known, dtype = LLM_C[magic]
    if version != known:
        fault = f"has version {version} of llm.c's format {magic}, not version {known}"
        raise DataError(f"{path}: {fault}; write the ids with numpy.save")
    found = max(size - HEADER, 0)
    if size < HEADER or found != count * dtype.itemsize:
        fault = f"has {found:,} bytes of ids, and its header says {count:,} ids of {dtype}"
        raise DataError(f"{path}: {fault}; get the file again, because it is incomplete or damaged")
    return dtype


def check_no_count(path: Path, tokens: np.memmap) -> None:
    """Raises DataError if a number at the start of a raw file counts what follows it.

    A short header, of at most :data:`SHORT` bytes, has the number of ids after it, or of their
    bytes. A single id may equal this number by chance, so it must then be at least 65,536. A number
    that is wider than an id must be at least 256.
    """
    start, width = tokens[: SHORT // tokens.itemsize].tobytes(), tokens.itemsize
    for word in (np.dtype("<i4"), np.dtype("<i8")):
        numbers = np.frombuffer(start[: len(start) // word.itemsize * word.itemsize], word)
        least = 1 << 8 if word.itemsize > width else 1 << 16
        for at, number in enumerate(numbers.tolist()):
            for header in range((at + 1) * word.itemsize, SHORT + 1, width):
                left = tokens.nbytes - header
                if number < least or number not in (left, left // width):
                    continue
                counted = "bytes" if number == left else "ids"
                fault = f"the number {number:,} at byte {at * word.itemsize} counts the"
                raise _seems_header(
                    path, f"{fault} {counted} after byte {header}", tokens, str(header)
                )


def _seems_header(path: Path, fault: str, tokens: np.ndarray, offset: str = "BYTES") -> DataError:
    cut = f"save numpy.fromfile(path, '{tokens.dtype}', offset={offset}) with numpy.save"
    largest = max(int(part.max()) for _, part in chunks(tokens))
    ids = argument("config.data.vocab_size", largest + 1)
    return DataError(
        f"{path}: {fault}, so the file seems to begin with a header; {cut}, or if all numbers are"
        f" ids, give {ids}"
    )


def check_no_header(path: Path, tokens: np.memmap) -> None:
    """Raises DataError if an id at the start of a raw file is so large that it seems a header's.

    It seems so if it is over twice the largest id after the start, or in a long file 5% above it.
    """
    first = HEADER // tokens.itemsize
    start, rest = np.asarray(tokens[:first]), tokens[first:]
    if len(rest) < first:
        return
    largest, factor = int(start.max()), 1.05 if len(rest) >= LONG * first else 2.0
    highest = 0
    for _, part in chunks(rest):
        highest = max(highest, int(part.max()))
        if largest <= factor * highest + 16:
            return
    at = int(np.argmax(start))
    fault = f"token {at} is {largest:,}, and no id after byte {HEADER} is above {highest:,}"
    raise _seems_header(path, fault, tokens)
