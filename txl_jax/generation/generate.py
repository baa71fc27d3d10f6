"""Continues prompts: fills the past from each prompt, then samples token by token on device."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from txl_jax.config import GenerateConfig, TransformerXLConfig
from txl_jax.generation.sampling import SETTINGS, apply_repetition_penalty, sample
from txl_jax.generation.utf8 import Automaton
from txl_jax.model.inputs import check_array
from txl_jax.model.memory import Cache
from txl_jax.model.transformer_xl import TransformerXL

_PREFILL = 128  # tokens of a prompt per call of the model
_PER_DISPATCH = 64  # sampled tokens per dispatch to the device


class TokenChunk(NamedTuple):
    """The next n tokens of each row, and their nats at temperature 1 with nothing masked."""

    tokens: np.ndarray  # int32 [B,n]
    nll: np.ndarray  # float32 [B,n]


class LastTokens(flax.struct.PyTreeNode):
    """The newest tokens of each row, right-aligned: int32 [B,W], and how many are real: [B]."""

    tokens: jax.Array | np.ndarray
    filled: jax.Array | np.ndarray


class DecodeState(flax.struct.PyTreeNode):
    """What one sampled token needs of the tokens before it."""

    token: jax.Array  # the newest token, int32 [B]
    past: Cache | LastTokens  # the tokens before it; with memory, their projected states
    seen: jax.Array | None  # bool [B,V], the tokens in the text, for a repetition penalty
    grammar_state: jax.Array | None  # int32 [B]


def generate(
    cfg: TransformerXLConfig,
    params: Any,
    prompts: Sequence[np.ndarray],
    c: GenerateConfig,
    grammar: Automaton | None = None,
    samples: Sequence[int] | None = None,
) -> Iterator[TokenChunk]:
    """Yields chunks of up to 64 tokens of all continuations, until each has ``c.length``.

    Attention is limited to a window of M positions (the model's ``same_length``, else
    ``pytorch``), so chunks of a prompt and other rows do not change a row's result. A form of
    attention without memory is run again on the last M tokens for each new one
    (``absolute_per_layer``: on no more than its table has).

    Args:
      cfg, params: the model's shape and parameters.
      prompts: B arrays of token ids, each of at least one token; lengths may differ.
      c: length, memory M, sampling, seed.
      grammar: the tokens that may follow; ``None``: any.
      samples: [B], numbers that distinguish rows with the same prompt. A row's draws depend on
        its number, the seed and the token's position only. ``None``: 0 for all.

    Raises:
      ValueError: a prompt is empty, no array of integers [n], or not of the vocabulary.
    """
    vocab_size = cfg.vocab_size or 0
    for row, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"prompt {row} is empty: it needs at least one token to continue")
        check_array(f"prompt {row}", prompt, "integers", ("n",))
        if np.min(prompt) < 0 or np.max(prompt) >= vocab_size:
            raise ValueError(f"prompt {row} has a token outside the {vocab_size} of the vocabulary")
    if not cfg.memory_free:
        cfg = dataclasses.replace(cfg, same_length=cfg.same_length or "pytorch")
    programs = _programs(cfg, GenerateConfig(**{name: getattr(c, name) for name in SETTINGS}))
    state = _first_state(programs, cfg, params, prompts, c, grammar)

    numbers = jnp.asarray([0] * len(prompts) if samples is None else samples)
    row_keys = jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(c.seed)))(numbers)
    position_keys = jax.vmap(jax.vmap(jax.random.fold_in, (0, None)), (None, 0))
    n = min(_PER_DISPATCH, c.length)  # also of the last chunk, so that it needs no compilation
    for start in range(0, c.length, _PER_DISPATCH):
        keys = position_keys(row_keys, np.arange(start, start + n))
        state, tokens, nll = programs.extend(params, state, keys, grammar)
        wanted = slice(0, c.length - start)
        yield TokenChunk(np.asarray(tokens)[:, wanted], np.asarray(nll)[:, wanted])


class _Programs(NamedTuple):
    """Compiled once per shape of the model and sampling settings."""

    extend: Callable
    read: Callable
    project: Callable


@functools.lru_cache(maxsize=8)
def _programs(cfg: TransformerXLConfig, c: GenerateConfig) -> _Programs:
    model = TransformerXL(cfg)
    step: Callable = _step_without_memory if cfg.memory_free else _step_with_memory
    extend = functools.partial(_extend, functools.partial(step, model), c)
    # Memory after right-padded rows [B,T]; the compiler drops the unused logits.
    read = lambda params, tokens, lengths, mems: model.apply(
        {"params": params}, tokens, mems, lengths=lengths
    )[1]
    project = functools.partial(model.apply, seg_len=1, method="init_cache")
    return _Programs(jax.jit(extend, donate_argnums=(1,)), jax.jit(read), jax.jit(project))


def _first_state(
    programs: _Programs, cfg: TransformerXLConfig, params, prompts, c: GenerateConfig, grammar
) -> DecodeState:
    """The state after all but the last token of each prompt, on device."""
    if cfg.memory_free:
        table = cfg.n_positions if cfg.attention == "absolute_per_layer" else None
        past: Any = _last_tokens([p[:-1] for p in prompts], min(c.mem_len, table or c.mem_len))
    else:
        mems = TransformerXL(cfg).init_mems(len(prompts), c.mem_len)
        for tokens, lengths in _prompt_chunks(prompts):
            mems = programs.read(params, tokens, lengths, mems)
        past = cast(Cache, programs.project({"params": params}, mems))
    seen = grammar_state = None
    if c.repetition_penalty > 1:
        words = np.arange(cfg.vocab_size or 0)
        seen = np.stack([np.isin(words, prompt) for prompt in prompts])
    if grammar is not None:
        grammar_state = np.array([grammar.state_after(prompt) for prompt in prompts], np.int32)
    token = np.array([p[-1] for p in prompts], np.int32)
    return DecodeState(*jax.tree.map(jnp.asarray, (token, past, seen, grammar_state)))


def _extend(step: Callable, c: GenerateConfig, params, state: DecodeState, keys, grammar):
    """Samples a token per row for each of keys [n,B]: the new state, tokens, nll [B,n]."""

    def sample_token(state: DecodeState, keys):
        logits, past = step(params, state.token, state.past)
        masked, seen, grammar_state = logits, state.seen, state.grammar_state
        if seen is not None:
            masked = apply_repetition_penalty(masked, seen, c.repetition_penalty)
        if grammar_state is not None:
            allowed = jnp.asarray(grammar.allowed)[grammar_state]
            masked = jnp.where(allowed, masked, -jnp.inf)
        token = sample(keys, masked, c)
        own_logits = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
        nll = jax.nn.logsumexp(logits, axis=-1) - own_logits
        if seen is not None:
            seen = seen.at[jnp.arange(len(token)), token].set(True)
        if grammar_state is not None:
            grammar_state = jnp.asarray(grammar.next_state)[grammar_state, token]
        return DecodeState(token, past, seen, grammar_state), (token, nll)

    state, (tokens, nll) = jax.lax.scan(sample_token, state, keys)
    return state, tokens.T, nll.T


# With memory: the past is the layers' projected memory.


def _step_with_memory(model: TransformerXL, params, token, past: Cache):
    """Logits [B,V] after one more token [B], and the past with it."""
    logits, after = model.apply({"params": params}, token[:, None], past)
    return logits[:, 0], after


def _prompt_chunks(prompts: Sequence[np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """All but the last token of each prompt, as right-padded [B,T] chunks and their lengths."""
    counts = np.array([len(p) - 1 for p in prompts], np.int32)
    tokens = np.zeros((len(prompts), -(-counts.max() // _PREFILL) * _PREFILL), np.int32)
    tokens[np.arange(tokens.shape[1]) < counts[:, None]] = np.concatenate([p[:-1] for p in prompts])
    for start in range(0, tokens.shape[1], _PREFILL):
        yield tokens[:, start : start + _PREFILL], np.clip(counts - start, 0, _PREFILL)


# Without memory: the past is the text itself, which is run again for every token.


def _step_without_memory(model: TransformerXL, params, token, past: LastTokens):
    """Logits [B,V] after one more token [B], and the past with it."""
    tokens = jnp.concatenate([past.tokens[:, 1:], token[:, None]], axis=1)
    rows, width = tokens.shape
    filled = jnp.minimum(past.filled + 1, width)
    reset = jnp.arange(width) == width - filled[:, None]  # the positions before it are padding
    mems = model.init_mems(rows, 0)
    # context_len: only the newest token needs logits
    logits, _ = model.apply({"params": params}, tokens, mems, reset=reset, context_len=width - 1)
    return logits[:, 0], LastTokens(tokens, filled)


def _last_tokens(texts: Sequence[np.ndarray], width: int) -> LastTokens:
    """The newest ``width`` tokens of texts, which may be shorter or empty."""
    filled = np.array([min(len(text), width) for text in texts], np.int32)
    tokens = np.zeros((len(texts), width), np.int32)
    newest = [text[len(text) - n :] for text, n in zip(texts, filled, strict=True)]
    tokens[np.arange(width) >= width - filled[:, None]] = np.concatenate(newest)
    return LastTokens(tokens, filled)
