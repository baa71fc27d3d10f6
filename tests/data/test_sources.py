"""Each corpus reads its text in every documented file format, and refuses unsafe or wrong files."""

import concurrent.futures
import hashlib
import http.server
import io
import os
import random
import re
import sysconfig
import tarfile
import threading
import time
import typing
import zipfile
from typing import Any

import numpy as np
import pytest
from corpus_files import (
    PTB,
    content,
    files_in,
    find_ptb,
    find_text,
    ptb_archive,
    publish,
    refused,
    write_archive,
    write_folder,
)

from txl_jax.config import ConfigError
from txl_jax.config.data import is_url
from txl_jax.data.corpus import load_corpus
from txl_jax.data.errors import DataError
from txl_jax.data.sources import archives, stdlib
from txl_jax.data.sources.archives import extract, plain_names
from txl_jax.data.sources.cache import make_folder, unfinished_download
from txl_jax.data.sources.download import download, download_folder
from txl_jax.data.sources.source import (
    SPLITS,
    ByteRange,
    is_file,
    join_files,
    merge_small,
    read,
    slice_text,
    text_size,
)

PTB_MD5 = {split: hashlib.md5(content).hexdigest() for split, content in PTB.items()}


def unpack(archive, into, *selection):
    make_folder(into, lambda folder: extract(archive, folder, *selection))


# --------------------------------------------------------------------------------------
# Penn Treebank.


@pytest.mark.parametrize(
    ("pattern", "inside"),
    [
        ("ptb.{}.txt", "."),
        ("{}.txt", "."),
        ("ptb.{}.txt", "data"),
        ("ptb.{}.txt", "simple-examples/data"),
    ],
)
def test_ptb_from_a_folder(tmp_path, pattern, inside):
    write_folder(tmp_path / inside, pattern)
    source = find_ptb(str(tmp_path), tmp_path / "cache")
    assert content(source) == PTB
    assert source.counted == SPLITS
    assert not source.published
    assert source.label == (
        "Penn Treebank, not the published data"
        " (other md5: ptb.train.txt, ptb.valid.txt, ptb.test.txt)"
    )


def test_ptb_from_its_archive_is_as_from_its_folder(tmp_path, monkeypatch):
    publish(monkeypatch, md5=PTB_MD5)
    source = find_ptb(str(ptb_archive(tmp_path / "simple-examples.tgz")), tmp_path / "cache")
    assert content(source) == PTB
    assert source.published
    assert source.label == "Penn Treebank, published data (md5 checked)"
    folder = write_folder(tmp_path / "folder", "{}.txt")
    assert source.hash() == find_ptb(str(folder), tmp_path / "cache").hash()


def test_ptb_archives_with_other_text_are_kept_apart(tmp_path):
    one = ptb_archive(tmp_path / "one.tgz")
    two = ptb_archive(tmp_path / "two.tgz", {**PTB, "test": b"other\n"})
    assert content(find_ptb(str(one), tmp_path / "cache")) == PTB
    assert content(find_ptb(str(two), tmp_path / "cache"))["test"] == b"other\n"


def test_a_file_of_an_archive_is_never_written_outside_of_the_cache(tmp_path):
    archive = ptb_archive(tmp_path / "evil.tgz", inside="../../ptb.{}.txt")
    cache = tmp_path / "a" / "b" / "cache"
    assert content(find_ptb(str(archive), cache)) == PTB
    assert {*tmp_path.rglob("ptb.*.txt")} == {*(cache / "unpacked").rglob("ptb.*.txt")}


def test_a_link_in_an_archive_is_not_read(tmp_path):
    (tmp_path / "secret").write_text("x")
    with tarfile.open(tmp_path / "link.tgz", "w:gz") as tar:
        member = tarfile.TarInfo("data/ptb.train.txt")
        member.type, member.linkname = tarfile.SYMTYPE, "other.txt"
        tar.addfile(member)
    message = refused(lambda: find_ptb(str(tmp_path / "link.tgz"), tmp_path / "cache"))
    assert message.endswith("link.tgz: there is no ptb.train.txt in this archive")


