"""A run's folder: what it is of, and the trained model in it.

workdir/
  config.json     every setting, the corpus's hash, versions and revision
  vocab.json      the symbols of the tokens
  checkpoints/    checkpoint/checkpoints.py
  metrics.jsonl  loss.png  tensorboard/  sample.txt
  library.log     errors of libraries, txl_jax/library_errors.py
  .lock           who trains in it, txl_jax/checkpoint/lock.py
"""

import dataclasses
import os
import tempfile
import time
from typing import Any

import jax

from txl_jax.checkpoint.checkpoints import Checkpoints
from txl_jax.checkpoint.errors import WorkdirError
from txl_jax.checkpoint.provenance import provenance
from txl_jax.checkpoint.trained_model import TrainedModel, param_shapes
from txl_jax.checkpoint.workdir_files import CHECKPOINTS, CONFIG, PROBE, VOCAB, check_free
from txl_jax.config import (
    ConfigError,
    ExperimentConfig,
    differing_keys,
    of_record,
)
from txl_jax.data.corpus import Corpus
from txl_jax.data.errors import DataError
from txl_jax.data.vocab import Vocab
from txl_jax.files import json_object, why_not_written, write_json
from txl_jax.model.transformer_xl import TransformerXL
from txl_jax.parallel import processes

WRITTEN_IN = (CHECKPOINTS, "tensorboard")
"""Folders of a workdir that training writes in."""


def check_writable(workdir: str, folders: tuple[str, ...] = ()) -> None:
    """Makes the folder; raises WorkdirError where nothing can be written in it.

    A folder and a file are made in it for a moment, and in each of its ``folders`` that is there:
    it may be on another disk, read-only, or without space or inodes.
    """
    try:
        os.makedirs(workdir, exist_ok=True)
        _try_writing(workdir)
    except OSError as error:
        raise WorkdirError(
            f"--workdir={workdir}: cannot be written ({why_not_written(error)}); name a folder"
            " that can"
        ) from error
    for name in folders:
        folder = os.path.join(workdir, name)
        if not os.path.lexists(folder):
            continue  # it will be made in the workdir, which can be written
        try:
            _try_writing(folder)
        except OSError as error:
            raise WorkdirError(
                f"--workdir={workdir}: its folder {name} cannot be written"
                f" ({why_not_written(error)}); make it writable, or name another --workdir"
            ) from error


def _try_writing(folder: str) -> None:
    """Makes a folder with a file that reaches the disk, and removes both."""
    with (
        tempfile.TemporaryDirectory(prefix=f"{PROBE}-", dir=folder) as made,
        open(os.path.join(made, PROBE), "wb") as file,
    ):
        file.write(bytes(_BLOCK))
        file.flush()
        os.fsync(file.fileno())


_BLOCK = 4096
"""Bytes of a block of most file systems, so that a free one is needed."""


def with_vocab(exp: ExperimentConfig, corpus: Corpus) -> ExperimentConfig:
    """The experiment with ``model.vocab_size`` taken from the corpus.

    Raises:
      ConfigError: the config names another size.
    """
    size, named = len(corpus.vocab), exp.model.vocab_size
    if named not in (None, size):
        raise ConfigError(
            f"config key model.vocab_size = {named}: the vocabulary of {corpus.name} has {size}"
            " symbols; leave it out to take that"
        )
    return dataclasses.replace(exp, model=dataclasses.replace(exp.model, vocab_size=size))


def init_workdir(workdir: str, exp: ExperimentConfig, corpus: Corpus) -> None:
    """Writes what this run is of; a folder that is another run's is refused and left as it is.

    ``config.json`` is written first: a folder without it has no other file of a run.

    Raises:
      WorkdirError: the folder belongs to another config, was trained on other text, holds an
        exported model, or is no run's and has files that the run would overwrite.
    """
    check_free(workdir)
    path = os.path.join(workdir, CONFIG)
    if os.path.exists(path):
        there = read_record(workdir)
        different = differing_keys(_settings(there), exp.to_dict())
        text = (there.get("corpus", {}).get("source_hash"), corpus.source_hash)
        if text[0] != text[1]:
            different.append(f"hash of the text: {text[0]} -> {text[1]}")
        if different:
            raise WorkdirError(
                f"--workdir={workdir}: is the folder of another run: {'; '.join(different)}."
                " Name another --workdir, or use that run's settings"
            )
    described = {
        "name": corpus.name,
        "source_hash": corpus.source_hash,
        **dict(corpus.info),
    }
    record = {**exp.to_dict(), "corpus": described, "provenance": provenance()}
    write_json(path, record)
    write_json(os.path.join(workdir, VOCAB), corpus.vocab.to_json())


