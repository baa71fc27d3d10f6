"""Continues prompts: reads each prompt into memory, then samples token by token on the device."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from txl_jax.checkpoint.trained_model import memory_shapes, param_shapes
from txl_jax.config import GenerateConfig, TransformerXLConfig
from txl_jax.evaluation.protocols import with_window
from txl_jax.generation.sampling import Sampling, apply_repetition_penalty, sample, sampling_of
from txl_jax.generation.utf8 import Automaton
from txl_jax.messages import fields_repr
from txl_jax.model import self_check
from txl_jax.model.inputs import token_ids
from txl_jax.model.memory import Cache
from txl_jax.model.precision import in_compute_dtype
from txl_jax.model.transformer_xl import TransformerXL
from txl_jax.model.wide_products import from_bits, reading_rows, to_bits
from txl_jax.parallel.compile_cache import compiled_rows
from txl_jax.parallel.device_memory import Checked, Work, check_arrays
from txl_jax.parallel.platforms import platform_of

PREFILL = 128
"""The number of prompt tokens in one call of the model."""
PER_DISPATCH = 64
"""The largest number of sampled tokens in one dispatch to the device."""
_WORK = Work.sized_by("generation", "generate.samples", "generate.batch_size", "generate.mem_len")


@dataclasses.dataclass(frozen=True, eq=False)
class TokenChunk:
    """The next n tokens of each row, and their losses under the unchanged model distribution."""

    __repr__ = fields_repr

    tokens: np.ndarray  # token ids, int32 [B,n]
    nll: np.ndarray  # negative log-likelihoods in nats at temperature 1, float32 [B,n]


class LastTokens(flax.struct.PyTreeNode):
    """The newest tokens of each row, right-aligned int32 [B,W], and the numbers of real tokens."""

    __repr__ = fields_repr

    tokens: jax.Array | np.ndarray
    filled: jax.Array | np.ndarray


class DecodeState(flax.struct.PyTreeNode):
    """The state of generation from which the next token is sampled."""

    __repr__ = fields_repr

    token: jax.Array  # the newest token, int32 [B]
    past: Cache | LastTokens  # the earlier tokens, or their projected states in memory
    seen: jax.Array  # the tokens that occur in the text, bool [B,V], if they are penalised
    grammar_state: jax.Array | None  # the state of the grammar, int32 [B]


class _Draws(NamedTuple):
    """The numbers from which the random keys of a dispatch are made."""

    seed: Any  # uint32 []
    samples: Any  # the numbers of the rows, int32 [B]
    positions: Any  # indices of the next tokens after the prompt, int32 [n]

    def keys(self, n: Any) -> jax.Array:
        """Returns the keys of token n of each row, [B]."""
        key = jax.random.key(self.seed)
        of_row = lambda number: jax.random.fold_in(key, number)
        of_token = lambda number: jax.random.fold_in(of_row(number), self.positions[n])
        return jax.vmap(of_token)(self.samples)


def check_generation_memory(cfg: TransformerXLConfig, c: GenerateConfig, prompts: int = 1) -> None:
    """Raises ConfigError if memory and logits of ``prompts`` prompts exceed the device memory."""
    rows = compiled_rows(prompts * c.samples)
    past: Any = jax.ShapeDtypeStruct((rows, c.mem_len), np.int32)
    if not cfg.memory_free:
        past = memory_shapes(cfg, rows, c.mem_len)
    words = jax.ShapeDtypeStruct((rows, cfg.vocab_size or 0), np.float32)
    check_arrays(_WORK, (past, words))


def generate(
    cfg: TransformerXLConfig,
    params: Any,
    prompts: Sequence[np.ndarray],
    c: GenerateConfig,
    grammar: Automaton | None = None,
    samples: Sequence[int] | None = None,
) -> Iterator[TokenChunk]:
    """Yields chunks of up to 64 tokens of all continuations, until each has ``c.length`` tokens.

    Attention is limited to a window of M positions (``same_length`` of the model, or ``pytorch``),
    so the result of a row does not depend on the other rows or on the chunks of its prompt. A model
    without memory reads the last M tokens again for each new token. A model with
    ``absolute_per_layer`` reads at most as many tokens as it has positions.

    The settings of sampling are arguments of the compiled programs, and rows are padded to one of
    a few numbers of rows (:func:`~txl_jax.parallel.compile_cache.compiled_rows`). So a call with
    another seed, length, prompt or setting of sampling compiles nothing.

    Args:
      cfg, params: the configuration and the parameters of the model.
      prompts: B arrays of token ids. Each has at least one token, and lengths may differ.
      c: the length, the memory length M, the sampling settings and the seed.
      grammar: an automaton that decides which tokens may follow, or ``None`` to allow all.
      samples: [B], numbers that distinguish rows with the same prompt. The draws of a row depend
        only on this number, the seed and the token's position. ``None`` means 0 for all rows.

    Raises:
      ValueError: a prompt is empty, is not an integer array [n], or has ids outside the vocabulary.
    """
    vocab_size = cfg.vocab_size or 0
    for row, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"prompt {row} is empty: a prompt needs at least one token")
        token_ids(f"prompt {row}", prompt, vocab_size, ("n",))
    cfg = with_window(cfg)
    rows = len(prompts)
    added = compiled_rows(rows) - rows
    sizes, program = read_attention(cfg, c, rows + added)
    self_check.check_on_one_device(cfg, *sizes, **program)
    programs = _programs(cfg)
    prompts = [*prompts, *[np.zeros(1, np.int32)] * added]
    state = _first_state(programs, cfg, params, prompts, c, grammar)
    if cfg.dtype != "float32":
        params = programs.cast(params)
    numbers = np.array([*([0] * rows if samples is None else samples), *[0] * added], np.int32)
    sampling = sampling_of(c)
    for start in range(0, c.length, PER_DISPATCH):
        positions = np.arange(start, start + PER_DISPATCH, dtype=np.int32)
        draws = _Draws(np.uint32(c.seed), numbers, positions)
        n = min(PER_DISPATCH, c.length - start)
        state, tokens, nll = programs.extend(params, state, draws, np.int32(n), sampling, grammar)
        yield TokenChunk(np.asarray(tokens)[:rows, :n], np.asarray(nll)[:rows, :n])


def read_attention(
    cfg: TransformerXLConfig, c: GenerateConfig, rows: int
) -> tuple[tuple[int, int, int], dict[str, bool]]:
    """Returns the sizes (rows, T, M) of attention on prompts, and whether rows have resets.

    A model without memory reads the last tokens again for each new token.
    """
    if cfg.memory_free:
        return (rows, min(c.mem_len, cfg.segment_limit or c.mem_len), 0), {"episodes": True}
    return (rows, PREFILL, c.mem_len), {"episodes": False}


class _Programs(NamedTuple):
    cast: Checked  # casts parameters to the compute dtype, once for all tokens
    extend: Checked  # extends texts by up to 64 tokens
    read: Checked  # reads prompts into memory
    project: Checked  # projects memory to a cache


@functools.lru_cache(maxsize=8)
def _programs(cfg: TransformerXLConfig, mesh: Mesh | None = None) -> _Programs:
    model = TransformerXL(cfg, mesh)
    step: Callable = _step_without_memory if cfg.memory_free else _step_with_memory
    step, on_cpu = functools.partial(step, model), platform_of(mesh) == "cpu"
    extend = functools.partial(_extend_on_bits if on_cpu else _extend, step)

    def cast(params):
        params = in_compute_dtype(model.cfg, params)
        return to_bits(params) if on_cpu else params

    # Returns the memory after right-padded rows [B,T]. The compiler removes the unused logits.
    read = lambda params, tokens, lengths, mems: model.apply(
        {"params": params}, tokens, mems, lengths=lengths
    )[1]
    project = functools.partial(model.apply, seg_len=1, method="init_cache")
    jitted = jax.jit(cast), jax.jit(extend, donate_argnums=(1,)), jax.jit(read), jax.jit(project)
    return _Programs(*(Checked(function, _WORK) for function in jitted))


def lower_programs(
    cfg: TransformerXLConfig, c: GenerateConfig, grammar: Automaton | None, mesh: Mesh
) -> dict[str, Callable[[], jax.stages.Lowered]]:
    """Returns functions that lower the programs of one prompt, for a mesh of one device."""
    cfg = with_window(cfg)
    cast, extend, read, project = _programs(cfg, mesh)
    rows, whole = compiled_rows(c.samples), NamedSharding(mesh, PartitionSpec())
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole)
    shape: Any = functools.partial(jax.ShapeDtypeStruct, sharding=whole)
    ids = shape((rows,), np.int32)
    mems = jax.tree.map(place, memory_shapes(cfg, rows, c.mem_len))
    params = jax.tree.map(place, param_shapes(cfg))
    programs: dict[str, Callable[[], jax.stages.Lowered]] = {}
    if cfg.dtype != "float32":
        programs["cast"] = functools.partial(cast.lower, params)
    if cfg.memory_free:
        width = min(c.mem_len, cfg.n_positions or c.mem_len)
        past: Any = LastTokens(shape((rows, width), np.int32), ids)
    else:
        prompts = shape((rows, PREFILL), np.int32)
        programs["read"] = functools.partial(read.lower, params, prompts, ids, mems)
        programs["cache"] = functools.partial(project.lower, {"params": params}, mems)
        past = jax.tree.map(place, jax.eval_shape(project.jitted, {"params": params}, mems))
    seen = shape((rows, cfg.vocab_size or 0), bool)
    state = DecodeState(ids, past, seen, None if grammar is None else ids)
    draws = _Draws(np.uint32(0), ids, np.arange(PER_DISPATCH, dtype=np.int32))
    matrices = jax.tree.map(place, jax.eval_shape(cast.jitted, params))
    programs["extend"] = functools.partial(
        extend.lower, matrices, state, draws, np.int32(1), sampling_of(c), grammar
    )
    return programs


def _first_state(
    programs: _Programs, cfg: TransformerXLConfig, params, prompts, c, grammar
) -> DecodeState:
    """Computes the state after all tokens of each prompt except the last, on the device."""
    if cfg.memory_free:
        most = min(c.mem_len, cfg.segment_limit or c.mem_len)
        past: Any = _last_tokens([p[:-1] for p in prompts], most)
    else:
        mems = TransformerXL(cfg).init_mems(len(prompts), c.mem_len)
        for tokens, lengths in _prompt_chunks(prompts):
            mems = programs.read(params, tokens, lengths, mems)
        past = programs.project({"params": params}, mems)
    grammar_state = None
    seen = np.zeros((len(prompts), cfg.vocab_size or 0), bool)
    if c.repetition_penalty > 1:
        for row, prompt in enumerate(prompts):
            seen[row, prompt] = True
    if grammar is not None:
        grammar_state = np.array([grammar.state_after(prompt) for prompt in prompts], np.int32)
    token = np.array([p[-1] for p in prompts], np.int32)
    return DecodeState(*jax.tree.map(jnp.asarray, (token, past, seen, grammar_state)))


def _extend(
    step: Callable, params, state: DecodeState, draws: _Draws, n, sampling: Sampling, grammar
):
    """Samples n tokens per row. Returns the new state, and tokens and nll [B,64], 0 from n on."""

    def sample_token(index, carry: tuple[DecodeState, jax.Array, jax.Array]):
        state, tokens, losses = carry
        logits, past = step(params, state.token, state.past)
        masked = apply_repetition_penalty(logits, state.seen, sampling.repetition_penalty)
        grammar_state = state.grammar_state
        if grammar_state is not None:
            allowed = jnp.asarray(grammar.allowed)[grammar_state]
            masked = jnp.where(allowed, masked, -jnp.inf)
        token = sample(draws.keys(index), masked, sampling)
        own_logits = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
        nll = jax.nn.logsumexp(logits, axis=-1) - own_logits
        seen = state.seen.at[jnp.arange(len(token)), token].set(True)
        if grammar_state is not None:
            grammar_state = jnp.asarray(grammar.next_state)[grammar_state, token]
        new = DecodeState(token, past, seen, grammar_state)
        return new, tokens.at[index].set(token), losses.at[index].set(nll)

    shape = (len(draws.positions), len(draws.samples))
    made = jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)
    state, tokens, nll = jax.lax.fori_loop(0, n, sample_token, (state, *made))
    return state, tokens.T, nll.T


def _extend_on_bits(step: Callable, params, state: DecodeState, *args):
    """Computes :func:`_extend` with bfloat16 arrays in a form that a CPU reads fast.

    The loop keeps these arrays as uint16 bits. It also keeps keys and distance vectors [...,K,H]
    transposed.
    """

    def on_bits(params, token, past):
        with reading_rows():
            logits, past = step(from_bits(params), token, from_bits(_columns(past)))
        return logits, _columns(to_bits(past))

    state = state.replace(past=_columns(to_bits(state.past)))
    state, tokens, nll = _extend(on_bits, params, state, *args)
    return state.replace(past=from_bits(_columns(state.past))), tokens, nll


def _columns(past: Any) -> Any:
    """Transposes the arrays of a cache that are multiplied by queries, if they are uint16 bits."""
    if not isinstance(past, Cache):
        return past
    turned = lambda x: x if x is None or x.dtype != jnp.uint16 else x.mT
    keys = lambda layers: tuple(x._replace(keys=turned(x.keys)) for x in layers)
    slots = lambda x: x and x.replace(layers=keys(x.layers))
    positions = tuple(x.replace(r=turned(x.r)) for x in past.positions)
    return past.replace(near=slots(past.near), far=slots(past.far), positions=positions)


# Models with memory: the past is the projected memory of the layers.


def _step_with_memory(model: TransformerXL, params, token, past: Cache):
    """Returns the logits [B,V] after one more token [B], and the past including this token."""
    logits, after = model.apply({"params": params}, token[:, None], past)
    return logits[:, 0], after


def _prompt_chunks(prompts: Sequence[np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields right-padded chunks [B,T] and their lengths, without the last token of each prompt."""
    counts = np.array([len(p) - 1 for p in prompts], np.int32)
    tokens = np.zeros((len(prompts), -(-counts.max() // PREFILL) * PREFILL), np.int32)
    tokens[np.arange(tokens.shape[1]) < counts[:, None]] = np.concatenate([p[:-1] for p in prompts])
    for start in range(0, tokens.shape[1], PREFILL):
        yield tokens[:, start : start + PREFILL], np.clip(counts - start, 0, PREFILL)


# Models without memory: the past is the text itself, which the model reads again for every token.


def _step_without_memory(model: TransformerXL, params, token, past: LastTokens):
    tokens = jnp.concatenate([past.tokens[:, 1:], token[:, None]], axis=1)
    rows, width = tokens.shape
    filled = jnp.minimum(past.filled + 1, width)
    reset = jnp.arange(width) == width - filled[:, None]  # earlier positions are padding
    mems = model.init_mems(rows, 0)
    # With this context_len, only the newest token has logits.
    logits, _ = model.apply({"params": params}, tokens, mems, reset=reset, context_len=width - 1)
    return logits[:, 0], LastTokens(tokens, filled)


def _last_tokens(texts: Sequence[np.ndarray], width: int) -> LastTokens:
    """Returns the newest ``width`` tokens of each text. A text can be shorter, or empty."""
    filled = np.array([min(len(text), width) for text in texts], np.int32)
    tokens = np.zeros((len(texts), width), np.int32)
    newest = [text[len(text) - n :] for text, n in zip(texts, filled, strict=True)]
    tokens[np.arange(width) >= width - filled[:, None]] = np.concatenate(newest)
    return LastTokens(tokens, filled)
