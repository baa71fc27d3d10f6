"""Splits a trained model into small bfloat16 files, and joins them again.

    python -m benchmarks.pieces split WORKDIR FOLDER [--mib=15]
    python -m benchmarks.pieces join FOLDER EXPORTED

    FOLDER     piece_00.safetensors ..  pieces.json  config.json  vocab.json
    EXPORTED   a folder that txl_jax.load() reads, float32

Use this to copy a model from a machine that returns only small files. The weights are those that
training chose (``average.use``). Rounding to bfloat16 changes the loss a little, so a published
score of the joined model must be measured with the joined model.
"""

import argparse
import dataclasses
import json
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file, save_file

import txl_jax
from txl_jax.checkpoint.tensors import flat_params, params_from_flat
from txl_jax.checkpoint.trained_model import TrainedModel, param_shapes
from txl_jax.checkpoint.workdir import read_json
from txl_jax.checkpoint.workdir_files import CONFIG, VOCAB
from txl_jax.config.changes import from_record
from txl_jax.data.vocab import Vocab


def split(workdir: str, folder: str, mib: float) -> list[pathlib.Path]:
    """Writes the model of a workdir in pieces of at most ``mib`` MiB each; returns their paths."""
    trained, out = txl_jax.load(workdir), pathlib.Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    limit, pieces, size = int(mib * 2**20), [{}], 0  # type: ignore[var-annotated]
    for name, rows in _parts(flat_params(trained.params), limit // 2):
        if size + rows.nbytes > limit and pieces[-1]:
            pieces.append({})
            size = 0
        pieces[-1][name] = rows
        size += rows.nbytes
    paths = [out / f"piece_{i:02}.safetensors" for i in range(len(pieces))]
    for path, piece in zip(paths, pieces, strict=True):
        save_file(piece, path)
    for name in (CONFIG, VOCAB):
        (out / name).write_bytes((pathlib.Path(workdir) / name).read_bytes())
    about = {"step": trained.step, "weights": trained.weights, "pieces": len(pieces)}
    (out / "pieces.json").write_text(json.dumps(about) + "\n")
    return paths


def _parts(tensors: dict[str, np.ndarray], most: int):
    """Yields the tensors in bfloat16, cut into parts of about ``most`` bytes called NAME#NUMBER."""
    for name, tensor in tensors.items():
        rows = tensor.reshape(len(tensor), -1).astype(jnp.bfloat16)
        n = -(-rows.nbytes // most)
        for i, part in enumerate(np.array_split(rows, n)):
            yield f"{name}#{i:03}", np.ascontiguousarray(part)


def join(folder: str, exported: str) -> TrainedModel:
    """Joins the pieces, writes them as an exported model in float32, and returns the model."""
    about = json.loads((pathlib.Path(folder) / "pieces.json").read_text())
    paths = sorted(pathlib.Path(folder).glob("piece_*.safetensors"))
    if len(paths) != about["pieces"]:
        raise SystemExit(f"{folder}: has {len(paths)} of {about['pieces']} pieces")
    parts: dict[str, Any] = {}
    for path in paths:
        parts |= load_file(path)
    record = read_json(str(pathlib.Path(folder) / CONFIG))
    exp = from_record(record)
    one_by_one = dataclasses.replace(exp.model, scan_layers=False, remat="none", kernel="auto")
    exp = dataclasses.replace(exp, model=one_by_one)
    vocab = Vocab.from_json(read_json(str(pathlib.Path(folder) / VOCAB)))
    model = txl_jax.TransformerXL(exp.model)
    tensors = _joined(parts)
    shapes = flatten_dict(param_shapes(exp.model), sep="/")
    whole = {name: tensor.reshape(shapes[name].shape) for name, tensor in tensors.items()}
    params = params_from_flat(whole, param_shapes(exp.model))
    trained = TrainedModel(model, params, vocab, exp, about["step"], about["weights"])
    txl_jax.save(trained, exported)
    return trained


def _joined(parts: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    found: dict[str, list[np.ndarray]] = {}
    for key in sorted(parts):
        found.setdefault(key.rpartition("#")[0], []).append(parts[key])
    return {name: np.concatenate(rows).astype(np.float32) for name, rows in found.items()}


def main(argv: list[str] | None = None) -> None:
    """Splits or joins a model, as the flags say."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("split", "join"))
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("--mib", type=float, default=15)
    flags = parser.parse_args(argv)
    if flags.what == "join":
        trained = join(flags.source, flags.target)
        print(f"{flags.target}: step {trained.step}, {trained.weights} weights")
        return
    for path in split(flags.source, flags.target, flags.mib):
        print(f"{path} {path.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