TEXTS = {n: random.Random(n).choices(range(97, 101), k=3000) for n in ("a.txt", "b.txt")}


def archive_of(kind: str) -> bytes:
    """Returns an archive of two texts, as bytes: a zip file if ``kind`` is "zip", else a tar file.

    For a tar file, ``kind`` is the compression, such as "gz"; "" means no compression.
    """
    whole = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(whole, "w", zipfile.ZIP_DEFLATED) as out:
            for name, text in TEXTS.items():
                out.writestr(name, bytes(text))
    else:
        mode: Any = f"w:{kind}"
        with tarfile.open(fileobj=whole, mode=mode) as out:
            for name, text in TEXTS.items():
                member = tarfile.TarInfo(name)
                member.size = len(text)
                out.addfile(member, io.BytesIO(bytes(text)))
    return whole.getvalue()


def damaged(whole: bytes, seed: int) -> bytes:
    """Returns the bytes truncated at a random place, or with one random bit flipped."""
    rng, content = random.Random(seed), bytearray(whole)
    if seed % 2:
        return whole[: rng.randrange(len(whole))]
    content[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
    return bytes(content)


@pytest.mark.parametrize("kind", ["", "gz", "bz2", "xz", "zip"])
def test_a_damaged_archive_is_refused_in_one_line_or_gives_its_text(tmp_path, kind):
    whole, refusals = archive_of(kind), 0
    for seed in range(80):
        archive, into = tmp_path / "archive", tmp_path / f"{seed}"
        archive.write_bytes(damaged(whole, seed))
        message = None
        try:
            unpack(archive, into, plain_names(list(TEXTS)), list(TEXTS))
        except DataError as error:
            message, refusals = str(error), refusals + 1
        if message is None:  # no error: the damage may be in a date or in padding
            same = [(into / name).read_bytes() == bytes(text) for name, text in TEXTS.items()]
            assert all(same) or (kind == "" and seed % 2 == 0)  # plain tar has no checksum of texts
        else:
            assert message.startswith(f"{archive}: ")
            assert "\n" not in message
            assert not into.exists()
    assert refusals >= (30 if kind == "" else 70)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_not_blamed_on_the_archive(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "open", lambda *args: io.FileIO("/dev/full", "w"), raising=False)
    archive = ptb_archive(tmp_path / "ptb.tgz")
    message = refused(lambda: unpack(archive, tmp_path / "i", lambda name: "a.txt", []))
    assert message == (
        f"cannot write in the cache folder {tmp_path}/i.unfinished (No space left on device); set"
        " data.cache_dir or $TXL_DATA_DIR to a folder that can be written"
    )


def test_a_damaged_archive_is_refused_with_what_to_do(tmp_path):
    def message(kind, change):
        (tmp_path / "a").write_bytes(change(bytearray(archive_of(kind))))
        return refused(lambda: unpack(tmp_path / "a", tmp_path / "i", plain_names([]), []))

    def second_header(content):
        content[512 + 3072 + 3] ^= 1  # after the first header and its 3,000 bytes of text
        return content

    ends = "); name an undamaged archive, or the folder of its files, in data.path"
    start = f"{tmp_path / 'a'}: cannot be unpacked ("
    for kind, change, reason in (
        ("zip", lambda content: content[:-50], "File is not a zip file"),
        ("", lambda content: content[:100], "it is damaged, or is neither a tar nor a zip archive"),
        ("", second_header, "a header in it is damaged"),
        ("gz", lambda content: content[:-9],
         "Compressed file ended before the end-of-stream marker was reached"),
    ):  # fmt: skip
        assert message(kind, change) == start + reason + ends


def test_ptb_says_what_is_missing(tmp_path):
    missing = str(tmp_path / "nowhere")
    assert refused(lambda: find_ptb(missing, tmp_path)) == (
        f"data.path = {missing!r}: there is no such file or folder"
    )
    folder = write_folder(tmp_path / "part", "ptb.{}.txt", {"train": b"a\n", "test": b"a\n"})
    assert refused(lambda: find_ptb(str(folder), tmp_path)) == (
        f"ptb: {folder} has ptb.train.txt but no ptb.valid.txt"
    )
    empty = tmp_path / "empty"
    empty.mkdir()
    assert refused(lambda: find_ptb(str(empty), tmp_path)) == (
        f"ptb: there is none of simple-examples.tgz, ptb.train.txt, train.txt in {empty}; name one"
        " of these files, or its folder"
    )
    archive = write_archive(tmp_path / "a.tgz", {"data/ptb.train.txt": b"a\n"})
    assert refused(lambda: find_ptb(str(archive), tmp_path)) == (
        f"{archive}: there is no ptb.valid.txt in this archive"
    )
    (tmp_path / "no.tgz").write_bytes(b"not an archive")
    assert refused(lambda: find_ptb(str(tmp_path / "no.tgz"), tmp_path)).startswith(
        f"{tmp_path / 'no.tgz'}: cannot be unpacked ("
    )
    (folder / "ptb.valid.txt").write_bytes(b"")
    assert "the valid split is empty" in refused(lambda: find_ptb(str(folder), tmp_path))


def test_ptb_is_downloaded_once_and_its_hashes_are_enforced(tmp_path, served, monkeypatch):
    folder, url = served
    archive = ptb_archive(folder / "simple-examples.tgz")
    publish(monkeypatch, url=f"{url}/simple-examples.tgz")
    cache = tmp_path / "cache"
    assert refused(lambda: find_ptb(None, cache)) == (
        f"{url}/simple-examples.tgz: the md5 of ptb.train.txt in it is not the published one; the"
        " download was deleted; get the file from elsewhere for data.path"
    )
    assert not files_in(cache)
    publish(monkeypatch, md5=PTB_MD5)
    assert content(find_ptb(None, cache)) == PTB
    archive.unlink()
    assert find_ptb(None, cache).published
    (cache / "downloads" / "ptb" / "ptb.test.txt").write_bytes(b" a cat \n")
    message = refused(lambda: find_ptb(None, cache).hash())
    assert message.endswith(
        f"delete the folder {cache}/downloads/ptb, and the next run downloads it again"
    )


# --------------------------------------------------------------------------------------
# The user's own text.


def test_a_file_is_cut_from_its_end_at_characters_or_lines(tmp_path):
    file = tmp_path / "book.txt"
    file.write_text("".join(f"{i} é 猫 😀\n" for i in range(300)))
    whole = file.read_bytes()
    for kind in ("byte", "char", "word"):
        for valid, test in ((0.1, 0.2), (0.11, 0.07), (0.013, 0.017)):
            source = find_text(file, kind=kind, valid_fraction=valid, test_fraction=test)
            got = content(source)
            assert b"".join(got[split] for split in SPLITS) == whole
            slack = 16 if kind == "word" else 3
            assert 0 <= test * len(whole) - len(got["test"]) + 0.5 <= slack + 1
            assert abs(valid * len(whole) - len(got["valid"])) <= slack + 1
            for split in SPLITS:
                got[split].decode()
                assert kind != "word" or got[split].endswith(b"\n")


def test_a_cut_that_falls_on_a_boundary_stays_there(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"123456789\n" * 10)
    for kind in ("byte", "word"):
        source = find_text(tmp_path / "a.txt", kind=kind, valid_fraction=0.2, test_fraction=0.1)
        assert [len(content(source)[split]) for split in SPLITS] == [70, 20, 10]


def test_a_folder_with_splits_is_used_as_it_is(tmp_path):
    write_folder(tmp_path, "{}.txt")
    (tmp_path / "other.txt").write_text("not read")
    source = find_text(tmp_path)
    assert content(source) == PTB
    assert not source.protocol


def test_any_other_folder_is_its_texts_one_after_another(tmp_path):
    for name, data in (("b.txt", "bb"), ("a.txt", "aaaa\n"), ("c.txt", "ccc"), ("d.md", "no")):
        (tmp_path / name).write_text(data * 9)
    source = find_text(tmp_path)
    expected = b"aaaa\n" * 9 + b"bb" * 9 + b"\n" + b"ccc" * 9
    assert b"".join(content(source).values()) == expected


def test_text_says_what_is_missing(tmp_path):
    assert refused(find_text) == (
        "data.name = 'text': needs data.path=FILE_OR_FOLDER, or data.url and data.hash"
    )
    nothing = f"{tmp_path}: has no *.txt file, and none of .jsonl, "
    assert refused(lambda: find_text(tmp_path)).startswith(nothing)
    (tmp_path / "empty").write_text("")
    assert refused(lambda: find_text(tmp_path / "empty")) == (
        f"{tmp_path / 'empty'}: the train split is empty; give longer texts, more lines or"
        " documents (check separators), or files of splits"
    )
    wrong = tmp_path / "Emtpy"
    assert refused(lambda: find_text(wrong)) == (
        f"data.path = '{wrong}': there is no such file or folder; the nearest is"
        f" '{tmp_path / 'empty'}'"
    )
    hub = (
        "for a dataset of the Hugging Face Hub run load_dataset(NAME).save_to_disk(FOLDER), and"
        " name FOLDER"
    )
    assert refused(lambda: find_text("owner/name")) == (
        f"data.path = 'owner/name': there is no such file or folder; {hub}"
    )
    for address in ("hf://datasets/owner/name", "https://huggingface.co/datasets/owner/name"):
        with pytest.raises(ConfigError, match=re.escape(f"data.hash; {hub} (write ./h")):
            find_text(address)
    pattern = refused(lambda: find_text(tmp_path / "empt*"))
    assert "; patterns are not expanded: name a folder of" in pattern
    (tmp_path / "short").write_text("abc")
    assert refused(lambda: find_text(tmp_path / "short")) == (
        f"{tmp_path / 'short'}: the valid split is empty; give longer texts, more lines or"
        " documents (check separators), or files of splits"
    )
    (tmp_path / "line").write_text("one line only " * 9)


def test_words_that_cannot_be_cut_at_line_ends_are_refused(tmp_path):
    one, uneven = tmp_path / "one", tmp_path / "uneven"
    one.write_text("one line only " * 90)
    uneven.write_text("long " * 900 + "\nb\nc")
    for path in (one, uneven):
        assert refused(lambda p=path: find_text(p, kind="word")) == (
            f"{path}: the valid split is empty; give longer texts, more lines or documents"
            " (check separators), or files of splits"
        )
    assert content(find_text(one))["train"]


@pytest.mark.parametrize("name", ["text", "ptb", "wt103", "lm1b", "enwik8", "text8"])
def test_a_path_that_is_no_regular_file_is_refused_and_never_opened(tmp_path, name):
    def message(path):
        return refused(lambda: load_corpus(name, path, cache_dir=tmp_path / "cache"))

    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "nothing").symlink_to("nowhere")
    fix = "is neither a regular file nor a folder; write the text to a regular file and name that"
    start = f"data.path = '{tmp_path}/"
    assert message(tmp_path / "pipe") == f"{start}pipe': {fix} file"
    assert message("/dev/zero") == f"data.path = '/dev/zero': {fix} file"
    for link in ("loop", "nothing"):
        assert message(tmp_path / link) == f"{start}{link}': there is no such file or folder"


