"""Recognises data that is not UTF-8 text: finds the kind of a file or the encoding of a text."""

import codecs
import contextlib
import string
from collections.abc import Iterable

LOOKED_AT = 1 << 16
"""The number of bytes at the start of a file that are examined."""
LFS = "a Git LFS pointer, which  git lfs pull  replaces with the file"
_KINDS = (
    (0, b"\x1f\x8b", "a gzip file"),
    (0, b"\x1f\x8b\x08\0", "a gzip file"),  # few files of raw ids begin with these 4 bytes
    (0, b"\x1f\x8b\x08\x08", "a gzip file"),
    (4, b"1AY&SY", "a bzip2 file"),
    (0, b"\xfd7zXZ\0", "an xz file"),
    (0, b"]\0\0", "an LZMA file"),
    (0, b"\x28\xb5\x2f\xfd", "a Zstandard file"),
    (0, b"PK\3\4", "a zip archive"),
    (0, b"PAR1", "a Parquet table"),
    (0, b"ARROW1", "an Arrow table"),
    (0, b"\xff\xff\xff\xff", "an Arrow table"),  # in the stream format
    (0, b"\x80\4\x95", "a Python pickle"),
    (0, b"\x80\5\x95", "a Python pickle"),
    (0, b"\x93NUMPY", "a NumPy array"),
    (0, b"%PDF-", "a PDF document"),
    (0, b"{\\rtf", "an RTF document"),
    (0, b"version https://git-lfs.github.com/spec/", LFS),
    (257, b"ustar", "a tar archive"),
)
"""The position and the bytes of a mark (magic number), and the kind of file with this mark."""
_IN_ZIP = {
    "[Content_Types].xml": "a Microsoft Office document",
    "mimetype": "an e-book or document",
    ".npy": "NumPy arrays (.npz)",
    "data.pkl": "a PyTorch file",
}
_CONTROLS = bytes(set(range(32)) - set(b"\t\n\v\f\r\b\x1a\x1b")) + b"\x7f"


def file_kind(start: bytes, least: int = 2) -> str | None:
    """Returns the kind of a file, such as "a gzip file", or ``None`` if it might be a text.

    ``start`` has the file's first bytes. Marks of fewer than ``least`` bytes do not count. Marks of
    letters and digits count only if ``start`` has control characters, which no text has.
    """
    controls = _controls(start)
    for at, mark, kind in _KINDS:
        usable = len(mark) >= least and (controls or not mark.isalnum())
        if usable and start.startswith(mark, at):
            return kind
    return None


def _controls(data: bytes) -> int:
    """Returns the number of control characters, without those that are usual in texts."""
    return len(data) - len(data.translate(None, _CONTROLS))


def zip_kind(names: Iterable[str]) -> str | None:
    """Returns the kind of document or program that a zip archive with these files is, or None."""
    known = tuple(names)
    kinds = (kind for end, kind in _IN_ZIP.items() if any(name.endswith(end) for name in known))
    return next(kinds, None)


def not_text(start: bytes) -> str | None:
    """Returns the kind of a file that is not text in any encoding; ``None`` if it might be text."""
    if kind := file_kind(start):
        return kind
    controls = _controls(start)
    if controls < 8 or controls * 50 < len(start) or wide_encoding(start):
        return None
    return "binary data"


def is_text(start: bytes) -> bool:
    """Tells whether the start of a file is UTF-8 without control characters.

    Few files of raw token ids have such a start.
    """
    with contextlib.suppress(UnicodeDecodeError):
        codecs.getincrementaldecoder("utf-8")().decode(start)  # the last character can be cut
        return not _controls(start)
    return False


_USUAL = string.printable.removesuffix("\x0b\x0c") + "\u3001\u3002\uff0c"


def wide_encoding(data: bytes) -> str | None:
    """Guesses the kind of UTF-16 or UTF-32 of a text that has no byte order mark.

    The result is the encoding that gives the most ASCII characters and Chinese punctuation in the
    first 4,096 bytes. These must be at least 1 character in 50; otherwise the result is ``None``.
    """
    found = {}
    for width, order in ((4, "little"), (4, "big"), (2, "little"), (2, "big")):
        start = data[: min(4096, len(data)) // width * width]
        with contextlib.suppress(UnicodeDecodeError):
            encoding = f"utf-{8 * width}-{'le' if order == 'little' else 'be'}"
            text = start.decode(encoding, "strict" if width == 4 else "ignore")
            usual = sum(map(text.count, _USUAL)) * width
            if text and usual * 50 >= len(start):
                found[f"UTF-{8 * width} ({order}-endian)"] = usual
    return max(found, key=found.__getitem__, default=None)
