"""Arguments of a wrong dtype, shape or value are refused in one line that names them."""

import re
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import tiny_models as tiny
from tiers import rest_slow

import txl_jax
from txl_jax import agents
from txl_jax.model import inputs

CFG = tiny.config(past_decode=True)
B, T, M = 3, 4, 5
TOKENS = tiny.tokens(CFG, B, T)
MEMS = tiny.memory(CFG, (0, 2, 5), M)
X = tiny.embeddings(CFG, B, T)
LOG_P = np.zeros((B, T, 13), np.float32)

METHODS: dict[str, dict[str, Any]] = {
    "__call__": {"tokens": TOKENS, "mems": MEMS},
    "logits_and_states": {"tokens": TOKENS, "mems": MEMS},
    "nll": {"tokens": TOKENS, "targets": TOKENS, "mems": MEMS},
    "nll_and_states": {"tokens": TOKENS, "targets": TOKENS, "mems": MEMS},
    "core": {"embeddings": X, "mems": MEMS},
    "init_cache": {"mems": MEMS, "seg_len": T},
    "past_nll": {"log_p": LOG_P, "inputs": TOKENS},
}
"""Every public method, with valid arguments."""

integers = "integers [B,T]"
a_memory = "a Memory of init_mems"
WRONG: dict[str, list] = {
    "tokens": [
        (TOKENS.tolist(), f"{integers}, not list"),
        (TOKENS.astype(np.float32), f"{integers}, not float32 [3,4]"),
        (TOKENS > 5, f"{integers}, not bool [3,4]"),
        (TOKENS[0], f"{integers}, not int32 [4]"),
        (TOKENS[..., None], f"{integers}, not int32 [3,4,1]"),
        (None, f"{integers}, not NoneType"),
    ],
    "targets": [
        (TOKENS.tolist(), f"{integers}, not list"),
        (TOKENS.astype(np.float32), f"{integers}, not float32 [3,4]"),
        (TOKENS[0], f"{integers}, not int32 [4]"),
    ],
    "embeddings": [
        (X.tolist(), "floats [B,T,8], not list"),
        (X.astype(np.int32), "floats [B,T,8], not int32 [3,4,8]"),
        (X[0], "floats [B,T,8], not float32 [4,8]"),
        (X[..., :6], "floats [B,T,8], not float32 [3,4,6]"),
    ],
    "mems": [
        (None, f"{a_memory}, not NoneType"),
        (MEMS.hidden, f"{a_memory}, not ndarray"),
    ],
    "mems.hidden": [
        (MEMS.hidden.astype(np.int32), "floats [L,B,M,D], not int32 [2,3,5,8]"),
        (MEMS.hidden[0], "floats [L,B,M,D], not float32 [3,5,8]"),
    ],
    "mems.filled": [
        (MEMS.filled.astype(np.float32), "integers [B], not float32 [3]"),
        (MEMS.filled[0], "integers [B], not int32 []"),
    ],
    "reset": [
        ([False] * B, "bool [3] or [3,4], not list"),
        (np.zeros(B, np.int32), "bool [3] or [3,4], not int32 [3]"),
        (np.zeros((B, T), np.float32), "bool [3] or [3,4], not float32 [3,4]"),
        (np.zeros(2, bool), "bool [3] or [3,4], not bool [2]"),
        (np.zeros((T, B), bool), "bool [3] or [3,4], not bool [4,3]"),
    ],
    "lengths": [
        ([1, 2, 3], "integers [3], not list"),
        (np.ones(B, np.float32), "integers [3], not float32 [3]"),
        (np.ones(2, np.int32), "integers [3], not int32 [2]"),
        (np.ones((B, T), np.int32), "integers [3], not int32 [3,4]"),
    ],
    "inputs": [(TOKENS.astype(np.float32), f"{integers}, not float32 [3,4]")],
    "log_p": [
        (LOG_P[0], "floats [3,4,13], not float32 [4,13]"),
        (LOG_P.astype(np.int32), "floats [3,4,13], not int32 [3,4,13]"),
    ],
}


def refusal(method, **changes):
    """The error message, a single line, of a method that gets some wrong arguments."""
    arguments = {**METHODS[method], **changes}
    model = txl_jax.TransformerXL(CFG)
    with pytest.raises(ValueError, match=r"^") as caught:
        model.apply(tiny.variables(CFG), **arguments, method=method)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("method", METHODS)
