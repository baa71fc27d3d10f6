"""Options of the model's methods, and checks of their arguments; each error names the argument."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from txl_jax.config import TransformerXLConfig
from txl_jax.model.memory import Cache, Memory

_DTYPES = {"integers": jnp.integer, "floats": jnp.floating, "bool": jnp.bool_}


class SegmentOptions(NamedTuple):
    """The keyword options of the model's methods, see :class:`TransformerXL`."""

    train: bool = False
    reset: Any = None
    lengths: Any = None
    context_len: int = 0


def check_array(name: str, value: Any, dtype: str, *shapes: tuple[int | str, ...]) -> None:
    """Raises ValueError unless a value is an array of this dtype and one of these shapes.

    ``dtype`` is ``integers``, ``floats`` or ``bool``. A letter in a shape stands for any size.
    """
    got = type(value).__name__
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        fits = any(_fits(value.shape, shape) for shape in shapes)
        if fits and jnp.issubdtype(value.dtype, _DTYPES[dtype]):
            return
        got = f"{value.dtype} {_shown(value.shape)}"
    wanted = " or ".join(map(_shown, shapes))
    raise ValueError(f"{name} must be {dtype} {wanted}, not {got}")


def check_size(name: str, value: Any, least: int) -> None:
    """Raises ValueError unless a value is an integer of at least ``least``."""
    if not _is_integer(value) or value < least:
        raise ValueError(f"{name} = {value!r}: must be an integer of at least {least}")


def check_ids(name: str, ids: Any, vocab_size: int) -> None:
    """Raises ValueError if a known id is not from 0 to V-1; under ``jax.jit`` ids are unknown."""
    if (known := _known(ids)) is None or not known.size:
        return
    wrong = (known < 0) | (known >= vocab_size)
    if wrong.any():
        place = tuple(int(axis[0]) for axis in np.nonzero(wrong))
        raise ValueError(
            f"{name}{_shown(place)} = {known[place]}: a token id must be from 0 to"
            f" {vocab_size - 1}, the vocabulary has {vocab_size} symbols"
        )


def check_tokens(tokens: Any, context_len: Any, cached: bool, vocab_size: int) -> None:
    """Raises ValueError unless tokens are ids [B,C+T] with T > 0; a cache needs C = 0."""
    check_array("tokens", tokens, "integers", ("B", "T"))
    check_ids("tokens", tokens, vocab_size)
    if not tokens.shape[1]:
        raise ValueError(f"tokens {_shown(tokens.shape)}: a segment has at least one token")
    if not _is_integer(context_len) or not 0 <= context_len < tokens.shape[1]:
        raise ValueError(
            f"context_len = {context_len!r}: must be an integer of at least 0 and leave at least"
            f" one of {tokens.shape[1]} tokens"
        )
    if context_len and cached:
        why = "with a cache is not possible: use a Memory, or context_len=0"
        raise ValueError(f"context_len = {context_len} {why}")


def check_targets(targets: Any, tokens: Any, context_len: int, vocab_size: int) -> None:
    """Raises ValueError unless targets are ids [B,T], one for each token after the context."""
    check_array("targets", targets, "integers", ("B", "T"))
    check_ids("targets", targets, vocab_size)
    b, t = tokens.shape
    if targets.shape != (b, t - context_len):
        raise ValueError(
            f"targets {targets.shape} and tokens {tokens.shape} do not fit: expected"
            f" [{b},{t - context_len}], a target for each token after context_len {context_len}"
        )


def check_segment(
    c: TransformerXLConfig, embeddings: Any, mems: Memory | Cache, options: SegmentOptions
) -> None:
    """Raises ValueError if the arguments of a segment do not fit one another."""
    check_array("embeddings", embeddings, "floats", ("B", "T", c.d_model))
    b, t = embeddings.shape[:2]
    check_memory(c, mems, b)
    if c.memory_free and mems.mem_len:
        raise ValueError(
            f"attention {c.attention!r} has no memory and M is {mems.mem_len}: use"
            " init_mems(batch_size, mem_len=0), and context_len for a longer view"
        )
    if c.attention == "absolute_per_layer" and t > (c.n_positions or 0):
        why = f"is longer than model.n_positions {c.n_positions}, the number of learnt positions"
        raise ValueError(f"a segment of {t} tokens {why}")
    if isinstance(mems, Cache) and (options.train or t > mems.seg_len):
        wrong = "train=True" if options.train else f"a segment of {t} tokens"
        use = f"is not possible: it is for inference on up to {mems.seg_len} tokens"
        raise ValueError(f"{wrong} with a cache made by init_cache {use}")
    if options.reset is not None:
        check_array("reset", options.reset, "bool", (b,), (b, t))
    if options.lengths is not None:
        check_array("lengths", options.lengths, "integers", (b,))


def check_memory(c: TransformerXLConfig, mems: Memory | Cache, b: int) -> None:
    """Raises ValueError unless ``mems`` fit this model and B streams."""
    if isinstance(mems, Cache):
        layers, shape = mems.near.layers, (c.n_head, b, "R", c.d_head)
        if len(layers) != c.n_layer:
            raise ValueError(f"the cache has {len(layers)} layers, and this model has {c.n_layer}")
        check_array("the cache's keys", layers[0].keys, "floats", shape)
        check_array("the cache's filled", mems.filled, "integers", (b,))
        return
    check_memory_type(mems)
    check_array("mems.hidden", mems.hidden, "floats", (c.n_layer, b, "M", c.d_model))
    check_array("mems.filled", mems.filled, "integers", (b,))


def check_memory_type(mems: Any) -> None:
    """Raises ValueError unless ``mems`` are a :class:`Memory` of arrays."""
    if not isinstance(mems, Memory):
        wanted = "a Memory of init_mems (or, in place of it, a Cache of init_cache)"
        raise ValueError(f"mems must be {wanted}, not {type(mems).__name__}")
    check_array("mems.hidden", mems.hidden, "floats", ("L", "B", "M", "D"))
    check_array("mems.filled", mems.filled, "integers", ("B",))


def real_tokens(lengths, seg_len: int) -> jax.Array:
    """Returns int32 ``lengths`` [B]. Values outside of 0 to T raise ValueError; jit clips them."""
    if (values := _known(lengths)) is not None:
        wrong = (values < 0) | (values > seg_len)
        if wrong.any():
            row, why = int(np.argmax(wrong)), f"must be from 0 to {seg_len}, the tokens of a row"
            raise ValueError(f"lengths[{row}] = {values[row]}: {why}")
    return jnp.clip(lengths, 0, seg_len).astype(jnp.int32)


def _known(array: Any) -> np.ndarray | None:
    """Returns the values of an array, or ``None`` under ``jax.jit`` and on other machines."""
    if isinstance(array, jax.core.Tracer) or not getattr(array, "is_fully_addressable", True):
        return None
    return np.asarray(array)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _fits(shape: tuple[int, ...], wanted: tuple[int | str, ...]) -> bool:
    return len(shape) == len(wanted) and all(
        isinstance(size, str) or n == size for n, size in zip(shape, wanted, strict=True)
    )


def _shown(shape: tuple[int | str, ...]) -> str:
    return "[" + ",".join(map(str, shape)) + "]"
