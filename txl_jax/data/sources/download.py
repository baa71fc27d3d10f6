"""Files from the net, checked by hash, and archives, unpacked with the safe filter."""

import contextlib
import http.client
import os
import shutil
import tarfile
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from absl import logging

from txl_jax.data.errors import DataError
from txl_jax.data.sources.source import file_hash


def download(url: str, into: Path, check: Callable[[Path], None] = lambda path: None) -> Path:
    """``into``, a file with what ``url`` gives; fetched only if it is not there.

    The download lies beside ``into`` under another name until it is complete and checked, so
    an interrupted one is never used.

    Args:
      url: ``http`` or ``https``.
      into: the file that is wanted.
      check: raises DataError for a file that is not what it should be. A file that is there
        already and fails is fetched anew.

    Raises:
      DataError: the net or the server gave nothing, or ``check`` refused what came.
    """
    if into.exists():
        with contextlib.suppress(DataError):
            check(into)
            return into
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise DataError(f"data.url = {url!r}: must start with http:// or https://")
    partial = beside(into)
    try:
        logging.info("downloading %s", url)
        with urllib.request.urlopen(url, timeout=60) as answer, open(partial, "wb") as file:
            shutil.copyfileobj(answer, file, 1 << 20)
            file.flush()
            os.fsync(file.fileno())
            size = answer.headers.get("Content-Length")
        if size is not None and int(size) != partial.stat().st_size:
            raise DataError(f"{url}: {partial.stat().st_size} of {size} bytes came; try again")
        check(partial)
        os.replace(partial, into)
    except (OSError, http.client.HTTPException) as error:
        raise DataError(
            f"cannot download {url} ({error}); fetch it by other means and name the file or its"
            " folder in data.path"
        ) from error
    finally:
        partial.unlink(missing_ok=True)
    return into


def check_hash(expected: str, what: str) -> Callable[[Path], None]:
    """A check for :func:`download`: the file has the hash ``md5:…`` or ``sha256:…``."""
    kind, _, digits = expected.partition(":")

    def check(path: Path) -> None:
        found = file_hash(path, kind)
        if found != digits:
            raise DataError(
                f"{what}: its {kind} is {found}, not {digits} as data.hash says; nothing of it"
                " was kept"
            )

    return check


def unpack(archive: Path, names: Sequence[str], into: Path) -> Path:
    """The folder ``into`` with the files ``names`` of a tar archive, wherever in it they lie.

    Raises:
      DataError: not a tar archive, a name is missing, or a member is refused by the filter
        ``data`` of :mod:`tarfile` (a path that leaves the folder, a device, …).
    """
    if into.is_dir():
        return into
    if not hasattr(tarfile, "data_filter"):
        raise DataError(
            f"{archive}: this Python has no safe filter for archives (3.11.4 and later have);"
            " unpack it by hand and name the folder in data.path"
        )
    partial = beside(into)
    partial.mkdir()
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                name = os.path.basename(member.name)
                if name in names and not (partial / name).exists():
                    safe = tarfile.data_filter(member, str(partial))
                    if not safe.isfile():
                        raise DataError(f"{archive}: {member.name} in it is not a plain file")
                    tar.extract(safe.replace(name=name), partial, filter="data")
        missing = [name for name in names if not (partial / name).exists()]
        if missing:
            raise DataError(f"{archive}: there is no {missing[0]} in this archive")
        rename_folder(partial, into)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise DataError(f"{archive}: cannot be unpacked ({error})") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return into


def beside(path: Path) -> Path:
    """A name that nothing else has, in the same folder, for what will become ``path``."""
    return path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex[:12]}")


def rename_folder(made: Path, final: Path) -> None:
    """Gives a complete folder its name in one move; if another process was first, its stays."""
    for path in [*made.rglob("*"), made]:
        _sync(path)
    try:
        os.rename(made, final)
        _sync(final.parent)
    except OSError:
        if not final.is_dir():
            raise
        shutil.rmtree(made, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
