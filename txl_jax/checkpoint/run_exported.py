"""Runs the exported model beside this file with jax, numpy and flatbuffers (see README.md).

python run.py IDS.npy LOGITS.npy     logits [B,S,V] of token ids [B,S], with memory carried
"""

import json
import pathlib
import sys

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

FOLDER = pathlib.Path(__file__).parent
DTYPES = {"F32": np.float32, "BF16": jnp.bfloat16}


def parameters():
    """Returns the arrays of model.safetensors by name."""
    raw = (FOLDER / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = {k: v for k, v in json.loads(raw[8:start]).items() if k != "__metadata__"}
    part = lambda x: raw[start + x["data_offsets"][0] : start + x["data_offsets"][1]]
    array = lambda x: np.frombuffer(part(x), DTYPES[x["dtype"]]).reshape(x["shape"])
    return {name: jnp.asarray(array(x)) for name, x in header.items()}


def program(name):
    """Returns a program of the folder, and the shapes of its arguments."""
    exported = jax.export.deserialize(bytearray((FOLDER / f"{name}.jax").read_bytes()))
    arguments, _ = jax.tree.unflatten(exported.in_tree, exported.in_avals)
    in_place = [2] if name == "step" else []  # the cache is updated in its own buffers
    return jax.jit(exported.call, donate_argnums=in_place), arguments


def empty(mems, rows):
    """Returns an empty memory for a number of rows, given its shapes."""
    sizes = lambda x: [n if isinstance(n, int) else rows for n in x.shape]
    return jax.tree.map(lambda x: jnp.zeros(sizes(x), x.dtype), mems)


def read(params, ids):
    """Yields the logits of each segment of ids [B,S], and the memory after the segment."""
    logits, (_, tokens, _, mems) = program("logits")
    mems, t = empty(mems, len(ids)), tokens.shape[1]
    for start in range(0, ids.shape[1], t):
        part = ids[:, start : start + t]
        lengths = np.full(len(ids), part.shape[1], np.int32)
        padded = np.pad(part, [(0, 0), (0, t - part.shape[1])]).astype(np.int32)
        found, mems = logits(params, padded, lengths, mems)
        yield np.asarray(found)[:, : part.shape[1]], mems


if __name__ == "__main__":
    segments = read(parameters(), np.load(sys.argv[1]))
    np.save(sys.argv[2], np.concatenate([found for found, _ in segments], axis=1))
