"""Writes arrays of token ids in the file formats of other programs."""

import pathlib

import numpy as np

IDS = np.arange(200) % 7


def save(path: pathlib.Path, ids=IDS, dtype="uint16") -> str:
    array = np.asarray(ids).astype(dtype)
    if path.suffix == ".npy":
        np.save(path, array)
    else:
        array.tofile(path)
    return str(path)


def llm_c(path, ids, magic=20240520, version=1, dtype="<u2", count=None):
    """Writes ids as llm.c does (dev/data/data_common.py): a header of 256 int32, then the ids."""
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(ids) if count is None else count
    path.write_bytes(header.tobytes() + np.asarray(ids).astype(dtype).tobytes())
    return str(path)
