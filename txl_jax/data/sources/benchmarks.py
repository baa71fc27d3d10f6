"""Finds the corpora ``ptb``, ``wt103``, ``wt2``, ``enwik8`` and ``text8``, each in one archive.

Penn Treebank is the text that Mikolov prepared. WikiText (Merity et al. 2016) keeps upper and lower
case; it is downloaded from its first author's mirror. The hashes of the WikiText archives are from
torchtext. No hashes are published for the files in these archives.

``enwik8`` and ``text8`` are 100,000,000 bytes of Wikipedia of 2006, in splits of 90M, 5M and 5M.
``text8`` has letters from a to z and spaces; white space at both ends of each split is stripped, as
in the authors' code. ``enwik8`` has two protocols, whose scores cannot be compared. ``authors``
drops the newline byte and leaves 204 symbols, so its bits per character are bits per byte that is
not a newline. ``bytes`` keeps all 205 symbols.

The authors count the vocabulary over all three splits, except for ``wt103``.
"""

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from txl_jax.data.errors import DataError
from txl_jax.data.sources import source
from txl_jax.data.sources.archives import extract, is_zip, plain_names, unpacked
from txl_jax.data.sources.download import download_folder
from txl_jax.data.sources.source import SPLITS, ByteRange, Source, Text
from txl_jax.data.sources.stored import Stored


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishedCorpus:
    """The published facts about a corpus, and the forms in which a user may have its files."""

    name: str
    title: str
    url: str  # of the archive
    names: Mapping[str, str]  # files to take from the archive: one per split, or one raw file
    patterns: tuple[str, ...]  # file names, {} is the split; the first found are used
    counts: Mapping[tuple[str, str], int | range]
    counted: tuple[str, ...] = SPLITS
    protocol: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    inside: tuple[str, ...] = (".",)  # subfolders to search, in this order
    md5: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of the files in ``names``
    archive_md5: str | None = None
    decode: Callable[[Iterable[bytes]], Iterator[bytes]] | None = None  # for files of patterns[0]
    decoded_key: str = ""  # the protocol's key that records whether files were decoded
    strip: bool = False  # whether white space at the ends of each split is left out

    def find(self, path: str | None, cache: Path) -> Source:
        """Finds the corpus at ``path``; the label says if files differ from the published ones.

        ``path`` is the archive, the raw file, or a folder with one of them or with a file of each
        split. ``None`` downloads the archive, and compares it with published hashes. Raises
        DataError if the corpus cannot be found or used.
        """
        if path is None:
            return self._downloaded(cache)
        given = source.existing_path(path, cache)
        if given.is_dir():
            for folder in (given / name for name in self.inside):
                for pattern in self.patterns:
                    if files := source.split_files(folder, pattern, f"{self.name}: {folder}"):
                        return self._source(files, pattern=pattern)
            given = self._single_file(given)
        if self._raw and not is_zip(given):
            return self._source({self._raw: given})
        names = list(self.names.values())
        folder = unpacked(self.name, given, cache, plain_names(names), names)
        archive_md5 = source.file_hash(given, "md5") if self.archive_md5 else None
        return self._source(self._files(folder), archive_md5=archive_md5)

    @property
    def _raw(self) -> str | None:
        """The name of the raw file, or ``None`` if the archive has a file of each split."""
        return None if set(self.names) == set(SPLITS) else next(iter(self.names))

    def _files(self, folder: Path) -> dict[str, Path]:
        return {key: folder / name for key, name in self.names.items()}

    def _single_file(self, folder: Path) -> Path:
        """Returns the raw file or the archive in a folder."""
        names = [*filter(None, [self._raw]), os.path.basename(self.url)]
        for path in (folder / name for name in names):
            if source.is_file(path):
                return path
        names += [pattern.format("train") for pattern in self.patterns]
        missing = f"there is none of {', '.join(names)} in {folder}"
        raise DataError(f"{self.name}: {missing}; name one of these files, or its folder")

    def _downloaded(self, cache: Path) -> Source:
        into, names = cache / "downloads" / self.name, list(self.names.values())

        def extract_checked(archive: Path, folder: Path) -> None:
            extract(archive, folder, plain_names(names), names, what=self.url)
            if other := self._other_md5(self._files(folder)):
                fault = f"the md5 of {other[0]} in it is not the published one"
                fix = "the download was deleted; get the file from elsewhere for data.path"
                raise DataError(f"{self.url}: {fault}; {fix}")

        known = self.archive_md5
        sums = download_folder(self.url, into, extract_checked, f"md5:{known}" if known else None)
        recorded = {key: sums[name] for key, name in self.names.items()}
        return self._source(self._files(into), archive_md5=known, recorded=recorded)

    def _source(
        self, files: Mapping[str, Path], pattern: Any = None, archive_md5: Any = None, **known: Any
    ) -> Source:
        """Returns the source of these files; ``archive_md5`` is the md5 of their archive."""
        for path in files.values():
            Stored(path, "text", 0).check_text()
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
            **known,
        )

    def _compare(self, files: Mapping[str, Path], archive_md5: str | None) -> tuple[Any, str]:
        """Returns whether the files are the published ones (``None`` if unknown), and a label."""
        if archive_md5:
            if archive_md5 == self.archive_md5:
                return True, "published data (md5 of the archive checked)"
            return False, "not the published data (the archive's md5 differs)"
        if set(files) != set(self.md5):
            first = next(iter(files.values())).name
            return None, f"{first}, …, for which no hash is published"
        if other := self._other_md5(files):
            return False, f"not the published data (other md5: {', '.join(other)})"
        return True, "published data (md5 checked)"

    def _other_md5(self, files: Mapping[str, Path]) -> list[str]:
        """Returns the names of files whose md5 differs from the published md5."""
        other = [key for key in self.md5 if source.file_hash(files[key], "md5") != self.md5[key]]
        return [self.names[key] for key in other]

    def _text(self, files: Mapping[str, Path], split: str) -> Text:
        """Returns the text of a split; a raw file is cut into 90%, 5% and 5% of its bytes."""
        if split in files:
            part = ByteRange.whole(files[split])
        else:
            whole = ByteRange.whole(*files.values())
            held_out = len(whole) // 20
            valid, test = len(whole) - 2 * held_out, len(whole) - held_out
            part = {"train": whole[:valid], "valid": whole[valid:test], "test": whole[test:]}[split]
        if self.strip:
            text = b"".join(source.read([part]))
            part = part[len(text) - len(text.lstrip()) : len(text.rstrip())]
        return [part]


