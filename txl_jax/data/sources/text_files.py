"""Finds the text files of a folder or zip archive by the suffixes of their names."""

import collections
import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from txl_jax.config import DataConfig
from txl_jax.config.folders import expanded
from txl_jax.data.errors import DataError
from txl_jax.data.sources import source
from txl_jax.data.sources.records import OTHERS, READERS, WHOLE_JSON, saved_files
from txl_jax.data.sources.source import hidden, say_once
from txl_jax.data.sources.splits import arrange, listed, splits_named
from txl_jax.data.sources.stored import ZIP, Stored, members
from txl_jax.messages import argument, one_line, shown_path
from txl_jax.paths import is_remote

SUFFIXES = (".txt", ".text", ".tokens", ".raw", "")
"""The suffixes of text files, in order of preference; ``""`` is for compressed files only."""
WEAK = (".raw", "", WHOLE_JSON)  # beside files of another kind, these are left out
ARRAYS, NO_DATA = (".npy", ".bin"), (".py", ".pkl", ".md", ".log")  # no text, even if named train
ABOUT = ("license", "licence", "copying", "copyright", "notice", "changelog", "requirements")
"""Names, in lower case, of files about other files, like readme*; read only if no other exists."""
ONE_KIND = "name one file or folder, or put the files of one kind into a folder of their own"


def text_files(path: Path) -> dict[str, Stored]:
    """Returns the files of a folder or zip archive that can be text, by name.

    A folder's zip archives, and folders in it that are named as splits, are searched too. If this
    finds no file, and the folder has one inner folder, the inner folder is searched instead. If no
    file has a suffix of text or records, but all have the same suffix, such as ``.md``, all are
    returned.
    """
    if path.is_dir():
        found = _in_folder(path, "", _may_be_text) or _in_folder(path, "", _is_other)
    else:
        found = members(path)
        if len(found) == 1:  # such as enwik8 in enwik8.zip
            return {found[0].name: found[0]}
        found = list(filter(_may_be_text, found)) or list(filter(_is_other, found))
    if known := {file.name: file for file in found if _may_be_text(file)}:
        return known
    ends = {file.suffix for file in found}
    if len(ends) == 1 and not ends & {*ARRAYS}:
        return {file.name: file for file in found}
    fix = ONE_KIND
    if ends & {*ARRAYS}:
        fix = f"for its arrays use {argument('config.data.name', 'tokens')}"
    names = [file.name for file in found] or [f"{p.name}/" for p in path.glob("*/")]
    there = f", but {listed(sorted(names))}" if names else ""
    raise DataError(f"{path}: has no *.txt file, and none of {', '.join(READERS)}{there}; {fix}")


def _folders(path: Path) -> list[Path]:
    """Returns the folders in a folder, without hidden folders."""
    return [p for p in sorted(path.iterdir()) if p.is_dir() and not hidden(p.name)]


def _in_folder(folder: Path, below: str, wanted: Callable[[Stored], bool]) -> list[Stored]:
    """Finds wanted files as :func:`text_files` does; their names begin with the path ``below``."""
    folders, found = _folders(folder), list(_files_of(folder, below, wanted))
    for inner in folders:
        if splits_named(inner.name):
            for root, _, _ in os.walk(inner, onerror=_unreadable):
                name = os.path.join(below, os.path.relpath(root, folder))
                found += _files_of(Path(root), name, wanted)
    if not found and len(folders) == 1:  # such as data/ of a dataset of the Hub
        return _in_folder(folders[0], os.path.join(below, folders[0].name), wanted)
    return found


def _unreadable(error: OSError) -> None:
    raise DataError(f"{error.filename}: cannot be read ({error.strerror}); check its permissions")


def _files_of(folder: Path, below: str, wanted: Callable[[Stored], bool]) -> Iterator[Stored]:
    """Yields a folder's wanted files, and all files of its zips; names begin with ``below``."""
    saved = saved_files(folder)
    is_zip = lambda path: path.suffix.lower() == ZIP
    usable = lambda path: is_zip(path) or wanted(Stored(path, path.name, 0))
    for path in source.files_in(folder, usable):
        name = os.path.join(below, path.name)
        if is_zip(path):
            yield from members(path, name)
        elif saved is None or path.name in saved:
            yield Stored(path, name, path.stat().st_size)


def _may_be_text(file: Stored) -> bool:
    name = os.path.basename(file.name)
    if file.suffix in (*SUFFIXES, *READERS) and (file.suffix or file.compression):
        return name not in OTHERS
    return bool(splits_named(name)) and file.suffix not in (*ARRAYS, *NO_DATA)


