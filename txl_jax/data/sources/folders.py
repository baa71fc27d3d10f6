"""A folder of the user's own with one file for each split."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from txl_jax.data.errors import DataError
from txl_jax.data.sources.source import is_file


def split_files(
    corpus: str, path: Path, inside: Sequence[str], patterns: Sequence[str], splits: Sequence[str]
) -> tuple[str, dict[str, Path]] | None:
    """The files of each split, and the pattern that their names have.

    Args:
      corpus: its name, for errors.
      path: a folder.
      inside: folders in it that are looked into, in this order; ``"."`` is itself.
      patterns: of the files' names, ``{}`` for the split; the first that is there is taken.
      splits: names of the splits.

    Raises:
      DataError: some of the splits are there and others are not, or one is no regular file.
    """
    for folder in (path / name for name in inside):
        for pattern in patterns:
            files = {split: folder / pattern.format(split) for split in splits}
            present = [file.name for file in files.values() if is_file(file)]
            if len(present) == len(splits):
                return pattern, files
            if present:
                missing = next(file.name for file in files.values() if not is_file(file))
                raise DataError(f"{corpus}: {folder} has {present[0]} but no {missing}")
    return None


def nothing_in(corpus: str, path: Path, inside: Sequence[str], names: Sequence[str]) -> DataError:
    """The error of a folder that has none of the files a corpus may be."""
    folders = [name for name in inside if name != "."]
    places = f", nor in its folders {' and '.join(folders)}" if folders else ""
    return DataError(f"{corpus}: there is no {' and no '.join(names)} in {path}{places}")


def file_names(pattern: str, splits: Sequence[str]) -> Mapping[str, str]:
    """The file's name of each split."""
    return {split: pattern.format(split) for split in splits}
