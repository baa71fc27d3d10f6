"""``relative_attention`` refuses wrong arguments and names them; padding has no effect."""

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import txl_jax
from txl_jax.messages import UserError
from txl_jax.model.kernels import reference
from txl_jax.parallel.mesh import AXES

B, T, N, H = 2, 5, 3, 4


def drawn(b=B, t=T, n=N, h=H, m=0, causal=True) -> dict[str, Any]:
    """Random arrays for the function's arguments, by name."""
    sides = {"q": (b, t), "k": (b, m + t), "v": (b, m + t), "u": (), "v_bias": ()}
    sides["r"] = (m + t if causal else max(0, m + t + t - 1),)
    keys = jax.random.split(jax.random.key(0), len(sides))
    draw = lambda key, sides: jax.random.normal(key, (*sides, n, h))
    return {name: draw(key, sides[name]) for key, name in zip(keys, sides, strict=True)}


def refused(said, **change):
    """Asserts that a call with changed arguments raises a UserError that matches ``said``."""
    with pytest.raises(UserError, match=said):
        txl_jax.relative_attention(**{**drawn(), **change})


def devices(sizes, names=AXES, kind=AxisType.Auto):
    """A mesh of some of the CPU devices."""
    used = jax.devices()[: int(np.prod(sizes))]
    return jax.make_mesh(sizes, names, (kind,) * len(sizes), devices=used)


# --------------------------------------------------------------------------------------
# Arrays


@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64", "float8_e4m3fn"])
@pytest.mark.parametrize("name", ["q", "k", "v", "r", "u", "v_bias"])
def test_an_array_of_another_dtype_than_the_four_floats_is_refused(name, dtype):
    said = rf"{name} has the dtype {dtype}.*float32, bfloat16.*{name}\.astype\(jnp\.float32\)"
    refused(said, **{name: drawn()[name].astype(dtype)})


@pytest.mark.parametrize("given", [None, "text", [[1.0], [1.0, 2.0]]])
def test_what_is_no_array_is_refused(given):
    refused("q must be an array of numbers", q=given)


def test_arrays_of_numpy_give_the_same_result():
    x = drawn()
    of_numpy: dict[str, Any] = {name: np.asarray(a) for name, a in x.items()}
    np.testing.assert_array_equal(
        txl_jax.relative_attention(**of_numpy), txl_jax.relative_attention(**x)
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"q": jnp.zeros((T, N, H))}, r"q has the shape \(5, 3, 4\).*\[B,T,N,H\]"),
        ({"k": jnp.zeros(T)}, r"k has the shape \(5,\).*\[B,K,N,H\]"),
        (drawn(n=0), r"q has .*N, H > 0"),
        (drawn(h=0), r"q has .*N, H > 0"),
    ],
)
def test_shapes_without_four_axes_or_without_heads_are_refused(change, said):
    refused(said, **change)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("sides", [{"b": 0}, {"t": 0, "m": 3}, {"t": 0}, {"b": 0, "t": 0}], ids=str)
def test_no_rows_or_no_queries_give_an_empty_result(sides, causal):
    x = drawn(**sides, causal=causal)
    run = lambda x: txl_jax.relative_attention(**x, causal=causal, window=2)
    assert run(x).shape == x["q"].shape
    gradient = jax.grad(lambda x: run(x).sum())(x)
    assert jax.tree.map(jnp.shape, gradient) == jax.tree.map(jnp.shape, x)


# --------------------------------------------------------------------------------------
# Lengths


@pytest.mark.parametrize(
    "lengths",
    [5, [3], [[2], [1]], np.ones((B, T), bool), [2.0, 3.0], [True, False], ["a", "b"], [[1], []]],
    ids=str,
)
def test_lengths_of_another_shape_or_dtype_are_refused(lengths):
    refused(r"relative_attention: ", lengths=lengths)


@pytest.mark.parametrize("lengths", [jnp.ones(1, int), jnp.ones(B), jnp.ones((B, T), bool)])
def test_unknown_lengths_of_another_shape_or_dtype_are_refused(lengths):
    with pytest.raises(UserError, match=r"lengths must be integers \[2\], not"):
        jax.jit(lambda lengths: txl_jax.relative_attention(**drawn(), lengths=lengths))(lengths)


