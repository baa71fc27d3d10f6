"""Recognises bytes that are no UTF-8 text: the kind of a file, or the encoding of a text."""

import codecs
import contextlib
import re
import string
from collections.abc import Iterable

LOOKED_AT = 1 << 16
"""The number of bytes at the start of a file that are examined."""

_ENDS = {
    b"\x1f\x8b": ".gz",
    b"BZh": ".bz2",
    b"\xfd7zXZ\0": ".xz",
    b"]\0\0": ".lzma",
    b"\x28\xb5\x2f\xfd": ".zst",
    b"PK\3\4": ".zip",
    b"PAR1": ".parquet",
    b"ARROW1": ".arrow",
    b"\xff\xff\xff\xff": ".arrow",
}
"""The suffix that a data file must have to be read as what it is, by its first bytes."""
LFS = "a Git LFS pointer, which  git lfs pull  replaces with the file"
_STARTS: dict[bytes, str] = {
    **{b"\x1f\x8b": "a gzip file", b"\xfd7zXZ\0": "an xz file"},
    **{b"]\0\0": "an LZMA file", b"version https://git-lfs.github.com/spec/": LFS},
    **{b"\x28\xb5\x2f\xfd": "a Zstandard file", b"\x04\x22\x4d\x18": "an LZ4 file"},
    **{
        b"PK\3\4": "a zip archive",
        b"PK\5\6": "an empty zip archive",
        b"Rar!\x1a\7": "a RAR archive",
    },
    **{b"7z\xbc\xaf\x27\x1c": "a 7-Zip archive", b"\x1f\x9d": "a compress (.Z) file"},
    **{b"PAR1": "a Parquet table", b"ARROW1": "an Arrow table", b"FEA1": "a Feather table"},
    b"\xff\xff\xff\xff": "an Arrow table",  # in the stream format
    **{
        b"ORC": "an ORC table",
        b"Obj\1": "an Avro file",
        b"SQLite format 3\0": "an SQLite database",
    },
    **{b"\x93NUMPY": "a NumPy array", b"\x89HDF\r\n\x1a\n": "an HDF5 file"},
    **{b"CDF\1": "a NetCDF file", b"CDF\2": "a NetCDF file", b"MATLAB 5.0 MAT": "a MATLAB file"},
    **{b"\x80" + bytes([n]): "a Python pickle" for n in (2, 3, 4, 5)},
    **{start + b"\n": "a Python pickle" for start in (b"(dp0", b"(dp1", b"(lp0", b"(lp1")},
    **{start + b"q\0": "a Python pickle" for start in (b"}", b"]", b"(")},
    **{b"GGUF": "a GGUF model", b"%PDF-": "a PDF document", b"{\\rtf": "an RTF document"},
    **{b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": "an old Microsoft Office document"},
    **{
        b"AT&TFORM": "a DjVu document",
        b"ITOLITLS": "a Microsoft e-book",
        b"%!PS-Adobe": "PostScript",
    },
    **{
        b"\x89PNG\r\n\x1a\n": "a PNG image",
        b"\xff\xd8\xff": "a JPEG image",
        b"GIF8": "a GIF image",
    },
    **{b"II*\0": "a TIFF image", b"MM\0*": "a TIFF image"},
    **{
        b"ID3": "an MP3 file",
        b"OggS": "an Ogg file",
        b"fLaC": "a FLAC file",
        b"MThd": "a MIDI file",
    },
    **{b"\x1a\x45\xdf\xa3": "a Matroska video", b"\x7fELF": "an ELF program or library"},
    **{b"\xca\xfe\xba\xbe": "a Java class", b"\0asm": "a WebAssembly program"},
    **{bytes([n]) + b"\xfa\xed\xfe": "a macOS program" for n in (0xCE, 0xCF)},
    **{b"wOFF": "a font", b"wOF2": "a font", b"OTTO\0": "a font"},
}
_INSIDE = (
    *((257, b"ustar", "a tar archive"), (4, b"ftyp", "an MP4 video or HEIF image")),
    *((8, b"WAVE", "a WAV file"), (8, b"WEBP", "a WebP image"), (8, b"AVI ", "an AVI video")),
    *((8, b'{"', "a safetensors file"), (4, b"1AY&SY", "a bzip2 file")),
)
"""Marks that are not at the start of a file: their position, their bytes, and the kind of file."""
_IN_ZIP = (
    *(
        ("[Content_Types].xml", "a Microsoft Office document"),
        ("mimetype", "an e-book or document"),
    ),
    *((".npy", "NumPy arrays (.npz)"), ("data.pkl", "a PyTorch file"), (".keras", "a Keras model")),
    *(("AndroidManifest.xml", "an Android program"), ("META-INF/MANIFEST.MF", "a Java archive")),
)
_CONTROLS = bytes(set(range(32)) - set(b"\t\n\v\f\r\b\x1a\x1b")) + b"\x7f"


def file_kind(start: bytes, least: int = 2) -> str | None:
    """Returns the kind of a file, such as "a gzip file", or ``None`` if it may be a text.

    ``start`` has the file's first bytes. Marks of fewer than ``least`` bytes do not count. Marks of
    letters and digits count only if ``start`` has control characters, which no text has.
    """
    letters_only = len(start.translate(None, _CONTROLS)) == len(start)
    for mark, kind in _STARTS.items():
        usable = len(mark) >= least and not (mark.isalnum() and letters_only)
        if usable and start.startswith(mark):
            return kind
    for at, mark, kind in _INSIDE:
        found = start[at : at + len(mark)] == mark and len(mark) >= least
        if found and (len(mark) > 4 or b"\0" in start[:8] or start[:4] == b"RIFF"):
            return kind
    return "a Windows program" if start[:2] == b"MZ" and b"\0" in start[:64] else None


def zip_kind(names: Iterable[str]) -> str | None:
    """Returns the kind of document or program that a zip archive with these files is, or None."""
    known = tuple(names)
    ends = (kind for end, kind in _IN_ZIP if any(name.endswith(end) for name in known))
    return next(ends, None)


def readable_end(start: bytes) -> str | None:
    """Returns the suffix that this file must have to be read as what it is, or ``None``."""
    return next((end for mark, end in _ENDS.items() if start.startswith(mark)), None)


def not_text(start: bytes) -> str | None:
    """Returns the kind of a file that is no text in any encoding, or ``None`` if it may be text."""
    if kind := file_kind(start):
        return kind
    controls = len(start) - len(start.translate(None, _CONTROLS))
    if controls < 8 or controls * 50 < len(start) or wide_encoding(start) or iso_2022(start):
        return None
    return "binary data"


def is_text(start: bytes) -> bool:
    """Whether the start of a file is UTF-8 without control characters, which few raw ids are."""
    with contextlib.suppress(UnicodeDecodeError):
        codecs.getincrementaldecoder("utf-8")().decode(start)  # the last character may be cut
        return len(start.translate(None, _CONTROLS)) == len(start)
    return False


_ISO_2022 = {
    **{b"\x1b$@": "ISO-2022-JP-2", b"\x1b$B": "ISO-2022-JP-2", b"\x1b$)C": "ISO-2022-KR"},
    **{b"\x1b$)A": "ISO-2022-CN-EXT", b"\x1b$)G": "ISO-2022-CN-EXT"},
}
"""The encodings to which escape sequences belong."""


def iso_2022(data: bytes) -> tuple[int, str] | None:
    """Returns where the first escape sequence of ISO-2022 is, and its encoding, or ``None``."""
    found = re.search(b"|".join(map(re.escape, _ISO_2022)), data)
    return (found.start(), _ISO_2022[found[0]]) if found else None


_USUAL = string.printable.removesuffix("\x0b\x0c") + "\u3001\u3002\uff0c"
_WIDE = {
    **{"utf-32-le": "UTF-32 (little-endian)", "utf-32-be": "UTF-32 (big-endian)"},
    **{"utf-16-le": "UTF-16 (little-endian)", "utf-16-be": "UTF-16 (big-endian)"},
}


def wide_encoding(data: bytes) -> str | None:
    """Returns the kind of UTF-16 or UTF-32 that a text without a byte order mark seems to be in.

    It is the one with the most ASCII characters and Chinese punctuation among the first 4,096
    bytes, if these are 1 character in 50 or more; ``None`` if the data seems to be neither.
    """
    found = dict[str, int]()
    for encoding, name in _WIDE.items():
        with contextlib.suppress(UnicodeDecodeError):
            width = int(encoding[4:6]) // 8
            start = data[: min(4096, len(data)) // width * width]
            text = start.decode(encoding, "strict" if width == 4 else "ignore")
            found[name] = sum(map(text.count, _USUAL)) * width
            if not text or found[name] * 50 < len(start):
                del found[name]
    return max(found, key=found.__getitem__, default=None)
