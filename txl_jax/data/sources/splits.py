"""Finds the splits of a folder or an archive by the names of its files, and prints what it found.

    ptb.train.txt  ptb.valid.txt  ptb.test.txt      train/a.txt  train/b.txt  dev/c.txt
    train-00000-of-00002.jsonl  train-00001-of-00002.jsonl  validation-00000-of-00001.jsonl

A name is divided into words: runs of letters, which are also divided before capital letters. A file
belongs to a split if a word of its name, such as ``train`` or ``dev``, stands for a split. So
``contest``, ``latest`` and ``training_notes`` name no split. But a file that is called just
``training`` or ``testing`` belongs to the train or the test split.
"""

import collections
import itertools
import os
import re
from collections.abc import Callable, Mapping

from txl_jax.data.errors import DataError
from txl_jax.data.sources.source import say_once
from txl_jax.messages import one_line

SPLIT_OF = {"train": "train", "trn": "train", "test": "test", "tst": "test"}
SPLIT_OF |= dict.fromkeys(("valid", "val", "validation", "dev", "eval"), "valid")
"""The split that a word of a name stands for."""
SHOWN = 4  # the largest number of files that are listed at each end of a longer list

_WORD = re.compile(r"[A-Z]+(?![^\W\d_A-Z])|[A-Z]?[^\W\d_A-Z]+")
_ING = re.compile(r"^(train|test)ing(?=\.|$)", re.IGNORECASE)  # training.txt, not training_notes
_COPY = re.compile(
    r"[\s_.-]+(?:\(\d+\)|copy|backup|old|small|tiny|mini|sample|subset)$", re.IGNORECASE
)  # ends the name of a file that repeats another one, or a part of it
_FOLD = re.compile(r"(?:folds?|cv)[\W_]*(\d+)", re.IGNORECASE)
_ZIPPED = re.compile(r"(.*?)\.zip/", re.IGNORECASE)
_SHARD = re.compile(r"\d+-of-(\d+)")
_PART = re.compile(
    r"train|valid(?:ation)?|test|dev|e?val|(?<![^\W\d_])(?:trn?|tst|te|va)(?![^\W\d_])"
)  # a part of a longer word, or an abbreviation
_SAME = "seem, by their names, to be the same text; remove one of them"
_FIX = "give one set of files, or folders named train, valid and test"


def arrange(
    sizes: Mapping[str, int], where: str, stem: Callable[[str], str]
) -> tuple[dict[str, list[str]], list[str]]:
    """Returns the files of each split, and the files that are left out; each list is sorted.

    If no file is named as a split, all files are one text, under the key ``""``.

    Args:
      sizes: the size in bytes of each file by its name, in which ``/`` separates folders.
      where: the folder or archive, for errors.
      stem: returns a name without the suffixes that say how a file is stored.

    Raises DataError if names contradict each other, seem to name splits by accident, or name no
    train split.
    """
    words = {name: _deciding_words(name) for name in sorted(sizes)}
    if any(len(_splits(found)) > 1 for found in words.values()):  # such as test_set.train
        columns = zip(*words.values(), strict=False)
        common = sum(1 for _ in itertools.takewhile(lambda column: len({*column}) == 1, columns))
        rest_of = {name: found[common:] for name, found in words.items()}
        if all(_splits(rest_of[name]) for name in words if _splits(words[name])):
            words = rest_of
    found: dict[str, list[str]] = {}
    for name, parts in words.items():
        if len(several := _splits(parts)) > 1:
            fault = f"{name} is named as the {' and the '.join(several)} split"
            raise DataError(f"{where}: {fault}; rename the file")
        found.setdefault(next(iter(several), ""), []).append(name)
    rest = found.pop("", [])
    if not found:
        _check_alike(rest, where)
        _check_copies({"": rest}, where, stem)
        return {"": rest}, []
    _check_rest(found, rest, sizes, where)
    _check_copies(found, where, stem)
    _check_sets(words, where)
    return {split: found[split] for split in ("train", "valid", "test") if split in found}, rest


def splits_named(name: str) -> set[str]:
    """Returns the splits that the name of a file or folder stands for; two if it is ambiguous."""
    return set(_splits(_deciding_words(name)))


def _deciding_words(name: str) -> list[str]:
    """Returns the words of the first folder whose name has a split, or else of the file name."""
    parts = [_WORD.findall(_ING.sub(r"\1", part)) for part in name.split("/")]
    return next(filter(_splits, parts), parts[-1])


def _splits(words: list[str]) -> dict[str, None]:
    return dict.fromkeys(SPLIT_OF[w.lower()] for w in words if w.lower() in SPLIT_OF)


