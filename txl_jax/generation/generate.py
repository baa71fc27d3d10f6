"""Continuing prompts: the past filled from the prompt, then one token at a time on device."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from txl_jax.config import GenerateConfig, TransformerXLConfig
from txl_jax.generation.sampling import penalised, sample
from txl_jax.generation.utf8 import Automaton
from txl_jax.model.inputs import check_array
from txl_jax.model.memory import Cache, Memory
from txl_jax.model.transformer_xl import TransformerXL

_PREFILL = 128
_PER_DISPATCH = 64


class TokenChunk(NamedTuple):
    """Some more tokens of each row.

    Attributes:
      tokens: int32 [B,n].
      nll: float32 [B,n], nats, of each under the model as it is (temperature 1, nothing left out).
    """

    tokens: np.ndarray
    nll: np.ndarray


class DecodeState(flax.struct.PyTreeNode):
    """What goes from token to token.

    Attributes:
      token: int32 [B], the newest.
      past: of all before it.
      seen: bool [B,V], the tokens that the text has; ``None`` without a repetition penalty.
      state: int32 [B], of the grammar; ``None`` without one.
    """

    token: jax.Array
    past: Any
    seen: jax.Array | None
    state: jax.Array | None


def generate(
    cfg: TransformerXLConfig,
    params: Any,
    prompts: Sequence[np.ndarray],
    c: GenerateConfig,
    grammar: Automaton | None = None,
    samples: Sequence[int] | None = None,
) -> Iterator[TokenChunk]:
    """Pieces of up to 64 tokens of each continuation, until each has ``c.length``.

    Attention is limited to a window of M positions (``same_length``; the model's own, else
    ``pytorch``), so that neither the cut of a prompt nor its neighbours change the result: a row
    is what it would be alone. A form of attention without memory is run again for each token on
    the last M tokens instead (``absolute_per_layer``: on no more than its table has).

    Args:
      cfg: the model's shape.
      params: its parameters.
      prompts: B arrays of token ids, each of at least one token; lengths may differ.
      c: length, memory M, sampling, seed.
      grammar: which tokens may follow; ``None``: any.
      samples: [B], numbers that tell rows of one prompt apart: with the seed and the token's place
        they are all that a row's draws depend on. ``None``: 0 for each.

    Raises:
      ValueError: a prompt that is empty or no array of integers [n], or a token that the
        vocabulary does not have.
    """
    vocab_size = cfg.vocab_size or 0
    _check(prompts, vocab_size)
    if not cfg.memory_free:
        cfg = dataclasses.replace(cfg, same_length=cfg.same_length or "pytorch")
    programs = _programs(cfg, _of_sampling(c))
    if cfg.memory_free:
        table = cfg.n_positions if cfg.attention == "absolute_per_layer" else None
        past: Any = _last_tokens([p[:-1] for p in prompts], min(c.mem_len, table or c.mem_len))
    else:
        past = _read_prompts(programs, TransformerXL(cfg), params, prompts, c.mem_len)
    seen = None
    if c.repetition_penalty > 1:
        seen = np.zeros((len(prompts), vocab_size), bool)
        for row, prompt in enumerate(prompts):
            seen[row, prompt] = True
    state = None
    if grammar is not None:
        state = np.array([grammar.state_after(prompt) for prompt in prompts], np.int32)
    token = np.array([p[-1] for p in prompts], np.int32)
    on_device: Callable = functools.partial(jax.tree.map, jnp.asarray)
    going = DecodeState(*on_device((token, past, seen, state)))

    numbers = jnp.asarray(samples if samples is not None else [0] * len(prompts))
    rows = jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(c.seed)))(numbers)
    at_place = jax.vmap(jax.vmap(jax.random.fold_in, (0, None)), (None, 0))
    n = min(_PER_DISPATCH, c.length)  # the last piece too: a shorter one would be compiled anew
    for start in range(0, c.length, _PER_DISPATCH):
        keys = at_place(rows, np.arange(start, start + n))
        going, tokens, nll = programs.extend(params, going, keys, grammar)
        wanted = slice(0, c.length - start)
        yield TokenChunk(np.asarray(tokens)[:, wanted], np.asarray(nll)[:, wanted])


class _Programs(NamedTuple):
    """Compiled once for a shape of model and a way of sampling."""

    extend: Callable
    read: Callable
    project: Callable


def _of_sampling(c: GenerateConfig) -> GenerateConfig:
    """The settings that programs are compiled for, all others as they are by default."""
    kept = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    return GenerateConfig(**{key: getattr(c, key) for key in kept})


@functools.lru_cache(maxsize=8)
def _programs(cfg: TransformerXLConfig, c: GenerateConfig) -> _Programs:
    model = TransformerXL(cfg)
    next_logits: Callable = _by_running_again if cfg.memory_free else _by_memory
    extend = functools.partial(_extend, functools.partial(next_logits, model), c)
    return _Programs(
        jax.jit(extend, donate_argnums=(1,)),
        jax.jit(functools.partial(_read, model)),
        jax.jit(functools.partial(model.apply, seg_len=1, method="init_cache")),
    )


def _extend(next_logits, c: GenerateConfig, params, going: DecodeState, keys, grammar):
    """A token of each row for each of keys [n,B], on device: what goes on, tokens, nll [B,n]."""

    def one(going: DecodeState, keys):
        logits, past = next_logits(params, going.token, going.past)
        token = sample(keys, _possible(logits, going, c, grammar), c)
        of_token = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
        nll = jax.nn.logsumexp(logits, axis=-1) - of_token
        seen, state = going.seen, going.state
        if seen is not None:
            seen = seen.at[jnp.arange(len(token)), token].set(True)
        if state is not None:
            state = jnp.asarray(grammar.after)[state, token]
        return DecodeState(token, past, seen, state), (token, nll)

    going, (tokens, nll) = jax.lax.scan(one, going, keys)
    return going, tokens.T, nll.T


def _possible(logits, going: DecodeState, c: GenerateConfig, grammar):
    """Logits [B,V] with what the text had made less likely, and what may not follow at -inf."""
    if going.seen is not None:
        logits = penalised(logits, going.seen, c.repetition_penalty)
    if going.state is not None:
        logits = jnp.where(jnp.asarray(grammar.allowed)[going.state], logits, -jnp.inf)
    return logits


# With memory: the past is what the layers project it to.


def _by_memory(model: TransformerXL, params, token, past: Cache):
    """Logits [B,V] after one more token [B], and the past with it."""
    logits, after = model.apply({"params": params}, token[:, None], past)
    return logits[:, 0], after


def _read_prompts(
    programs: _Programs,
    model: TransformerXL,
    params,
    prompts: Sequence[np.ndarray],
    mem_len: int,
) -> Cache:
    """The past of all but the last token of each prompt."""
    mems = model.init_mems(len(prompts), mem_len)
    for tokens, lengths in _chunks(prompts):
        mems = programs.read(params, tokens, lengths, mems)
    return cast(Cache, programs.project({"params": params}, mems))


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
        check_array(f"prompt {row}", prompt, "integers", ("n",))
        if np.min(prompt) < 0 or np.max(prompt) >= vocab_size:
            raise ValueError(f"prompt {row} has a token outside the {vocab_size} of the vocabulary")