@pytest.mark.parametrize("kind", [list, np.array, jnp.array])
@pytest.mark.parametrize("lengths", [(2, T + 1), (-1, 2)])
def test_known_lengths_outside_of_the_segment_are_refused(lengths, kind):
    refused(r"lengths\[.\] = (6|-1): must be from 0 to T = 5", lengths=kind(lengths))


def test_known_lengths_beyond_int32_are_refused():
    refused(r"lengths\[1\] = 4294967297", lengths=np.array([2, 2**32 + 1]))


@pytest.mark.parametrize("causal", [True, False])
def test_unknown_lengths_outside_of_the_segment_are_clamped(causal):
    x = drawn(causal=causal)
    run = jax.jit(lambda n: txl_jax.relative_attention(**x, causal=causal, lengths=n))
    np.testing.assert_array_equal(run(jnp.array([T + 4, -3])), run(jnp.array([T, 0])))


def test_lengths_may_be_a_list_of_which_some_are_unknown():
    x, of = drawn(), lambda *lengths: cast(jax.Array, list(lengths))
    run = jax.jit(lambda n: txl_jax.relative_attention(**x, lengths=of(n, 2)))
    known = txl_jax.relative_attention(**x, lengths=of(3, 2))
    np.testing.assert_allclose(run(3), known, rtol=1e-5, atol=1e-6)


def test_no_query_is_said_to_see_a_key_past_the_last(monkeypatch):
    """The mask's interval ends at the last key, because fused kernels read all of its keys."""
    plain, ends = reference.attend, []

    def attend(x):
        ends.append(x.mask.interval()[1].max())
        return plain(x)

    monkeypatch.setattr(reference, "attend", attend)
    x = drawn(causal=False, m=2)

    @jax.jit
    def last_key(lengths):
        txl_jax.relative_attention(**x, causal=False, lengths=lengths)
        return ends.pop()

    assert last_key(jnp.array([T + 4, 1])) == 2 + T - 1


def test_lengths_may_be_of_a_dtype_that_cannot_hold_the_segment():
    run = functools.partial(txl_jax.relative_attention, **drawn(1, 130, 1, 1, causal=False))
    found = run(causal=False, lengths=jnp.array([100], jnp.int8))
    np.testing.assert_array_equal(found, run(causal=False, lengths=jnp.array([100])))


@pytest.mark.parametrize(
    ("names", "bad"), [("q", np.nan), ("k", np.nan), ("v", np.nan), ("qkv", np.inf)]
)
@pytest.mark.parametrize("causal", [True, False])
def test_nan_in_the_padding_changes_no_output_and_no_gradient(causal, names, bad):
    x, lengths, m = drawn(causal=causal, m=2), jnp.array([2, 4]), 2
    direction = jax.random.normal(jax.random.key(1), (B, T, N, H))

    def run(x):
        out = txl_jax.relative_attention(**x, causal=causal, lengths=lengths)
        return jnp.sum(out * direction), out

    spoilt = dict(x)
    for name in names:
        place = jnp.arange(x[name].shape[1]) - (m if name in "kv" else 0)
        padded = (place >= lengths[:, None])[:, :, None, None]
        spoilt[name] = jnp.where(padded, bad, x[name])
    both = jax.jit(jax.value_and_grad(run, has_aux=True))
    jax.tree.map(np.testing.assert_array_equal, both(spoilt), both(x))
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(both(x)))


# --------------------------------------------------------------------------------------
# Numbers and names


@pytest.mark.parametrize("rate", [1.0, -0.1, float("nan"), 1.5, float("inf"), "often", None])
def test_a_dropout_rate_that_is_no_probability_below_1_is_refused(rate):
    said = r"dropout_rate = .*from 0 to 0\.999999"
    refused(said, dropout_rate=rate, dropout_key=jax.random.key(0))


