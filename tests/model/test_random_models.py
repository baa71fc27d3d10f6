"""With random configurations, the model keeps its promises (the documented properties).

Hypothesis draws the form of attention, shapes, memory, clusters and tied weights. To compile few
programs, each case is checked for all promises. All inputs of a case have one shape [B,T], and
always include ``lengths`` and ``reset``. Shorter texts are padded.
"""

import dataclasses
import functools

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import reference
import tiny_models as tiny

import txl_jax

ROWS = 3
CLOSE = 2e-5
"""The tolerance: ten times the largest difference seen in 150 cases."""

settings = functools.partial(
    hypothesis.settings,
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=False,
    suppress_health_check=list(hypothesis.HealthCheck),
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A configuration, with the lengths of its segment and memory, and a random seed."""

    cfg: txl_jax.TransformerXLConfig
    seg_len: int
    mem_len: int
    seed: int


@st.composite
def cases(draw, attention):
    """Draws cases of one form of attention; the first values of a list are tried first."""
    memory_free = attention.startswith("absolute")
    n_head, d_head = draw(st.integers(1, 3)), draw(st.sampled_from([2, 4, 1, 3, 5]))
    d_model = draw(st.sampled_from([8, 4, 6, 10]))
    if attention == "absolute_per_layer":
        n_head, d_head = draw(st.sampled_from([(2, 4), (3, 2), (1, 4), (2, 2)]))
        d_model = n_head * d_head
    seg_len = draw(st.sampled_from([4, 3, 5, 2, 1]))
    mem_len = 0 if memory_free else draw(st.sampled_from([5, 2, 7, 1, 0]))
    windows = ["pytorch", False, "tf"] if mem_len else [False, "tf"]
    cutoffs = draw(st.sampled_from([(3, 7), (5,), (), (1, 2, 9)]))
    div_val = draw(st.integers(1, 3))
    narrowest = div_val ** len(cutoffs)
    d_embed = draw(st.sampled_from([None, 1, 5])) if d_model >= narrowest else 1
    cfg = tiny.config(
        vocab_size=10,
        n_layer=draw(st.sampled_from([2, 1, 3])),
        d_model=d_model,
        n_head=n_head,
        d_head=d_head,
        d_inner=draw(st.integers(1, 9)),
        d_embed=None if d_embed is None else narrowest - 1 + d_embed,
        attention=attention,
        pre_lnorm=(pre_lnorm := draw(st.booleans())),
        final_norm=pre_lnorm and draw(st.booleans()),
        activation=draw(st.sampled_from(["relu", "gelu"])),
        attention_bias=draw(st.booleans()),
        gate=draw(st.sampled_from([None, "gru"])),
        untie_r=attention == "relative" and draw(st.booleans()),
        same_length=draw(st.sampled_from(windows)),
        clamp_len=draw(st.sampled_from([2, -1, 1, 5])),
        n_positions=draw(st.sampled_from([5, 9] if memory_free else [6, 1, 3, 12])),
        cutoffs=cutoffs,
        div_val=div_val,
        tie_weight=draw(st.booleans()),
        tie_projs=tuple(draw(st.lists(st.booleans(), max_size=len(cutoffs) + 1))),
        proj_same_dim=draw(st.booleans()),
        norm_epsilon=draw(st.sampled_from([1e-5, 0.1])),
    )
    return Case(cfg, seg_len, mem_len, draw(st.integers(0, 1000)))


def holds_its_promises(case):
    """Checks every promise of this file for one case."""
    run = Runner(case)
    equals_the_formulas(run)
    gives_probabilities(run)
    sees_no_future(run)
    keeps_rows_apart(run)
    starts_episodes_anew(run)
    if not case.cfg.memory_free:
        starts_streams_anew(run)
        gives_the_same_from_a_cache(run)
        gives_the_same_however_cut(run)


@pytest.mark.slow
@settings(max_examples=3, phases=[hypothesis.Phase.generate])  # shrinking would take minutes
@hypothesis.given(st.sampled_from(list(tiny.ATTENTION)).flatmap(cases))
def test_a_few_random_models_keep_every_promise(case):
    holds_its_promises(case)


@pytest.mark.slow
@pytest.mark.parametrize("attention", tiny.ATTENTION)
def test_many_random_models_keep_every_promise(attention):
    settings(max_examples=30)(hypothesis.given(cases(attention))(holds_its_promises))()


class Runner:
    """The programs of a case, and random inputs for them."""

    def __init__(self, case):
        self.case, self.cfg, self.seg_len = case, case.cfg, case.seg_len
        self.variables = tiny.variables(self.cfg, case.seed)
        self.rng = np.random.default_rng(case.seed)
        self.nll = tiny.quick(tiny.apply(self.cfg, "nll"))
        filled = (0, case.mem_len // 2, case.mem_len)
        self.mems = tiny.memory(self.cfg, filled, case.mem_len, case.seed)
        self.empty = self.mems.replace(filled=np.zeros(ROWS, np.int32))

    def __call__(self, tokens, targets, mems, reset=None, lengths=None):
        """Returns the losses, as a NumPy array, and new memory."""
        if reset is None:
            reset = np.zeros(tokens.shape, bool)
        if lengths is None:
            lengths = np.full(ROWS, self.seg_len, np.int32)
        extra = {"reset": reset, "lengths": lengths}
        nll, mems = self.nll(self.variables, tokens, targets, mems, **extra)
        return np.asarray(nll), mems

    def text(self):
        """Random tokens and targets, [B,T] each."""
        return self.rng.integers(0, 10, (2, ROWS, self.seg_len)).astype(np.int32)

    def lengths(self):
        """Random lengths from 0 to T, int32 [B]."""
        return self.rng.integers(0, self.seg_len + 1, ROWS).astype(np.int32)

    def resets(self):
        """Random resets, bool [B,T], which begin episodes of a few tokens."""
        return self.rng.random((ROWS, self.seg_len)) < 0.3


def assert_same_memory(got, row, want, want_row):
    assert int(got.filled[row]) == int(want.filled[want_row])
    np.testing.assert_allclose(
        tiny.real_states(got, row), tiny.real_states(want, want_row), atol=CLOSE
    )


def equals_the_formulas(run):
    """Two segments with resets and lengths give what helpers/reference.py gives."""
    cfg, mems = run.cfg, run.mems
    params = reference.float64(run.variables["params"])
    past = [[list(layer) for layer in tiny.real_states(mems, b)] for b in range(ROWS)]
    for _ in range(2):
        (tokens, targets), resets, lengths = run.text(), run.resets(), run.lengths()
        nll, mems = run(tokens, targets, mems, resets, lengths)
        for b, n in enumerate(lengths):
            starts = list(np.flatnonzero(resets[b, :n]))
            want, past[b] = reference.nll(
                params, cfg, tokens[b, :n], targets[b, :n], past[b], mems.mem_len, starts
            )
            np.testing.assert_allclose(nll[b, :n], want, atol=CLOSE)
            states = np.array(past[b]).reshape(cfg.n_layer, -1, cfg.d_model)
            np.testing.assert_allclose(tiny.real_states(mems, b), states, atol=CLOSE)


def gives_probabilities(run):
    """The probabilities of all words sum to one at every position."""
    tokens, _ = run.text()
    words = [np.full_like(tokens, word) for word in range(10)]
    total = sum(np.exp(-run(tokens, word, run.mems)[0]) for word in words)
    np.testing.assert_allclose(total, 1, atol=1e-5)


def sees_no_future(run):
    """Later tokens change no bit of earlier losses."""
    tokens, targets = run.text()
    others, _ = run.text()
    for first in range(1, run.seg_len):
        changed = np.where(np.arange(run.seg_len) < first, tokens, others)
        before, after = (run(x, targets, run.mems)[0] for x in (tokens, changed))
        np.testing.assert_array_equal(before[:, :first], after[:, :first])


def keeps_rows_apart(run):
    """The other rows, their memory, episodes and lengths change no bit of row 1's states.

    Without clusters, they change no bit of its losses either. With clusters, the other rows decide
    at which row of a cluster's matrix product a token is, and rounding can differ between rows.
    """
    tokens, targets = run.text()
    nll, mems = run(tokens, targets, run.mems)
    others, other_targets = run.text()
    others[1], other_targets[1] = tokens[1], targets[1]
    hidden = -run.mems.hidden
    hidden[:, 1] = run.mems.hidden[:, 1]
    filled = run.mems.filled[::-1].copy()
    reset, lengths = run.resets(), run.lengths()
    reset[1], lengths[1] = False, run.seg_len
    other_mems = run.mems.replace(hidden=hidden, filled=filled)
    nll_2, mems_2 = run(others, other_targets, other_mems, reset, lengths)
    last_bits = 1e-6 if run.cfg.cutoffs else 0  # rounding of losses below 8
    np.testing.assert_allclose(nll[1], nll_2[1], rtol=0, atol=last_bits)
    np.testing.assert_array_equal(tiny.real_states(mems, 1), tiny.real_states(mems_2, 1))


def starts_streams_anew(run):
    """Rows with a true ``reset`` [B] give the results of an empty memory."""
    tokens, targets = run.text()
    reset = np.array([True, False, True])
    nll, mems = run(tokens, targets, run.mems, reset)
    for b in range(ROWS):
        want, want_mems = run(tokens, targets, run.empty if reset[b] else run.mems)
        np.testing.assert_allclose(nll[b], want[b], atol=CLOSE)
        assert_same_memory(mems, b, want_mems, b)


def starts_episodes_anew(run):
    """A reset at a position equals two separate texts: tokens before it, and tokens from it on."""
    tokens, targets = run.text()
    for start in range(run.seg_len):
        reset = np.zeros((ROWS, run.seg_len), bool)
        reset[:, start] = True
        nll, mems = run(tokens, targets, run.mems, reset)
        without, _ = run(tokens, targets, run.mems)
        np.testing.assert_allclose(nll[:, :start], without[:, :start], atol=CLOSE)
        n = run.seg_len - start
        lengths = np.full(ROWS, n, np.int32)
        from_there = (np.roll(x, -start, axis=1) for x in (tokens, targets))
        alone, alone_mems = run(*from_there, run.empty, lengths=lengths)
        np.testing.assert_allclose(nll[:, start:], alone[:, :n], atol=CLOSE)
        for b in range(ROWS):
            assert_same_memory(mems, b, alone_mems, b)


def gives_the_same_from_a_cache(run):
    """Projected memory equals memory over three segments, with resets and lengths."""
    model, mems = txl_jax.TransformerXL(run.cfg), run.mems
    cache = model.apply(run.variables, mems, seg_len=run.seg_len, method="init_cache")
    for _ in range(3):
        (tokens, targets), resets, lengths = run.text(), run.resets(), run.lengths()
        want, mems = run(tokens, targets, mems, resets, lengths)
        got, cache = run(tokens, targets, cache, resets, lengths)
        np.testing.assert_array_equal(cache.filled, mems.filled)
        for b, n in enumerate(lengths):
            np.testing.assert_allclose(got[b, :n], want[b, :n], atol=CLOSE)


def gives_the_same_however_cut(run):
    """The cuts of a text do not matter with a window, or if the whole text fits into memory."""
    if not run.cfg.same_length and run.case.mem_len < run.seg_len:
        return
    tokens, targets = run.text()
    want, want_mems = run(tokens, targets, run.empty)
    first, second = run.lengths(), run.lengths()
    second = np.minimum(second, run.seg_len - first)
    mems, done = run.empty, np.zeros(ROWS, np.int32)
    for lengths in (first, second, run.seg_len - first - second):
        at = (done[:, None] + np.arange(run.seg_len)) % run.seg_len  # each row from its own place
        piece = (np.take_along_axis(x, at, axis=1) for x in (tokens, targets))
        nll, mems = run(*piece, mems, lengths=lengths)
        for b, n in enumerate(lengths):
            np.testing.assert_allclose(nll[b, :n], want[b, done[b] : done[b] + n], atol=CLOSE)
        done = done + lengths
    for b in range(ROWS):
        assert_same_memory(mems, b, want_mems, b)
