"""Downloads files, resumes interrupted downloads, and checks hashes."""

import contextlib
import http.client
import json
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from absl import logging

from txl_jax.data.errors import DataError
from txl_jax.data.sources.cache import make_folder, unfinished_download, write_errors
from txl_jax.data.sources.source import file_hash
from txl_jax.progress import bar

Check = Callable[[Path], None]  # raises DataError if a file is not the expected one
ORIGIN = "origin.json"  # a downloaded folder's file with the address and the hashes of its files


def check_hash(expected: str, what: str, whose: str = "data.hash") -> Check:
    """Returns a check that a file has the hash ``expected``, ``md5:…`` or ``sha256:…``."""
    kind, _, digits = expected.partition(":")

    def check(path: Path) -> None:
        if (found := file_hash(path, kind)) != digits:
            fault = f"its {kind} is {found}, and {whose} is {digits}"
            raise DataError(f"{what}: {fault}; the download was deleted")

    return check


def download(url: str, into: Path, check: Check) -> Path:
    """Downloads ``url`` to the file ``into``, unless this file exists and passes ``check``.

    Raises DataError if the download fails or does not pass ``check``.
    """
    if into.exists():
        with contextlib.suppress(DataError):
            check(into)
            return into
    with _downloaded(url, into, check) as file:
        os.replace(file, into)
    return into


def download_folder(
    url: str, into: Path, extract: Callable[[Path, Path], object], check: Check | None = None
) -> dict[str, str]:
    """Creates the folder ``into`` from the file at ``url``, if the folder does not exist.

    ``extract`` takes the downloaded file, which ``check`` has checked, and an empty folder to write
    to. Returns the sha256 that each file had when it was downloaded, by its path in the folder.
    Raises DataError as :func:`download` does, or if ``extract`` fails; then no files are kept.
    """

    def fill(folder: Path) -> None:
        name = os.path.basename(urllib.parse.urlsplit(url).path)
        with _downloaded(url, into.with_name(name), check) as file:
            extract(file, folder)
            paths = sorted(path for path in folder.rglob("*") if path.is_file())
            sums = {path.relative_to(folder).as_posix(): file_hash(path) for path in paths}
            record = {"url": url, "sha256": file_hash(file), "files": sums}
            (folder / ORIGIN).write_text(json.dumps(record, indent=1))

    origin = make_folder(into, fill) / ORIGIN
    try:
        return dict(json.loads(origin.read_text())["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        fix = f"delete the folder {into}, and the next run downloads it again"
        raise DataError(f"{origin}: cannot be read ({error}); {fix}") from error


@contextlib.contextmanager
def _downloaded(url: str, name: Path, check: Check | None) -> Iterator[Path]:
    """Yields a temporary file beside ``name`` with the checked content of ``url``.

    The next call resumes an interrupted download only if there is a check, because the file at
    ``url`` may have changed.
    """
    with unfinished_download(name) as file:
        if check is None:
            os.truncate(file, 0)
        resumed = _fetch(url, file, "; the partial download is kept" if check else "")
        try:
            if check is not None:
                try:
                    check(file)
                except DataError:
                    if not resumed:
                        raise
                    logging.info("%s: the part that was kept does not fit; starting again", url)
                    os.truncate(file, 0)
                    _fetch(url, file, "")
                    check(file)
            yield file
        finally:
            file.unlink(missing_ok=True)


def _fetch(url: str, file: Path, kept: str) -> bool:
    """Completes ``file`` or raises DataError; returns whether it continued a partial download."""
    try:
        return _request(url, file, kept)
    except DataError:
        raise
    except (OSError, http.client.HTTPException, ValueError) as error:  # also a malformed answer
        fix = "fetch the file by other means, and name it or its folder in data.path"
        raise DataError(f"cannot download {url} ({error}); {fix}") from error


def _request(url: str, file: Path, kept: str) -> bool:
    start = file.stat().st_size
    headers = {"Range": f"bytes={start}-"} if start else {}
    logging.info("downloading %s from byte %d", url, start)
    try:
        answer = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60)
    except urllib.error.HTTPError as error:
        if error.code != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE or not start:
            raise
        os.truncate(file, 0)
        return _request(url, file, kept)
    with answer:
        begins = answer.headers.get("Content-Range", "").partition("-")[0]
        resumed = answer.status == http.HTTPStatus.PARTIAL_CONTENT and begins == f"bytes {start}"
        start = start if resumed else 0
        left = answer.headers.get("Content-Length")
        total = None if left is None else start + int(left)
        with write_errors(file.parent):
            os.truncate(file, start)
        with bar(f"downloading {os.path.basename(url)}", total, start) as shown:
            while block := answer.read(1 << 20):
                with write_errors(file.parent), open(file, "ab") as out:
                    out.write(block)
                shown.update(len(block))
    with write_errors(file.parent), open(file, "ab") as out:
        os.fsync(out.fileno())
    size = file.stat().st_size
    if total not in (None, size):
        raise DataError(f"{url}: {size} of {total} bytes were received; try again{kept}")
    return resumed
