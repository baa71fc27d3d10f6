"""A file that is not text is refused by an error that names its kind, such as a PDF document.

With ``data.vocab=byte``, the bytes of any file can be read.
"""

import bz2
import gzip
import hashlib
import io
import lzma
import os
import pickle
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from corpus_files import content, find_ptb, find_text, refused

from txl_jax.data.corpus import load_corpus
from txl_jax.file_kinds import file_kind, not_text
from txl_jax.files import decode_text

NOISE = np.random.default_rng(0).integers(0, 256, 5000, np.uint8).tobytes()


def zipped(*names) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in names:
            archive.writestr(name, NOISE)
    return file.getvalue()


def tarred() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        member = tarfile.TarInfo("a.txt")
        member.size = 5
        archive.addfile(member, io.BytesIO(b"text\n"))
    return file.getvalue()


def arrays(save) -> bytes:
    file = io.BytesIO()
    save(file, np.arange(99.0))
    return file.getvalue()


KINDS = {
    "a PDF document": b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj\n" + NOISE,
    "a gzip file": gzip.compress(NOISE),
    "a zip archive": zipped("x.txt"),
    "a Microsoft Office document": zipped("[Content_Types].xml", "word/document.xml"),
    "an e-book or document": zipped("mimetype", "content.xml"),
    "a PyTorch file": zipped("archive/data.pkl"),
    "NumPy arrays (.npz)": arrays(np.savez),
    "a tar archive": tarred(),
    "a bzip2 file": bz2.compress(b"text\n" * 99),
    "an xz file": lzma.compress(NOISE),
    "an LZMA file": lzma.compress(NOISE, lzma.FORMAT_ALONE),
    "a Git LFS pointer, which  git lfs pull  replaces with the file": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    ),
    "a Parquet table": b"PAR1" + NOISE,
    "an Arrow table": b"\xff\xff\xff\xff\xa8\0\0\0\x10\0\0\0" + b"a\0" * 999,  # the stream format
    "binary data 1": NOISE,
    "binary data 2": b"GIF89a" + NOISE,
    **{f"a Python pickle {n}": pickle.dumps({"text": ["a"]}, n) for n in (4, 5)},
}


@pytest.mark.parametrize("name", KINDS)
def test_what_is_no_text_is_refused_by_what_it_looks_like(tmp_path, name):
    kind, data = name.rstrip("0123456789").strip(), KINDS[name]
    folder = tmp_path / "folder"
    folder.mkdir()
    for path in (tmp_path / "x", tmp_path / "x.txt", folder / "train.txt", tmp_path / "y.txt.gz"):
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
        expected = "a zip archive" if path.suffix == ".gz" and data[:2] == b"PK" else kind
        for vocab in (None, "char", "word", "subword"):
            given = folder if path.parent == folder else path
            message = refused(
                lambda p=given, v=vocab: load_corpus("text", p, vocab=v, cache_dir=tmp_path / "c")
            )
            assert message.startswith(f"{path}: is {expected}, not text; ")
            assert "byte" not in message
            assert "\n" not in message


@pytest.mark.parametrize("damaged", [b"PKxx", b"PK\1\2\x14\3\xff"])  # the 2nd needs zip version 255
def test_a_damaged_document_is_refused_too(tmp_path, damaged):
    right = b"PK\1\2\x14\3\x14"[: len(damaged)]
    data = KINDS["a Microsoft Office document"].replace(right, damaged)
    (tmp_path / "x.docx").write_bytes(data)
    message = refused(lambda: load_corpus("text", tmp_path / "x.docx", cache_dir=tmp_path / "c"))
    assert message.startswith(f"{tmp_path}/x.docx: is a zip archive, not text; ")


def test_bytes_of_anything_are_trained_if_this_is_asked_for(tmp_path):
    path = tmp_path / "x.pdf"
    path.write_bytes(KINDS["a PDF document"])
    corpus = load_corpus("text", path, vocab="byte", cache_dir=tmp_path / "c")
    assert corpus.vocab.decode_bytes(corpus.train) == path.read_bytes()[: len(corpus.train)]


def test_a_download_is_read_as_what_the_end_of_its_address_says(tmp_path, served):
    folder, url = served
    for name, data in (
        ("x.pdf", KINDS["a PDF document"]),
        ("x.txt.gz", gzip.compress(b"ab\n" * 99)),
    ):
        (folder / name).write_bytes(data)
        digest = f"md5:{hashlib.md5(data).hexdigest()}"
        find = lambda n=name, h=digest: find_text(None, tmp_path, url=f"{url}/{n}", hash=h)
        if name == "x.pdf":
            assert refused(find).startswith(f"{url}/x.pdf: is a PDF document, not text")
        else:
            assert b"".join(content(find()).values()) == b"ab\n" * 99