def test_a_wrong_dtype_or_shape_is_refused_naming_the_argument(method):
    segment = (
        {"reset", "lengths"} if "mems" in METHODS[method] and method != "init_cache" else set()
    )
    for name in WRONG:
        first, _, field = name.partition(".")
        if first not in METHODS[method] and name not in segment:
            continue
        for wrong, message in WRONG[name]:
            given = MEMS.replace(**{field: wrong}) if field else wrong
            assert refusal(method, **{first: given}) == f"{name} must be {message}"


@pytest.mark.parametrize("wrong", [-3, 6, 2**31 + 1])
def test_more_states_than_slots_or_fewer_than_none_are_refused(wrong):
    expected = f"mems.filled[1] = {wrong}: must be from 0 to 5, the number of slots of the memory"
    filled = np.array([0, wrong, 5])
    for method in (name for name, arguments in METHODS.items() if "mems" in arguments):
        assert refusal(method, mems=MEMS.replace(filled=filled)) == expected
    model, variables = txl_jax.TransformerXL(CFG), tiny.variables(CFG)
    cache: Any = model.apply(variables, MEMS, seg_len=T, method="init_cache")
    cache = cache.replace(filled=filled)
    assert refusal("core", mems=cache) == expected.replace("mems.filled", "the cache's filled")
    with pytest.raises(ValueError, match=r"^mems.filled\[1\] = "):
        agents.StateBuffer.start(MEMS.replace(filled=filled), 2)


def test_a_segment_without_tokens_and_a_context_that_is_no_number_are_refused():
    assert refusal("__call__", tokens=TOKENS[:, :0]).startswith(
        "tokens [3,0]: must have at least one row"
    )
    for wrong in (1.0, True, "1", None):
        assert refusal("nll", context_len=wrong).startswith(f"context_len = {wrong!r}: must be an")


def test_a_cache_needs_a_memory_and_a_segment_of_at_least_one_token():
    for wrong in (0, -1, 2.0, None):
        assert refusal("init_cache", seg_len=wrong) == (
            f"seg_len = {wrong!r}: must be an integer of at least 1"
        )
    model = txl_jax.TransformerXL(CFG)
    cache = model.apply(tiny.variables(CFG), MEMS, seg_len=1, method="init_cache")
    fix = "a Memory of init_mems"
    assert refusal("init_cache", mems=cache) == f"mems must be {fix}, not Cache"


def test_a_memory_of_no_size_is_refused():
    model = txl_jax.TransformerXL(CFG)
    cases: list[tuple[str, Any]] = [("batch_size", (-1, 5)), ("batch_size", (2.0, 5))]
    for name, sizes in [*cases, ("mem_len", (3, -2))]:
        wrong = next(size for size in sizes if size not in (3, 5))
        message = re.escape(f"{name} = {wrong!r}: must be an integer of at least 0")
        with pytest.raises(ValueError, match=message):
            model.init_mems(*sizes)


def test_past_nll_needs_a_model_that_decodes_the_past():
    cfg = tiny.config()
    with pytest.raises(ValueError, match=r"past_nll needs .* model\.past_decode=True"):
        tiny.apply(cfg, "past_nll")(tiny.variables(cfg), LOG_P, TOKENS)


@pytest.mark.parametrize("method", ["__call__", "nll", "core"])
def test_lengths_beyond_the_segment_are_refused(method):
    """Lengths that a jitted function closes over are constants, so they are checked too."""
    for lengths, text in (([4, 5, 0], "lengths[1] = 5"), ([0, 1, -1], "lengths[2] = -1")):
        given = np.array(lengths, np.int32)
        want = f"{text}: must be from 0 to 4, the number of tokens in a row"
        for array in (given, jax.numpy.asarray(given), given.astype(np.int64)):
            assert refusal(method, lengths=array) == want
    compiled = jax.jit(lambda x: refusal("core", embeddings=x, lengths=given) and x)
    jax.eval_shape(compiled, X)


