"""``ptb``: Penn Treebank as Mikolov prepared it, 929,589 / 73,760 / 82,430 tokens."""

import tempfile
from pathlib import Path

from txl_jax.data.errors import DataError
from txl_jax.data.sources import download
from txl_jax.data.sources.source import SPLITS, Piece, Source, existing, file_hash

URL = "http://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz"
PUBLISHED_MD5 = {
    "train": "f26c4b92c5fdc7b3f8c7cdcb991d8420",
    "valid": "aa0affc06ff7c36e977d7cd49e3839bf",
    "test": "8b80168b89c18661a38ef683c0dc3721",
}
NAMES = {split: f"ptb.{split}.txt" for split in SPLITS}
PLAIN_NAMES = {split: f"{split}.txt" for split in SPLITS}


def find(path: str | None, cache: Path) -> Source:
    """The corpus at ``path``, or downloaded.

    Its vocabulary is counted over all three splits, as published (10,000 words).

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
    differing = [s for s in SPLITS if file_hash(files[s], "md5") != PUBLISHED_MD5[s]]
    if path is None and differing:
        split = differing[0]
        raise DataError(
            f"{files[split]}: its md5 is {file_hash(files[split], 'md5')}, not the published"
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
        splits={split: [Piece.whole(file)] for split, file in files.items()},
        counted=SPLITS,
        published=not differing,
        label=f"Penn Treebank, {label}",
    )


def _local(path: Path, cache: Path) -> dict[str, Path]:
    if path.is_file():
        into = cache / "unpacked" / f"ptb-{file_hash(path)[:16]}"
        into.parent.mkdir(parents=True, exist_ok=True)
        folder = download.unpack(path, tuple(NAMES.values()), into)
        return {split: folder / name for split, name in NAMES.items()}
    for folder in (path, path / "data", path / "simple-examples" / "data"):
        for names in (NAMES, PLAIN_NAMES):
            present = [split for split in SPLITS if (folder / names[split]).is_file()]
            if len(present) == len(SPLITS):
                return {split: folder / names[split] for split in SPLITS}
            if present:
                missing = next(names[s] for s in SPLITS if s not in present)
                raise DataError(f"ptb: {folder} has {names[present[0]]} but no {missing}")
    raise DataError(
        f"ptb: there is no {NAMES['train']} and no {PLAIN_NAMES['train']} in {path}, nor in its"
        " folders data and simple-examples/data"
    )


def _downloaded(cache: Path) -> dict[str, Path]:
    into = cache / "downloads" / "ptb"
    if not into.is_dir():
        into.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=into.parent, prefix="ptb.tmp-") as temporary:
            archive = download.download(URL, Path(temporary) / "simple-examples.tgz")
            folder = download.unpack(archive, tuple(NAMES.values()), Path(temporary) / "ptb")
            for split, name in NAMES.items():
                found = file_hash(folder / name, "md5")
                if found != PUBLISHED_MD5[split]:
                    raise DataError(
                        f"{URL}: the md5 of {name} in it is {found}, not the published"
                        f" {PUBLISHED_MD5[split]}; nothing of it was kept. Fetch Penn Treebank"
                        " from elsewhere and name its folder in data.path"
                    )
            download.rename_folder(folder, into)
    return {split: into / name for split, name in NAMES.items()}