@pytest.mark.parametrize(
    ("name", "link"),
    [
        ("text", "test.txt"),
        ("tokens", "test.npy"),
        ("tokens", "train.starts.npy"),
        ("ptb", "test.txt"),
    ],
)
def test_a_link_to_nothing_is_not_an_absent_file(tmp_path, name, link):
    """If a broken link counted as no file, other text would, for example, become the test split."""
    for split in ("train", "valid"):
        (tmp_path / f"{split}.txt").write_text("a line\n" * 100)
        np.save(tmp_path / f"{split}.npy", np.arange(100))
    (tmp_path / link).symlink_to("nowhere")
    message = refused(lambda: load_corpus(name, tmp_path, cache_dir=tmp_path / "cache"))
    fix = "remove the link, or copy the file there"
    assert message == f"{tmp_path / link}: is a link to a file that does not exist; {fix}"


def test_a_file_that_cannot_be_looked_at_is_no_absent_file(tmp_path, monkeypatch):
    def denied(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(tmp_path), "is_symlink", denied)
    message = refused(lambda: is_file(tmp_path / "a.txt"))
    assert message == f"{tmp_path}/a.txt: cannot be read (Permission denied)"


def test_a_folder_that_holds_itself_is_read_once(tmp_path):
    (tmp_path / "a.txt").write_text("a line\n" * 100)
    (tmp_path / "loop.txt").symlink_to(".")
    assert b"".join(content(find_text(tmp_path)).values()) == b"a line\n" * 100


