"""Continuing prompts: the past filled from the prompt, then one token at a time on device."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from txl_jax.config import GenerateConfig, TransformerXLConfig
from txl_jax.generation.sampling import sample
from txl_jax.model.memory import Cache, Memory
from txl_jax.model.transformer_xl import TransformerXL

_PREFILL = 128
_PER_DISPATCH = 64


def generate(
    cfg: TransformerXLConfig,
    params: Any,
    prompts: Sequence[np.ndarray],
    c: GenerateConfig,
) -> Iterator[np.ndarray]:
    """Pieces of the continuations, int32 [B, up to 64], until each has ``c.length`` tokens.

    Attention is limited to a window of M positions (``same_length``; the model's own, else
    ``pytorch``), so that neither the cut of a prompt nor its neighbours change the result. A
    form of attention without memory is run again for each token on the last M tokens instead
    (``absolute_per_layer``: on no more than its table has).

    Args:
      cfg: the model's shape.
      params: its parameters.
      prompts: B arrays of token ids, each of at least one token; lengths may differ.
      c: length, memory M, sampling, seed.

    Raises:
      ValueError: an empty prompt, or a token that the vocabulary does not have.
    """
    _check(prompts, cfg.vocab_size or 0)
    past: Any
    next_logits: Callable
    if cfg.memory_free:
        model, next_logits = TransformerXL(cfg), _by_running_again
        table = cfg.n_positions if cfg.attention == "absolute_per_layer" else None
        past = _last_tokens([p[:-1] for p in prompts], min(c.mem_len, table or c.mem_len))
    else:
        cfg = dataclasses.replace(cfg, same_length=cfg.same_length or "pytorch")
        model, next_logits = TransformerXL(cfg), _by_memory
        past = _read_prompts(model, params, prompts, c.mem_len)
    extend = jax.jit(
        functools.partial(_extend, functools.partial(next_logits, model), c), donate_argnums=(2,)
    )

    token = jnp.asarray([p[-1] for p in prompts], jnp.int32)
    key_at = functools.partial(jax.random.fold_in, jax.random.key(c.seed))
    for start in range(0, c.length, _PER_DISPATCH):
        n = min(_PER_DISPATCH, c.length - start)
        positions = jnp.arange(start, start + n)
        token, past, made = extend(params, token, past, jax.vmap(key_at)(positions))
        yield np.asarray(made)


def _extend(next_logits, c: GenerateConfig, params, token, past, keys):
    """A token of each row for each of n keys, on device: last token [B], past, all [B,n]."""

    def one(carry, step_key):
        token, past = carry
        logits, past = next_logits(params, token, past)
        token = sample(step_key, logits, c)
        return (token, past), token

    (token, past), made = jax.lax.scan(one, (token, past), keys)
    return token, past, made.T


# With memory: the past is what the layers project it to.


def _by_memory(model: TransformerXL, params, token, past: Cache):
    """Logits [B,V] after one more token [B], and the past with it."""
    logits, after = model.apply({"params": params}, token[:, None], past)
    return logits[:, 0], after


def _read_prompts(
    model: TransformerXL, params, prompts: Sequence[np.ndarray], mem_len: int
) -> Cache:
    """The past of all but the last token of each prompt."""
    mems = model.init_mems(len(prompts), mem_len)
    read = jax.jit(functools.partial(_read, model))
    for tokens, lengths in _chunks(prompts):
        mems = read(params, tokens, lengths, mems)
    project = jax.jit(functools.partial(model.apply, seg_len=1, method="init_cache"))
    return cast(Cache, project({"params": params}, mems))


def _read(model: TransformerXL, params, tokens, lengths, mems: Memory) -> Memory:
    """Memory after reading right-padded rows [B,T]; no scores are needed."""
    return cast(Memory, model.apply({"params": params}, tokens, mems, lengths=lengths)[1])


def _chunks(prompts: Sequence[np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """All but the last token of each prompt, as right-padded [B,T] chunks and their lengths."""
    counts = np.array([len(p) - 1 for p in prompts])
    for start in range(0, int(counts.max()), _PREFILL):
        lengths = np.clip(counts - start, 0, _PREFILL).astype(np.int32)
        tokens = np.zeros((len(prompts), _PREFILL), np.int32)
        for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            tokens[row, :length] = prompt[start : start + length]
        yield tokens, lengths


# Without memory: the past is the text itself, run again for every token.


class LastTokens(flax.struct.PyTreeNode):
    """The newest tokens of each row: int32 [B,W], and how many are real: int32 [B].

    They lie on the right, where a segment's newest token is in every row.
    """

    tokens: jax.Array | np.ndarray
    filled: jax.Array | np.ndarray


def _by_running_again(model: TransformerXL, params, token, past: LastTokens):
    """Logits [B,V] after one more token [B], and the past with it."""
    tokens = jnp.concatenate([past.tokens[:, 1:], token[:, None]], axis=1)
    rows, width = tokens.shape
    filled = jnp.minimum(past.filled + 1, width)
    begins = jnp.arange(width) == width - filled[:, None]  # what is before it is padding
    nothing = model.init_mems(rows, 0)
    before = width - 1  # only the newest token is asked what follows
    logits, _ = model.apply({"params": params}, tokens, nothing, reset=begins, context_len=before)
    return logits[:, 0], LastTokens(tokens, filled)


def _last_tokens(texts: Sequence[np.ndarray], width: int) -> LastTokens:
    """The newest ``width`` tokens of texts, which may be shorter, or empty."""
    tokens = np.zeros((len(texts), width), np.int32)
    filled = np.array([min(len(text), width) for text in texts], np.int32)
    for row, (text, n) in enumerate(zip(texts, filled, strict=True)):
        tokens[row, width - n :] = text[len(text) - n :]
    return LastTokens(tokens, filled)


def _check(prompts: Sequence[np.ndarray], vocab_size: int) -> None:
    for row, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"prompt {row} is empty: it needs at least one token to continue")
        if np.min(prompt) < 0 or np.max(prompt) >= vocab_size:
            raise ValueError(f"prompt {row} has a token outside the {vocab_size} of the vocabulary")