@pytest.mark.parametrize("name", ["dropout_rate", "window"])
def test_a_number_that_must_be_known_is_refused_if_it_is_traced(name):
    key = jax.random.key(0)
    run = lambda n: txl_jax.relative_attention(**drawn(), dropout_key=key, **{name: n})
    with pytest.raises(UserError, match=rf"{name} = .*known before jax\.jit"):
        jax.jit(run)(0)


@pytest.mark.parametrize("kind", [np.float32, jnp.float32])
def test_a_dropout_rate_may_be_a_number_of_numpy_or_jax(kind):
    run = functools.partial(txl_jax.relative_attention, **drawn(), dropout_key=jax.random.key(0))
    np.testing.assert_array_equal(run(dropout_rate=kind(0.25)), run(dropout_rate=0.25))


@pytest.mark.parametrize("window", [1.5, True, "3", -1, jnp.ones(2, int)], ids=str)
def test_a_window_that_is_no_count_is_refused(window):
    refused("window = .*at least 0", window=window)


@pytest.mark.parametrize("kind", [np.int64, jnp.int32])
def test_a_window_may_be_a_number_of_numpy_or_jax(kind):
    run = functools.partial(txl_jax.relative_attention, **drawn())
    np.testing.assert_array_equal(run(window=kind(2)), run(window=2))


@pytest.mark.parametrize("scale", [1j, True, "half", jnp.ones(H), jnp.ones((N, 1, 1, 1))], ids=str)
def test_a_scale_that_is_not_one_real_number_is_refused(scale):
    refused("scale (has|must)", scale=scale)


@pytest.mark.parametrize("causal", [jnp.ones((2, 2), bool), "yes", None], ids=str)
def test_causal_is_true_or_false(causal):
    refused("causal = .*True or False", causal=causal)


@pytest.mark.parametrize("name", ["foo", "", None])
def test_an_unknown_implementation_is_refused_and_the_known_ones_are_named(name):
    refused(r"implementation = .*auto, reference, xla, triton", implementation=name)


# --------------------------------------------------------------------------------------
# Devices

MESHES: dict[str, tuple[dict[str, Any], str]] = {
    "other names": ({"mesh": ((2,), ("d",))}, r"'d'.*needs data, fsdp and tensor"),
    "one device of another name": ({"mesh": ((1,), ("d",))}, "needs data, fsdp and tensor"),
    "explicit": ({"mesh": ((2, 1, 1), AXES, AxisType.Explicit)}, "Explicit.*of the type Auto"),
    "heads": ({"mesh": ((1, 1, 2),)}, "tensor = 2.*heads, N = 3"),
    "rows": ({"mesh": ((2, 2, 1),), "implementation": "triton"}, "data x fsdp = 4.*B = 2"),
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("case", MESHES)
def test_a_mesh_that_cannot_split_the_arrays_is_refused(case, causal):
    change, said = MESHES[case]
    change = {**change, "mesh": devices(*change["mesh"])}
    refused(said, **drawn(causal=causal), causal=causal, **change)


@pytest.mark.parametrize("mesh", [jax.sharding.AbstractMesh((1, 1, 1), AXES), "cpu"], ids=str)
def test_what_is_no_mesh_of_devices_is_refused(mesh):
    refused(r"mesh = .*must be a jax\.sharding\.Mesh", mesh=mesh)


def test_a_mesh_inside_of_shard_map_is_refused():
    mesh = devices((2, 1, 1))
    own = lambda x: txl_jax.relative_attention(**x, mesh=mesh)
    specs: Any = {"mesh": mesh, "in_specs": P(), "out_specs": P(), "check_vma": False}
    with pytest.raises(UserError, match=r"None inside of jax\.shard_map"):
        jax.shard_map(own, **specs)(drawn())


@pytest.mark.parametrize("sizes", [(2, 1, 1), (1, 1, 3), (3, 1, 1)], ids=str)
def test_a_mesh_that_splits_rows_or_heads_gives_the_same_result(sizes):
    run = jax.jit(txl_jax.relative_attention, static_argnames="mesh")
    np.testing.assert_allclose(
        run(**drawn(), mesh=devices(sizes)), run(**drawn()), rtol=0, atol=1e-6
    )
