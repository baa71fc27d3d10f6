"""Copies texts and arrays of a bucket into the cache, because they are read through memory maps."""

import os
from pathlib import Path, PurePosixPath

from txl_jax.data.errors import DataError
from txl_jax.data.sources.cache import json_hash, make_folder
from txl_jax.parallel.processes import is_process_zero
from txl_jax.paths import BUCKETS, path, store
from txl_jax.standard_streams import stderr

BESIDE = ("symbols.json", "meta.pkl", "1b_word_vocab.txt", "{}.starts.npy")
"""Files that are also read if they are beside a single file, whose stem is ``{}``."""


def local_copy(address: str, cache: Path) -> Path | None:
    """Returns the local copy of an object or folder, or ``None`` if the bucket has no such name.

    A copy is made once for each state: its key is the objects' names, sizes and generations.
    """
    path(address)  # raises an error if the bucket cannot be used
    root = address.removeprefix(BUCKETS).rstrip("/")
    parent, name = os.path.split(root)
    names = [root]
    if store().isfile(root):
        stem = os.path.splitext(name)[0]
        names += [os.path.join(parent, beside.format(stem)) for beside in BESIDE]
    found = {key: info for one in names for key, info in store().find(one, detail=True).items()}
    found = {key: info for key, info in found.items() if not key.endswith("/")}
    if not found:
        return None
    state = [[key, info["size"], info.get("generation")] for key, info in sorted(found.items())]

    def fill(folder: Path) -> None:
        size = sum(info["size"] for info in found.values())
        if is_process_zero():
            print(f"copying {address}: {size / 1e6:,.1f} MB", file=stderr(), flush=True)
        for key in found:
            relative = PurePosixPath(key.removeprefix(f"{parent}/"))
            if relative.is_absolute() or ".." in relative.parts:
                raise DataError(
                    f"{BUCKETS}{key}: no local file can have this name; rename the object"
                )
            (folder / relative).parent.mkdir(parents=True, exist_ok=True)
            store().get_file(key, str(folder / relative))

    return make_folder(cache / "copies" / json_hash(state)[:20], fill) / name
