"""Named experiments for measuring speed: every recipe of ``configs/``, and small ones for a CPU.

The benchmarks use random tokens, because the time of a step does not depend on the text.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from txl_jax.config import ExperimentConfig, load_config
from txl_jax.model.precision import resolved
from txl_jax.planning.vocabulary import with_vocab_size

CONFIGS = pathlib.Path(__file__).resolve().parents[1] / "configs"


def _small(model: dict[str, Any], batch_size: int, seg_len: int) -> dict[str, Any]:
    return {
        "model": {"dropout": 0.1, **model},
        "optimizer": {"learning_rate": 2.5e-4, "clip_norm": 0.25, "warmup_steps": 0},
        "train": {
            "batch_size": batch_size,
            "seg_len": seg_len,
            "mem_len": seg_len,
            "steps_per_dispatch": 10,
        },
        "evaluate": {
            "batch_size": 1,
            "seg_len": 128,
            "mem_len": 1600,
            "same_length": "pytorch",
        },
        "generate": {"mem_len": 512},
    }


SMALL = {
    "tiny": _small(
        {"n_layer": 2, "d_model": 32, "n_head": 2, "d_head": 16, "d_inner": 64, "vocab_size": 64},
        2,
        16,
    ),
    "3l_128": _small(
        {"n_layer": 3, "d_model": 128, "n_head": 4, "d_head": 32, "d_inner": 512}
        | {"vocab_size": 256},
        8,
        64,
    ),
    "6l_256": _small(
        {"n_layer": 6, "d_model": 256, "n_head": 8, "d_head": 32, "d_inner": 1024}
        | {"vocab_size": 204},
        8,
        128,
    ),
    "12l_512": _small(
        {"n_layer": 12, "d_model": 512, "n_head": 8, "d_head": 64, "d_inner": 2048}
        | {"vocab_size": 204},
        4,
        128,
    ),
    "12l_384_words": _small(
        {"n_layer": 12, "d_model": 384, "n_head": 8, "d_head": 48, "d_inner": 1216}
        | {"vocab_size": 10_000},
        20,
        70,
    ),
}
"""Experiments that are not recipes; ``tiny`` is for testing that a benchmark runs."""


def experiment(name: str, changes: Mapping[str, Any] | None = None) -> ExperimentConfig:
    """Returns the experiment called ``name``, from :data:`SMALL` or ``configs/``.

    Its vocabulary size is set, also where a recipe leaves it to the text.

    A ``model.dtype`` of ``auto`` is replaced by the dtype that it means on this machine, so that
    programs that are timed beside ours use the same dtype.

    Args:
      name: such as ``12l_512`` or ``wt103_large``.
      changes: settings by dotted key, such as ``{"train.batch_size": 16}``.
    """
    if name in SMALL:
        settings: dict[str, Any] = {k: dict(v) for k, v in SMALL[name].items()}
        for key, value in (changes or {}).items():
            section, _, rest = key.partition(".")
            settings.setdefault(section, {})[rest] = value
        exp = ExperimentConfig.from_dict({"name": name, **settings})
    else:
        config = str(CONFIGS / f"{name}.py")
        exp = with_vocab_size(load_config(config, overrides=dict(changes or {})))
    return dataclasses.replace(exp, model=resolved(exp.model, None))
