"""Writes small corpora in their published formats, and calls the functions that find a corpus."""

import dataclasses
import functools
import http.server
import io
import tarfile
import threading
from pathlib import Path

import pytest

from txl_jax.config import DataConfig
from txl_jax.data.errors import DataError
from txl_jax.data.sources import benchmarks, text
from txl_jax.data.sources.source import SPLITS

PTB = {"train": b" the cat <unk> \n the dog \n", "valid": b" the <unk> \n", "test": b" a dog \n"}


def find_ptb(path, cache):
    return benchmarks.CORPORA["ptb", None].find(None if path is None else str(path), cache)


def publish(monkeypatch, name="ptb", **changes):
    """Changes fields of a corpus's description in ``CORPORA`` for one test."""
    known = dataclasses.replace(benchmarks.CORPORA[name, None], **changes)
    monkeypatch.setitem(benchmarks.CORPORA, (name, None), known)


def files_in(folder):
    return [p for p in folder.rglob("*") if p.is_file() and p.suffix != ".lock"]


def content(source):
    return {split: b"".join(source.blocks(split)) for split in SPLITS}


def write_folder(folder: Path, pattern: str, texts=PTB) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for split, data in texts.items():
        (folder / pattern.format(split)).write_bytes(data)
    return folder


def write_archive(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def ptb_archive(path: Path, texts=PTB, inside="./simple-examples/data/ptb.{}.txt") -> Path:
    return write_archive(path, {inside.format(split): data for split, data in texts.items()})


def refused(call) -> str:
    with pytest.raises(DataError) as error:
        call()
    return str(error.value)


@pytest.fixture
def served(tmp_path):
    """A folder, and the URL at which a local HTTP server serves it."""
    folder = tmp_path / "served"
    folder.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    handler = functools.partial(Quiet, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        yield folder, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def find_text(path=None, cache=Path("unused"), kind="byte", **settings):
    data = DataConfig(name="text", path=None if path is None else str(path), **settings)
    return text.find(data, kind, cache)
