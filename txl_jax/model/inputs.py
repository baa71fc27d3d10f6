"""Checks the arguments of the model's methods, and converts them to the types that they need.

Integers of any type become int32 here, before any arithmetic: a narrow type could overflow. Each
error names the argument.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from txl_jax.config import TransformerXLConfig
from txl_jax.model.memory import Cache, Memory

_DTYPES = {
    "integers": jnp.integer,
    "floats": jnp.floating,
    "bool": jnp.bool_,
    "bool or numbers": np.generic,
}


class SegmentOptions(NamedTuple):
    """The keyword options of the model's methods, see :class:`TransformerXL`."""

    train: bool = False
    reset: Any = None
    lengths: Any = None
    context_len: int = 0


def check_array(name: str, value: Any, dtype: str, *shapes: tuple[int | str, ...]) -> None:
    """Raises ValueError unless a value is an array of this dtype and one of these shapes.

    ``dtype`` is a key of ``_DTYPES``. A letter in a shape stands for any size.
    """
    of_dtype = _is_array(value) and jnp.issubdtype(value.dtype, _DTYPES[dtype])
    if not of_dtype or not any(_fits(value.shape, shape) for shape in shapes):
        wanted = " or ".join(map(_shown, shapes))
        raise ValueError(f"{name} must be {dtype} {wanted}, not {_kind(value)}")


