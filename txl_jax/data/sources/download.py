"""Downloads, resumed after an interruption and checked by hash."""

import contextlib
import http.client
import json
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from absl import logging

from txl_jax.data.errors import DataError
from txl_jax.data.sources.archives import Check, unpack
from txl_jax.data.sources.partial import file_in_the_making, writing
from txl_jax.data.sources.progress import bar
from txl_jax.data.sources.source import file_hash

ORIGIN = "origin.json"
"""File of a downloaded folder that says where it is from and what came."""


def check_hash(expected: str, what: str, whose: str = "as data.hash says") -> Check:
    """A check: the file has the hash ``md5:…`` or ``sha256:…``."""
    kind, _, digits = expected.partition(":")

    def check(path: Path) -> None:
        found = file_hash(path, kind)
        if found != digits:
            raise DataError(
                f"{what}: its {kind} is {found}, not {digits} {whose}; nothing of it was kept"
            )

    return check


def download(url: str, into: Path, check: Check | None = None) -> Path:
    """``into``, a file with what ``url`` gives; fetched only if it is not there.

    The download lies beside ``into`` under another name until it is complete and checked, so
    an interrupted one is never used. The next call goes on from where it stopped if there is a
    check, and starts again if there is none.

    Args:
      url: as :func:`txl_jax.config.data.is_url` allows.
      into: the file that is wanted.
      check: of its content. A file that is there already and fails is fetched anew.

    Raises:
      DataError: the server cannot be reached, its answer is not complete, ``check`` refused the
        file, or it cannot be written.
    """
    if into.exists():
        with contextlib.suppress(DataError):
            if check is not None:
                check(into)
            return into
    with downloaded(url, into, check) as file:
        os.replace(file, into)
    return into


def download_folder(
    url: str,
    into: Path,
    wanted: Callable[[str], str | None],
    required: Sequence[str],
    check_archive: Check | None = None,
    check_folder: Check = lambda folder: None,
) -> dict[str, str]:
    """Makes the folder ``into`` of files in the archive at ``url``, if it is not there.

    Nothing is kept of an archive that fails a check. Arguments as of :func:`unpack`.

    Returns:
      The sha256 of each file when it came, by its path in the folder; :data:`ORIGIN` there holds
      them too, with the archive's.
    """
    if not into.is_dir():
        name = into.with_name(os.path.basename(urllib.parse.urlsplit(url).path))
        with downloaded(url, name, check_archive) as archive:

            def check(folder: Path) -> None:
                check_folder(folder)
                write_origin(folder, url, file_hash(archive))

            unpack(archive, into, wanted, required, check, what=url)
    return read_origin(into)["files"]


def write_origin(folder: Path, url: str, sha256: str) -> None:
    """Writes :data:`ORIGIN`: where the files of a folder are from, and what they are."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != ORIGIN)
    sums = {path.relative_to(folder).as_posix(): file_hash(path) for path in files}
    record = {"url": url, "sha256": sha256, "files": sums}
    (folder / ORIGIN).write_text(json.dumps(record, indent=1))


def read_origin(folder: Path) -> dict[str, Any]:
    """What :func:`write_origin` wrote. Raises DataError where it cannot be read."""
    try:
        record = json.loads((folder / ORIGIN).read_text())
        return {**record, "files": dict(record["files"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{folder / ORIGIN}: cannot be read ({error}); delete the folder {folder}, it will be"
            " downloaded again"
        ) from error


@contextlib.contextmanager
def downloaded(url: str, name: Path, check: Check | None = None) -> Iterator[Path]:
    """A temporary file beside ``name`` with what ``url`` gives, checked; it is gone at the end.

    Raises:
      DataError: as :func:`download`.
    """
    with file_in_the_making(name) as file:
        if check is None:
            os.truncate(file, 0)  # without a check a mixture of two versions would not be noticed
        resumed = _complete(url, file) if check else _complete(url, file, kept="")
        try:
            if check is not None:
                _check_whole(url, file, check, resumed)
            yield file
        finally:
            file.unlink(missing_ok=True)


def _check_whole(url: str, file: Path, check: Check, resumed: bool) -> None:
    try:
        check(file)
    except DataError:
        if not resumed:
            raise
        logging.info("%s: the part that was there before does not fit; starting again", url)
        os.truncate(file, 0)
        _complete(url, file)
        check(file)


def _complete(url: str, file: Path, kept: str = ", what came is kept") -> bool:
    """Completes ``file``; whether something of it was there before. Raises DataError."""
    try:
        return _fetch(url, file, kept)
    except DataError:
        raise
    except (OSError, http.client.HTTPException, ValueError) as error:  # also a malformed answer
        raise DataError(
            f"cannot download {url} ({error}); fetch it by other means and name the file or its"
            " folder in data.path"
        ) from error


def _fetch(url: str, file: Path, kept: str) -> bool:
    there = file.stat().st_size
    headers = {"Range": f"bytes={there}-"} if there else {}
    logging.info("downloading %s from byte %d", url, there)
    try:
        answer = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60)
    except urllib.error.HTTPError as error:
        if error.code != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE or not there:
            raise
        os.truncate(file, 0)
        return _fetch(url, file, kept)
    with answer:
        begins = answer.headers.get("Content-Range", "").partition("-")[0]
        goes_on = answer.status == http.HTTPStatus.PARTIAL_CONTENT and begins == f"bytes {there}"
        if not goes_on:
            there = 0
        size = answer.headers.get("Content-Length")
        whole = None if size is None else there + int(size)
        _copy(answer, file, f"downloading {os.path.basename(url)}", whole, there)
    if whole is not None and file.stat().st_size != whole:
        raise DataError(f"{url}: {file.stat().st_size} of {whole} bytes came; try again{kept}")
    return goes_on


def _copy(answer: BinaryIO, file: Path, what: str, total: int | None, done: int) -> None:
    """Appends to ``file`` from byte ``done`` on what the server sends."""
    with bar(what, total, done) as shown:
        with writing(file.parent):
            os.truncate(file, done)
        while block := answer.read(1 << 20):
            with writing(file.parent), open(file, "ab") as out:
                out.write(block)
            shown.update(len(block))
    with writing(file.parent), open(file, "ab") as out:
        os.fsync(out.fileno())
