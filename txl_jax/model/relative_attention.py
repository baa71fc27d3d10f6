"""Attention with the paper's relative positions, as a function for models of your own."""

import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from txl_jax.config.bounds import BELOW_1
from txl_jax.messages import UserError, one_line, short_repr
from txl_jax.model.dropout import AttentionDropout
from txl_jax.model.inputs import int32_array
from txl_jax.model.kernels.choice import FUSED, IMPLEMENTATIONS, attend
from txl_jax.model.kernels.reference import AttentionInputs
from txl_jax.model.masks import AttentionMask, BothWaysMask
from txl_jax.model.positions import Positions
from txl_jax.parallel.mesh import AXES, row_devices

_FLOATS = ("float32", "bfloat16", "float16", "float64")


def relative_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    r: jax.Array,
    u: jax.Array | None = None,
    v_bias: jax.Array | None = None,
    *,
    causal: bool = True,
    window: int | None = None,
    lengths: jax.Array | None = None,
    scale: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    implementation: str = "auto",
    mesh: Mesh | None = None,
) -> jax.Array:
    """Returns attention with relative positions, [B,T,N,H] in the dtype of q; differentiable.

    Query i is at position M+i of the K keys, with M = K - T, and its score with key j is

        ( (q_i + u).k_j  +  (q_i + v_bias).r_d ) scale,        d = M + i - j

    (Dai et al. 2019, section 3.3). The output is the sum of the values v_j, weighted by the softmax
    over the keys that the query sees. For segments of 128 queries or more, a fused kernel computes
    the output on TPUs and on NVIDIA GPUs of compute capability 8.0 or higher. Otherwise XLA
    computes it. On a GPU, the kernel for bfloat16 stores the position scores,
    (q_i + v_bias).r_d scale, in float16. Position scores beyond +-65,504 overflow.

    NaN or infinity in the padding of q, k and v (see ``lengths``) changes no output and no
    gradient. In any other place, NaN or infinity can change them, even in rows of k, v and r that
    no query sees, such as rows beyond the window.

    Args:
      q: queries [B,T,N,H], not scaled: float32, bfloat16, float16 or float64. The other arrays can
        have any of these dtypes, and are converted to that of q.
      k, v: keys and values [B,K,N,H], K >= T; the first M = K - T are memory, such as the keys of
        an earlier segment.
      r: vectors of distances [R,N,H]; row c is for the distance K-1-c. R is K if ``causal``, else
        K+T-1, where the last row is for the distance -(T-1).
      u, v_bias: biases of the queries [N,H]; ``None`` means 0.
      causal: if true, queries see no later keys.
      window: the largest distance at which a query sees a key, before or after the query; ``None``
        means no limit.
      lengths: integers [B], the number of real tokens in each row; ``None`` means T. No query sees
        the other tokens, which are padding, and the outputs of the padding are 0. A number outside
        of 0 .. T is an error. Inside of ``jax.jit``, where numbers are unknown, they are clipped to
        0 .. T instead.
      scale: a number; ``None`` means 1 / sqrt(H).
      dropout_rate: the probability that a weight is dropped, from 0 to 0.999999; needs
        ``dropout_key``.
      implementation: ``auto``, or the name of an implementation, as in the setting
        ``model.kernel``. ``pallas_tpu`` does not support ``causal=False``.
      mesh: the mesh of the devices, if there are several; ``None`` inside of ``jax.shard_map``. The
        axes ``data`` and ``fsdp`` split the B rows, and the axis ``tensor`` splits the N heads. The
        mesh needs all three axes, of the type ``AxisType.Auto``. The size of ``tensor`` must divide
        N. If data x fsdp does not divide B, ``auto`` chooses ``xla``, and it is an error to name a
        fused kernel.

    If B or T is 0, the result is empty. Raises UserError if an argument does not fit its
    description, or if shapes do not fit together.

    >>> import jax, jax.numpy as jnp, txl_jax
    >>> from txl_jax.model.positions import sinusoids
    >>> draw = lambda i, *sides: jax.random.normal(jax.random.key(i), sides)
    >>> heads = lambda i, x: jnp.einsum("...d,dnh->...nh", x, draw(i, 64, 4, 16) / 8)
    >>> speech = draw(0, 2, 100, 64)  # the frames of two utterances, the second padded
    >>> q, k, v = (heads(i, speech) for i in (1, 2, 3))
    >>> r = heads(4, sinusoids(jnp.arange(99, -100, -1), 64))
    >>> lengths = jnp.array([100, 70])
    >>> txl_jax.relative_attention(q, k, v, r, causal=False, lengths=lengths).shape
    (2, 100, 4, 16)
    """
    q, k, v, r = (_floats(name, x) for name, x in zip("qkvr", (q, k, v, r), strict=True))
    u = None if u is None else _floats("u", u)
    v_bias = None if v_bias is None else _floats("v_bias", v_bias)
    _check_shapes(causal, q, k, v=v, r=r, u=u, v_bias=v_bias)
    (b, t, n, h), n_keys = q.shape, k.shape[1]
    mem_len, reach, real = n_keys - t, n_keys - 1, _lengths(lengths, b, t)
    if window is not None:
        rule = "an integer of at least 0"
        reach = min(reach, _number("window", window, operator.index, math.inf, rule))
    rule = f"a number from 0 to {BELOW_1}"
    dropout = None
    if rate := _number("dropout_rate", dropout_rate, float, BELOW_1, rule):
        if dropout_key is None:
            raise _refused("dropout_rate", "needs a dropout_key")
        dropout = AttentionDropout.draw(dropout_key, rate)
    given_scale = _array("scale", 1 if scale is None else scale)
    if given_scale.shape or given_scale.dtype == bool or not jnp.isrealobj(given_scale):
        raise _refused("scale", f"must be one real number, not {one_line(short_repr(scale))}")
    if implementation not in IMPLEMENTATIONS:
        rule = f"must be one of {', '.join(IMPLEMENTATIONS)}"
        raise _refused_value("implementation", implementation, rule)
    if mesh is not None:
        _check_mesh(mesh, b, n, implementation in FUSED)
    if b == 0 or t == 0:
        return jnp.zeros_like(q)
    if lengths is not None:  # a weight of 0 does not hide NaN in the padding
        is_real = (jnp.arange(n_keys) < mem_len + real[:, None])[:, :, None, None]
        own = is_real[:, mem_len:]
        q, k, v = _kept(own, q), _kept(is_real, k), _kept(is_real, v)
    mask = AttentionMask(jnp.full(b, mem_len, jnp.int32), None, t, mem_len, reach)
    if not causal:
        mask = BothWaysMask(real, None, t, mem_len, reach)
    scaled = lambda x: x * jnp.asarray(h**-0.5 if scale is None else scale, x.dtype)
    scaled_bias = lambda x: None if x is None else scaled(x.astype(q.dtype))
    by_head = lambda x: x.astype(q.dtype).transpose(2, 0, 1, 3)
    positions = Positions(scaled_bias(u), scaled_bias(v_bias), by_head(r[None])[:, 0])
    x = AttentionInputs(scaled(by_head(q)), by_head(k), by_head(v), positions, mask, dropout)
    out = attend(x, implementation, mesh).transpose(1, 2, 0, 3)
    return out if lengths is None else _kept(own, out)


