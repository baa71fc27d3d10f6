"""What the formats share: other programs' arguments as settings, and a layer's parameters."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from flax.traverse_util import unflatten_dict

from txl_jax.checkpoint.errors import ModelFormatError
from txl_jax.checkpoint.tensors import Tensors
from txl_jax.config import TransformerXLConfig
from txl_jax.model.adaptive import Cluster, clusters

SHAPE = ("n_layer", "d_model", "n_head", "d_head", "d_inner")


def take_settings(
    args: dict[str, Any], what: str, *names: str, size: str = "n_token", **defaults: Any
) -> dict[str, Any]:
    """Takes out of ``args`` the settings that every program has, and others by ``names``.

    ``defaults`` are others whose defaults differ from ours. ``size`` names the vocabulary's size.
    Raises ModelFormatError where it or one of :data:`SHAPE` is missing; ``what`` says of what.
    """
    require(args, (size, *SHAPE), what)
    taken = {name: args.pop(name) for name in (*SHAPE, *names, *defaults) if name in args}
    d_embed, clamp_len = args.pop("d_embed", None), args.pop("clamp_len", -1)
    return {
        **defaults,
        **taken,
        "vocab_size": args.pop(size),
        "d_embed": None if d_embed == taken["d_model"] else d_embed,
        "clamp_len": clamp_len if clamp_len > 0 else -1,
        "cutoffs": tuple(args.pop("cutoffs", None) or ()),
    }


def require(args: Mapping[str, object], names: Iterable[str], what: str) -> None:
    """Raises ModelFormatError if a name is missing; ``what`` says what the names are."""
    missing = [name for name in names if name not in args]
    if missing:
        raise ModelFormatError(f"{what} are missing: {quoted(missing)}")


def require_one_of(argument: str, value: object, supported: Iterable) -> None:
    """Raises ModelFormatError, naming argument, value and the supported values, for any other."""
    if value not in supported:
        raise ModelFormatError(
            f"{argument} = {value!r} is not supported; supported: {quoted(supported)}"
        )


def quoted(names: Iterable) -> str:
    """Names in quotes, separated by commas."""
    return ", ".join(repr(name) for name in names)


def check_convertible(c: TransformerXLConfig) -> None:
    """Raises ModelFormatError for a model that no other program can have."""
    if c.vocab_size is None:
        raise ModelFormatError("cfg.vocab_size is None: a model of the original has a vocabulary")
    for key in ("mixtures", "past_decode"):
        value = getattr(c, key)
        if value != getattr(TransformerXLConfig, key):
            raise ModelFormatError(
                f"model.{key} = {value!r}: the other code bases have no such parameters; leave it"
                " at its default"
            )


def parameter_clusters(c: TransformerXLConfig) -> list[tuple[str, Cluster]]:
    """The clusters with parameters of their own, each with the suffix of its names here.

    With ``div_val`` 1 there is a single one of all words, whatever the cutoffs.
    """
    parts = clusters(c)
    if c.div_val > 1:
        return [(f"_{i}", part) for i, part in enumerate(parts)]
    return [("", dataclasses.replace(parts[0], stop=parts[-1].stop))]


def projected_outputs(c: TransformerXLConfig) -> list[tuple[int, int, bool]]:
    """Number and width of clusters with an output projection; whether it is the input's."""
    parts = [(i, part.width) for i, part in enumerate(clusters(c)) if part.projected]
    return [(i, width, i < len(c.tie_projs) and c.tie_projs[i]) for i, width in parts]


def take_layer(
    tensors: Tensors, c: TransformerXLConfig, names: dict[str, str], prefix: str, transposed: bool
) -> dict[str, Any]:
    """Takes the parameters of a layer that every program has.

    ``names``: of each parameter by its path here, without the layer's ``prefix``. ``qkv`` holds
    queries, keys and values; without memory ``q`` and ``kv`` do. ``transposed``: kernels [out, in].
    """
    d, n, f = c.d_model, c.n_head, c.d_inner
    heads = n * c.d_head
    norms, dense = ("norm_attention", "norm_feed_forward"), "feed_forward"
    shapes: dict[str, tuple[int, ...]] = {
        **({"q": (d, heads), "kv": (d, 2 * heads)} if c.memory_free else {"qkv": (d, 3 * heads)}),
        **({"attention/position": (d, heads)} if c.attention == "relative" else {}),
        "attention/output": (heads, d),
        **{f"{dense}/inner/kernel": (d, f), f"{dense}/inner/bias": (f,)},
        **{f"{dense}/outer/kernel": (f, d), f"{dense}/outer/bias": (d,)},
        **{f"{norm}/{part}": (d,) for norm in norms for part in ("scale", "bias")},
    }
    by_head = {"attention/position": (d, n, -1), "attention/output": (n, -1, d)}
    found, qkv = {}, []
    for path, shape in shapes.items():
        stored = tensors.take(prefix + names[path], shape[::-1] if transposed else shape)
        array = stored.T if transposed else stored
        if path in ("q", "kv", "qkv"):
            qkv.append(array.reshape(d, -1, n, c.d_head))
        else:
            found[path] = array.reshape(by_head.get(path, shape))
    query, key, value = np.moveaxis(np.concatenate(qkv, axis=1), 1, 0)
    found |= {"attention/query": query, "attention/key": key, "attention/value": value}
    return unflatten_dict(found, sep="/")