@pytest.mark.parametrize("vocab", [None, "char"])
def test_raw_numbers_are_advised_as_tokens_and_their_bytes_are_read_if_asked_for(tmp_path, vocab):
    (tmp_path / "x.bin").write_bytes(np.arange(5000, dtype="<u2").tobytes())
    load = lambda v: load_corpus("text", tmp_path / "x.bin", vocab=v, cache_dir=tmp_path / "c")
    assert refused(lambda: load(vocab)).endswith("not a text; use data.name=tokens")
    assert len(load("byte").train) == 9001


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-32-be"])
def test_another_encoding_is_not_trained_as_bytes_unless_asked_for(tmp_path, encoding):
    path = tmp_path / "x.txt"
    path.write_bytes(("The cat sat on the mat.\n" * 50).encode(encoding))
    message = refused(lambda: load_corpus("text", path, cache_dir=tmp_path / "c"))
    assert f"is {encoding[:6].upper()}" in message
    assert "save it as UTF-8" in message
    assert len(load_corpus("text", path, vocab="byte", cache_dir=tmp_path / "c").train)


@pytest.mark.parametrize("end", [".jsonl", ".csv", ".json.gz"])
def test_what_is_named_as_records_and_is_none_is_refused_by_what_it_looks_like(tmp_path, end):
    (tmp_path / f"x{end}").write_bytes(gzip.compress(NOISE) if end.endswith("gz") else NOISE)
    assert "is binary data, not text" in refused(
        lambda: load_corpus("text", tmp_path / f"x{end}", vocab="byte", cache_dir=tmp_path / "c")
    )


def test_binary_data_after_text_is_not_advised_as_bytes(tmp_path):
    path = tmp_path / "x.txt"
    path.write_bytes(b"some text\n" * 20_000 + NOISE)
    message = refused(lambda: load_corpus("text", path, vocab="char", cache_dir=tmp_path / "c"))
    assert message.endswith("this is binary data, not text")


@pytest.mark.parametrize("name", ["enwik8", "text8", "ptb"])
def test_benchmarks_are_not_read_from_what_is_no_text(tmp_path, name):
    path = tmp_path / f"{name}.gz"
    path.write_bytes(gzip.compress(b"some text\n" * 99))
    message = refused(lambda: load_corpus(name, path, cache_dir=tmp_path / "c"))
    assert message.startswith(f"{path}: ")
    assert "gzip" in message or "tar" in message
    for split in ("train", "valid", "test"):
        (tmp_path / f"ptb.{split}.txt").write_bytes(KINDS["a PDF document"])
    assert "is a PDF document" in refused(lambda: find_ptb(str(tmp_path), tmp_path / "c"))


def test_other_texts_that_are_read_say_what_they_are_not():
    for data, fault in (
        (KINDS["a PDF document"], "is a PDF document, not text"),
        (NOISE, "is binary data, not text"),
        (b"caf\xe9", "is not UTF-8 text"),
        (b"some text" * 99 + b"\0b", "has a NUL character"),
    ):
        with pytest.raises(ValueError, match=fault):
            decode_text(data)


@pytest.mark.parametrize(
    "text",
    [
        "MZ is a text about programs.", "BM and GIF are formats", "PK", "IDEAS", "MM*",
        "(dp is text", "Ogg and ORC", "7z", "Rar! it said", '{"text": 1}', "<html>", "#!/bin/sh\n",
        "\x1b[1mbold", "caf\xe9", "\ufeffword", "%!", "ARROW1", "PACK", "\f\n\tpage\x1a", "ftyp",
        '12345678{"a": 1}', "ORCHESTRA", "GIF89a", "ID3 tags", "PAR1", "MThd", "BZh is", "GGUF",
    ],
)  # fmt: skip
@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "utf-16-le"])
def test_text_is_never_taken_for_another_kind(text, encoding):
    raw = text.encode(encoding, "ignore")
    if encoding != "utf-16-le":
        assert file_kind(raw) is None
    assert not_text((raw + ". And more of it, as usual.\n".encode(encoding)) * 9) is None


def test_the_standard_library_is_text(tmp_path):
    for path in list(Path(os.__file__).parent.glob("*.py"))[:150]:
        assert not_text(path.read_bytes()[:65536]) is None, path
    assert content(find_text(Path(os.__file__), tmp_path))["train"]