def _kept(where: jax.Array, x: jax.Array) -> jax.Array:
    """Returns an array that keeps the entries marked by ``where``, and is 0 elsewhere."""
    return jnp.where(where, x, jnp.zeros_like(x))


def _refused(name: str, why: str) -> UserError:
    return UserError(f"relative_attention: {name} {why}")


def _refused_value(name: str, value: object, rule: str) -> UserError:
    return _refused(name, f"= {one_line(short_repr(value))}: {rule}")


def _array(name: str, given: Any) -> jax.Array:
    try:
        return jnp.asarray(given)
    except (TypeError, ValueError, OverflowError) as error:
        raise _refused(name, f"must be an array of numbers: {one_line(error)}") from error


def _floats(name: str, given: Any) -> jax.Array:
    """Returns an argument as an array of one of :data:`_FLOATS`."""
    x = _array(name, given)
    if x.dtype.name not in _FLOATS:
        why = f"has the dtype {x.dtype.name}, and must have one of {', '.join(_FLOATS)}"
        raise _refused(name, f"{why}: give {name}.astype(jnp.float32)")
    return x


def _check_shapes(causal: bool, q: jax.Array, k: jax.Array, **others: jax.Array | None) -> None:
    if not isinstance(causal, int | np.bool_):
        raise _refused_value("causal", causal, "must be True or False")
    for name, x, axes in (("q", q, "[B,T,N,H]"), ("k", k, "[B,K,N,H]")):
        if x.ndim != 4 or not all(x.shape[2:]):
            raise _refused(name, f"has the shape {x.shape}, and needs {axes} with N, H > 0")
    (b, t, n, h), n_keys = q.shape, k.shape[1]
    distances = n_keys if causal else max(0, n_keys + t - 1)
    expected: dict[str, tuple[int, ...]] = dict.fromkeys("kv", (b, n_keys, n, h))
    expected |= {"r": (distances, n, h), "u": (n, h), "v_bias": (n, h)}
    for name, given in {"k": k, **others}.items():
        if given is not None and given.shape != expected[name]:
            why = f"q {q.shape}, {n_keys} keys and causal={causal} need {expected[name]}"
            raise _refused(name, f"has the shape {given.shape}, and {why}")
    if n_keys - t < 0:
        raise UserError(f"relative_attention: {n_keys} keys are fewer than the {t} queries")


