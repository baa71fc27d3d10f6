"""Continuing prompts: memory filled from the prompt, then one token at a time on device."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from txl_jax.config import GenerateConfig, TransformerXLConfig
from txl_jax.generation.sampling import sample
from txl_jax.model.memory import Memory
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
    ``pytorch``), so that neither the cut of a prompt nor its neighbours change the result.

    Args:
      cfg: the model's shape.
      params: its parameters.
      prompts: B arrays of token ids, each of at least one token; lengths may differ.
      c: length, memory, sampling, seed.

    Raises:
      ValueError: an empty prompt, or a token that the vocabulary does not have.
    """
    cfg = dataclasses.replace(cfg, same_length=cfg.same_length or "pytorch")
    model = TransformerXL(cfg)
    _check(prompts, cfg.vocab_size or 0)
    prefill = jax.jit(functools.partial(_read, model))
    extend = jax.jit(functools.partial(_extend, model, c))

    mems = model.init_mems(len(prompts), c.mem_len)
    for tokens, lengths in _chunks(prompts):
        mems = prefill(params, tokens, lengths, mems)
    token = jnp.asarray([p[-1] for p in prompts], jnp.int32)
    key_at = functools.partial(jax.random.fold_in, jax.random.key(c.seed))
    for start in range(0, c.length, _PER_DISPATCH):
        n = min(_PER_DISPATCH, c.length - start)
        positions = jnp.arange(start, start + n)
        token, mems, made = extend(params, token, mems, jax.vmap(key_at)(positions))
        yield np.asarray(made)


def _read(model: TransformerXL, params, tokens, lengths, mems: Memory) -> Memory:
    """Memory after reading right-padded rows [B,T]; no scores are needed."""
    return cast(Memory, model.apply({"params": params}, tokens, mems, lengths=lengths)[1])


def _extend(model: TransformerXL, c: GenerateConfig, params, token, mems, keys):
    """A token of each row for each of n keys, on device: last token [B], memory, all [B,n]."""

    def one(carry, step_key):
        token, mems = carry
        logits, mems = model.apply({"params": params}, token[:, None], mems)
        token = sample(step_key, logits[:, 0], c)
        return (token, mems), token

    (token, mems), made = jax.lax.scan(one, (token, mems), keys)
    return token, mems, made.T


def _chunks(prompts: Sequence[np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """All but the last token of each prompt, as right-padded [B,T] chunks and their lengths."""
    counts = np.array([len(p) - 1 for p in prompts])
    for start in range(0, int(counts.max()), _PREFILL):
        lengths = np.clip(counts - start, 0, _PREFILL).astype(np.int32)
        tokens = np.zeros((len(prompts), _PREFILL), np.int32)
        for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            tokens[row, :length] = prompt[start : start + length]
        yield tokens, lengths


def _check(prompts: Sequence[np.ndarray], vocab_size: int) -> None:
    for row, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"prompt {row} is empty: it needs at least one token to continue")
        if np.min(prompt) < 0 or np.max(prompt) >= vocab_size:
            raise ValueError(f"prompt {row} has a token outside the {vocab_size} of the vocabulary")
