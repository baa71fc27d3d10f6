"""Files are replaced atomically; text is read unchanged, or refused with the reason."""

import errno
import json
import os
import subprocess
import sys

import pytest

from txl_jax import files, paths
from txl_jax.file_kinds import wide_encoding
from txl_jax.files import (
    atomic_write,
    decode_text,
    parse_json_object,
    write_failure_reason,
    write_json,
)


def test_a_file_is_never_missing_while_it_is_replaced(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def interrupted(source, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        atomic_write(str(path), b"new")
    assert path.read_bytes() == b"old"


def test_processes_that_write_one_file_at_once_leave_a_whole_file_and_no_other(tmp_path):
    program = """
import sys
from txl_jax.files import atomic_write
for _ in range(300):
    atomic_write(sys.argv[1], sys.argv[2].encode() * 5000)
"""
    path = tmp_path / "evaluation.json"
    start = lambda letter: subprocess.Popen([sys.executable, "-c", program, str(path), letter])
    assert [process.wait() for process in list(map(start, "abc"))] == [0, 0, 0]
    assert path.read_bytes() in [letter * 5000 for letter in (b"a", b"b", b"c")]
    assert os.listdir(tmp_path) == [path.name]


def test_a_write_that_fails_leaves_no_other_file(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="cannot write"):
        atomic_write(str(tmp_path / "folder"), b"data")
    assert os.listdir(tmp_path) == ["folder"]
    assert files.written_as("a.json.0a1b2c3d.tmp") == "a.json"


def test_json_keeps_names_and_prompts_that_are_not_utf8(tmp_path):
    """Python reads bytes of a command line that are not UTF-8 as surrogates; JSON escapes them."""
    path = str(tmp_path / "config.json")
    for value in ({"prompt": "é€"}, {"prompt": "é", "path": os.fsdecode(b"caf\xe9")}):
        write_json(path, value)
        with open(path, encoding="utf-8") as file:
            text = file.read()
        assert json.loads(text) == value


def test_text_has_no_byte_order_mark():
    assert decode_text(b"\xef\xbb\xbfthe \xc3\xa9") == decode_text("the é".encode()) == "the é"
    assert decode_text("a\ufeffb".encode()) == "a\ufeffb"  # elsewhere U+FEFF is a character
    assert decode_text(b"\xef\xbb\xbf\xff", "surrogateescape") == "\udcff"
    assert decode_text(b"") == decode_text(b"\xef\xbb\xbf") == ""
    assert parse_json_object(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_text_in_another_encoding_is_named_with_the_fix(encoding):
    name = encoding[:6].upper()
    for text in ("", "the"):
        with pytest.raises(ValueError, match=rf"^is {name} text, not UTF-8 .*; save it as UTF-8$"):
            decode_text(f"\ufeff{text}".encode(encoding), "surrogateescape")
    with pytest.raises(ValueError, match=r"^is not UTF-8 text \(byte 4 is 0xe9\); save it as"):
        decode_text(b"\xef\xbb\xbfa\xe9")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.EROFS, "any"), "Read-only file system"),
        (OSError(errno.EDQUOT, "any"), "the disk is full"),
        (ValueError("Error writing d/1: No space left on device"), "the disk is full"),
        (ValueError("INTERNAL: d/1 [OS error 28]"), "the disk is full"),
        (ValueError("Failed: " + "spec " * 999 + "[os_error_code='27']"), "File too large"),
        (ValueError("one\ntwo"), "ValueError: one"),
        (ValueError("x" * 999), "ValueError: " + "x" * 300),
    ],
    ids=["read-only", "quota", "full", "full by number", "tensorstore", "two lines", "long"],
)
def test_the_reason_of_a_failed_write_is_one_short_line(error, reason):
    assert write_failure_reason(error) == reason


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("text", ['{"a": 1}\n', "猫坐在垫子上，狗也。\n", "Кот", "x"])
def test_an_encoding_without_a_mark_is_named(encoding, text):
    order = {"le": "little", "be": "big"}[encoding[-2:]]
    name = rf"{encoding[:6].upper()} \({order}-endian\)"
    data = text.encode(encoding)
    if text == "Кот":
        assert wide_encoding(data) is None  # these bytes could be another text
    else:
        with pytest.raises(ValueError, match=rf"^is {name} text without a .*; save it as UTF-8$"):
            decode_text(data)


def test_a_nul_character_is_in_no_text_and_all_other_characters_stay():
    with pytest.raises(ValueError, match=r"^has a NUL character \(byte 2 is 0x00\), which no"):
        decode_text(b"ab\0" + b"c" * 99)
    assert decode_text(b"ab\0", "surrogateescape") == "ab\0"  # this handler allows any bytes
    text = "a\r\nb\rc\x0b\x0c\x1a\x85\u2028\n"
    assert decode_text(text.encode()) == text


@pytest.mark.parametrize("data", ["naïve café, déjà vu.\n".encode("latin-1"), b"\x00" * 99, b""])
def test_other_data_is_in_no_named_encoding(data):
    assert wide_encoding(data) is None


def test_every_name_in_a_folder_is_found(tmp_path):
    (tmp_path / "copy~").write_text("")
    assert paths.names(str(tmp_path)) == ["copy~"]
