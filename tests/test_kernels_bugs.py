"""The tests of the Triton kernels see mistakes: each of these is made in a copy, and is found.

A mistake changes one line of ``triton_tiles.py``. ``launch/interpret.sh -m slow -s`` also prints
the tests that find each one.
"""

import importlib.util
import pathlib
import sys
from typing import NamedTuple

import numpy as np
import pytest
import test_kernels_triton as suite
from test_kernels_triton import interpreter  # noqa: F401  (a fixture)

from txl_jax.model import kernels
from txl_jax.model.kernels import reference, triton


class Bug(NamedTuple):
    """In the function ``where``, the text ``right`` becomes ``wrong``; the test ``check`` fails."""

    where: str
    right: str
    wrong: str
    check: str


PLAIN, EXACT, FULL = "causal with memory", "one tile, exactly", "tiles that memory and segment fill"
LARGER, ONE, ALONE = "larger tiles", "one query", "one query, no memory"
LONGER, PARTLY = "window of more than a tile", "memory empty or partly so"
QUERIES, KEYS, DISTANCES = (f"gradient_of_{x}" for x in ("queries", "keys", "distances"))
SHARED, ALL, LAST = "rows shared out", "everything", "dot(tl.where(of_far(0"
DELTA, SKEWED = "(dweights - line_delta)", " + skewed(far, near, nothing(m, reach), 1, SIZE)"
BUGS = {
    "rows: one too many": Bug("load_rows", "row < limit", "row <= limit", PLAIN),
    "lines: one too few": Bug("load_along", "at < limit", "at < limit - 1", LARGER),
    "rotated by one less": Bug("skewed", "place - row - 1", "place - row", EXACT),
    "rotated the other way": Bug("skewed", "place - row - 1", "place + row", FULL),
    "rotated back by one less": Bug("unskewed", "place + row + 1", "place + row", ONE),
    "mixed one place later": Bug("of_far", ">= SIZE - 1", ">= SIZE", "no memory"),
    "sees the next key": Bug("seen", "distance >= 0", "distance >= -1", PLAIN),
    "sees itself no more": Bug("seen", "distance >= 0", "distance >= 1", ALONE),
    "window of one less": Bug("seen", "distance <= reach", "distance < reach", "window"),
    "sees an empty slot": Bug("seen", "key >= empty", "key >= empty - 1", PARTLY),
    "sees earlier episodes": Bug("seen", "of_query == of_key", "of_query >= of_key", "episodes"),
    "dropout without scale": Bug("dropped", "x * SCALE", "x", "dropout"),
    "half of the seed": Bug("dropped", "seed + 1", "seed", "dropout"),
    "dropout of every row": Bug("dropped", "HEAD_STRIDE + b", "HEAD_STRIDE", ALL),
    "wrong block": Bug("product_of_either", "start - SIZE", "start", FULL),
    "stride of r": Bug("forward", "r += head * K * H", "r += head * T * H", PLAIN),
    "keys of another head": Bug("forward", "k += row * K * H", "k += b * K * H", "no biases"),
    "near block not carried": Bug("forward", "near = far", "near = near", PLAIN),
    "sum not rescaled": Bug("forward", "total * before", "total", LONGER),
    "values not rescaled": Bug("forward", "gathered * before[:, None]", "gathered", "no biases"),
    "softmax to base 2": Bug("forward", "scores * LOG2E", "scores", "half precision"),
    "lse without its sum": Bug("forward", "largest + tl.log2(total)", "largest", ONE),
    "a tile too few": Bug("forward", "first - reach,", "first - reach + SIZE,", "window of TF"),
    "no delta, queries": Bug(QUERIES, DELTA, "dweights", ALONE),
    "no sum over tiles": Bug(QUERIES, "sum_qu += dot", "sum_qu = dot", LONGER),
    "sign of the last block": Bug(QUERIES, f"+= {LAST}", f"-= {LAST}", EXACT),
    "no positions": Bug(QUERIES, SKEWED, "", LARGER),
    "no delta, keys": Bug(KEYS, DELTA, "dweights", FULL),
    "a group too few": Bug(KEYS, "group + 1 + tl.cdiv", "group + tl.cdiv", LONGER),
    "no dropout for values": Bug(KEYS, "weights = dropped(weights,", "dropped(weights,", ALL),
    "half-empty tile left out": Bug(KEYS, "start + SIZE <= empty", "start <= empty", PARTLY),
    "no delta, distances": Bug(DISTANCES, DELTA, "dweights", SHARED),
    "only the first row": Bug(DISTANCES, "part * each, each)", "part * each, 1)", ALL),
    "one part for all": Bug(DISTANCES, "(part * tl.num_programs(1) + head)", "head", SHARED),
    "starts a group late": Bug(DISTANCES, "* SIZE - M, 0)", "* SIZE - M, 0) + SIZE", "no memory"),
}  # fmt: skip
SHARED_OUT = {"rows": 5, "filled": (0, 27, 3, 27, 20), "episodes": True, "programs": 20}
CHECKS = {
    **{name: (form, "float32") for name, form in suite.FORMS.items()},
    "half precision": ({"t": 33, "m": 30, "h": 64, "rate": 0.2}, "float16"),
    "rows shared out": (SHARED_OUT, "float32"),
    "no biases": (None, "float32"),
}
"""What test_kernels_triton.py compares: a form and its dtype, by the name of the test."""


def changed(bug: Bug) -> str:
    """The source of the kernels with a bug."""
    source = (pathlib.Path(triton.__file__).parent / "triton_tiles.py").read_text(encoding="utf-8")
    before, _, rest = source.partition(f"def {bug.where}(")
    own, end, after = rest.partition("@triton.jit")
    assert own.count(bug.right) == 1, bug
    return f"{before}def {bug.where}({own.replace(bug.right, bug.wrong)}{end}{after}"


def interpreted(path, check):
    """What the kernels of a file give; called in the interpreter's process."""
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
    """As the test of test_kernels_triton.py does it."""
    form, dtype = CHECKS[check]
    if form is not None:
        return suite.assert_near(found, suite.expected(form, dtype), suite.TOLERANCE[dtype])
    out = reference.attend(suite.without_biases())
    return np.testing.assert_allclose(found, out, atol=3e-6 * np.abs(out).max())


def test_each_bug_changes_one_place_and_each_test_has_a_bug_to_find():
    for bug in BUGS.values():
        assert changed(bug)
    assert {bug.check for bug in BUGS.values()} == CHECKS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_found(interpreter, tmp_path, name):  # noqa: F811
    bug, path = BUGS[name], tmp_path / "wrong_kernels.py"
    path.write_text(changed(bug))
    found = interpreter.submit(interpreted, path, bug.check).result()
    with pytest.raises(AssertionError) as said:
        compare(bug.check, found)
    print(f"{name}: found by {bug.check!r}: {str(said.value).strip().splitlines()[0]}")


@pytest.mark.slow
def test_the_same_comparison_passes_where_nothing_is_wrong(interpreter, tmp_path):  # noqa: F811
    path = tmp_path / "kernels.py"
    path.write_text(changed(Bug("dot", "return", "return", PLAIN)))
    for check in ("no biases", "half precision", PLAIN):
        compare(check, interpreter.submit(interpreted, path, check).result())
