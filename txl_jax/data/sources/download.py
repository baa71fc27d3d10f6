"""Downloads files, resumes interrupted downloads, and checks hashes."""

import contextlib
import http.client
import json
import os
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from absl import logging

from txl_jax.data.errors import DataError
from txl_jax.data.sources.cache import make_folder, unfinished_download, write_errors
from txl_jax.data.sources.source import file_hash
from txl_jax.progress import bar

ORIGIN = "origin.json"  # in a downloaded folder: the address, and the hashes of the files


def download(url: str, into: Path, expected: str) -> Path:
    """Downloads ``url`` to the file ``into``, unless it exists with the hash ``expected``.

    A hash is ``md5:…`` or ``sha256:…``. Raises DataError if the download fails, or has another
    hash.
    """
    if into.exists() and _hash(into, expected) == expected:
        return into
    with _downloaded(url, into, expected) as file:
        os.replace(file, into)
    return into


def download_folder(
    url: str, into: Path, extract: Callable[[Path, Path], object], expected: str | None = None
) -> dict[str, str]:
    """Creates the folder ``into`` from the file at ``url``, if the folder does not exist.

    ``extract`` is called with the downloaded file and with an empty folder to write to. If
    ``expected`` is given, the hash of the file is checked first. Returns the sha256 that each file
    had when it was downloaded, by its path in the folder. Raises DataError as :func:`download`
    does, or if ``extract`` fails; then no files are kept.
    """

    def fill(folder: Path) -> None:
        name = os.path.basename(urllib.parse.urlsplit(url).path)
        with _downloaded(url, into.with_name(name), expected) as file:
            extract(file, folder)
            paths = sorted(path for path in folder.rglob("*") if path.is_file())
            sums = {path.relative_to(folder).as_posix(): file_hash(path) for path in paths}
            record = {"url": url, "sha256": file_hash(file), "files": sums}
            (folder / ORIGIN).write_text(json.dumps(record, indent=1))

    origin = make_folder(into, fill) / ORIGIN
    try:
        return json.loads(origin.read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        fix = f"delete the folder {into}, and the next run downloads it again"
        raise DataError(f"{origin}: cannot be read ({error}); {fix}") from error


def _hash(file: Path, expected: str) -> str:
    """Returns the hash of a file, of the same kind as ``expected``: ``md5:…`` or ``sha256:…``."""
    kind = expected.partition(":")[0]
    return f"{kind}:{file_hash(file, kind)}"


@contextlib.contextmanager
def _downloaded(url: str, name: Path, expected: str | None) -> Iterator[Path]:
    """Yields a temporary file beside ``name`` with the content of ``url``; checks a given hash.

    The next call resumes an interrupted download only if there is a hash. Without a hash, a change
    of the file at ``url`` in the meantime would not be noticed.
    """
    with unfinished_download(name) as file:
        if expected is None:
            os.truncate(file, 0)
        resumed = file.stat().st_size > 0
        _fetch(url, file, "; the partial download is kept" if expected else "")
        try:
            if expected and resumed and _hash(file, expected) != expected:
                logging.info("%s: the part that was kept does not fit; starting again", url)
                os.truncate(file, 0)
                _fetch(url, file, "")
            if expected and (found := _hash(file, expected)) != expected:
                fault = f"its hash is {found}, and must be {expected}"
                raise DataError(f"{url}: {fault}; the download was deleted")
            yield file
        finally:
            file.unlink(missing_ok=True)


def _fetch(url: str, file: Path, kept: str) -> None:
    """Downloads the rest of ``file``, or all of it if the server cannot resume a download."""
    start = file.stat().st_size
    logging.info("downloading %s from byte %d", url, start)
    headers = {"Range": f"bytes={start}-"} if start else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as at:
            start = start if at.status == http.HTTPStatus.PARTIAL_CONTENT else 0
            left = at.headers.get("Content-Length")
            total = None if left is None else start + int(left)
            with write_errors(file.parent):
                os.truncate(file, start)
            with bar(f"downloading {os.path.basename(url)}", total, start) as shown:
                while block := at.read(1 << 20):
                    with write_errors(file.parent), open(file, "ab") as out:
                        out.write(block)
                    shown.update(len(block))
    except DataError:
        raise
    except (OSError, http.client.HTTPException, ValueError) as error:  # also a malformed answer
        if start and getattr(error, "code", 0) == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            os.truncate(file, 0)
            return _fetch(url, file, kept)
        fix = "fetch the file by other means, and name it or its folder in data.path"
        raise DataError(f"cannot download {url} ({error}); {fix}") from error
    size = file.stat().st_size
    if total not in (None, size):
        raise DataError(f"{url}: {size} of {total} bytes were received; try again{kept}")