def check_shared(workdir: str, seconds: float = 30.0) -> None:
    """Waits until every process sees what the first one has claimed.

    Raises:
      WorkdirError: one does not, for so many ``seconds``: checkpoints would be in pieces.
    """
    path, limit = os.path.join(workdir, CONFIG), time.monotonic() + seconds
    while not (seen := os.path.exists(path)) and time.monotonic() < limit:
        time.sleep(0.1)
    blind = processes.failing(not seen)
    if blind:
        raise WorkdirError(
            f"--workdir={workdir}: process {blind[0]} does not see what process 0 wrote there; with"
            " many processes it must be on a file system that all of them share"
        )


def load_workdir(workdir: str, step: str = "best", weights: str | None = None) -> TrainedModel:
    """The trained model of a workdir.

    Args:
      workdir: as given to training.
      step: ``best`` by validation, ``latest``, or a number.
      weights: ``raw``, ``swa`` or ``ema`` (:class:`~txl_jax.config.AverageConfig`);
        ``None``: those that training chose.

    Raises:
      WorkdirError: it is no workdir.
      CheckpointError: there is no such checkpoint, or it is damaged.
    """
    path = os.path.join(workdir, CONFIG)
    if not os.path.exists(path):
        raise WorkdirError(f"--workdir={workdir}: there is no {CONFIG} in it; train first")
    exp = experiment_of(workdir)
    one_by_one = dataclasses.replace(exp.model, scan_layers=False, remat="none", kernel="auto")
    exp = dataclasses.replace(exp, model=one_by_one)
    vocab = vocab_of(workdir)
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), param_shapes(exp.model)
    )
    with Checkpoints(workdir) as checkpoints:
        chosen = checkpoints.choose(step)
        preferred, others = checkpoints.weights(chosen)
        weights = weights or preferred
        params = checkpoints.restore_params(chosen, abstract, weights)
    rest = tuple(name for name in (preferred, *others) if name != weights)
    return TrainedModel(TransformerXL(exp.model), params, vocab, exp, chosen, weights, rest)


def _settings(record: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in record.items() if k not in ("corpus", "provenance")}


def read_record(workdir: str) -> dict[str, Any]:
    """What a run's ``config.json`` says: settings by section, ``corpus`` and ``provenance``.

    Raises:
      WorkdirError: it is not there, is damaged, or is another program's.
    """
    path = os.path.join(workdir, CONFIG)
    record = read_json(path)
    sections = ("model", "data", "train")
    wrong = [key for key in sections if not isinstance(record.get(key), dict)]
    wrong += [key for key in ("corpus", "provenance") if not isinstance(record.get(key, {}), dict)]
    if not isinstance(record.get("name", ""), str):
        wrong.append("name")
    if wrong:
        raise WorkdirError(
            f"{path}: is no run's record (see {wrong[0]!r} in it); name the workdir of a run"
        )
    return record


def experiment_of(workdir: str) -> ExperimentConfig:
    """The settings of a run; raises WorkdirError, naming the file, where they cannot be used."""
    try:
        return of_record(read_record(workdir))
    except ConfigError as error:
        raise WorkdirError(f"{os.path.join(workdir, CONFIG)}: {error}") from error


def vocab_of(workdir: str) -> Vocab:
    """The vocabulary of a run.

    Raises:
      WorkdirError: its file is not there or damaged.
      DataError: it holds no vocabulary; names the file.
    """
    path = os.path.join(workdir, VOCAB)
    try:
        return Vocab.from_json(read_json(path))
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def read_json(path: str) -> dict[str, Any]:
    """The object in a JSON file of a workdir; raises WorkdirError where there is none."""
    try:
        with open(path, "rb") as file:
            return json_object(file.read())
    except OSError as error:
        raise WorkdirError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise WorkdirError(
            f"{path} is damaged (it {error}); restore it or use another workdir"
        ) from error
