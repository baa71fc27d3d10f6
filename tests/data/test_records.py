"""Compressed files, archives and files of records are read as the text that they contain.

A damaged or unsuitable file gives an error of one line.
"""

import bz2
import csv
import functools
import gzip
import io
import json
import lzma
import pathlib
import sys
import zipfile
from typing import Any

import numpy as np
import pytest
from corpus_files import content, find_text, refused

from txl_jax.data.corpus import load_corpus
from txl_jax.data.pieces import Pieces
from txl_jax.data.sources import records, stored
from txl_jax.data.sources.source import SPLITS

zstd = pytest.importorskip("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
pa = pytest.importorskip("pyarrow")
import pyarrow.parquet as pq  # noqa: E402 after the check that it is installed

COMPRESS: dict[str, Any] = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress,
            ".lzma": functools.partial(lzma.compress, format=lzma.FORMAT_ALONE),
            ".zst": functools.partial(
                zstd.compress, options={zstd.CompressionParameter.checksum_flag: 1}
            )}  # fmt: skip
TEXT = "".join(f"line {n} of the boók\r\n" for n in range(300)).encode()
SONGS = [f'song {n}, "called"\nla{" la" * n} ó\n' for n in range(30)]


def zipped(path, files, method=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def json_lines(songs, field="text"):
    return "".join(json.dumps({"id": n, field: s}) + "\n" for n, s in enumerate(songs)).encode()


def comma_separated(songs, field="text", **form):
    file = io.StringIO(newline="")
    rows = csv.writer(file, **form)
    rows.writerows([("id", field), *enumerate(songs)])
    return file.getvalue().encode()


def table(songs, field="text", kind=None):
    return pa.table({"id": range(len(songs)), field: pa.array(songs, kind or pa.string())})


def parquet(songs, **options):
    return written(table(songs, **options))


def written(whole):
    file = io.BytesIO()
    pq.write_table(whole, file, row_group_size=7)
    return file.getvalue()


def arrow(songs, new=pa.ipc.new_stream, **options):
    file = io.BytesIO()
    with new(file, (whole := table(songs, **options)).schema) as writer:
        writer.write_table(whole, max_chunksize=4)
    return file.getvalue()


def array_of(songs, field="text"):
    return json.dumps([{field: song} for song in songs], indent=1).encode()


FORMS: dict[str, Any] = {
    "x.jsonl": json_lines,
    "x.ndjson": json_lines,
    "x.jl": json_lines,
    "arrays.jsonl": lambda songs, **options: b"".join(
        array_of(part, **options).replace(b"\n", b"") + b"\n" for part in (songs[:7], songs[7:])
    ),
    "lines.json": json_lines,
    "array.json": array_of,
    "marked.json": lambda songs, **options: b"\xef\xbb\xbf" + array_of(songs, **options),
    "x.csv": comma_separated,
    "keyed.json": lambda songs, **options: json.dumps(
        {"version": "1", "tags": ["a"], "data": json.loads(array_of(songs, **options))}
    ).encode(),
    "X.CSV": lambda songs: b"\xef\xbb\xbf" + comma_separated(songs, lineterminator="\n"),
    "x.tab": functools.partial(comma_separated, delimiter="\t"),
    "x.tsv": functools.partial(comma_separated, delimiter="\t"),
    "x.parquet": parquet,
    "large.parquet": functools.partial(parquet, kind=pa.large_string()),
    "x.arrow": arrow,
    "dictionary.arrow": functools.partial(arrow, kind=pa.dictionary(pa.int32(), pa.string())),
    "x.feather": functools.partial(arrow, new=pa.ipc.new_file),
}


def documents(corpus, splits=SPLITS):
    """Returns the decoded documents of the given splits."""
    parts = [getattr(corpus, split) for split in splits]
    assert all(isinstance(part, Pieces) for part in parts)
    return [corpus.vocab.decode(document) for part in parts for document in part]


# --------------------------------------------------------------------------------------
# Compressed text.


@pytest.mark.parametrize("kind", ["byte", "char", "word"])
@pytest.mark.parametrize("end", [*COMPRESS, ".zip", ".GZ"])
def test_a_compressed_text_is_the_text(tmp_path, kind, end):
    (tmp_path / "x.txt").write_bytes(TEXT)
    plain = find_text(tmp_path / "x.txt", kind=kind)
    path = tmp_path / f"x.txt{end}"
    if end == ".zip":
        zipped(path, {"folder/x": b"\xef\xbb\xbf" + TEXT})
    else:
        path.write_bytes(COMPRESS[end.lower()](b"\xef\xbb\xbf" + TEXT))
    found = find_text(path, tmp_path / "cache", kind=kind)
    assert content(found) == content(plain)
    assert found.protocol == plain.protocol


def test_a_folder_and_an_archive_of_compressed_files_have_the_splits_of_their_names(tmp_path):
    parts = {"train": TEXT, "valid": TEXT[:999], "test": TEXT[:500]}
    folder = tmp_path / "folder"
    folder.mkdir()
    for (split, text), (end, compress) in zip(parts.items(), COMPRESS.items(), strict=False):
        (folder / f"my.{split}.txt{end}").write_bytes(compress(text))
    assert content(find_text(folder, tmp_path / "cache")) == parts
    files = {f"data/my.{s}.txt": text for s, text in parts.items()}
    files |= {"__MACOSX/data/._my.test.txt": b"\0\1", "data/.DS_Store": b"\0"}
    archive = zipped(tmp_path / "all.zip", files)
    assert content(find_text(archive, tmp_path / "cache")) == parts
    several = tmp_path / "several"
    several.mkdir()
    for split, text in parts.items():
        zipped(several / f"{split}.zip", {"1.txt": text[:99], "2.txt": text[99:]})
    found = content(find_text(several, tmp_path / "cache"))
    assert {s: text.replace(b"\n", b"") for s, text in found.items()} == {
        s: text.replace(b"\n", b"") for s, text in parts.items()
    }


def test_several_members_of_a_file_and_nothing_are_read(tmp_path):
    for end, compress in COMPRESS.items():
        path = tmp_path / f"x{end}"
        path.write_bytes(compress(TEXT) + compress(b"end\n"))
        assert b"".join(content(find_text(path, tmp_path / "c")).values()) == TEXT + b"end\n"
        path.write_bytes(compress(b""))
        assert refused(lambda p=path: find_text(p, tmp_path / "c")).startswith(
            f"{path}: the train split is empty"
        )


@pytest.mark.parametrize("end", [*COMPRESS, ".zip"])
@pytest.mark.parametrize("fault", ["truncated", "damaged", "of another kind", "empty"])
def test_a_file_that_cannot_be_unpacked_is_one_line_of_error(tmp_path, end, fault):
    if end == ".lzma" and fault == "damaged":
        pytest.skip("the format has no checksum")
    noise = np.random.default_rng(0).integers(97, 122, 40_000, np.uint8).tobytes()
    path = tmp_path / f"x.txt{end}"
    if end == ".zip":
        zipped(path, {"x.txt": noise})
    else:
        path.write_bytes(COMPRESS[end](noise))
    whole = path.read_bytes()
    path.write_bytes({
        "truncated": whole[: len(whole) // 2],
        "damaged": whole[:9000] + bytes(64) + whole[9064:],
        "of another kind": TEXT,
        "empty": b"",
    }[fault])  # fmt: skip
    if fault == "empty" and end == ".gz":  # gzip unpacks an empty file to an empty text
        assert "the train split is empty" in refused(lambda: find_text(path, tmp_path / "c"))
        return
    message = refused(lambda: find_text(path, tmp_path / "c"))
    assert message.startswith(str(path))
    assert "cannot be read (" in message or "split is empty" in message
    assert "\n" not in message
    assert not list((tmp_path / "c" / "unpacked").glob("text-*"))


@pytest.mark.parametrize("end", [*COMPRESS, ".zip"])
def test_a_bomb_is_refused_before_much_is_written(tmp_path, end, monkeypatch):
    monkeypatch.setattr(stored, "BOMB", 1 << 20)
    path, bomb = tmp_path / f"x.txt{end}", b"a b\n" * (1 << 20)
    if end == ".zip":
        zipped(path, {"x.txt": bomb})
    else:
        path.write_bytes(COMPRESS[end](bomb))
    written, check = list[int](), stored.check_unpacked_size

    def noted(n, *args):
        written.append(n)
        check(n, *args)

    monkeypatch.setattr(stored, "check_unpacked_size", noted)
    assert " bytes or more from " in refused(lambda: find_text(path, tmp_path / "c"))
    assert max(written) <= (4 << 20 if end == ".zip" else 3 << 19)
    monkeypatch.setattr(stored, "RATIO", 1e6)
    assert sum(map(len, content(find_text(path, tmp_path / "c")).values())) == len(bomb)


@pytest.mark.parametrize("form", ["encrypted", "no text"])
def test_an_archive_that_is_not_read_says_why(tmp_path, form):
    names = ("a.png", "b.exe") if form == "no text" else ("x.txt",)
    path = zipped(tmp_path / "x.zip", dict.fromkeys(names, TEXT))
    if form == "encrypted":
        raw = bytearray(path.read_bytes())
        raw[raw.rindex(b"PK\1\2") + 8] |= 1
        path.write_bytes(raw)
    message = refused(lambda: find_text(path, tmp_path / "c"))
    expected = {
        "encrypted": "x.zip, x.txt: cannot be read (File 'x.txt' is encrypted, password required",
        "no text": "x.zip: has no *.txt file, and none of .jsonl",
    }
    assert expected[form] in message


@pytest.mark.parametrize("kind", ["char", "word"])
def test_a_compressed_text_that_is_no_utf8_names_the_users_file(tmp_path, kind):
    path = tmp_path / "x.txt.gz"
    for bad, fault in (
        (b"caf\xe9 au lait\n", "byte 303: not UTF-8"),
        (b"\0", "byte 300: the char"),
    ):
        path.write_bytes(gzip.compress(TEXT[:300] + bad + TEXT))
        assert refused(lambda: find_text(path, tmp_path / "c", kind=kind)).startswith(
            f"{path}, {fault}"
        )
    path.write_bytes(gzip.compress(TEXT.decode().encode("utf-16")))
    assert refused(lambda: find_text(path, tmp_path / "c")).startswith(f"{path}: is UTF-16 text")


def test_zstandard_without_its_package_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "x.txt.zst").write_bytes(zstd.compress(TEXT))
    monkeypatch.setitem(sys.modules, zstd.__name__, None)
    assert "pip install '.[zstd]'" in refused(
        lambda: find_text(tmp_path / "x.txt.zst", tmp_path / "c")
    )


# --------------------------------------------------------------------------------------
# Records.


@pytest.mark.parametrize("end", ["", ".gz", ".zst", ".zip"])
@pytest.mark.parametrize("form", FORMS)
def test_each_record_is_a_document_with_its_text(tmp_path, form, end):
    path, data = tmp_path / f"{form}{end}", FORMS[form](SONGS)
    if end == ".zip":
        zipped(path, {form: data})
    else:
        path.write_bytes(COMPRESS[end](data) if end else data)
    corpus = load_corpus("text", path, vocab="char", cache_dir=tmp_path / "c")
    assert documents(corpus) == SONGS
    assert corpus.info["documents"] == {"train": 28, "valid": 1, "test": 1}
    assert not list((tmp_path / "c").rglob("table"))


@pytest.mark.parametrize("form", FORMS)
def test_the_field_of_the_text_is_a_setting(tmp_path, form):
    write = comma_separated if form == "X.CSV" else FORMS[form]
    data = write(SONGS, field="body")
    (tmp_path / form).write_bytes(data)
    load = functools.partial(load_corpus, "text", tmp_path / form, cache_dir=tmp_path / "c")
    assert documents(load(field="body")) == SONGS
    message = refused(load)
    assert message.startswith(f"{tmp_path / form}")
    assert "has no field 'text', but " in message
    assert "body; name the field of the text: data.field=NAME" in message


@pytest.mark.parametrize("name", ["x.csv", "x.tsv", "x.tab", "x.psv"])
@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_columns_are_divided_as_the_first_line_is(tmp_path, name, delimiter):
    with open(tmp_path / name, "w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file, delimiter=delimiter)
        rows.writerows([["a, b; c", "text"], *(["1;2|3,4\t5", song] for song in SONGS)])
    corpus = load_corpus("text", tmp_path / name, vocab="char", cache_dir=tmp_path / "c")
    assert documents(corpus) == SONGS


def test_records_in_files_of_splits_keep_their_splits(tmp_path):
    for name, part in (("train-0", SONGS[:9]), ("train-1", SONGS[9:20]), ("test-0", SONGS[20:])):
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress(json_lines(part)))
    corpus = load_corpus("text", tmp_path, valid_fraction=0.2, cache_dir=tmp_path / "c")
    assert documents(corpus) == SONGS
    assert len(corpus.test) == 10
    assert len(corpus.valid) >= 2


@pytest.mark.parametrize("form", ["array", "long array", "object"])
def test_json_of_another_name_is_not_trained_as_characters(tmp_path, form):
    records = [{"text": song} for song in SONGS]
    data = {
        "array": json.dumps(records),
        "long array": "\ufeff" + json.dumps(records, indent=1),
        "object": json.dumps({"cells": records}, indent=1),
    }[form]
    (tmp_path / "x.ipynb").write_text(data, encoding="utf-8")
    load = lambda **options: load_corpus("text", tmp_path, cache_dir=tmp_path / "c", **options)
    assert (
        "x.ipynb: is JSON; let its name end in .jsonl (an object in each line) or .json, or in"
        in (refused(load))
    )
    assert len(load(vocab="byte").train) > len(data) * 0.8


def test_a_list_of_texts_has_a_document_in_each(tmp_path):
    (tmp_path / "x.json").write_text(json.dumps(SONGS))
    corpus = load_corpus("text", tmp_path / "x.json", vocab="char", cache_dir=tmp_path / "c")
    assert documents(corpus) == SONGS


@pytest.mark.parametrize("name", ["data", "x.log", "corpus.gz", "x.rows.xz", "x.zip", "folder"])
def test_records_of_another_name_are_not_trained_as_characters(tmp_path, name):
    data, end = json_lines(SONGS, "content"), pathlib.PurePath(name).suffix
    path = shown = tmp_path / name
    if end == ".zip":
        zipped(path, {"data": data})
        shown = f"{path}, data"
    elif name == "folder":
        path.mkdir()
        (shown := path / "train").write_bytes(data)
    else:
        path.write_bytes(COMPRESS[end](data) if end in COMPRESS else data)
    load = lambda **options: load_corpus("text", path, cache_dir=tmp_path / "c", **options)
    for options in ({}, {"vocab": "char"}, {"field": "content"}):
        message = refused(lambda o=options: load(**o))
        end = end if end in COMPRESS else ""
        assert message == (
            f"{shown}: is JSON; let its name end in .jsonl{end} (an object in each line) or"
            f" .json{end}, or in .txt{end} to train on the characters as they are"
        )
    assert len(load(vocab="byte").train) > len(data) * 0.8
    (tmp_path / "x.txt").write_bytes(data)
    assert load_corpus("text", tmp_path / "x.txt", cache_dir=tmp_path / "c").vocab.kind == "byte"


def test_a_separator_ends_each_record(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(json_lines(SONGS))
    corpus = load_corpus(
        "text",
        tmp_path / "x.jsonl",
        document_separator="<end>",
        valid_fraction=0.2,
        test_fraction=0.2,
        cache_dir=tmp_path / "c",
    )
    assert corpus.train.shared
    whole = b"".join(corpus.vocab.decode_bytes(getattr(corpus, s).ids) for s in SPLITS)
    assert whole.decode() == "".join(f"{song}<end>" for song in SONGS)


def test_no_word_goes_on_in_the_next_record(tmp_path):
    texts = ["the cat", "saw a", "dog"] * 20
    (tmp_path / "x.jsonl").write_bytes(json_lines(texts))
    given = {"vocab": "word", "cache_dir": tmp_path / "c"}
    corpus = load_corpus("text", tmp_path / "x.jsonl", **given)
    assert corpus.vocab.symbols == ["<eos>", "the", "cat", "saw", "a", "dog"]
    assert documents(corpus) == [f"{text}\n" for text in texts]
    corpus = load_corpus("text", tmp_path / "x.jsonl", document_separator=" end", **given)
    assert documents(corpus)[1:4] == ["end saw a end", "end dog end", "end the cat end"]


def test_documents_of_no_or_one_token_are_left_out_and_counted(tmp_path, capsys):
    (tmp_path / "x.jsonl").write_bytes(json_lines(["", *SONGS[:9], "a", *SONGS[9:], ""]))
    corpus = load_corpus("text", tmp_path / "x.jsonl", vocab="char", cache_dir=tmp_path / "c")
    assert documents(corpus) == SONGS
    assert (
        "train split: documents of one token, which has no target, are left out: 1"
        in capsys.readouterr().err
    )


def test_bytes_words_and_lines_are_those_of_each_record_that_is_kept(tmp_path):
    """The numbers of bytes and words are the denominators of bits per byte and word perplexity."""
    texts = ["é", "two words", "é", "and\nthree more", "é"] * 30
    (tmp_path / "x.jsonl").write_bytes(json_lines(texts))
    corpus = load_corpus("text", tmp_path / "x.jsonl", vocab="char", cache_dir=tmp_path / "c")
    for split in SPLITS:
        kept = documents(corpus, [split])
        assert kept, split
        assert corpus.info["bytes"][split] == sum(len(text.encode()) for text in kept)
        assert corpus.info["words"][split] == sum(len(text.split()) for text in kept)
        assert corpus.info["lines"][split] == sum(len(text.splitlines()) for text in kept)


def test_the_same_text_in_other_documents_is_another_corpus(tmp_path):
    whole = "".join(SONGS)
    for n in (30, 40):
        (tmp_path / f"{n}.jsonl").write_bytes(json_lines(
            [whole[i : i + n] for i in range(0, len(whole), n)]
        ))  # fmt: skip
    load = lambda n: load_corpus("text", tmp_path / f"{n}.jsonl", cache_dir=tmp_path / "c")
    assert len(load(30).train) != len(load(40).train)
    assert len(documents(load(30))[0]) == 30


BAD = {
    "not json": ("x.jsonl", b'{"text": "ab"}\n{"text": }\n', "line 2: is not JSON ("),
    "no object": ("x.jsonl", b'{"text": "ab"}\n"ab"\n', "line 2: is 'ab', not an object"),
    "no text": ("x.jsonl", b'{"text": "ab"}\n\n{"text": 3}\n', "line 3: 'text' is 3, not a text"),
    "null": ("x.jsonl", b'{"text": null}\n', "line 1: 'text' is None, not a text"),
    "no field": ("x.jsonl", b'{"text": "a"}\n{"b": "a"}\n', "line 2: has no field 'text', but b"),
    "not utf-8": ("x.jsonl", b'{"text": "a"}\n{"text": "\xe9"}\n', "line 2: is not UTF-8"),
    "surrogate": ("x.jsonl", b'{"text": "\\ud800"}\n', r"line 1: '\ud800' is half of a character"),
    "nul": ("x.jsonl", b'{"text": "a\\u0000b"}\n', "line 1: has the character U+0000"),
    "deep": ("x.jsonl", b"[" * 100_000, "line 1: is not JSON"),
    "digits": ("x.jsonl", b'{"n": ' + b"1" * 5000 + b"}", "line 1: is not JSON"),
    "number": ("x.json", b"42", "record 1: is 42, not an object"),
    "two lists": (
        "x.json", b'{"a": [{"text": "a"}], "b": [{"text": "b"}]}',
        "record 1: has no field 'text', but a, b; name the field",
    ),
    "array in lines": ("x.jsonl", b'[\n{"text": "a"}]', "let the name of one array end in .json"),
    "mixed": ("x.json", b'[{"text": "a"}, "b"]', "record 2: is 'b', not an object"),
    "old Macintosh": ("x.csv", b"id,text\r1,ab\r", "line 1: is not CSV (new-line character"),
    "no columns": ("x.csv", b"", "line 1 (of column names): has no field 'text'"),
    "swapped": ("x.arrow", parquet(SONGS), "is a Parquet table, and cannot be read as .arrow ("),
    "not fetched": (
        "x.parquet", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n",
        "is a Git LFS pointer, which  git lfs pull  replaces with the file, and cannot be read as",
    ),
    "list of texts": ("x.json", b'{"a": ["b"]}', "record 1: has no field 'text', but a"),
    "array": ("x.json", b'[{"text": "a"}, {"text": 3}]', "record 2: 'text' is 3, not a text"),
    "open array": ("x.json", b'[{"text": "a"},', "is not JSON"),
    "few": ("x.csv", b"id,text\n1,ab\n2\n", "line 3: has 1 values for 2 columns"),
    "many": ("x.csv", b"id,text\n1,a, b\n", "line 2: has 3 values for 2 columns"),
    "quote": ("x.csv", b'id,text\n1,"a "b" c"\n', "line 2: is not CSV"),
    "open quote": ("x.csv", b'id,text\n1,"ab\n', "line 2: is not CSV (unexpected end of data)"),
    "capital": (
        "x.csv", b"Nr;Text\n1;ab\n", "but Nr, Text; name the field of the text: data.field=Text",
    ),
    "near": ("x.jsonl", b'{"id": 1, "texts": "ab"}\n', "field of the text: data.field=texts"),
    "colons": ("x.csv", b"id:text\n1:ab\n", "(of column names): has no field 'text', but id:text"),
    "twice": ("x.csv", b"text,text\na,b\n", "line 1 (of column names): names 'text' twice; give"),
    "twice in a table": (
        "x.parquet", written(pa.table([SONGS] * 2, ["text"] * 2)), "names 'text' twice; give each",
    ),
    "parquet": ("x.parquet", b"PAR1 and nothing", "cannot be read as .parquet ("),
    "half parquet": ("x.parquet", parquet(SONGS)[:-9], "cannot be read as .parquet ("),
    "arrow": ("x.arrow", arrow(SONGS)[:-200], "cannot be read as .arrow ("),
    "empty arrow": ("x.arrow", b"", "cannot be read as .arrow ("),
    "numbers": ("x.parquet", parquet([1, 2], kind=pa.int8()), "'text' is a column of int8, not of"),
    "null row": ("x.parquet", parquet(["ab", None]), "row 2: 'text' is None, not a text"),
    "empty": ("x.jsonl", b"\n\n", "has 0 documents for 3 splits"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_record_is_one_line_with_its_file_and_line(tmp_path, name):
    file, data, fault = BAD[name]
    (tmp_path / file).write_bytes(data)
    (tmp_path / f"{file}.gz").write_bytes(gzip.compress(data))
    for path in (tmp_path / file, tmp_path / f"{file}.gz"):
        message = refused(lambda p=path: load_corpus("text", p, cache_dir=tmp_path / "c"))
        assert message.startswith(str(path))
        assert fault in message.replace("x.arrow.gz:", "x.arrow:").replace(".gz:", ":")
        assert "\n" not in message
    assert not list((tmp_path / "c" / "unpacked").glob("text-*")) or name == "empty"


@pytest.mark.parametrize("form", ["x.jsonl", "x.csv"])
def test_a_line_without_end_is_refused_before_it_fills_the_memory(tmp_path, form, monkeypatch):
    monkeypatch.setattr(records, "LONGEST", 1000)
    path = tmp_path / form
    path.write_bytes(b'text\n"' + b"a" * 5000)
    message = refused(lambda: load_corpus("text", path, cache_dir=tmp_path / "c"))
    assert "not JSON" in message or "line 2: has more than 1,000 bytes; divide the" in message
    path.write_bytes(b'text\n"' + b"aaaaaaaa\n" * 5000)
    message = refused(lambda: load_corpus("text", path, cache_dir=tmp_path / "c"))
    assert "not JSON" in message or "is not CSV (field larger than field limit" in message
    assert csv.field_size_limit() == 131072


def test_settings_that_contradict_records_are_refused(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(json_lines(SONGS))
    (tmp_path / "y").mkdir()
    (tmp_path / "y" / "y.txt").write_bytes(TEXT)
    load = functools.partial(load_corpus, "text", cache_dir=tmp_path / "c")
    assert "each record of" in refused(lambda: load(tmp_path, document_files=True))
    assert "is for records (.jsonl, " in refused(lambda: load(tmp_path / "y", field="body"))


def saved(folder: pathlib.Path, songs, parts=2):
    """Writes songs in the format in which Hugging Face's package ``datasets`` saves a data set.

    The data are in ``parts`` files. Beside them is a cache file, whose text is not in the data set.
    """
    folder.mkdir(parents=True)
    names = [f"data-{n:05}-of-{parts:05}.arrow" for n in range(parts)]
    cuts = np.linspace(0, len(songs), parts + 1).astype(int)
    for name, begin, end in zip(names, cuts, cuts[1:], strict=False):
        (folder / name).write_bytes(arrow(songs[begin:end]))
    (folder / "cache-0123456789abcdef.arrow").write_bytes(arrow(["no text of this dataset"] * 9))
    state = {"_data_files": [{"filename": name} for name in names], "_split": folder.name}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {"text": {}}}))


def test_a_saved_dataset_is_read_without_its_cache(tmp_path, capsys):
    saved(tmp_path / "one", SONGS)
    assert documents(load_corpus("text", tmp_path / "one", cache_dir=tmp_path / "c")) == SONGS
    for split, part in (("train", SONGS[:20]), ("validation", SONGS[20:24]), ("test", SONGS[24:])):
        saved(tmp_path / "dict" / split, part)
    (tmp_path / "dict" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    corpus = load_corpus("text", tmp_path / "dict", cache_dir=tmp_path / "c")
    assert documents(corpus) == SONGS
    assert corpus.info["documents"] == {"train": 20, "valid": 4, "test": 6}
    said = capsys.readouterr().err
    assert "valid = validation/data-00000-of-00002.arrow" in said
    assert "left out" not in said
    (tmp_path / "dict" / "test" / "data-00001-of-00002.arrow").unlink()
    assert "lists data-00001-of-00002.arrow, which is missing" in refused(
        lambda: find_text(tmp_path / "dict", tmp_path / "c")
    )
    state = json.loads((tmp_path / "one" / "state.json").read_text())
    state["_indices_data_files"] = [{"filename": "indices.arrow"}]
    (tmp_path / "one" / "state.json").write_text(json.dumps(state))
    assert "flatten_indices()" in refused(lambda: find_text(tmp_path / "one", tmp_path / "c"))


def test_tables_without_pyarrow_name_the_extra(tmp_path, monkeypatch):
    (tmp_path / "x.parquet").write_bytes(parquet(SONGS))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    message = refused(lambda: find_text(tmp_path / "x.parquet", tmp_path / "c"))
    assert "pip install '.[parquet]'" in message