def test_a_download_must_have_its_hash(tmp_path, served):
    folder, url = served
    data = b"some text of a server\n" * 50
    (folder / "t.txt").write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    cache = tmp_path / "cache"
    wrong = "sha256:" + "0" * 64
    assert refused(lambda: find_text(None, cache, url=f"{url}/t.txt", hash=wrong)) == (
        f"{url}/t.txt: its hash is sha256:{digest}, and must be {wrong}; the download was deleted"
    )
    assert not files_in(cache)
    right = {"url": f"{url}/t.txt", "hash": f"sha256:{digest}"}
    assert b"".join(content(find_text(None, cache, **right)).values()) == data
    (kept,) = files_in(cache)
    kept.write_bytes(b"damaged")
    assert b"".join(content(find_text(None, cache, **right)).values()) == data
    (folder / "t.txt").unlink()
    assert b"".join(content(find_text(None, cache, **right)).values()) == data
    kept.unlink()
    assert refused(lambda: find_text(None, cache, **right)) == (
        f"cannot download {url}/t.txt (HTTP Error 404: File not found); fetch the file by other"
        " means, and name it or its folder in data.path"
    )
    assert refused(lambda: find_text(None, cache, url=f"{url}/t.txt")) == (
        f"data.url = '{url}/t.txt': needs data.hash to check the download"
    )