def _is_other(file: Stored) -> bool:
    """Whether a file with an unusual suffix may be a text; its bytes are checked later."""
    name = os.path.basename(file.name)
    return name not in OTHERS and not about_others(name) and not hidden(name)


def check_not_text(key: str, output: str | None, data: DataConfig) -> None:
    """Raises DataError if the output file of the setting ``key`` would be among texts of ``data``.

    The next run could then read the output as text.
    """
    if output in (None, "-") or data.path is None or is_remote(data.path):
        return
    text = Path(os.path.realpath(expanded(data.path, "config key data.path")))
    file, folders = Path(os.path.realpath(str(output))), set[str]()
    if data.name == "text" and text.is_dir():
        with contextlib.suppress(DataError):  # the folder has no text
            folders = {name.split("/")[0] for name in text_files(text)}
    below = file.relative_to(text).parts if text in file.parents else ()
    is_read = below and (len(below) == 1 or below[0] in folders or splits_named(below[0]))
    if file == text or is_read:
        named = f"config key {key} = {shown_path(str(output))!r}"
        raise DataError(f"{named}: is in the folder of the texts, data.path; name another folder")


def selected(files: Mapping[str, Stored], where: str) -> tuple[dict[str, list[str]], list[str]]:
    """Chooses one kind of file; returns the files of each split, and files that are left out."""
    chosen = of_one_kind(files, where)
    chosen = [name for name in chosen if not about_others(name)] or chosen
    sizes = {name: files[name].size for name in chosen}
    found, rest = arrange(sizes, where, lambda name: files[name].stem)
    return found, [*rest, *sorted(files.keys() - set(chosen))]


def about_others(name: str) -> bool:
    """Whether the name of a file says that it is about the files beside it, like README.txt."""
    stem = os.path.basename(name).partition(".")[0].casefold()
    return stem in ABOUT or stem.startswith("readme")


def of_one_kind(files: Mapping[str, Stored], where: str) -> list[str]:
    """Returns the files with one suffix: that which names most splits, or the only usable one."""
    kinds: dict[str, list[str]] = {suffix: [] for suffix in (*SUFFIXES, *READERS)}
    for name, file in files.items():
        suffix = "" if splits_named(file.suffix) else file.suffix
        kinds.setdefault(".txt" if suffix == ".text" else suffix, []).append(name)
    if sum(map(bool, kinds.values())) == 1:
        return list(files)
    splits = {suffix: set().union(*map(splits_named, found)) for suffix, found in kinds.items()}
    known = (*SUFFIXES, *READERS)
    usable = [s for s in kinds if kinds[s] and (s in known or {"train"} < splits[s])]
    if not usable:
        raise DataError(f"{where}: there is no *.txt file")
    chosen = max(usable, key=lambda suffix: len(splits[suffix]))
    if splits[chosen] and chosen in known:
        others = [suffix for suffix in usable if splits[suffix] - splits[chosen]]
    else:
        others = [suffix for suffix in usable if suffix not in (chosen, *WEAK)]
    if others:
        both = f"{kinds[chosen][0]} and {kinds[others[0]][0]}"
        raise DataError(f"{where}: has files of several kinds, such as {both}; {ONE_KIND}")
    return kinds[chosen]


def unread(path: Path, files: Mapping[str, Stored]) -> list[str]:
    """Returns the names of files and folders in a folder that contribute nothing to ``files``."""
    read = {name.split("/")[0] for name in files}
    if not path.is_dir() or saved_files(path) is not None:
        return []
    known = lambda p: p.name in read or hidden(p.name) or p.name in OTHERS
    others = [p for p in sorted(path.iterdir()) if not known(p)]
    return [p.name + "/" * p.is_dir() for p in others]


def note_copies(where: str, files: Sequence[Stored]) -> None:
    """Prints a note once if files have the same bytes: a text could be in two splits.

    For a file in an archive, the bytes of the archive are compared.
    """
    shown = lambda file: file.path.name if file.member else file.name
    names = {file.path: shown(file) for file in files if file.size}
    sizes = collections.Counter(path.stat().st_size for path in names)
    known, copies = dict[str, Path](), list[str]()
    for path in (path for path in names if sizes[path.stat().st_size] > 1):
        if (first := known.setdefault(source.file_hash(path), path)) is not path:
            copies.append(f"{names[first]} and {names[path]}")
    if copies:
        more = f", and so have {len(copies) - 1:,} more pairs" if len(copies) > 1 else ""
        fix = "remove copies, because a model must not be scored on a text that trained it"
        say_once(f"note: {where}: {one_line(copies[0])} have the same bytes{more}; {fix}")
