"""The sampled softmax equals its formula for known draws, and the full softmax for many draws."""

import jax
import numpy as np
import pytest
import tiny_models as tiny

CFG = tiny.config(sample_softmax=4)
EXACT = tiny.config()
TEXT = tiny.tokens(CFG, 6, 4).reshape(2, 3, 4)
MEMS = tiny.memory(CFG, (0, 2, 5), 5)
VARIABLES = tiny.variables(EXACT)


def nll(cfg, key=0, **extra):
    keys = {"dropout": jax.random.key(key)}
    return np.asarray(tiny.apply(cfg, "nll")(VARIABLES, *TEXT, MEMS, rngs=keys, **extra)[0])


def probability(word):
    """The log-uniform probability of word k: P(k) = log((k+2)/(k+1)) / log(V+1)."""
    return np.log((word + 2) / (word + 1)) / np.log(14)


@pytest.mark.integration
@pytest.mark.parametrize(
    "drawn",
    [[0, 1, 2, 3, 5, 8, 11, 12], [0, 0, 0, 1, 1, 7, 7, 7], [12] * 8],
    ids=["all_distinct", "some_again", "one_word"],
)
def test_training_scores_against_the_distinct_words_drawn(monkeypatch, drawn):
    """The test replaces the uniform random numbers so that exactly the words ``drawn`` result."""
    before = np.concatenate([[0], np.cumsum(probability(np.arange(13)))])
    middle = np.array([(before[k] + before[k + 1]) / 2 for k in drawn[::-1]], np.float32)

    def uniform(key, shape=(), *args, **kwargs):
        assert shape == (8,)  # 2 x sample_softmax
        return jax.numpy.asarray(middle)

    monkeypatch.setattr(jax.random, "uniform", uniform)
    got = nll(CFG, train=True)
    logits, _ = tiny.apply(EXACT, "__call__")(VARIABLES, TEXT[0], MEMS)
    expected_count = -np.expm1(8 * np.log1p(-probability(np.arange(13))))
    corrected = np.asarray(logits, np.float64) - np.log(expected_count)
    for place in np.ndindex(3, 4):
        target = TEXT[1][place]
        rivals = sorted(set(drawn) - {target})
        scores = corrected[place][[target, *rivals]]
        np.testing.assert_allclose(got[place], np.log(np.exp(scores).sum()) - scores[0], atol=1e-5)


def test_scoring_is_exact():
    np.testing.assert_array_equal(nll(CFG), nll(EXACT))


def test_with_every_word_drawn_training_is_exact_too():
    """8,000 draws miss the rarest word, P = 0.028, with a probability below 10^-98."""
    np.testing.assert_allclose(
        nll(tiny.config(sample_softmax=4000), train=True), nll(EXACT), atol=1e-5
    )


def test_draws_follow_the_key_and_not_the_row():
    one, again, other = (nll(CFG, key, train=True) for key in (1, 1, 2))
    np.testing.assert_array_equal(one, again)
    assert np.abs(one - other).max() > 1e-2
