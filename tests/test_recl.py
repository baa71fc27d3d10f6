"""RECL: equal to a hand-worked example and to the definition written out (paper, appendix C)."""

import math

import numpy as np
import pytest

from txl_jax.evaluation.recl import Gains, Losses, LossesError, gains


def losses(name="ours", contexts=(1, 2), nll=((1.0, 2.0), (0.5, 1.5))):
    return Losses(name, contexts, np.array(nll, np.float32))


def test_a_hand_worked_example():
    """Two models, two tokens, r = 0.5: one hard token, the one of the larger baseline."""
    ours = losses("ours", (1, 2), [[1.0, 3.0], [0.2, 2.0]])
    theirs = losses("theirs", (1, 2), [[2.0, 2.5], [1.0, 2.4]])
    # c = 1: baseline (1.0, 2.5), hard: the second, f(1,1) = 2.5
    #        ours f(1,2) = min(2.5, 2.0), theirs f(1,2) = min(2.5, 2.4)
    # c = 2: baseline (0.2, 2.0), hard: the second, f(2,2) = 2.0; back to 1: ours 3.0, theirs 2.5
    of_ours, of_theirs = gains([ours, theirs], r=0.5)
    step = math.exp(2.5) - math.exp(2.0)
    np.testing.assert_allclose(of_ours.absolute, np.array([[0, step], [0, 0]]), atol=1e-6)
    np.testing.assert_allclose(of_ours.relative[0, 1], step / math.exp(2.5), rtol=1e-6)
    np.testing.assert_allclose(
        of_theirs.absolute, np.array([[0, math.exp(2.5) - math.exp(2.4)], [0, 0]]), atol=1e-5
    )
    assert of_ours.recl() == 2
    assert of_theirs.recl(threshold=0.1) == 1  # a gain of 9.5%


def written_out(group, r, c, c_new, i):
    """The relative gain of model i, token by token."""
    n = len(group[0].nll[0])
    baseline = [min(float(m.nll[c][t]) for m in group) for t in range(n)]
    hard = sorted(range(n), key=lambda t: -baseline[t])[: round(r * n)]
    f = lambda at: sum(min(baseline[t], float(group[i].nll[at][t])) for t in hard) / len(hard)
    return (math.exp(f(c)) - math.exp(f(c_new))) / math.exp(f(c))


@pytest.mark.parametrize("r", [0.1, 0.5, 1.0])
def test_gains_are_the_definition_written_out(r):
    rng = np.random.default_rng(0)
    contexts = (100, 200, 300, 400)
    group = [Losses(f"m{i}", contexts, rng.gamma(2.0, 1.0, (4, 50))) for i in range(3)]
    for i, found in enumerate(gains(group, r)):
        for c in range(4):
            for c_new in range(4):
                want = written_out(group, r, c, c_new, i)
                assert found.relative[c, c_new] == pytest.approx(want, abs=1e-9)
        floor = found.absolute[0, 1] / found.relative[0, 1]
        np.testing.assert_allclose(found.absolute[0], found.relative[0] * floor)


def test_the_length_is_where_the_next_gain_first_falls_short():
    relative = np.zeros((5, 5))
    relative[np.arange(4), np.arange(1, 5)] = [0.05, 0.01, 0.0099, 0.5]
    found = Gains("m", (100, 200, 300, 400, 500), relative, relative)
    assert found.recl() == 300  # 1% is enough, less is not, and a later gain does not count
    assert found.recl(threshold=0.02) == 200
    assert found.recl(threshold=0.06) == 100
    assert found.recl(threshold=0.0) == 500


def test_a_weak_model_does_not_gain_where_the_group_is_good_already():
    """Its own loss falls with context, but never below what the best model had without."""
    strong = losses("strong", (1, 2), [[1.0, 1.0], [1.0, 1.0]])
    weak = losses("weak", (1, 2), [[5.0, 5.0], [2.0, 2.0]])
    alone = gains([weak], r=1.0)[0]
    among = gains([strong, weak], r=1.0)[1]
    assert alone.recl() == 2
    assert among.recl() == 1
    assert among.relative[0, 1] == 0


def test_losses_are_kept_in_a_file_without_pickle(tmp_path):
    kept = losses()
    kept.save(tmp_path / "ours.npz")
    again = Losses.load(tmp_path / "ours.npz")
    assert (again.name, again.contexts) == ("ours", (1, 2))
    np.testing.assert_array_equal(again.nll, kept.nll)


@pytest.mark.parametrize("content", [b"", b"no zip", None])
def test_a_file_that_is_no_losses_is_named(tmp_path, content):
    path = tmp_path / "other.npz"
    if content is None:
        np.savez(path, contexts=np.array([1, 2]))
    else:
        path.write_bytes(content)
    with pytest.raises(LossesError, match=r"other\.npz: must be an \.npz of name, contexts"):
        Losses.load(path)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"contexts": (2, 1)}, "rising"),
        ({"contexts": (1,), "nll": [[1.0]]}, "two or more"),
        ({"nll": [[1.0, 2.0]]}, r"must be \[2,N\]"),
        ({"nll": [[1.0, math.nan], [1.0, 1.0]]}, "not a finite"),
    ],
)
def test_losses_that_cannot_be_are_refused(wrong, words):
    with pytest.raises(LossesError, match=words):
        losses(**wrong)


def test_a_group_that_does_not_compare_is_refused():
    other = losses("other", (1, 3))
    with pytest.raises(LossesError, match="same contexts"):
        gains([losses(), other], 0.5)
    with pytest.raises(LossesError, match="one name"):
        gains([losses(), losses()], 0.5)
    with pytest.raises(LossesError, match="above 0"):
        gains([losses()], 0.0)
    with pytest.raises(LossesError, match="at least one"):
        gains([], 0.5)
