"""The planner's programs of tiny experiments, each compiled once for all tests."""

import functools
from typing import Any

import jax

from txl_jax.config import ExperimentConfig, override
from txl_jax.planning import compile_ahead as ahead

MAIN = ("train", "validate", "evaluate")
B, T, M = 8, 24, 16


def experiment(**changes) -> ExperimentConfig:
    settings = {
        "model": {
            "vocab_size": 50,
            "n_layer": 2,
            "d_model": 32,
            "n_head": 4,
            "d_head": 8,
            "d_inner": 64,
        },
        "train": {"batch_size": B, "seg_len": T, "mem_len": M},
        "validate": {"batch_size": B, "seg_len": T, "mem_len": M},
        "evaluate": {"batch_size": 3, "seg_len": T, "mem_len": 2 * M},
        "mesh": {"data": 1},
    }
    return override(ExperimentConfig.from_dict(settings), changes)


def train_program(**changes) -> Any:
    """The train program of a tiny experiment; it is compiled once for all tests."""
    return _programs(tuple(sorted(changes.items())), ("train",))["train"]


def compiled(**changes) -> dict[str, Any]:
    """The programs of a tiny experiment that ``MAIN`` lists, by name."""
    return _programs(tuple(sorted(changes.items())), MAIN)


@functools.cache
def _programs(changes, names) -> dict[str, ahead.Program]:
    exp = experiment(**dict(changes))
    found = ahead.programs(exp, jax.devices(), names)
    return {p.name: p for p in found}