def tree_like(name: str, value: Any, like: Any, how: str) -> Any:
    """Returns the arrays of a tree in the structure and the dtypes of the tree ``like``.

    ``None`` stands for zeros. Raises ValueError unless each array has the shape of its counterpart
    in ``like``, and both are floats or neither is. The error's text includes ``how``, which tells
    the user where to get a correct tree.
    """
    if value is None:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
    kind = lambda x: _is_array(x) and (x.shape, jnp.issubdtype(x.dtype, jnp.floating))
    leaves, wanted = jax.tree.leaves(value), jax.tree.leaves(like)
    if list(map(kind, leaves)) != list(map(kind, wanted)):
        told, got = (", ".join(map(_kind, x)) or "empty" for x in (wanted, leaves))
        raise ValueError(f"{name} must be {told} ({how}), not {got}")
    cast = [x.astype(y.dtype) for x, y in zip(leaves, wanted, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(like), cast)


def int32_array(
    name: str,
    value: Any,
    *shapes: tuple[int | str, ...],
    allowed: range | None = None,
    why: str = "",
) -> jax.Array:
    """Returns integers of any type and one of these shapes as int32.

    Raises ValueError for another dtype or shape, and for values outside of ``allowed``. Under
    ``jax.jit``, values are unknown, so they are not checked.
    """
    value = np.asarray(value) if _is_integer(value) else value
    check_array(name, value, "integers", *shapes)
    traced = isinstance(value, jax.core.Tracer)
    elsewhere = traced or not getattr(value, "is_fully_addressable", True)  # on other processes
    if allowed is not None and not elsewhere:
        known = np.asarray(value)
        wide = known.astype(np.int64)  # a bound might not fit into the array's own type
        for place in np.argwhere((wide < allowed.start) | (wide >= allowed.stop)):
            at = _shown(tuple(place)) if known.ndim else ""
            raise ValueError(f"{name}{at} = {known[tuple(place)]}: {why}")
    return jnp.asarray(value, jnp.int32)


def size(name: str, value: Any, least: int) -> int:
    """Returns a number as ``int``; raises ValueError unless it is an integer >= ``least``."""
    if not _is_integer(value) or value < least:
        raise ValueError(f"{name} = {value!r}: must be an integer of at least {least}")
    return int(value)


def token_ids(
    name: str, ids: Any, vocab_size: int, shape: tuple[int | str, ...] = ("B", "T")
) -> jax.Array:
    """Returns ids [B,T] as int32; raises ValueError for a known id outside of 0 to V-1."""
    size = f"the vocabulary has {vocab_size} symbols"
    why = f"a token id must be from 0 to {vocab_size - 1}, because {size}"
    return int32_array(name, ids, shape, allowed=range(vocab_size), why=why)


def segment_tokens(tokens: Any, context_len: Any, cached: bool, vocab_size: int) -> jax.Array:
    """Returns the token ids of context and segment, [B,C+T], as int32.

    Raises ValueError if B or T is 0, or if there is a context (C = ``context_len`` > 0) although
    the memory is a cache.
    """
    tokens = token_ids("tokens", tokens, vocab_size)
    _check_not_empty("tokens", tokens)
    if not _is_integer(context_len) or not 0 <= context_len < tokens.shape[1]:
        raise ValueError(
            f"context_len = {context_len!r}: must be an integer from 0 to {tokens.shape[1] - 1}, so"
            f" that at least one of the {tokens.shape[1]} tokens comes after the context"
        )
    if context_len and cached:
        why = "is not possible with a cache; use a Memory, or context_len=0"
        raise ValueError(f"context_len = {context_len} {why}")
    return tokens


def segment_targets(targets: Any, tokens: Any, context_len: int, vocab_size: int) -> jax.Array:
    """Returns the target ids [B,T] as int32.

    Raises ValueError unless each token after the context has a target.
    """
    targets = token_ids("targets", targets, vocab_size)
    b, t = tokens.shape
    if targets.shape != (b, t - context_len):
        raise ValueError(
            f"targets {targets.shape} and tokens {tokens.shape} do not fit: expected"
            f" [{b},{t - context_len}], a target for each token after context_len {context_len}"
        )
    return targets


def segment(
    c: TransformerXLConfig, embeddings: Any, mems: Any, options: SegmentOptions
) -> tuple[Any, SegmentOptions]:
    """Returns memory and options of a segment in the types of the model.

    Raises ValueError if the arguments do not fit one another, and for ``lengths`` outside of 0 to
    T. Under ``jax.jit``, lengths are unknown and are clipped instead.
    """
    check_array("embeddings", embeddings, "floats", ("B", "T", c.d_model))
    _check_not_empty("embeddings", embeddings)
    b, t = embeddings.shape[:2]
    mems = memory(c, mems, b)
    if c.memory_free and mems.mem_len:
        raise ValueError(
            f"model.attention = {c.attention!r} has no memory, but mems has {mems.mem_len} slots;"
            " give init_mems(batch_size, mem_len=0), and give earlier tokens with context_len"
        )
    if c.segment_limit is not None and t > c.segment_limit:
        why = f"is longer than model.n_positions {c.n_positions}, the number of learnt positions"
        raise ValueError(f"a segment of {t} tokens {why}; give fewer tokens")
    if isinstance(mems, Cache) and (options.train or t > mems.seg_len):
        wrong = "train=True" if options.train else f"a segment of {t} tokens"
        use = f"which is for inference on at most {mems.seg_len} tokens"
        fix = "give a Memory of init_mems"
        raise ValueError(f"{wrong} is not possible with this cache, {use}; {fix}")
    if options.reset is not None:
        check_array("reset", options.reset, "bool", (b,), (b, t))
    if options.lengths is None:
        return mems, options
    why = f"must be from 0 to {t}, the number of tokens in a row"
    lengths = int32_array("lengths", options.lengths, (b,), allowed=range(t + 1), why=why)
    return mems, options._replace(lengths=jnp.clip(lengths, 0, t))


def memory(c: TransformerXLConfig, mems: Any, b: int | str = "B") -> Any:
    """Returns a memory or a cache in the types of the model.

    Raises ValueError unless ``mems`` fits this model and B streams.
    """
    if isinstance(mems, Cache):
        layers, shape = mems.near.layers, (c.kv_heads, b, "R", c.d_head)
        if len(layers) != c.n_layer:
            fix = "make the cache with init_cache of this model"
            found = f"the cache has {len(layers)} layers, and the model has {c.n_layer}"
            raise ValueError(f"{found}; {fix}")
        check_array("the cache's keys", layers[0].keys, "floats", shape)
        return mems.replace(filled=_filled("the cache's filled", mems, b))
    mems = any_memory(mems)
    b = mems.hidden.shape[1] if b == "B" else b
    check_array("mems.hidden", mems.hidden, "floats", (c.n_layer, b, "M", c.d_model))
    return Memory(jnp.asarray(mems.hidden, c.dtype), _filled("mems.filled", mems, b))


def any_memory(mems: Any) -> Memory:
    """Returns a memory with ``filled`` as int32; raises ValueError unless it is a valid Memory."""
    if not isinstance(mems, Memory):
        raise ValueError(f"mems must be a Memory of init_mems, not {type(mems).__name__}")
    check_array("mems.hidden", mems.hidden, "floats", ("L", "B", "M", "D"))
    return mems.replace(filled=_filled("mems.filled", mems, "B"))


def _filled(name: str, mems: Memory | Cache, b: int | str) -> jax.Array:
    why = f"must be from 0 to {mems.mem_len}, the number of slots of the memory"
    return int32_array(name, mems.filled, (b,), allowed=range(mems.mem_len + 1), why=why)


def _check_not_empty(name: str, array: Any) -> None:
    if not all(array.shape[:2]):
        why = "must have at least one row and at least one token"
        raise ValueError(f"{name} {_shown(array.shape)}: {why}")


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _kind(value: Any) -> str:
    return f"{value.dtype} {_shown(value.shape)}" if _is_array(value) else type(value).__name__


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _fits(shape: tuple[int, ...], wanted: tuple[int | str, ...]) -> bool:
    return len(shape) == len(wanted) and all(
        isinstance(size, str) or n == size for n, size in zip(shape, wanted, strict=True)
    )


def _shown(shape: tuple[int | str, ...]) -> str:
    return "[" + ",".join(map(str, shape)) + "]"
