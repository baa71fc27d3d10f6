"""Functions for all formats: they convert constructor arguments and the parameters of a layer."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from flax.traverse_util import unflatten_dict

from txl_jax.checkpoint.errors import ModelFormatError
from txl_jax.checkpoint.tensors import Tensors
from txl_jax.config import TransformerXLConfig
from txl_jax.model.adaptive import Cluster, clusters

OWN_SETTINGS = ("mixtures", "past_decode", "gate", "activation", "attention_bias", "final_norm")
"""Settings of the model that the language models of other programs do not have."""
SHAPE = ("n_layer", "d_model", "n_head", "d_head", "d_inner")


def take_settings(
    args: dict[str, Any], what: str, *names: str, size: str = "n_token", **defaults: Any
) -> dict[str, Any]:
    """Removes settings from ``args`` and returns them under the names of this project.

    They are those of all programs, and ``names``, and ``defaults`` whose values differ from this
    project's. ``size`` is the name of the vocabulary's size. Raises ModelFormatError, with the text
    ``what``, if the size or one of :data:`SHAPE` is missing.
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
    """Raises ModelFormatError if a name is missing. ``what`` describes the names in the error."""
    missing = [name for name in names if name not in args]
    if missing:
        raise ModelFormatError(f"{what} are missing: {quoted(missing)}")


def require_one_of(argument: str, value: object, supported: Iterable) -> None:
    """Raises ModelFormatError, with all supported values, if the argument's value is another."""
    if value not in supported:
        raise ModelFormatError(
            f"{argument} = {value!r} is not supported; supported: {quoted(supported)}"
        )


def quoted(names: Iterable) -> str:
    """Returns names in quotes, separated by commas."""
    return ", ".join(repr(name) for name in names)


def check_convertible(c: TransformerXLConfig) -> None:
    """Raises ModelFormatError if the model has settings that no other program has."""
    if c.vocab_size is None:
        raise ModelFormatError("cfg.vocab_size is None: a converted model needs a vocabulary size")
    for key in OWN_SETTINGS:
        value = getattr(c, key)
        if value != getattr(TransformerXLConfig, key):
            raise ModelFormatError(
                f"model.{key} = {value!r}: the other code bases have no such setting; leave it at"
                " its default"
            )


def parameter_clusters(c: TransformerXLConfig) -> list[tuple[str, Cluster]]:
    """Returns the clusters with separate parameters (one with ``div_val`` 1), by name's suffix."""
    parts = clusters(c)
    if c.div_val > 1:
        return [(f"_{i}", part) for i, part in enumerate(parts)]
    return [("", dataclasses.replace(parts[0], stop=parts[-1].stop))]


def projected_outputs(c: TransformerXLConfig) -> list[tuple[int, int, bool]]:
    """Lists clusters with an output projection: index, width, whether the embedding shares it."""
    parts = [(i, part.width) for i, part in enumerate(clusters(c)) if part.projected]
    return [(i, width, i < len(c.tie_projs) and c.tie_projs[i]) for i, width in parts]


def take_layer(
    tensors: Tensors, c: TransformerXLConfig, names: dict[str, str], prefix: str, transposed: bool
) -> dict[str, Any]:
    """Takes those parameters of a layer that all programs have.

    ``names`` maps parameter paths of this project to tensor names without the layer's ``prefix``.
    ``qkv`` holds queries, keys and values; models without memory have ``q`` and ``kv``. Kernels are
    stored as [out, in] if ``transposed``.
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
