"""Checks paths and makes them absolute; finds the folder of the cache."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from txl_jax.config.errors import ConfigError
from txl_jax.messages import short_repr
from txl_jax.paths import absolute as absolute_path
from txl_jax.paths import address_fault, is_remote

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def path_text(path: Any, where: str, remote: bool = False) -> str:
    """Returns a path, which may be a text, bytes or a ``pathlib.Path``, as text.

    ``remote`` says whether the path may be in a bucket, ``gs://BUCKET/NAME``. Raises ConfigError
    for any other URL, and for a value that is not a path. The error names the flag, key or argument
    ``where``.
    """
    try:
        text = os.fsdecode(path)
    except TypeError:
        kind = type(path).__name__
        raise ConfigError(
            f"{where} = {short_repr(path)}: must be a path, which is text or a pathlib.Path, not a"
            f" value of type {kind}"
        ) from None
    if remote and is_remote(text):
        if fault := address_fault(text):
            raise ConfigError(f"{where} = {short_repr(text)}: {fault}")
        return text
    if scheme := _URL.match(text):
        advice = "copy or mount the files, and name the local path"
        if remote and scheme[0] == "gs:/":
            advice = "pathlib.Path drops a slash of gs://, so pass an address as text"
        if where.endswith("data.path"):
            advice = f"a text is downloaded by data.url with data.hash; {FROM_THE_HUB}"
        usable = "local paths and gs:// addresses" if remote else "local paths"
        raise ConfigError(
            f"{where} = {short_repr(text)}: is a URL, and only {usable} can be used; {advice}"
            f" (write ./{scheme[0]}... for a local folder of this name)"
        )
    if not text.strip():
        raise ConfigError(f"{where} = {short_repr(text)}: names no file or folder; give a path")
    if "\0" in text:
        raise ConfigError(f"{where} = {short_repr(text)}: no path has the character NUL; remove it")
    return text


FROM_THE_HUB = (
    "for a dataset of the Hugging Face Hub run load_dataset(NAME).save_to_disk(FOLDER), and name"
    " FOLDER"
)
"""What to do if the name of a dataset is given in place of a path."""


def path_texts(value: Any) -> Any:
    """Returns a path as text, or a list of paths as a list of texts; other values unchanged."""
    if isinstance(value, list | tuple):
        return [path_texts(item) for item in value]
    return os.fsdecode(value) if isinstance(value, bytes | os.PathLike) else value


def expanded(path: str | os.PathLike[str], where: str) -> Path:
    """Returns the path with ``~`` or ``~user`` replaced by a home folder.

    Raises ConfigError as :func:`path_text` does, and if there is no such home folder.
    """
    path = path_text(path, where)
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        home = Path(path).parts[0]
        raise ConfigError(
            f"{where} = {short_repr(path)}: there is no home folder {short_repr(home)}; write the"
            " whole path"
        ) from error


def expanded_text(path: Any, where: str) -> str:
    """Returns the result of :func:`expanded` as text; only checks an address in a bucket."""
    text = path_text(path, where, remote=True)
    return text if is_remote(text) else str(expanded(text, where))


def workdir_path(path: str | os.PathLike[str], where: str) -> str:
    """Returns the absolute path of a workdir, perhaps in a bucket; errors as :func:`expanded`."""
    return absolute_path(expanded_text(path, where))


def expanded_paths(value: Any, where: str, named: bool = False, remote: bool = False) -> Any:
    """Returns a path, or a list of paths, with home folders in place of ``~``.

    The items of a ``named`` list are ``NAME=PATH``. ``where``, ``remote`` and errors are those of
    :func:`expanded` and :func:`path_text`.
    """

    def with_home(text: str) -> str:
        home = text.startswith("~")
        return str(expanded(text, where)) if home else path_text(text, where, remote)

    return _changed_paths(value, with_home, named)


def absolute_paths(value: Any, where: str, named: bool = False) -> Any:
    """Returns a path or a list of paths as absolute; arguments are as in :func:`expanded_paths`.

    A stored path then also works for a command in another folder. ``-`` (a standard stream) and
    ``None`` are returned as they are.
    """

    def absolute(text: str) -> str:
        if text == "-":
            return text
        if is_remote(text):
            return absolute_path(text)
        path = str(expanded(text, where).absolute())
        tidy = os.path.normpath(path)
        return tidy if same_files(tidy, path) else path  # differ if ".." follows a link

    return _changed_paths(value, absolute, named)


def _changed_paths(value: Any, change: Callable[[str], str], named: bool) -> Any:
    if not value:
        return value
    if not isinstance(value, tuple):
        return change(value)
    parts = [text.partition("=") if named else ("", "", text) for text in value]
    return tuple(name + sign + (change(path) if path else "") for name, sign, path in parts)


def same_files(a: Any, b: Any) -> bool:
    """Whether two paths, or two lists of paths, name the same files, perhaps through links."""
    if isinstance(a, str) and isinstance(b, str):
        real = lambda path: absolute_path(path) if is_remote(path) else os.path.realpath(path)
        return real(a) == real(b)
    both = isinstance(a, list | tuple) and isinstance(b, list | tuple)
    return len(a) == len(b) and all(map(same_files, a, b)) if both else a == b


def data_folder(cache_dir: str | None = None) -> Path:
    """Returns the absolute path of the folder of prepared corpora and compiled programs.

    This is ``data.cache_dir``, else ``$TXL_DATA_DIR``, else ``~/.cache/txl_jax``.
    """
    named = cache_dir or os.environ.get("TXL_DATA_DIR") or "~/.cache/txl_jax"
    where = "config key data.cache_dir" if cache_dir else "environment variable TXL_DATA_DIR"
    return expanded(named, where).absolute()
