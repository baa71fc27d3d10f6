"""Creates, checks and reads a workdir, which has the settings and the vocabulary of a run.

    config.json     every setting, the corpus's hash, versions, revision, devices and kernel
    vocab.json      the symbols of the tokens

workdir_files.py lists all other files.
"""

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Mapping
from typing import Any

from txl_jax.checkpoint.checkpoint_folder import CheckpointFolder
from txl_jax.checkpoint.errors import AnotherRunError, WorkdirError
from txl_jax.checkpoint.provenance import provenance
from txl_jax.checkpoint.workdir_files import CONFIG, VOCAB, check_free
from txl_jax.config import ConfigError, ExperimentConfig, differing_keys
from txl_jax.config.changes import from_record
from txl_jax.config.model import DtypeName
from txl_jax.data.corpus import Corpus
from txl_jax.data.errors import DataError
from txl_jax.data.vocab import Vocab
from txl_jax.files import parse_json_object, write_json
from txl_jax.messages import argument
from txl_jax.parallel import processes
from txl_jax.paths import path

VOCAB_HASH = "vocab_hash"
"""The key of the vocabulary's hash in the description of the corpus (``config.json``)."""
AUTO_DTYPE = "auto_dtype"
"""The key in the provenance that tells whether ``model.dtype`` was ``auto``."""


def with_vocab(exp: ExperimentConfig, corpus: Corpus) -> ExperimentConfig:
    """Sets ``model.vocab_size`` to that of the corpus; raises ConfigError if another one is set."""
    size, named = len(corpus.vocab), exp.model.vocab_size
    if named not in (None, size):
        rule = f"the vocabulary of {corpus.name} has {size} symbols; leave the key out to use these"
        raise ConfigError(f"config key model.vocab_size = {named}: {rule}")
    return dataclasses.replace(exp, model=dataclasses.replace(exp.model, vocab_size=size))


def init_workdir(
    workdir: str,
    exp: ExperimentConfig,
    corpus: Corpus,
    attention: str | None = None,
    auto_dtype: bool = False,
) -> None:
    """Writes the settings and the vocabulary of a run to its folder, ``config.json`` first.

    ``attention`` describes how training computes attention on these devices. ``auto_dtype`` records
    that ``model.dtype`` was ``auto``, which :func:`loaded_experiment` restores.
    Raises WorkdirError, and changes nothing, if the folder has another config, version or text, an
    exported model, or a user's files that the run would overwrite.
    """
    check_free(workdir)
    config = path(workdir, CONFIG)
    if config.exists():
        settings = read_experiment(workdir)  # raises for another version or damaged settings
        if auto_dtype and loaded_experiment(workdir).model.dtype == "auto":
            settings = _with_dtype(settings, exp.model.dtype)  # can change before a checkpoint
        record = read_record(workdir)
        different = differing_keys(settings.to_dict(), exp.to_dict())
        text_hash = record.get("corpus", {}).get("source_hash")
        if text_hash != corpus.source_hash:
            different.append(f"hash of the text: {text_hash} -> {corpus.source_hash}")
        vocab = os.path.join(workdir, VOCAB)
        if path(vocab).exists() and read_json(vocab) != corpus.vocab.to_json():
            different.append(f"vocabulary: not that of {vocab}")
        if different:
            named = argument("workdir", workdir)
            how = f"name another workdir, or resume that run by {named} alone; what differs:"
            raise AnotherRunError(
                f"{named}: is the folder of another run", details=[how, *different]
            )
    origin = {**provenance(), "attention": attention, AUTO_DTYPE: auto_dtype}
    made = {"corpus": describe_corpus(corpus), "provenance": origin}
    write_json(str(config), {**exp.to_dict(), **made})
    write_json(os.path.join(workdir, VOCAB), corpus.vocab.to_json())


def describe_corpus(corpus: Corpus) -> dict[str, Any]:
    """Returns what ``config.json`` says about a corpus: name, hash, counts and vocabulary hash."""
    described = {"name": corpus.name, "source_hash": corpus.source_hash, **dict(corpus.info)}
    return {**described, VOCAB_HASH: vocab_hash(corpus.vocab)}