def test_lengths_that_are_not_known_count_as_the_nearest_that_can_be():
    """Under jit, lengths below 0 count as 0, and lengths above T count as T."""
    core = tiny.compiled(CFG, "core")
    run = lambda lengths: core(tiny.variables(CFG), X, MEMS, lengths=np.array(lengths, np.int32))
    (states, mems), (want_states, want_mems) = run([9, -3, 2]), run([4, 0, 2])
    np.testing.assert_array_equal(states, want_states)
    np.testing.assert_array_equal(mems.hidden, want_mems.hidden)
    assert mems.filled.tolist() == want_mems.filled.tolist() == [4, 2, 5]
    eager = tiny.apply(CFG, "core")(
        tiny.variables(CFG), X, MEMS, lengths=np.array([4, 0, 2], np.uint8)
    )
    np.testing.assert_allclose(eager[1].hidden, mems.hidden, atol=1e-5)


@pytest.mark.parametrize("changes", [{}, {"cutoffs": (4, 9), "div_val": 2}, {"mixtures": 2}])
@pytest.mark.parametrize("wrong", [13, -1, 10**6])
def test_an_id_outside_the_vocabulary_is_refused_by_every_method(changes, wrong):
    cfg = tiny.config(past_decode=not changes, **changes)
    model, ids = txl_jax.TransformerXL(cfg), TOKENS.copy()
    ids[1, 2] = wrong
    told = (
        f"[1,2] = {wrong}: a token id must be from 0 to 12, because the vocabulary has 13 symbols"
    )
    for method, name in (("__call__", "tokens"), ("nll", "targets"), ("past_nll", "inputs")):
        if method == "past_nll" and changes:
            continue
        for array in (ids, jax.numpy.asarray(ids)):
            given = {**METHODS[method], name: array}
            with pytest.raises(ValueError, match=re.escape(name + told)):
                model.apply(tiny.variables(cfg), **given, method=method)
    with pytest.raises(ValueError, match=re.escape(f"tokens{told}")):
        model.init(jax.random.key(0), ids, MEMS)


def test_an_id_that_is_known_when_a_function_is_compiled_is_refused():
    ids = np.full((B, T), 13, np.int32)
    closed_over = lambda mems: refusal("__call__", tokens=ids, mems=mems) and mems
    jax.eval_shape(closed_over, MEMS)
    unknown = lambda tokens: tiny.apply(CFG, "__call__")(tiny.variables(CFG), tokens, MEMS)[0]
    jax.eval_shape(unknown, ids)


FORMS: dict[str, dict[str, Any]] = {
    "clusters": {"cutoffs": (64, 128)},
    "clusters of their own widths": {"cutoffs": (64,), "div_val": 2},
    "a large vocabulary": {"vocab_size": 65536, "cutoffs": (64, 300), "div_val": 2},
    "mixture": {"mixtures": 2},
    "positions from the end": tiny.attention("absolute_per_layer", n_positions=200),
    "window": {"same_length": "pytorch", "clamp_len": 4},
}


def drawn(cfg, rows=3, seg_len=T):
    """Random ids from 0 to 255, int32 [2,rows,T]; row 0 starts with 255 and 0."""
    ids = np.random.default_rng(0).integers(0, 256, (2, rows, seg_len)).astype(np.int32)
    ids[:, 0, :2] = 255, 0
    return ids


@pytest.mark.integration
@pytest.mark.parametrize("form", rest_slow(1, FORMS))
def test_integers_of_any_type_give_the_losses_of_int32(form):
    """The integers are NumPy, JAX or traced arrays. Arithmetic in 8 bits would overflow."""
    cfg = tiny.config(n_layer=1, **{"vocab_size": 256, **FORMS[form]})
    (tokens, targets), variables = drawn(cfg), tiny.variables(cfg)
    mems, lengths = tiny.memory(cfg, (0, 2, 5), M), np.array([0, 4, 1], np.int32)
    run = lambda *given: tiny.apply(cfg, "nll")(variables, *given[:3], lengths=given[3])
    compiled = tiny.quick(run)
    want, want_mems = compiled(tokens, targets, mems, lengths)
    for dtype in (np.uint8, np.uint16, np.int64):
        cast = lambda x, dtype=dtype: x.astype(dtype)
        numpy = (cast(tokens), cast(targets), mems.replace(filled=cast(mems.filled)), cast(lengths))
        on_device = jax.tree.map(jax.numpy.asarray, numpy)
        calls = [(compiled, numpy)] if dtype == np.uint16 else [(run, numpy), (run, on_device)]
        for call, given in [*calls, *[(compiled, numpy)] * (dtype == np.uint8)]:
            got, got_mems = call(*given)
            np.testing.assert_allclose(got, want, atol=1e-5)
            np.testing.assert_allclose(got_mems.hidden, want_mems.hidden, atol=1e-5)
            np.testing.assert_array_equal(got_mems.filled, want_mems.filled)
            assert got_mems.filled.dtype == np.int32


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_narrow_lengths_and_fillings_of_long_segments_give_those_of_int32(dtype):
    """The sum of 200 slots and 100 tokens exceeds the range of either type."""
    cfg = tiny.config(n_layer=1, vocab_size=None)
    x, mems = tiny.embeddings(cfg, B, 100), tiny.memory(cfg, (100, 120, 7), 200)
    lengths, reset = np.array([100, 99, 3], np.int32), np.zeros((B, 100), bool)
    reset[0, 40] = True
    core = tiny.compiled(cfg, "core")
    run = lambda dtype, **more: core(
        tiny.variables(cfg),
        x,
        mems.replace(filled=mems.filled.astype(dtype)),
        lengths=lengths.astype(dtype),
        **more,
    )
    for more in ({}, {"reset": reset}):
        (got, got_mems), (want, want_mems) = run(dtype, **more), run(np.int32, **more)
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(got_mems.hidden, want_mems.hidden)
        np.testing.assert_array_equal(got_mems.filled, want_mems.filled)
    assert want_mems.filled.tolist() == [60, 200, 10]