@pytest.mark.parametrize(
    "url",
    ["file:///etc/passwd", "ftp://example.com/a", "example.com/a", "http://", "https:///a.txt",
     "http://[::1/a", "http://example.com:99999/a", "http://example.com:0/a",
     "http://example.com:port/a", "http://example.com/a b", "http://example.com/bü", "http:a",
     "http://me:secret@example.com/a", "http://example.com/\n"],
)  # fmt: skip
def test_an_invalid_address_is_refused_before_anything_is_made(tmp_path, url):
    cache = tmp_path / "cache"
    with pytest.raises(ConfigError) as error:
        load_corpus("text", url=url, hash="md5:" + "0" * 32, cache_dir=cache)
    assert str(error.value) == (
        f"config key data.url = {url!r}: must be http:// or https://, a host, perhaps a port from"
        " 1 to 65535, and a path, in ASCII without spaces, user name or password"
    )
    assert not cache.exists()


@pytest.mark.parametrize(
    "url", ["http://a.com", "https://a_b.com:8443/x%20y?z=1#t", "HTTP://[::1]:1/a"]
)
def test_valid_addresses_are_accepted(url):
    assert is_url(url)


# --------------------------------------------------------------------------------------
# Interrupted downloads.


class Breaking(http.server.BaseHTTPRequestHandler):
    """An HTTP server whose answers can break off, as in an interrupted download.

    It serves ``data``, or the rest of it from a requested byte on. Each answer takes the next byte
    offset from ``stops`` and ends there. When ``stops`` is empty, answers are complete.
    """

    data = b""
    stops: typing.ClassVar[list[int]] = []
    ranges = True
    asked: typing.ClassVar[list[str | None]] = []

    def do_GET(self):
        asked = self.headers.get("Range")
        self.asked.append(asked)
        start = int(asked[len("bytes=") : -1]) if asked and self.ranges else 0
        if start >= len(self.data):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(self.data) - 1}/x")
        self.send_header("Content-Length", str(len(self.data) - start))
        self.end_headers()
        stop = self.stops.pop(0) if self.stops else len(self.data)
        self.wfile.write(self.data[start:stop])

    def log_message(self, *args):
        pass


@pytest.fixture
def breaking():
    handler = type("Handler", (Breaking,), {"asked": [], "stops": [], "data": TEXT})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        yield handler, f"http://127.0.0.1:{server.server_port}/t.txt"
        server.shutdown()
        thread.join()


