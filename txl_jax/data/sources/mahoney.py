"""What ``enwik8`` and ``text8`` share: one raw file in a zip (Mahoney), cut by its size."""

import dataclasses
from pathlib import Path

from txl_jax.data.errors import DataError
from txl_jax.data.sources.archives import ZIP, first_bytes, plain_names, unpacked
from txl_jax.data.sources.download import download_folder
from txl_jax.data.sources.folders import nothing_in, split_files
from txl_jax.data.sources.source import SPLITS, ByteRange, existing, file_hash, is_file

PREPARED = "{}.txt"
"""Files of the authors' scripts: symbols between spaces."""
RAW_SPLITS = ("{}.txt.raw", "{}.raw")
"""What these scripts leave beside them: the text itself."""
SIZES = {"train": 90_000_000, "valid": 5_000_000, "test": 5_000_000}


@dataclasses.dataclass(frozen=True)
class RawFile:
    """One of the two files.

    Attributes:
      name: of the corpus and of the file.
      url: of the zip that holds it.
      md5: published, of the file.
    """

    name: str
    url: str
    md5: str

    def find(self, path: str | None, cache: Path) -> tuple[Path, bool, str]:
        """The raw file, whether it is the published one, and what to say of it.

        Args:
          path: the file, the zip, or a folder with one of them. ``None``: downloaded; the
            published hash is enforced.
          cache: folder for what is downloaded or unpacked.

        Raises:
          DataError: it is not there, or a download has a wrong hash.
        """
        raw = self._downloaded(cache) if path is None else self._local(existing(path), cache)
        found = file_hash(raw, "md5")
        if found == self.md5:
            return raw, True, "published data (md5 checked)"
        if path is None:
            raise DataError(
                f"{raw}: its md5 is {found}, not the published {self.md5}; delete the folder"
                f" {raw.parent}, it will be downloaded again"
            )
        return raw, False, f"not the published data (its md5 is {found})"

    def _local(self, path: Path, cache: Path) -> Path:
        if path.is_dir():
            files = [path / self.name, path / f"{self.name}.zip"]
            there = [file for file in files if is_file(file)]
            if not there:
                names = [self.name, f"{self.name}.zip"]
                names += [p.format("train") for p in (PREPARED, *RAW_SPLITS)]
                raise nothing_in(self.name, path, (".",), names)
            path = there[0]
        if first_bytes(path) != ZIP:
            return path
        names = [self.name]
        return unpacked(self.name, path, cache, plain_names(names), names) / self.name

    def _downloaded(self, cache: Path) -> Path:
        into, names = cache / "downloads" / self.name, [self.name]

        def check(folder: Path) -> None:
            found = file_hash(folder / self.name, "md5")
            if found != self.md5:
                raise DataError(
                    f"{self.url}: the md5 of {self.name} in it is {found}, not the published"
                    f" {self.md5}; nothing of it was kept. Fetch it from elsewhere and name the"
                    " file in data.path"
                )

        download_folder(self.url, into, plain_names(names), names, check_folder=check)
        return into / self.name


def find_splits(name: str, path: str | None) -> tuple[str, dict[str, Path]] | None:
    """Pattern and files of splits in the folder ``path``; prepared ones before raw ones."""
    if path is None or not existing(path).is_dir():
        return None
    return split_files(name, existing(path), (".",), (PREPARED, *RAW_SPLITS), SPLITS)


def twentieths(raw: Path) -> dict[str, ByteRange]:
    """The splits of a raw file: its last twentieth is test, the one before it valid."""
    size = ByteRange.whole(raw).stop
    held_out = size // 20
    cuts = (0, size - 2 * held_out, size - held_out, size)
    return {split: ByteRange(raw, cuts[i], cuts[i + 1]) for i, split in enumerate(SPLITS)}
