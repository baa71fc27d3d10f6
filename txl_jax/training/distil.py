"""Distillation from models that were trained earlier on the same text (born-again networks).

A student with the architecture of its teachers often becomes better than they are (Furlanello et
al. 2018). Before the first update, the teachers read the training text and give soft targets:

    teachers ──▶ mean probabilities of the next word ──▶ the k likeliest words, and all others
             ──▶ soft_targets.npz in the workdir ──▶ on the device with the text ──▶ loss

A resumed run reads ``soft_targets.npz`` and does not load the teachers.
"""

import io
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from txl_jax.checkpoint.errors import WorkdirError
from txl_jax.checkpoint.loading import load
from txl_jax.config import ConfigError, ExperimentConfig
from txl_jax.config.combinations import lengths_of
from txl_jax.data.batch import Batch, SoftTargets, make_batch
from txl_jax.data.corpus import Corpus
from txl_jax.data.pieces import Pieces
from txl_jax.data.streams import ordered_streams
from txl_jax.evaluation.protocols import under_protocol
from txl_jax.files import atomic_write
from txl_jax.messages import one_line, shown_path
from txl_jax.model.transformer_xl import TransformerXL
from txl_jax.paths import path

FILE = "soft_targets.npz"
Teacher = tuple[TransformerXL, Any]
"""A teacher's model, configured for the evaluation protocol, and its parameters."""


def soft_targets(
    exp: ExperimentConfig,
    corpus: Corpus,
    workdir: str,
    message: Callable[[str], None],
    stop: Callable[[], bool] = lambda: False,
) -> SoftTargets | None:
    """Returns the mean probabilities of ``distil.teachers`` for the training split: arrays [N,k].

    N is the number of tokens, and k is ``distil.words``, or the size of a smaller vocabulary. Entry
    i is the prediction of token i from the tokens before it, under the ``validate`` protocol that
    the run had at its first start. Entry 0 gives probability 1 to token 0. Returns ``None`` without
    teachers, or if ``stop()`` became true. Raises ConfigError if a teacher is missing or has
    another vocabulary, and WorkdirError if the stored targets are damaged.
    """
    c = exp.distil
    if not c.teachers:
        return None
    stored = path(workdir, FILE)
    if stored.exists():  # made for the settings and text of this workdir
        try:
            with stored.open("rb") as opened, np.load(opened) as file:
                return SoftTargets(file["words"], file["probabilities"])
        except Exception as error:  # NumPy, zipfile and zlib raise different ones
            fix = "remove this file, and the teachers are read again"
            raise WorkdirError(f"{stored}: is damaged ({one_line(error)}); {fix}") from error
    if isinstance(corpus.train, Pieces):
        why = "teachers need a continuous text, but this text has separate documents or sentences"
        raise ConfigError(f"config key distil.teachers: {why}; leave this key out")
    models = [_load_teacher(folder, exp, corpus) for folder in c.teachers]
    message(f"reading the training text with {len(models)} teacher(s)")
    soft = teacher_probabilities(models, np.asarray(corpus.train), exp, stop)
    if soft is not None:
        buffer = io.BytesIO()
        np.savez(buffer, words=soft.words, probabilities=soft.probabilities)
        atomic_write(str(stored), buffer.getvalue())
    return soft


def copy_soft_targets(workdir: str, other: str) -> None:
    """Copies the soft targets of ``workdir``, if any, to the workdir ``other`` if it has none."""
    stored = path(workdir, FILE)
    if stored.exists() and not path(other, FILE).exists():
        atomic_write(os.path.join(other, FILE), stored.read_bytes())


def teacher_probabilities(
    teachers: list[Teacher],
    tokens: np.ndarray,
    exp: ExperimentConfig,
    stop: Callable[[], bool] = lambda: False,
) -> SoftTargets | None:
    """Computes the teachers' mean probabilities of the k likeliest words for tokens [N].

    k is ``distil.words``, or the size of a smaller vocabulary. Words are uint16 or int32 [N,k],
    probabilities float16 [N,k]. Returns ``None`` if ``stop()`` became true.
    """
    p, models = exp.validate, [model for model, _ in teachers]
    size = models[0].cfg.vocab_size or 0
    k = min(exp.distil.words, size)
    segments = lambda values: ordered_streams(
        values, p.batch_size, p.seg_len, context_len=p.context_len
    )

    @jax.jit
    def predict(params, batch: Batch, mems):
        total, after = jnp.zeros((), jnp.float32), []
        for model, own, memory in zip(models, params, mems, strict=True):
            inputs = batch.model_kwargs(model.cfg.memory_free)
            logits, memory = model.apply({"params": own}, batch.inputs, memory, **inputs)
            total = total + jax.nn.softmax(logits, axis=-1)
            after.append(memory)
        return jax.lax.top_k(total / len(models), k), after

    words = np.zeros((len(tokens), k), np.uint16 if size <= 2**16 else np.int32)
    probabilities = np.zeros((len(tokens), k), np.float16)
    words[0] = [tokens[0], *[word for word in range(k) if word != tokens[0]]][:k]
    probabilities[0, 0] = 1.0
    params = tuple(own for _, own in teachers)
    mems: Any = [model.init_mems(p.batch_size, p.mem_len) for model in models]
    positions = segments(np.arange(len(tokens)))
    for segment, position in zip(segments(tokens), positions, strict=True):
        if stop():
            return None
        (likely, likeliest), mems = predict(params, make_batch(segment, reset_memory=False), mems)
        real = segment.weights > 0
        at = position.targets[real]
        words[at], probabilities[at] = np.asarray(likeliest)[real], np.asarray(likely)[real]
    return SoftTargets(words, probabilities)


def _load_teacher(folder: str, exp: ExperimentConfig, corpus: Corpus) -> Teacher:
    named = f"config key distil.teachers: {shown_path(folder)}"
    error = lambda reason: ConfigError(f"{named}: {reason}")
    if not path(folder).is_dir():
        raise error("there is no such folder; name a workdir or an exported folder")
    trained = load(folder)
    if trained.vocab.to_json() != corpus.vocab.to_json():
        raise error("the teacher has another vocabulary than the run; train both on the same text")
    if trained.model.cfg.memory_free and exp.validate.mem_len:
        raise error("the teacher has no memory; set validate.mem_len to 0, or name another teacher")
    for key, why in lengths_of(trained.model.cfg, "validate", exp.validate):
        raise error(f"the teacher cannot be read with this {key}: {why}, or name another teacher")
    return TransformerXL(under_protocol(trained.model.cfg, exp.validate)), trained.params