TEXT = bytes(random.Random(0).randbytes(3 << 20))


def fetch(url, tmp_path):
    digest = hashlib.sha256(TEXT).hexdigest()
    return download(url, tmp_path / "t.txt", f"sha256:{digest}")


def parts(folder):
    return sorted(folder.glob("*.part"))


def test_an_interrupted_download_goes_on_where_it_stopped(tmp_path, breaking):
    handler, url = breaking
    handler.stops += [2_000_000, 2_500_000]
    for came, asked in ((2_000_000, None), (2_500_000, "bytes=2000000-")):
        message = refused(lambda: fetch(url, tmp_path))
        received = f"{url}: {came} of {len(TEXT)} bytes were received"
        assert message == f"{received}; try again; the partial download is kept"
        assert handler.asked[-1] == asked
        assert [part.stat().st_size for part in parts(tmp_path)] == [came]
        assert not (tmp_path / "t.txt").exists()
    assert fetch(url, tmp_path).read_bytes() == TEXT
    assert handler.asked[-1] == "bytes=2500000-"
    assert not parts(tmp_path)


@pytest.mark.parametrize("left", ["other", "longer", "no ranges"])
def test_a_download_that_cannot_go_on_starts_again(tmp_path, breaking, left):
    handler, url = breaking
    handler.stops.append(1_000_000)
    refused(lambda: fetch(url, tmp_path))
    (part,) = parts(tmp_path)
    if left == "other":
        part.write_bytes(b"of another version" * 9)
    elif left == "longer":
        part.write_bytes(TEXT + b"more")
    else:
        handler.ranges = False
    assert fetch(url, tmp_path).read_bytes() == TEXT
    assert not parts(tmp_path)


def test_a_download_without_a_hash_is_never_put_together(tmp_path, breaking):
    handler, url = breaking
    handler.stops.append(1_000_000)
    extract = lambda file, folder: (folder / "t").write_bytes(file.read_bytes())
    fetch = lambda: download_folder(url, tmp_path / "f", extract)
    refused(fetch)
    assert fetch() == {"t": hashlib.sha256(TEXT).hexdigest()}
    assert handler.asked == [None, None]


def test_what_another_process_is_downloading_is_waited_for(tmp_path, breaking):
    handler, url = breaking
    with concurrent.futures.ThreadPoolExecutor() as pool:
        with unfinished_download(tmp_path / "t.txt") as other:
            other.write_bytes(TEXT[:1000])
            waiting = pool.submit(fetch, url, tmp_path)
            time.sleep(0.3)
            assert not waiting.done()
            assert handler.asked == []
        assert waiting.result(60).read_bytes() == TEXT
    assert handler.asked == ["bytes=1000-"]


def test_a_users_file_beside_a_download_is_never_removed(tmp_path, breaking):
    _, url = breaking
    mine = [tmp_path / f"t.txt.{rest}" for rest in ("part-1", "part.old", "unfinished")]
    for number, path in enumerate(mine):
        path.write_bytes(b"mine" * (number + 1))
    assert fetch(url, tmp_path).read_bytes() == TEXT
    assert [path.stat().st_size for path in mine] == [4, 8, 12]


@pytest.mark.parametrize(
    ("status", "header", "value"),
    [(200, "Content-Length", "many"), (302, "Location", "http://[::1/a"), (302, "Location", "x://"),
     (302, "Location", "http://a..b/")],
)  # fmt: skip
def test_an_answer_that_makes_no_sense_is_an_error_of_the_download(
    tmp_path, breaking, status, header, value
):
    def do_GET(self):
        self.send_response(status)
        self.send_header(header, value)
        self.end_headers()

    handler, url = breaking
    handler.do_GET = do_GET
    message = refused(lambda: fetch(url, tmp_path))
    assert message.startswith(f"cannot download {url} (")
    assert message.endswith(
        "); fetch the file by other means, and name it or its folder in data.path"
    )
    assert "\n" not in message


