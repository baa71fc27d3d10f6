"""Reads, lists, moves and removes files and folders of this machine, or of ``gs://`` buckets.

Paths are passed as text; :func:`path` makes the object that reads and writes files. A bucket has
only complete objects: a folder exists while there is an object in it, and one request replaces an
object.
"""

import contextlib
import functools
import importlib.util
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from txl_jax.messages import UserError, one_line
from txl_jax.progress import waiting_for

if TYPE_CHECKING:
    from txl_jax.literal_path import LiteralPath

BUCKETS = "gs://"
_ADDRESS = re.compile(
    r"gs://[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]"
    r"(/(?!\.{1,2}(/|$))[^/\x00-\x1f\x7f\\#?*\[\]]+)*/?"  # some clients misread these characters
)
_ROOTS = ("/gs/", "/s3/", "/az/", "/hf/")


class StorageError(UserError, OSError):
    """A bucket cannot be used; the message names it and the reason."""


def is_remote(path: str) -> bool:
    """Whether a path is the address of objects in a bucket."""
    return path.startswith(BUCKETS)


def address_fault(address: str) -> str | None:
    """Returns why an address cannot be used, as text that follows the address, or ``None``."""
    if not _ADDRESS.fullmatch(address):
        rule = "with a bucket in lower case and names that are not empty, '.' or '..' and have none"
        return f"must be gs://BUCKET/NAME/..., {rule} of \\ # ? * [ ]"
    if importlib.util.find_spec("gcsfs") is None:
        return "is in Google Cloud Storage, which needs a package: pip install 'txl_jax[gcs]'"
    return None


def path(*parts: str) -> "LiteralPath":
    """Joins the parts of a path, and returns the path as an object.

    The first use of a bucket checks that it exists and can be listed, or raises StorageError.
    """
    from txl_jax.literal_path import LiteralPath  # slow, and --help needs no path

    text = os.path.join(*parts)
    if is_remote(text):
        _check_bucket(text.removeprefix(BUCKETS).partition("/")[0])
    elif text.startswith(_ROOTS):
        text = f"/{text}"  # etils takes /gs/x for gs://x, and //gs/x is the same local folder
    return LiteralPath(text)


def absolute(path: str) -> str:
    """Returns an absolute path without ``..``. An address only loses slashes at its end."""
    return path.rstrip("/") if is_remote(path) else os.path.abspath(path)


def names(folder: str) -> list[str]:
    """Returns the names of the files and folders in a folder; no names if it does not exist."""
    try:
        return [found.name for found in path(folder).iterdir() if found.name]
    except (FileNotFoundError, NotADirectoryError):
        return []


def read_text(file: str, errors: str) -> str:
    """Returns the text of a UTF-8 file with its line ends; ``errors`` as in ``bytes.decode``."""
    return path(file).read_bytes().decode("utf-8", errors)


def make_folder(folder: str) -> None:
    """Makes a folder and its missing parents; a bucket needs no folders."""
    if not is_remote(folder):
        os.makedirs(folder, exist_ok=True)


def files_in(folder: str, below: str = "") -> Iterator[str]:
    """Yields every file in a folder and in its folders, as a path relative to the folder."""
    for found in path(folder, below).iterdir():
        name = os.path.join(below, found.name)
        if found.is_dir():
            yield from files_in(folder, name)
        elif found.name:
            yield name


def remove_folder(folder: str) -> None:
    """Removes a folder and its files as far as they can be removed."""
    if not is_remote(folder):
        shutil.rmtree(folder, ignore_errors=True)
        return
    with contextlib.suppress(Exception):  # the client raises many types
        path(folder).rmtree()


def move_folder(folder: str, to: str) -> None:
    """Renames a folder with a checkpoint.

    In a bucket, every object is copied, the commit mark last. Then the old objects are removed, the
    mark first. So at any moment, at least one of the two folders is complete and has its mark.
    """
    from txl_jax.literal_path import COMMIT_MARK

    if not is_remote(folder):
        os.rename(folder, to)
        return
    files = sorted(files_in(folder), key=lambda name: (name == COMMIT_MARK, name))
    for name in files:
        store().copy(os.path.join(folder, name), os.path.join(to, name))
    path(folder).rmtree()


@contextlib.contextmanager
def local_file(file: str) -> Iterator[str]:
    """Yields the path of a file, or of its local copy, for programs that read local files only."""
    if not is_remote(file):
        yield file
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = os.path.join(folder, os.path.basename(file))
        with contextlib.suppress(FileNotFoundError):  # the reader then reports this
            store().get_file(file, copy)
        yield copy


@contextlib.contextmanager
def local_folder(folder: str) -> Iterator[str]:
    """Yields a folder for programs that write only local files; copies the files to a bucket."""
    if not is_remote(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory() as made:
        yield made
        for name in files_in(made):
            store().put_file(os.path.join(made, name), os.path.join(folder, name))


@functools.cache
def store() -> Any:
    """Returns the client of Google Cloud Storage, the same one that ``etils`` uses.

    It does not cache lists of objects, because other processes might write new objects.
    """
    import fsspec

    # StorageError names the reason. Without these lines, the client would first log tracebacks.
    logging.getLogger("gcsfs").addHandler(logging.NullHandler())
    logging.getLogger("gcsfs").propagate = False
    os.environ.setdefault("EPATH_USE_TF", "false")  # even if TensorFlow is installed
    for protocol in ("gcs", "gs"):
        fsspec.config.conf.setdefault(protocol, {}).setdefault("use_listings_cache", False)
    return fsspec.filesystem("gcs", finalize_on_close=True)


def store_fault(error: Exception) -> str | None:
    """Returns a message about an error that a bucket's client raised after all its attempts.

    Returns ``None`` for other errors.
    """
    clients = ("aiohttp", "gcsfs", "google", "requests")
    if type(error).__module__.partition(".")[0] not in clients:
        return None
    return f"Google Cloud Storage: {type(error).__name__}: {error}; run the command again"


@functools.cache
def _check_bucket(bucket: str) -> None:
    try:
        with waiting_for(f"waiting for the first answer of {BUCKETS}{bucket}"):
            store().call("GET", "b/{}/o", bucket, maxResults=1, json_out=True)
    except Exception as error:  # gcsfs, aiohttp and google.auth raise different ones
        missing = isinstance(error, FileNotFoundError)
        reason = "there is no such bucket" if missing else one_line(error)
        raise StorageError(
            f"{BUCKETS}{bucket}: cannot be listed ({reason}); check the network and the name of"
            " the bucket, and sign in with  gcloud auth application-default login"
        ) from error
