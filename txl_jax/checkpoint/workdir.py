"""A run's folder: its settings and vocabulary, and whether another run may use it.

workdir/
  config.json     every setting, the corpus's hash, versions and revision
  vocab.json      the symbols of the tokens
  checkpoints/    checkpoint/checkpoints.py
  metrics.jsonl  loss.png  tensorboard/  sample.txt
  library.log     errors of libraries, library_errors.py
  .lock           the process that trains in it, checkpoint/lock.py
"""

import dataclasses
import os
import time
from typing import Any

from txl_jax.checkpoint.errors import WorkdirError
from txl_jax.checkpoint.provenance import provenance
from txl_jax.checkpoint.workdir_files import CONFIG, VOCAB, check_free
from txl_jax.config import ConfigError, ExperimentConfig, differing_keys, from_record
from txl_jax.data.corpus import Corpus
from txl_jax.data.errors import DataError
from txl_jax.data.vocab import Vocab
from txl_jax.files import parse_json_object, write_json
from txl_jax.parallel import processes


def with_vocab(exp: ExperimentConfig, corpus: Corpus) -> ExperimentConfig:
    """The experiment with the corpus's ``model.vocab_size``; ConfigError if it names another."""
    size, named = len(corpus.vocab), exp.model.vocab_size
    if named not in (None, size):
        rule = f"the vocabulary of {corpus.name} has {size} symbols; leave it out to take that"
        raise ConfigError(f"config key model.vocab_size = {named}: {rule}")
    return dataclasses.replace(exp, model=dataclasses.replace(exp.model, vocab_size=size))


def init_workdir(workdir: str, exp: ExperimentConfig, corpus: Corpus) -> None:
    """Writes the settings and the vocabulary of a run in its folder.

    ``config.json`` is written first: a folder without it has no other file of a run. WorkdirError:
    the folder is of another config, version or text, holds an exported model, or has a user's files
    that the run would overwrite. It is left unchanged.
    """
    check_free(workdir)
    path = os.path.join(workdir, CONFIG)
    if os.path.exists(path):
        read_experiment(workdir)  # raises for another version or damaged settings
        record = read_record(workdir)
        settings = {k: v for k, v in record.items() if k not in ("corpus", "provenance")}
        different = differing_keys(settings, exp.to_dict())
        text_hash = record.get("corpus", {}).get("source_hash")
        if text_hash != corpus.source_hash:
            different.append(f"hash of the text: {text_hash} -> {corpus.source_hash}")
        if different:
            raise WorkdirError(
                f"--workdir={workdir}: is the folder of another run: {'; '.join(different)}."
                " Name another --workdir, or use that run's settings"
            )
    made = {"corpus": describe_corpus(corpus), "provenance": provenance()}
    write_json(path, {**exp.to_dict(), **made})
    write_json(os.path.join(workdir, VOCAB), corpus.vocab.to_json())


def describe_corpus(corpus: Corpus) -> dict[str, Any]:
    """What ``config.json`` says about the corpus."""
    return {"name": corpus.name, "source_hash": corpus.source_hash, **dict(corpus.info)}


def check_shared(workdir: str, seconds: float = 30.0) -> None:
    """Waits until every process sees the ``config.json`` that process 0 has written.

    WorkdirError after so many ``seconds``: a checkpoint's parts would be on different disks.
    """
    path, limit = os.path.join(workdir, CONFIG), time.monotonic() + seconds
    while not (seen := os.path.exists(path)) and time.monotonic() < limit:
        time.sleep(0.1)
    if failing := processes.failing(not seen):
        raise WorkdirError(
            f"--workdir={workdir}: process {failing[0]} does not see what process 0 wrote there;"
            " with many processes it must be on a file system that all of them share"
        )


def read_record(workdir: str) -> dict[str, Any]:
    """The content of a run's ``config.json``: settings by section, ``corpus``, ``provenance``.

    WorkdirError where it does not exist, is damaged, or belongs to another program.
    """
    path = os.path.join(workdir, CONFIG)
    record = read_json(path)
    complete = {"corpus": {}, "provenance": {}, "name": "", **record}
    kinds = {**dict.fromkeys(("model", "data", "train", "corpus", "provenance"), dict), "name": str}
    for key, kind in kinds.items():
        if not isinstance(complete.get(key), kind):
            raise WorkdirError(
                f"{path}: is not the record of a run (see {key!r} in it); name the workdir of a run"
            )
    return record


def read_experiment(workdir: str) -> ExperimentConfig:
    """The settings of a run; raises WorkdirError, naming the file, if they cannot be used."""
    try:
        return from_record(read_record(workdir))
    except ConfigError as error:
        raise WorkdirError(f"{os.path.join(workdir, CONFIG)}: {error}") from error


def read_vocab(workdir: str) -> Vocab:
    """The vocabulary of a run; WorkdirError or DataError, naming its file, without one."""
    path = os.path.join(workdir, VOCAB)
    try:
        return Vocab.from_json(read_json(path))
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def read_json(path: str) -> dict[str, Any]:
    """The object in a JSON file; raises WorkdirError if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return parse_json_object(file.read())
    except OSError as error:
        raise WorkdirError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise WorkdirError(f"{path}: {error}; restore the file or name another one") from error