def _check_rest(
    found: Mapping[str, list[str]], rest: list[str], sizes: Mapping[str, int], where: str
) -> None:
    """Raises DataError if the names of splits seem to be accidents, or there is no train split."""
    if "train" not in found:
        split, name = next((split, names[0]) for split, names in found.items())
        fault = f"{name} is named as the {split} split, and no file is named as the train split"
        raise DataError(f"{where}: {fault}; name the training text train, or rename {name}")
    named = [name for names in found.values() for name in names]
    of_rest, of_named = (sum(sizes[name] for name in names) for names in (rest, named))
    plain = all(len(_WORD.findall(os.path.splitext(name)[0])) == 1 for name in named)
    lonely = len(found) == 1 and not plain and of_rest * 10 > of_named
    if lonely or (of_rest > of_named and len(rest) > len(named)):
        fault = f"some names say a split ({listed(named)}), and others do not ({listed(rest)})"
        raise DataError(f"{where}: {fault}; rename files, or remove what is no part of the text")


def _check_copies(found: Mapping[str, list[str]], where: str, stem: Callable[[str], str]) -> None:
    """Raises DataError if two files of a split seem the same, as do val.txt and valid.txt.gz.

    A file in an archive counts as the same file as its unpacked copy, beside the archive or in a
    folder of the archive's name.
    """
    as_split = lambda word: "{}" if word[0].lower() in SPLIT_OF else word[0]
    for split, names in found.items():
        known: dict[str, str] = {}
        for name in names:
            form = _WORD.sub(as_split, _ING.sub(r"\1", stem(name)))
            if split and (short := _COPY.sub("", form)).endswith("{}"):
                form = short
            before = known.setdefault(form, name)
            if before != name:
                raise DataError(f"{where}: {before} and {name} {_SAME}")
        for (form, name), to in itertools.product(known.items(), ("", r"\1/")):
            if (beside := known.get(_ZIPPED.sub(to, form), name)) != name:
                raise DataError(f"{where}: {name} and {beside} {_SAME}")


def _check_alike(names: list[str], where: str) -> None:
    """Raises DataError if names, such as mytrain and mytest, seem to have splits inside words."""
    forms: dict[str, dict[str, str]] = {}
    for name in names:
        for part in _PART.finditer(name.lower()):
            form = f"{name[: part.start()]}{{}}{name[part.end() :]}".lower()
            forms.setdefault(form, {})[part[0]] = name
    for parts in forms.values():
        if len(parts) > 1 and any(part.startswith("tr") for part in parts):
            fault = f"{listed(list(parts.values()))} seem to be splits, but no name has a word"
            fix = "name them train.txt, valid.txt and test.txt"
            raise DataError(f"{where}: {fault} such as train or valid; {fix}")


def _check_sets(words: Mapping[str, list[str]], where: str) -> None:
    """Raises DataError for two sets of splits, such as ptb.train, ptb.char.train and their tests.

    Digits in names are ignored, because they often number the parts of one split. Only numbers of
    folds count: the test text of one fold is training text of the other folds.
    """
    sets: dict[tuple[str, ...], dict[str, str]] = {}
    for name, parts in words.items():
        for split in _splits(parts):
            key = tuple("{}" if word.lower() in SPLIT_OF else word for word in parts)
            sets.setdefault((*key, *_FOLD.findall(name)), {}).setdefault(split, name)
    whole = [names for names in sets.values() if len(names) > 1]
    if len(whole) > 1:
        both = " and ".join(next(iter(names.values())) for names in whole[:2])
        raise DataError(f"{where}: {both} belong to two sets of splits; {_FIX}")


def listed(names: list[str], sizes: Mapping[str, int] | None = None) -> str:
    """Returns names, with sizes if they are given, in one line; a long list is shortened."""
    shown = [f"{n} ({_size(sizes[n])})" if sizes else n for n in names]
    if len(shown) > 2 * SHOWN + 1:
        left = f"… {len(shown) - 2 * SHOWN:,} more …"
        shown = [*shown[:SHOWN], left, *shown[-SHOWN:]]
    return one_line(", ".join(shown))


def report(where: str, found: Mapping[str, list[str]], rest: list[str], sizes: Mapping[str, int]):
    """Prints once the files of each split, or of one text in order, and files that are left out."""
    parts = [f"{split} = {listed(names, sizes)}" for split, names in found.items() if split]
    if len(text := found.get("", [])) > 1:
        of_all = f"{len(text):,} files, {_size(sum(sizes[name] for name in text))}"
        parts = [f"one text of {of_all}, in this order: {listed(text, sizes)}"]
    elif text and rest:
        parts = [f"the text is {listed(text, sizes)}"]
    parts += [f"left out: {listed(rest)}"] if rest else []
    if parts:
        say_once(one_line(f"{where}: {'; '.join(parts)}"))
    shards = (m for names in found.values() for m in map(_SHARD.search, names) if m)
    there = collections.Counter((shard.string[: shard.start()], shard[1]) for shard in shards)
    for (name, of), count in there.items():
        if count < int(of):
            fault = f"{one_line(name)}*-of-{of} has {count:,} of {int(of):,} parts"
            say_once(f"note: {where}: {fault}; are the others missing?")


def _size(n: int) -> str:
    return f"{n:,} byte{'s' * (n != 1)}" if n < 100_000 else f"{n / 1e6:,.1f} MB"
