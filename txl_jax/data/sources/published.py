"""Published corpora that are one archive: found in any form they come in, or downloaded."""

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from txl_jax.data.errors import DataError
from txl_jax.data.sources.archives import extract, is_zip, plain_names, unpacked
from txl_jax.data.sources.download import check_hash, download_folder
from txl_jax.data.sources.source import (
    SPLITS,
    ByteRange,
    Source,
    Text,
    existing_path,
    file_hash,
    is_file,
    read,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishedCorpus:
    """What is published of a corpus, and the forms in which a user may have its files.

    Attributes:
      name, title, counted, counts, protocol: of the :class:`Source`.
      url: of the archive.
      names: of the files that are taken from the archive: one of each split, or one raw file.
      patterns: names of a folder's files, ``{}`` for the split, in order of preference.
      inside: folders that are searched in a folder, in this order; ``"."`` is itself.
      md5: published for each of ``names``; empty: none.
      archive_md5: published for the archive; ``None``: none.
      decode: turns the files of the first pattern into text, where they are symbols.
      decoded_key: records in the protocol whether that was done.
      strip: whether white space at the ends of each split is left out.
    """

    name: str
    title: str
    url: str
    names: Mapping[str, str]
    patterns: tuple[str, ...]
    counts: Mapping[tuple[str, str], int | range]
    counted: tuple[str, ...] = SPLITS
    protocol: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    inside: tuple[str, ...] = (".",)
    md5: Mapping[str, str] = dataclasses.field(default_factory=dict)
    archive_md5: str | None = None
    decode: Callable[[Iterable[bytes]], Iterator[bytes]] | None = None
    decoded_key: str = ""
    strip: bool = False

    def find(self, path: str | None, cache: Path) -> Source:
        """The corpus at ``path``; files that differ from the published ones are labelled so.

        ``path``: the archive, the raw file, or a folder with one of them or with a file of each
        split. ``None``: the archive is downloaded to ``cache``; published hashes are enforced.

        Raises:
          DataError: nothing usable is there, or a download has a wrong hash.
        """
        if path is None:
            return self._downloaded(cache)
        given = existing_path(path)
        if given.is_dir():
            for folder in (given / name for name in self.inside):
                for pattern in self.patterns:
                    if files := self._split_files(folder, pattern):
                        return self._source(files, pattern=pattern)
            given = self._single_file(given)
        if self._raw and not is_zip(given):
            return self._source({self._raw: given})
        names = list(self.names.values())
        folder = unpacked(self.name, given, cache, plain_names(names), names)
        files = {key: folder / name for key, name in self.names.items()}
        archive_md5 = file_hash(given, "md5") if self.archive_md5 else None
        return self._source(files, archive_md5=archive_md5)

    @property
    def _raw(self) -> str | None:
        """The name of the raw file; ``None``: the archive has a file of each split."""
        return None if set(self.names) == set(SPLITS) else next(iter(self.names))

    def _split_files(self, folder: Path, pattern: str) -> dict[str, Path] | None:
        files = {split: folder / pattern.format(split) for split in SPLITS}
        missing = [file.name for file in files.values() if not is_file(file)]
        if missing and len(missing) < len(files):
            present = next(file.name for file in files.values() if file.name not in missing)
            raise DataError(f"{self.name}: {folder} has {present} but no {missing[0]}")
        return None if missing else files

    def _single_file(self, folder: Path) -> Path:
        """The raw file or the archive in a folder."""
        names = [*filter(None, [self._raw]), os.path.basename(self.url)]
        for name in names:
            if is_file(folder / name):
                return folder / name
        names += [pattern.format("train") for pattern in self.patterns]
        others = [name for name in self.inside if name != "."]
        places = f", nor in its folders {' and '.join(others)}" if others else ""
        raise DataError(f"{self.name}: there is no {' and no '.join(names)} in {folder}{places}")

    def _downloaded(self, cache: Path) -> Source:
        into, names = cache / "downloads" / self.name, list(self.names.values())

        def extract_checked(archive: Path, folder: Path) -> None:
            extract(archive, folder, plain_names(names), names, what=self.url)
            for key, expected in self.md5.items():
                found = file_hash(folder / self.names[key], "md5")
                if found != expected:
                    raise DataError(
                        f"{self.url}: the md5 of {self.names[key]} in it is {found}, not the"
                        f" published {expected}; the download was deleted. Get the file from"
                        " elsewhere and name it in data.path"
                    )

        check = None
        if self.archive_md5:
            check = check_hash(f"md5:{self.archive_md5}", self.url, "as published")
        sums = download_folder(self.url, into, extract_checked, check)
        files = {key: into / name for key, name in self.names.items()}
        recorded = {key: sums[name] for key, name in self.names.items()}
        return self._source(files, archive_md5=self.archive_md5, recorded=recorded)

    def _source(
        self,
        files: Mapping[str, Path],
        pattern: str | None = None,
        archive_md5: str | None = None,
        recorded: Mapping[str, str] | None = None,
    ) -> Source:
        """The source of these files; ``archive_md5``: of the archive that they are from."""
        decoded = bool(self.decode) and pattern == self.patterns[0]
        flag = {self.decoded_key: decoded} if self.decode else {}
        published, label = self._compare(files, archive_md5)
        return Source(
            name=self.name,
            files=files,
            splits={split: self._text(files, split) for split in SPLITS},
            counted=self.counted,
            protocol={**self.protocol, **flag},
            published=published,
            label=f"{self.title}, {label}",
            counts=self.counts,
            decode=self.decode if decoded else None,
            recorded=recorded or {},
        )

    def _compare(
        self, files: Mapping[str, Path], archive_md5: str | None
    ) -> tuple[bool | None, str]:
        """Whether the files are the published ones, and the same for reports."""
        if archive_md5:
            if archive_md5 == self.archive_md5:
                return True, "published data (md5 of the archive checked)"
            return False, "not the published data (the archive's md5 differs)"
        if set(files) != set(self.md5):
            first = next(iter(files.values())).name
            return None, f"{first}, …, for which no hash is published"
        differing = [self.names[k] for k in files if file_hash(files[k], "md5") != self.md5[k]]
        if differing:
            return False, f"not the published data (other md5: {', '.join(differing)})"
        return True, "published data (md5 checked)"

    def _text(self, files: Mapping[str, Path], split: str) -> Text:
        """The text of a split; a raw file is cut 90 / 5 / 5 by its size."""
        if not self._raw or set(files) == set(SPLITS):
            part = ByteRange.whole(files[split])
        else:
            part = ByteRange.whole(files[self._raw])
            size, held_out = part.stop, part.stop // 20
            ends = (0, size - 2 * held_out, size - held_out, size)
            n = SPLITS.index(split)
            part = part.slice(ends[n], ends[n + 1])
        if self.strip:
            text = b"".join(read([part]))
            start = len(text) - len(text.lstrip())
            part = part.slice(start, max(start, len(text.rstrip())))
        return [part]