def _number(name: str, given: Any, convert: Callable, largest: float, rule: str) -> Any:
    """Converts an argument to a number from 0 to ``largest``; refuses values traced by JAX."""
    try:
        number = convert(given)
    except (TypeError, ValueError):
        number = -1
    if not 0 <= number <= largest or isinstance(given, bool):
        raise _refused_value(name, given, f"must be {rule}, known before jax.jit")
    return number


def _lengths(given: Any, b: int, t: int) -> jax.Array:
    """Returns the numbers of real tokens, int32 [B], between 0 and T."""
    if given is None:
        return jnp.full(b, t, jnp.int32)
    allowed = range(t + 1) if isinstance(t, int) else None  # T can be a symbol of jax.export
    try:
        if not isinstance(given, jax.Array):  # np keeps the dtype; a list can have traced numbers
            traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(given))
            given = jnp.asarray(given) if traced else np.asarray(given)
        why = f"must be from 0 to T = {t}"
        lengths = int32_array("lengths", given, (b,), allowed=allowed, why=why)
    except ValueError as error:
        raise UserError(f"relative_attention: {one_line(error)}") from error
    return jnp.clip(lengths, 0, t)


def _check_mesh(mesh: Any, b: int, n: int, by_rows: bool) -> None:
    """Refuses a mesh that cannot split n heads or, if ``by_rows``, cannot split b rows."""
    if not isinstance(mesh, Mesh):
        raise _refused_value("mesh", mesh, "must be a jax.sharding.Mesh")
    if set(AXES) - set(mesh.axis_names) or set(mesh.axis_types) != {AxisType.Auto}:
        works = "jax.make_mesh((2, 1, 1), ('data', 'fsdp', 'tensor'), (AxisType.Auto,) * 3)"
        rule = f"it needs data, fsdp and tensor, all of the type Auto, as in {works}"
        raise _refused("mesh", f"has the axes {mesh.axis_names} of {mesh.axis_types}: {rule}")
    if mesh.size > 1 and jax.sharding.get_abstract_mesh().manual_axes:
        raise _refused("mesh", "must be None inside of jax.shard_map")
    if n % mesh.shape["tensor"]:
        size = f"tensor = {mesh.shape['tensor']}"
        raise _refused("mesh", f"has the axis {size}: it must divide the number of heads, N = {n}")
    if by_rows and b % row_devices(mesh):
        rows = f"data x fsdp = {row_devices(mesh)}: a fused kernel needs a divisor of B = {b}"
        raise _refused("mesh", f"has the axes {rows}; implementation='xla' needs none")