def write_record(folder: str, record: Mapping[str, Any], vocab: Vocab) -> None:
    """Writes ``vocab.json``, then ``config.json``, to a folder that has the model's parameters."""
    write_json(os.path.join(folder, VOCAB), vocab.to_json())
    described = {**record.get("corpus", {}), VOCAB_HASH: vocab_hash(vocab)}
    write_json(os.path.join(folder, CONFIG), {**record, "corpus": described})


def vocab_hash(vocab: Vocab) -> str:
    """Returns the sha256 of a vocabulary; :func:`read_vocab` compares it with the recorded one."""
    return hashlib.sha256(json.dumps(vocab.to_json(), sort_keys=True).encode()).hexdigest()


def check_shared(workdir: str, seconds: float = 30.0) -> None:
    """Waits until all processes see the ``config.json`` of process 0, or raises WorkdirError."""
    config, limit = path(workdir, CONFIG), time.monotonic() + seconds
    while not (seen := config.exists()) and time.monotonic() < limit:
        time.sleep(0.1)
    if failing := processes.failing(not seen):
        raise WorkdirError(
            f"{argument('workdir', workdir)}: process {failing[0]} does not see what process 0"
            " wrote there; name a workdir on a file system that all processes share"
        )


def read_record(workdir: str) -> dict[str, Any]:
    """Returns a run's ``config.json``, or raises WorkdirError if it is missing or not of a run."""
    config = os.path.join(workdir, CONFIG)
    record = read_json(config)
    sections = {"corpus": {}, "provenance": {}, **record}
    needed = ("model", "data", "train", "corpus", "provenance")
    if not all(isinstance(sections.get(key), dict) for key in needed):
        raise WorkdirError(f"{config}: is not the record of a run; name the workdir of a run")
    return record


def read_experiment(workdir: str) -> ExperimentConfig:
    """Returns the settings of a run.

    Raises WorkdirError, which names the file, if the settings cannot be used.
    """
    try:
        return from_record(read_record(workdir))
    except ConfigError as error:
        raise WorkdirError(f"{os.path.join(workdir, CONFIG)}: {error}") from error


def loaded_experiment(workdir: str) -> ExperimentConfig:
    """Returns the settings of a run, for any use of its model except to resume its training.

    If the run's dtype was ``auto``, it is ``auto`` again, not the dtype chosen for its devices.
    """
    exp = read_experiment(workdir)
    if read_record(workdir).get("provenance", {}).get(AUTO_DTYPE) is not True:
        return exp
    return _with_dtype(exp, "auto")


def begun_dtype(workdir: str) -> DtypeName:
    """Returns the dtype in which a run with ``model.dtype="auto"`` resumes in a workdir.

    The dtype is ``auto`` until the run has a checkpoint, unless its first start named a dtype.
    """
    if not path(workdir, CONFIG).exists():
        return "auto"
    stored = read_experiment if CheckpointFolder(workdir).steps() else loaded_experiment
    return stored(workdir).model.dtype


def _with_dtype(exp: ExperimentConfig, dtype: Any) -> ExperimentConfig:
    return dataclasses.replace(exp, model=dataclasses.replace(exp.model, dtype=dtype))


def read_vocab(workdir: str) -> Vocab:
    """Returns the vocabulary of a run; raises WorkdirError or DataError if it cannot be used.

    A vocabulary other than the model's would give wrong texts and losses, so it is refused.
    """
    file = os.path.join(workdir, VOCAB)
    try:
        vocab = Vocab.from_json(read_json(file))
    except DataError as error:
        raise DataError(f"{file}: {error}") from error
    record, fault = read_record(workdir), None
    if len(vocab) != (size := record["model"].get("vocab_size", len(vocab))):
        fault = f"it has {len(vocab)} symbols, and the model has {size}"
    elif record.get("corpus", {}).get(VOCAB_HASH, vocab_hash(vocab)) != vocab_hash(vocab):
        fault = f"its hash is not the {VOCAB_HASH} in {CONFIG}"
    if fault:
        raise DataError(
            f"{file}: was changed since the model was trained: {fault}; restore the file"
        )
    return vocab


def read_json(file: str) -> dict[str, Any]:
    """Returns the object in a JSON file; raises WorkdirError if the file cannot be read."""
    try:
        return parse_json_object(path(file).read_bytes())
    except OSError as error:
        raise WorkdirError(f"{file}: cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        raise WorkdirError(f"{file}: {error}; restore the file or name another one") from error
