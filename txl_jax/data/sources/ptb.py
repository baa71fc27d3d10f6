"""``ptb``: Penn Treebank as Mikolov prepared it, 929,589 / 73,760 / 82,430 tokens."""

from pathlib import Path

from txl_jax.data.errors import DataError
from txl_jax.data.sources.archives import plain_names, unpacked
from txl_jax.data.sources.download import download_folder
from txl_jax.data.sources.folders import file_names, nothing_in, split_files
from txl_jax.data.sources.source import SPLITS, ByteRange, Source, existing, file_hash

URL = "http://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz"
PUBLISHED_MD5 = {
    "train": "f26c4b92c5fdc7b3f8c7cdcb991d8420",
    "valid": "aa0affc06ff7c36e977d7cd49e3839bf",
    "test": "8b80168b89c18661a38ef683c0dc3721",
}
COUNTS = {
    ("tokens", "train"): 929_589,
    ("tokens", "valid"): 73_760,
    ("tokens", "test"): 82_430,
    ("symbols", ""): 10_000,
}
PATTERNS = ("ptb.{}.txt", "{}.txt")
INSIDE = (".", "data", "simple-examples/data")
NAMES = file_names(PATTERNS[0], SPLITS)


def find(path: str | None, cache: Path) -> Source:
    """The corpus at ``path``, or downloaded.

    Its vocabulary is counted over all three splits, in lower case, as the authors do (10,000
    words; only Mikolov's ``N`` for numbers is not lower case already).

    Args:
      path: ``simple-examples.tgz``, its unpacked folder, a folder with ``ptb.train.txt``,
        ``ptb.valid.txt`` and ``ptb.test.txt``, or one with ``train.txt``, ``valid.txt`` and
        ``test.txt``. ``None``: downloaded from :data:`URL`; the published hashes are enforced.
      cache: folder for what is downloaded or unpacked.

    Raises:
      DataError: nothing usable is there, or a download has a wrong hash. Files at ``path`` that
        differ from the published ones are used, and labelled so.
    """
    files = _downloaded(cache) if path is None else _local(existing(path), cache)
    sums = {split: file_hash(files[split], "md5") for split in SPLITS}
    differing = [split for split in SPLITS if sums[split] != PUBLISHED_MD5[split]]
    if path is None and differing:
        split = differing[0]
        raise DataError(
            f"{files[split]}: its md5 is {sums[split]}, not the published"
            f" {PUBLISHED_MD5[split]}; delete the folder {files[split].parent}, it will be"
            " downloaded again"
        )
    if differing:
        label = f"not the published data ({', '.join(NAMES[s] for s in differing)} differ)"
    else:
        label = "published data (md5 checked)"
    return Source(
        name="ptb",
        files=files,
        splits={split: [ByteRange.whole(file)] for split, file in files.items()},
        counted=SPLITS,
        published=not differing,
        label=f"Penn Treebank, {label}",
        counts=COUNTS,
    )


def _local(path: Path, cache: Path) -> dict[str, Path]:
    if path.is_file():
        names = tuple(NAMES.values())
        folder = unpacked("ptb", path, cache, plain_names(names), names)
        return {split: folder / name for split, name in NAMES.items()}
    found = split_files("ptb", path, INSIDE, PATTERNS, SPLITS)
    if found is None:
        raise nothing_in("ptb", path, INSIDE, [pattern.format("train") for pattern in PATTERNS])
    return found[1]


def _downloaded(cache: Path) -> dict[str, Path]:
    into, names = cache / "downloads" / "ptb", tuple(NAMES.values())

    def check(folder: Path) -> None:
        for split, name in NAMES.items():
            found = file_hash(folder / name, "md5")
            if found != PUBLISHED_MD5[split]:
                raise DataError(
                    f"{URL}: the md5 of {name} in it is {found}, not the published"
                    f" {PUBLISHED_MD5[split]}; nothing of it was kept. Fetch Penn Treebank"
                    " from elsewhere and name its folder in data.path"
                )

    download_folder(URL, into, plain_names(names), names, check_folder=check)
    return {split: into / name for split, name in NAMES.items()}
