"""The tests of the Triton kernels find deliberate bugs in copies of the kernels' source.

Each bug changes one line of ``triton_tiles.py``. ``launch/interpret.sh -m slow -s`` also prints
the test that finds each bug.
"""

import importlib.util
import pathlib
import sys
from typing import NamedTuple

import interpreted_kernels as suite
import numpy as np
import pytest

from txl_jax.model import kernels
from txl_jax.model.kernels import reference, triton


class Bug(NamedTuple):
    """In the function ``where``, the text ``right`` becomes ``wrong``; the test ``check`` fails."""

    where: str
    right: str
    wrong: str
    check: str


PLAIN, FULL, OTHER, LONG = "causal with memory", "tiles that are full", "other tiles", "no memory"
WINDOW, TF, ONE, ALONE = "window", "window of TF", "one query", "one query, no memory"
PARTLY, ALL, SECOND = "memory empty or partly so", "everything", "every second query"
WHOLE, WHOLE_WINDOW = "memory of whole tiles", "memory of whole tiles, window"
BOTH, BOTH_ALL = "both directions", "both directions, window and memory"
LONGER = "window of more than a tile"
RING, RING_64 = "memory in a ring", "memory in a ring, heads of 64"
SCORES, QUERIES = "position_scores", "gradient_of_queries"
KEYS, DISTANCES = "gradient_of_keys", "gradient_of_distances"
BUGS = {
    "last row again": Bug("put_rows", "row < limit", "row < limit - 1", ALONE),
    "rows of another head": Bug("rows_of", "* STRIDE)", "* H)", FULL),
    "no bias": Bug("queries_of", "tile + bias", "tile", PLAIN),
    "bias of another head": Bug("forward", "u + head * H + ", "u + ", OTHER),
    "classes in the wrong place":
        Bug("class_of", "number // EVERY) * SX", "number // EVERY)", SECOND),
    "half of the seed": Bug("line_of", "seed + 1", "seed", "dropout"),
    "dropout of every row": Bug("line_of", "HEAD_STRIDE + b", "HEAD_STRIDE", ALL),
    "dropout of other tiles": Bug("kept", "tl.full((), start, tl.uint32)", "0", "dropout"),
    "neighbours dropped alike":
        Bug("kept", "tl.where((column & 1) == 0, even, odd)", "even", OTHER),
    "eighth key dropped alike": Bug("kept", "ODD, ODD_8", "ODD, ODD", "half precision"),
    "dropout the other way": Bug("kept", " >= tl.full", " < tl.full", "dropout"),
    "biased by u": Bug(SCORES, "tl.load(v +", "tl.load(r +", "every eighth query"),
    "shifted by one more": Bug(SCORES, "T - 1 - p +", "T - p +", SECOND),
    "shifted by x":
        Bug(SCORES, "(x + y)[:, None] * EVERY", "x[:, None] + y * EVERY", "heads of 64"),
    "positions of another head": Bug(SCORES, "rows_of(r + head * H", "rows_of(r", "no biases"),
    "a block of positions too few": Bug(SCORES, "tl.max(high) + 1", "tl.max(high) - 7", FULL),
    "positions too late": Bug(SCORES, "range(tl.min(low)", "range(tl.min(low) + 1", TF),
    "values of another row": Bug("forward", "(b * (K - M) - M)", "(0 * (K - M) - M)", PLAIN),
    "memory of another row": Bug("forward", "= b * M * STRIDE", "= 0 * M * STRIDE", WHOLE),
    "values of memory for its keys": Bug("forward", "keys_of(k_mem", "keys_of(val_mem", WHOLE),
    "keys of memory for its values":
        Bug("forward", "keys_of(val_mem", "keys_of(k_mem", WHOLE_WINDOW),
    "keys of a neighbour": Bug("keys_of", "K, step, H", "K, H, H", FULL),
    "memory for the segment": Bug("keys_of", "M, memory, own)", "K, memory, own)", WHOLE),
    "ring of another head": Bug("forward", "head * B + b", "b", RING),
    "ring not turned": Bug("forward", "tl.load(slot)", "0", RING),
    "ring turned the other way": Bug("keys_of", "key + turn, key", "key - turn, key", RING),
    "segment turned like a ring": Bug("keys_of", "slot, key)", "slot, slot)", RING_64),
    "sees the next key": Bug("forward", "<= high)", "<= high + 1)", BOTH),
    "sees one key less": Bug("forward", "key[None, :] >= low", "key[None, :] > low", WINDOW),
    "sum not rescaled": Bug("forward", "total * before", "total", "window and long segment"),
    "values not rescaled": Bug("forward", "gathered * before[:, None]", "gathered", LONG),
    "softmax to base 2": Bug("forward", "s * LOG2E - larger", "s - larger", ONE),
    "dropout without scale": Bug("forward", "total * keeps", "total", "dropout"),
    "lse without its sum": Bug("forward", "largest + tl.log2(total)", "largest", ONE),
    "no mask at the old end":
        Bug("forward", "tl.cdiv(tl.load(oldest + last), SK)", "begin", ALL),
    "no mask at the diagonal":
        Bug("forward", "(tl.load(newest + first) + 1) // SK", "end", FULL),
    "starts a tile late": Bug("forward", "tl.load(oldest + first) // SK,", "1,", ALL),
    "ends a tile early":
        Bug("forward", "(newest + last) // SK + 1", "(newest + last) // SK", ALONE),
    "no delta": Bug(KEYS, " - tl.load(delta + query)[:, None]", "", "episodes"),
    "gradient sees the next key": Bug(KEYS, "<= high)", "<= high + 1)", BOTH_ALL),
    "gradient sees an empty slot": Bug(KEYS, "(key[None, :] >= low) & ", "", PARTLY),
    "weights beyond T": Bug(KEYS, "other=1e30", "other=0.0", "long episodes"),
    "no dropout for values": Bug(KEYS, "dropped = tl.where(keep, weights, 0.0)", "", ALL),
    "no dropout for the weights":
        Bug(KEYS, "dweights = tl.where(keep, dweights, 0.0)", "", "dropout"),
    "only the last part of queries":
        Bug(KEYS, "in tl.static_range(3)", "in tl.static_range(2)", OTHER),
    "gradient of all keys summed": Bug(KEYS, "tile_q, sum_k", "tile_q, sum_val", "heads of 64"),
    "gradient of another row's memory":
        Bug(KEYS, "tl.where(old, b * M,", "tl.where(old, 0 * b,", WHOLE),
    "gradients of memory exchanged": Bug(KEYS, "(old, dval_mem,", "(old, dk_mem,", WHOLE_WINDOW),
    "gradient with other keys of memory": Bug(KEYS, "(old, k_mem,", "(old, val_mem,", WHOLE),
    "tiles of a neighbour":
        Bug("written", "query // SQ * SQ", "query", SECOND),
    "written one tile less": Bug("written", "// SK + 1) * SK", "// SK) * SK", LONG),
    "shifted back by one more": Bug(QUERIES, "T - 1 - p +", "T - p +", PLAIN),
    "d(q+v) left out": Bug(QUERIES, "sum_u + sum_v", "sum_u", PLAIN),
    "d(q+u) of another row's memory": Bug(QUERIES, "k_mem + b * M", "k_mem + 0 * M", WHOLE),
    "du and dv exchanged": Bug(QUERIES, "tl.sum(sum_u, 0)", "tl.sum(sum_v, 0)", ALL),
    "d(q+u) starts late": Bug(QUERIES, "tl.min(low) // SD", "tl.min(low) // SD + 1", TF),
    "d(q+v) starts late": Bug(QUERIES, "y0 = tl.min(", "y0 = 1 + tl.min(", SECOND),
    "parts of du overwritten": Bug(QUERIES, "b * parts // B + number", "number", WINDOW),
    "distances: one class": Bug(DISTANCES, "p.to(tl.int64) * R", "0 * R", "every eighth query"),
    "distances: first row": Bug(DISTANCES, "range(0, B * each)", "range(0, each)", PARTLY),
    "distances: starts late": Bug(DISTANCES, "1, 0) // SX", "1, 0) // SX + 1", LONG),
    "distances: ends early": Bug(DISTANCES, "tl.cdiv(K, EVERY) - y", "tl.cdiv(T, EVERY) - y", ONE),
    "distances: window too small": Bug(DISTANCES, "+ SD <= far", "<= far", LONGER),
    "distances: content bias": Bug(DISTANCES, "tl.load(v +", "0 * tl.load(v +", "dropout"),
}  # fmt: skip
CHECKS = {
    **{name: (form, "float32") for name, form in suite.FORMS.items()},
    "half precision": ({"t": 33, "m": 30, "h": 64, "rate": 0.2}, "float16"),
    "no biases": (None, "float32"),
}
"""The comparisons of test_kernels_triton.py: the form of attention and the dtype, by name."""