def test_a_full_disk_is_not_blamed_on_the_server(tmp_path, breaking, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    _, url = breaking
    monkeypatch.setattr(os, "truncate", full)
    assert refused(lambda: fetch(url, tmp_path)) == (
        f"cannot write in the cache folder {tmp_path} (No space left on device); set"
        " data.cache_dir or $TXL_DATA_DIR to a folder that can be written"
    )


def test_a_wrong_download_is_not_kept_to_go_on_with(tmp_path, breaking):
    handler, url = breaking
    handler.data = TEXT[::-1]
    assert "its hash is sha256:" in refused(lambda: fetch(url, tmp_path))
    assert not files_in(tmp_path)


# --------------------------------------------------------------------------------------
# The standard library.


def test_stdlib_is_the_same_each_time_and_its_splits_share_no_file():
    one, two = stdlib.find(), stdlib.find()
    assert one.hash() == two.hash()
    assert content(one) == content(two)
    assert list(one.files) == sorted(one.files)
    found = {s: {p.path for p in one.splits[s] if not isinstance(p, bytes)} for s in SPLITS}
    assert sum(len(files) for files in found.values()) == len(one.files)
    assert set.union(*found.values()) == set(one.files.values())
    sizes = {split: text_size(one.splits[split]) for split in SPLITS}
    assert 5e6 < sizes["train"] < 9e6
    assert 2e5 < sizes["valid"] < 8e5
    assert 2e5 < sizes["test"] < 8e5


def test_stdlib_splits_and_choice_are_functions_of_the_path_alone():
    chosen = {p: stdlib.split_of(p) for p in ("ast.py", "argparse.py", "os.py", "json/tool.py")}
    assert chosen == {"ast.py": "test", "argparse.py": "valid", "os.py": "train",
                      "json/tool.py": "test"}  # fmt: skip
    taken = {"os.py", "json/tool.py", "re/_parser.py"}
    others = {"site-packages/os.py", "json/tests/a.py", "test/a.py", "encodings/cp1252.py",
              "_sysconfigdata__linux_x86_64-linux-gnu.py", "idlelib/run.py", "sitecustomize.py",
              "turtle.py", "unittest/test/a.py"}  # fmt: skip
    assert {path for path in taken | others if stdlib.is_taken(path)} == taken


def test_stdlib_files_are_joined_with_one_line_feed():
    source = stdlib.find()
    files = [path for path in source.files if stdlib.split_of(path) == "test"]
    expected = b"\n".join(source.files[path].read_bytes() for path in files)
    assert content(source)["test"] == expected


def test_stdlib_without_source_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "python.zip"))
    assert refused(stdlib.find) == (
        f"stdlib: there is no source code in {tmp_path}/python.zip (zipped or stripped?); use"
        " another Python, or data.name='text' with a data.path"
    )


# --------------------------------------------------------------------------------------
# Pieces.


def test_any_part_of_a_text_in_pieces_is_that_part(tmp_path):
    (tmp_path / "a").write_bytes(bytes(range(40)))
    (tmp_path / "b").write_bytes(bytes(range(40, 70)))
    pieces = [
        *slice_text([ByteRange.whole(tmp_path / "a")], 0, 40),
        b"--",
        ByteRange.whole(tmp_path / "b"),
    ]
    whole = bytes(range(40)) + b"--" + bytes(range(40, 70))
    assert b"".join(read(pieces)) == whole
    rng = random.Random(0)
    for _ in range(200):
        a, b = sorted((rng.randrange(73), rng.randrange(73)))
        part = slice_text(pieces, a, b)
        assert b"".join(read(part)) == whole[a:b]
        assert text_size(part) == b - a


def test_files_are_joined_at_line_ends(tmp_path):
    files = []
    for i, data in enumerate([b"a", b"", b"b\n", b"", b"c\n\n", b"d"]):
        files.append(tmp_path / str(i))
        files[-1].write_bytes(data)
    assert b"".join(read(join_files(files))) == b"a\nb\nc\n\nd"
    assert join_files(files[1:2]) == []


def test_small_parts_are_put_together():
    parts = [bytes([i % 256]) * 1000 for i in range(1000)]
    blocks = list(merge_small(parts))
    assert b"".join(blocks) == b"".join(parts)
    assert all(64 * 1024 <= len(block) <= 1 << 20 for block in blocks)
