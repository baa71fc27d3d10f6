"""Learning from models trained before, on the same text: born-again networks.

A model of the same shape that learns from the probabilities of its predecessors, not only from the
words that happened to follow, often becomes better than they are (Furlanello et al. 2018). Their
mean over every position of the training text is computed once, before the first update:

    teachers ──▶ probabilities of the next word, mean over teachers ──▶ the k likeliest and a rest
             ──▶ soft_targets.npz in the workdir ──▶ on the device beside the text ──▶ loss

A resumed run reads the file and needs no teacher.
"""

import io
import json
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from txl_jax.config import ConfigError, ExperimentConfig
from txl_jax.data.batch import Batch, SoftTargets, make_batch
from txl_jax.data.corpus import Corpus
from txl_jax.data.streams import Streams
from txl_jax.evaluation.evaluate import under_protocol
from txl_jax.files import atomic_write
from txl_jax.model.transformer_xl import TransformerXL

FILE = "soft_targets.npz"


def soft_targets(
    exp: ExperimentConfig,
    corpus: Corpus,
    workdir: str,
    tell: Callable[[str], None],
    stop: Callable[[], bool] = lambda: False,
) -> SoftTargets | None:
    """What ``distil.teachers`` say of every token of the training split: [N,k].

    ``None``: there are none, or ``stop()`` became true.

    Entry i is of token i as the tokens before it foretell it, the teachers reading under the
    ``validate`` protocol; entry 0, which nothing foretells, is the token itself. Computed once for
    a workdir and kept there. A resumed run may have other ``validate`` settings: it keeps the
    targets that were read under the settings of the first start. ``tell``: takes a line about it.

    Raises:
      ConfigError: a teacher that is not there, or has another vocabulary.
    """
    c = exp.distil
    if not c.teachers:
        return None
    path = os.path.join(workdir, FILE)
    about = [list(c.teachers), c.words, exp.to_dict()["validate"], corpus.source_hash]
    if os.path.exists(path):
        with np.load(path) as there:
            if _key(json.loads(str(there["about"]))) == _key(about):
                return SoftTargets(there["words"], there["probabilities"])
    teachers = [_teacher(folder, exp, corpus) for folder in c.teachers]
    tell(f"reading the training text with {len(teachers)} teacher(s)")
    soft = taught(teachers, np.asarray(corpus.train), exp, stop)
    if soft is None:
        return None
    file = io.BytesIO()
    np.savez(file, words=soft.words, probabilities=soft.probabilities, about=json.dumps(about))
    atomic_write(path, file.getvalue())
    return soft


def _key(about: list[Any]) -> list[Any]:
    """What must be equal for kept targets to be used: all but ``validate``, which may change."""
    teachers, words, _, text = about
    return [teachers, words, text]


def taught(
    teachers: list[tuple[TransformerXL, Any]],
    tokens: np.ndarray,
    exp: ExperimentConfig,
    stop: Callable[[], bool] = lambda: False,
) -> SoftTargets | None:
    """Mean probabilities of the likeliest words for every token, [N,k]: uint16 or int32, float16.

    ``None`` if ``stop()`` became true meanwhile.

    Args:
      teachers: models and their parameters.
      tokens: [N].
      exp: its ``validate`` and ``distil`` sections.
    """
    p = exp.validate
    k = min(exp.distil.words, min(model.cfg.vocab_size or 0 for model, _ in teachers))
    cut = lambda values: Streams(values, p.batch_size, p.seg_len, context_len=p.context_len)
    streams, places = cut(tokens), cut(np.arange(len(tokens)))
    models, params = zip(*teachers, strict=True)

    @jax.jit
    def read(params, batch: Batch, mems):
        total, after = jnp.zeros(()), []
        for model, own, memory in zip(models, params, mems, strict=True):
            about = batch.model_kwargs(model.cfg.memory_free)
            logits, memory = model.apply({"params": own}, batch.inputs, memory, **about)
            total = total + jax.nn.softmax(logits, axis=-1)
            after.append(memory)
        return jax.lax.top_k(total / len(models), k), after

    small = max(model.cfg.vocab_size or 0 for model, _ in teachers) <= 2**16
    words = np.zeros((len(tokens), k), np.uint16 if small else np.int32)
    probabilities = np.zeros((len(tokens), k), np.float16)
    words[0] = [tokens[0], *[word for word in range(k) if word != tokens[0]]][:k]
    probabilities[0, 0] = 1.0
    mems: Any = [model.init_mems(p.batch_size, p.mem_len) for model in models]
    for segment, place in zip(streams, places, strict=True):
        if stop():
            return None
        (likely, likeliest), mems = read(params, make_batch(segment, reset_memory=False), mems)
        real = segment.weights > 0
        at = place.targets[real]
        words[at], probabilities[at] = np.asarray(likeliest)[real], np.asarray(likely)[real]
    return SoftTargets(words, probabilities)


def _teacher(folder: str, exp: ExperimentConfig, corpus: Corpus) -> tuple[TransformerXL, Any]:
    """A teacher's model, under the protocol that it reads in, and its parameters."""
    from txl_jax.checkpoint.loading import load

    refuse = lambda why: ConfigError(f"config key distil.teachers: {folder}: {why}")
    if not os.path.isdir(folder):
        raise refuse("there is no such folder; name a workdir or an exported folder")
    trained = load(folder)
    if trained.vocab.to_json() != corpus.vocab.to_json():
        raise refuse("has another vocabulary than this run's text; train it on the same text")
    if trained.model.cfg.memory_free and exp.validate.mem_len:
        raise refuse("has no memory, and validate.mem_len, which it reads with, is not 0")
    cfg = under_protocol(trained.model.cfg, exp.validate)
    return TransformerXL(cfg), trained.params