def changed(bug: Bug) -> str:
    """The source of the kernels with a bug."""
    source = (pathlib.Path(triton.__file__).parent / "triton_tiles.py").read_text(encoding="utf-8")
    before, _, rest = source.partition(f"def {bug.where}(")
    own, end, after = rest.partition("@triton.jit")
    assert own.count(bug.right) == 1, bug
    return f"{before}def {bug.where}({own.replace(bug.right, bug.wrong)}{end}{after}"


def interpreted(path, check):
    """Runs the kernels of a file and returns their results, in the interpreter's process."""
    spec = importlib.util.spec_from_file_location("wrong_kernels", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["txl_jax.model.kernels.triton_tiles"] = module
    setattr(kernels, "triton_tiles", module)  # noqa: B010
    form, dtype = CHECKS[check]
    return suite.interpreted_without_biases() if form is None else suite.interpreted(form, dtype)


def compare(check, found):
    """Compares results as the test ``check`` of test_kernels_triton.py does."""
    form, dtype = CHECKS[check]
    if form is not None:
        expected = suite.in_float64 if dtype == "float32" else suite.expected
        return suite.assert_near(found, expected(form, dtype), suite.TOLERANCE[dtype])
    out = reference.attend(suite.without_biases())
    return np.testing.assert_allclose(found, out, atol=3e-6 * np.abs(out).max())


def test_each_bug_changes_one_place_and_each_test_has_a_bug_to_find():
    for bug in BUGS.values():
        assert changed(bug)
    assert {bug.check for bug in BUGS.values()} == CHECKS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_found(interpreter, tmp_path, name):
    bug, path = BUGS[name], tmp_path / "wrong_kernels.py"
    path.write_text(changed(bug))
    found = interpreter.submit(interpreted, path, bug.check).result()
    with pytest.raises(AssertionError) as said:
        compare(bug.check, found)
    print(f"{name}: found by {bug.check!r}: {str(said.value).strip().splitlines()[0]}")


@pytest.mark.slow
def test_the_same_comparison_passes_where_nothing_is_wrong(interpreter, tmp_path):
    path = tmp_path / "kernels.py"
    path.write_text(changed(Bug("mix", "return", "return", PLAIN)))
    for check in ("no biases", "half precision", PLAIN):
        compare(check, interpreter.submit(interpreted, path, check).result())