def decode_numbers(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Decodes bytes that the authors' script wrote as decimal numbers, or raises DataError.

    Spaces separate the numbers. A line end is the newline byte, which the script does not convert.
    """
    rest = b""
    for block in itertools.chain(source.merge_small(parts), [b" "]):
        text = rest + block
        end = max(text.rfind(b" "), text.rfind(b"\n")) + 1
        rest = text[end:]
        numbers = text[:end].replace(b"\n", b" 10 ").split()
        try:
            yield bytes(map(int, numbers))
        except ValueError:
            raise _not_prepared("enwik8", "decimal numbers of bytes") from None


def decode_symbols(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Decodes text that the authors' script wrote with spaces between its characters.

    Raises DataError for other text. In this form, ``_`` stands for a space.
    """
    last = b" "
    for part in parts:
        at_edge = bool(last.strip() and part[:1].strip())
        text = b"".join(symbols := part.split())
        if at_edge or len(text) != len(symbols):
            raise _not_prepared("text8", "single characters")
        last = part[-1:]
        yield text.replace(b"_", b" ")


def _not_prepared(name: str, expected: str) -> DataError:
    fault = f"train.txt, valid.txt or test.txt has not only {expected} and white space, as the"
    fix = f"name the raw file or {name}.zip in data.path"
    return DataError(f"{name}: {fault} authors' script writes them; {fix}")


def _counts(what: str, counts: tuple[Any, ...], symbols: int) -> dict[tuple[str, str], Any]:
    by_split = {(what, split): n for split, n in zip(SPLITS, counts, strict=True)}
    return {**by_split, ("symbols", ""): symbols}


PTB = PublishedCorpus(
    name="ptb",
    title="Penn Treebank",
    url="http://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz",
    names={split: f"ptb.{split}.txt" for split in SPLITS},
    patterns=("ptb.{}.txt", "{}.txt"),
    counts=_counts("tokens", (929_589, 73_760, 82_430), 10_000),
    inside=(".", "data", "simple-examples/data"),
    md5={
        "train": "f26c4b92c5fdc7b3f8c7cdcb991d8420",
        "valid": "aa0affc06ff7c36e977d7cd49e3839bf",
        "test": "8b80168b89c18661a38ef683c0dc3721",
    },
)
WT103 = PublishedCorpus(
    name="wt103",
    title="WikiText-103",
    url="https://wikitext.smerity.com/wikitext-103-v1.zip",
    names={split: f"wiki.{split}.tokens" for split in SPLITS},
    patterns=("wiki.{}.tokens", "{}.txt"),
    counts=_counts("tokens", (103_227_021, 217_646, 245_569), 267_735),
    counted=("train",),
    inside=(".", "wikitext-103"),
    archive_md5="9ddaacaf6af0710eda8c456decff7832",
)
WT2 = dataclasses.replace(
    WT103,
    name="wt2",
    title="WikiText-2",
    url="https://wikitext.smerity.com/wikitext-2-v1.zip",
    counts=_counts("tokens", (2_088_628, 217_646, 245_569), 33_278),
    counted=SPLITS,
    inside=(".", "wikitext-2"),
    archive_md5="542ccefacc6c27f945fb54453812b3cd",
)
_SIZES = (90_000_000, 5_000_000, 5_000_000)
ENWIK8 = PublishedCorpus(
    name="enwik8",
    title="enwik8, the authors' protocol (newline bytes left out)",
    url="http://mattmahoney.net/dc/enwik8.zip",
    names={"enwik8": "enwik8"},
    patterns=("{}.txt", "{}.txt.raw", "{}.raw"),  # the authors' script's numbers; then raw text
    counts=_counts("bytes", _SIZES, 204),
    protocol={"protocol": "authors"},
    md5={"enwik8": "a1fa5ffddb56f4953e226637dabbb36a"},
    decode=decode_numbers,
    decoded_key="numbers",
)
ENWIK8_BYTES = dataclasses.replace(
    ENWIK8,
    title="enwik8, the byte protocol (no byte left out)",
    counts=_counts("bytes", _SIZES, 205),
    protocol={"protocol": "bytes"},
)
TEXT8 = dataclasses.replace(
    ENWIK8,
    name="text8",
    title="text8",
    url="http://mattmahoney.net/dc/text8.zip",
    names={"text8": "text8"},
    # a split loses at most one space at each of its ends
    counts=_counts("bytes", tuple(range(size - 2, size + 1) for size in _SIZES), 27),
    protocol={},
    md5={"text8": "3bea1919949baf155f99411df5fada7e"},
    decode=decode_symbols,
    decoded_key="symbols",
    strip=True,
)

_ALL = (PTB, WT103, WT2, ENWIK8, ENWIK8_BYTES, TEXT8)
CORPORA = {(corpus.name, corpus.protocol.get("protocol")): corpus for corpus in _ALL}
CORPORA["enwik8", None] = ENWIK8
"""The benchmark corpora by name and protocol."""
