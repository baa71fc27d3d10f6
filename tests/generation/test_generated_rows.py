"""A row gets the same text in a batch as alone, and the same text with a cache as without it.

Without a cache, all states are computed again for each token. Both are true for every state of the
memory: empty, partly filled, full, and overwritten twice.
"""

import dataclasses

import jax
import numpy as np
import pytest
import reference
import tiny_models
from generation_cases import WITH_MEMORY, WITHOUT_MEMORY, prompts_of, some

from txl_jax.config import GenerateConfig
from txl_jax.generation import generate as generation
from txl_jax.generation.generate import generate

FORMS = {**WITH_MEMORY, "tf window": {"same_length": "tf"}, **WITHOUT_MEMORY}

M = 9
LENGTHS = (1, 3, M, M + 1, M + 2, 3 * M + 1, 129, 200)
"""Lengths of prompts. All tokens except the last are first read into memory: these are none, a few,
M - 1, M, M + 1 or several times M tokens. They are read in chunks of 128 tokens; the prompts of 129
and 200 tokens fill a whole chunk."""
TURNING = GenerateConfig(length=2 * M + 6, mem_len=M, temperature=0.0)
"""Settings with enough new tokens to overwrite the whole memory, a ring buffer, twice."""


SEEDS = {
    "gtrxl": 4,
    "shaw": 2,
    "shared_projection": 5,
    "adaptive": 4,
    "absolute": 5,
    "absolute_per_layer": 2,
}
"""For each form, a seed of parameters with which greedy texts vary and rows differ; default 1."""


def lively(form):
    """A form's config and parameters, with output biases of 0, so that no word is always likely."""
    cfg = tiny_models.config(**FORMS[form], tie_weight=False)
    params = tiny_models.variables(cfg, SEEDS.get(form, 1))["params"]
    zero = lambda name, x: 0 * x if name.startswith(("softmax_bias", "cluster_bias")) else x
    params = {name: zero(name, value) for name, value in params.items()}
    if cfg.final_norm:
        norm = params["norm_output"]
        params["norm_output"] = {**norm, "bias": 0 * norm["bias"]}
    return cfg, params


@pytest.fixture
def asked(monkeypatch):
    """A list with (logits [B,V], ``filled``, ``oldest``) for each token that is made with memory.

    ``filled`` and ``oldest`` describe the memory before the token: the number of filled slots of
    each row, and the slot of the ring buffer that has the oldest state.
    """
    seen: list[tuple[np.ndarray, ...]] = []
    by_memory = generation._step_with_memory
    keep = lambda *arrays: seen.append(tuple(map(np.array, arrays)))

    def watched(model, params, token, past):
        logits, after = by_memory(model, params, token, past)
        jax.debug.callback(keep, logits, past.filled, past.near.oldest, ordered=True)
        return logits, after

    monkeypatch.setattr(generation, "_step_with_memory", watched)
    generation._programs.cache_clear()
    yield seen
    generation._programs.cache_clear()


def greedy(form, prompts, c):
    """Greedy tokens of the model of :func:`lively`, int32 [B,length]."""
    cfg, params = lively(form)
    return np.concatenate([p.tokens for p in generate(cfg, params, prompts, c)], axis=1)


@pytest.mark.integration
@pytest.mark.parametrize("form", some(FORMS, "relative", "shaw", "adaptive", "absolute"))
@pytest.mark.few(1)
def test_a_greedy_row_of_a_batch_is_what_it_is_alone(form):
    """Eight lengths of prompts in one batch cover every state of the ring buffer."""
    prompts = prompts_of(*LENGTHS)
    together = greedy(form, prompts, TURNING)
    assert len({tuple(row) for row in together.tolist()}) >= 7  # else equality would prove little
    for row, prompt in enumerate(prompts):
        np.testing.assert_array_equal(together[row], greedy(form, [prompt], TURNING)[0])


def recomputed(form, window, text, mem_len):
    """Logits [T,V] from ``reference``, with the text as one segment, no memory, in float64.

    ``window`` is the value of the setting ``same_length``.
    """
    cfg, params = lively(form)
    cfg, params = dataclasses.replace(cfg, same_length=window), reference.float64(params)
    scores, _ = reference.logits(params, cfg, text, [[]] * cfg.n_layer, mem_len)
    return np.stack(scores)


def assert_recomputed(form, window, c, lengths, asked):
    """Asserts that tokens and logits equal those of the whole text recomputed for each token.

    One pass computes the logits of all tokens, because no token changes earlier logits.
    """
    prompts = prompts_of(*lengths)
    tokens = greedy(form, prompts, c)
    jax.effects_barrier()  # waits for the callbacks that fill ``asked``
    made_from = np.stack([logits for logits, _, _ in asked], axis=1)
    assert made_from.shape[:2] == (len(lengths), c.length)
    for prompt, row, logits in zip(prompts, tokens, made_from, strict=True):
        text = [*prompt.tolist(), *row.tolist()]
        expected = recomputed(form, window, text, c.mem_len)[len(prompt) - 1 : -1]
        np.testing.assert_allclose(logits, expected, atol=1e-4)
        assert row.tolist() == expected.argmax(axis=1).tolist()


@pytest.mark.integration
@pytest.mark.parametrize("form", some([*WITH_MEMORY, "tf window"], "relative", "shaw", "tf window"))
@pytest.mark.few(1)
def test_with_a_window_what_is_kept_gives_what_recomputing_gives(form, asked):
    """Memory is shorter than the text, so the ring buffer is overwritten, at least twice."""
    window = FORMS[form].get("same_length", "pytorch")
    assert_recomputed(form, window, TURNING, LENGTHS, asked)
    assert asked[0][1].tolist() == [0, 2, M - 1, M, M, M, M, M]
    assert [int(oldest) for *_, oldest in asked] == [n % M for n in range(TURNING.length)]
    assert TURNING.length > 2 * M  # overwritten twice


@pytest.mark.parametrize("form", some(WITH_MEMORY, "relative", "adaptive"))
def test_without_a_window_all_that_fits_memory_gives_what_recomputing_gives(form, asked):
    """The paper's model has no window; here memory holds every token."""
    lengths = (1, 2, 3, 5, 8, 9, 13, 21)
    c = dataclasses.replace(TURNING, mem_len=max(lengths) + TURNING.length)
    assert_recomputed(form, False, c, lengths, asked)
