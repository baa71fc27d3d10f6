"""Small models with large random parameters, and inputs for them.

The package's initial values are near 0: attention is almost uniform, and a wrong position or mask
hardly changes results. Here every parameter is large enough to change them.
"""

import functools
import typing
from typing import Any

import jax
import numpy as np

import txl_jax
from txl_jax.config import AttentionForm

ATTENTION: dict[str, dict] = {
    **{name: {} for name in typing.get_args(AttentionForm)},
    "shaw": {"n_positions": 6},
    "absolute_per_layer": {"n_positions": 9, "d_head": 4},
}
"""For each form of attention, the other arguments of :func:`config` that it needs."""

GTRXL: dict = {
    "pre_lnorm": True,
    "final_norm": True,
    "activation": "gelu",
    "attention_bias": True,
    "gate": "gru",
    "gate_bias": 2.0,
}
"""Arguments of :func:`config` for the model of Parisotto et al. (2019), with all its settings."""

WITH_MEMORY = tuple(name for name in ATTENTION if not name.startswith("absolute"))


def attention(name, **changes) -> dict:
    """Arguments of :func:`config` for a form of attention and ``changes``."""
    return {"attention": name, **ATTENTION[name], **changes}


def config(**changes) -> txl_jax.TransformerXLConfig:
    """The config of a tiny model with ``changes``; by default, n_head * d_head is not d_model."""
    tiny = {"vocab_size": 13, "n_layer": 2, "d_model": 8, "n_head": 2, "d_head": 3, "d_inner": 10}
    return txl_jax.TransformerXLConfig(**{**tiny, **changes})


@functools.cache
def shapes(cfg):
    """The tree of parameter shapes, from ``init`` without running it."""
    model = txl_jax.TransformerXL(cfg)
    mems = model.init_mems(1, 0 if cfg.memory_free else 1)
    if cfg.vocab_size is None:
        inputs, method = np.zeros((1, 1, cfg.d_model), np.float32), "core"
    else:
        inputs, method = np.zeros((1, 1), np.int32), "__call__"
    init = lambda key: model.init(key, inputs, mems, method=method)
    return jax.eval_shape(init, jax.random.key(0))["params"]


@functools.cache
def variables(cfg, seed=0):
    """Random ``{"params": …}`` of a model, from normal distributions with standard deviation 0.4.

    The mean is 1 for the gains of LayerNorm, else 0.
    """
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        mean = 1.0 if path[-1].key == "scale" else 0.0
        return (mean + 0.4 * rng.standard_normal(leaf.shape)).astype(np.float32)

    return {"params": jax.tree_util.tree_map_with_path(draw, shapes(cfg))}


def apply(cfg, method):
    """Returns a function (variables, *inputs, reset=…, lengths=…) that runs a method of the model.

    It is not jitted. XLA then compiles single operations, which models of equal shapes share.
    """
    return functools.partial(txl_jax.TransformerXL(cfg).apply, method=method)


def quick(function, **options):
    """``jax.jit`` with less optimisation: compiles in half the time; tiny models run as fast."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0}, **options)


@functools.cache
def compiled(cfg, method):
    """:func:`apply` under jit, for shapes that few models share and for tests that need jit."""
    return quick(apply(cfg, method))


def memory(cfg, filled, mem_len, seed=0):
    """A memory with random states in every slot; in row b, only the newest ``filled[b]`` are real.

    It has no slots if the form of attention has no memory.
    """
    if cfg.memory_free:
        filled, mem_len = [0] * len(filled), 0
    rng = np.random.default_rng(seed)
    hidden = rng.standard_normal((cfg.n_layer, len(filled), mem_len, cfg.d_model))
    arrays: Any = hidden.astype(np.float32), np.asarray(filled, dtype=np.int32)
    return txl_jax.Memory(*arrays)


def tokens(cfg, batch_size, seg_len, seed=0):
    """Random token ids, int32 [B,T]."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, cfg.vocab_size, (batch_size, seg_len)).astype(np.int32)


def embeddings(cfg, batch_size, seg_len, seed=0):
    """Random inputs for ``core``, float32 [B,T,D]."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((batch_size, seg_len, cfg.d_model)).astype(np.float32)


def real_states(mems, row):
    """The filled slots of one row, oldest first: [L,filled,D]."""
    m, filled = mems.hidden.shape[2], int(mems.filled[row])
    return np.asarray(mems.hidden)[:, row, m - filled :]