def test_a_cache_takes_integers_of_any_type():
    cfg = tiny.config(n_layer=1)
    model, variables = txl_jax.TransformerXL(cfg), tiny.variables(cfg)
    mems = tiny.memory(cfg, (200, 120, 7), 200)
    start: Any = lambda dtype, n: model.apply(
        variables, mems.replace(filled=mems.filled.astype(dtype)), seg_len=n, method="init_cache"
    )
    want, got = start(np.int32, 100), start(np.uint8, np.int8(100))
    assert got.filled.dtype == np.int32
    assert got.seg_len == 100
    assert got.slots == want.slots
    narrow = got.replace(filled=np.asarray(got.filled).astype(np.uint8))
    step = tiny.quick(lambda tokens, cache: model.apply(variables, tokens, cache))
    tokens = tiny.tokens(cfg, B, 100)
    (logits, after), (want_logits, want_after) = step(tokens, narrow), step(tokens, want)
    np.testing.assert_array_equal(logits, want_logits)
    np.testing.assert_array_equal(after.filled, want_after.filled)


def test_ids_beyond_int32_are_refused():
    for wrong in (np.int64(2**32), np.uint64(2**63)):
        ids = TOKENS.astype(wrong.dtype)
        ids[1, 2] = wrong
        assert refusal("nll", tokens=ids).startswith(f"tokens[1,2] = {wrong}: a token id must be")


def test_sizes_may_be_numpy_integers_of_any_type():
    model = txl_jax.TransformerXL(CFG)
    mems = model.init_mems(batch_size=np.int8(2), mem_len=np.uint8(200))
    assert mems.hidden.shape == (2, 2, 200, 8)
    tokens = tiny.tokens(CFG, 2, 300)
    call = tiny.apply(CFG, "__call__")
    of = lambda c: jax.eval_shape(
        lambda x: call(tiny.variables(CFG), x, mems, context_len=c), tokens
    )
    assert of(np.int8(100))[0].shape == (2, 200, 13)


@pytest.mark.parametrize("method", ["__call__", "nll", "core"])
@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_a_segment_without_rows_or_tokens_is_refused_by_name(method, shape):
    cfg = tiny.config()
    model = txl_jax.TransformerXL(cfg)
    variables, tokens = tiny.variables(cfg), np.zeros(shape, np.int32)
    given = [np.zeros((*shape, cfg.d_model), np.float32)] if method == "core" else [tokens]
    given += [tokens] * (method == "nll")
    name = "embeddings" if method == "core" else "tokens"
    with pytest.raises(ValueError, match=rf"{name} \[{shape[0]},{shape[1]}.*at least one row"):
        model.apply(variables, *given, model.init_mems(shape[0], 4), method=method)


@pytest.mark.parametrize("dtype", ["int4", "uint4", "int2"])
def test_ids_of_a_few_bits_are_compared_with_a_larger_vocabulary(dtype):
    ids = np.ones((1, 3), ml_dtypes.__dict__[dtype])
    np.testing.assert_array_equal(inputs.token_ids("tokens", ids, 300), np.ones((1, 3), np.int32))
