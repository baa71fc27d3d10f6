"""Recorded runs of the authors' and NVIDIA's PyTorch code (``recorded/README.md``)."""

import json

import numpy as np
import shared_files
from places import RECORDED

FOLDERS = {
    "published": RECORDED / "published",
    "recorded": RECORDED,
    "shared": shared_files.FOLDER / "fixtures" / "model",
}
OTHER_RECORDINGS = ("lamb",)
"""Recordings of an optimizer, not of a model."""


def recordings():
    """Returns (name, key of ``FOLDERS``) of every recorded model.

    If several folders have a model, the first of these folders counts.
    """
    found: dict[str, str] = {}
    for where, folder in FOLDERS.items():
        for file in sorted(folder.glob("*.json")):
            if file.stem not in OTHER_RECORDINGS:
                found.setdefault(file.stem, where)
    return list(found.items())


class Recorded:
    """One recorded run of an original program."""

    def __init__(self, name, where):
        folder = FOLDERS[where]
        self.meta = json.loads((folder / f"{name}.json").read_text())
        self.arrays = np.load(folder / f"{name}.npz")
        self.n_segments = len(self.meta["segment_lengths"])
        lengths = {**self.meta["constructor"], **self.meta["extras"].get("reset_length", {})}
        self.mem_len, self.context_len = lengths["mem_len"], lengths["ext_len"]

    def constructor_args(self):
        untie_r = {"untie_r": True} if self.meta["extras"].get("untie_r") else {}
        return {**self.meta["constructor"], "impl": self.meta["impl"], **untie_r}

    def under(self, prefix):
        """Every array whose key starts with ``prefix``, keyed by the rest of its key."""
        return {k[len(prefix) :]: self.arrays[k] for k in self.arrays.files if k.startswith(prefix)}

    def first_mems(self, model):
        mems = model.init_mems(self.meta["batch_size"], self.mem_len)
        given = self.under("init_mem/")
        if given:  # as in the TensorFlow code, queries attend to a first memory of zeros
            assert not any(state.any() for state in given.values())
            mems = mems.replace(filled=np.full_like(mems.filled, self.mem_len))
        return mems
