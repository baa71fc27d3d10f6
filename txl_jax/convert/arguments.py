"""What the formats share: arguments of other programs as settings, and parameter clusters."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from txl_jax.checkpoint.errors import ModelFormatError
from txl_jax.checkpoint.tensors import Tensors
from txl_jax.config import TransformerXLConfig
from txl_jax.model.adaptive import Cluster, clusters

SHAPE = ("n_layer", "d_model", "n_head", "d_head", "d_inner")


def take_settings(args: dict[str, Any], *names: str, **defaults: Any) -> dict[str, Any]:
    """Takes from ``args`` the settings that every program has, and those with the same name here.

    Args:
      args: must have ``n_token`` and :data:`SHAPE`; what is taken is removed from it.
      names: other settings to take.
      defaults: other settings to take, with the program's defaults where they differ from ours.
    """
    taken = {name: args.pop(name) for name in (*SHAPE, *names, *defaults) if name in args}
    d_embed, clamp_len = args.pop("d_embed", None), args.pop("clamp_len", -1)
    return {
        **defaults,
        **taken,
        "vocab_size": args.pop("n_token"),
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


def check_convertible(c: TransformerXLConfig) -> int:
    """V; raises ModelFormatError for a model that no other program can have."""
    if c.vocab_size is None:
        raise ModelFormatError("cfg.vocab_size is None: a model of the original has a vocabulary")
    for key, value in (("mixtures", c.mixtures), ("past_decode", c.past_decode)):
        if value != getattr(TransformerXLConfig, key):
            raise ModelFormatError(
                f"model.{key} = {value!r}: the other code bases have no such parameters; leave it"
                " at its default"
            )
    return c.vocab_size


def parameter_clusters(c: TransformerXLConfig) -> list[tuple[str, Cluster]]:
    """The clusters with parameters of their own, each with the suffix of its names here.

    With ``div_val`` 1 there is a single one of all words, whatever the cutoffs.
    """
    parts = clusters(c)
    if c.div_val > 1:
        return [(f"_{i}", part) for i, part in enumerate(parts)]
    return [("", dataclasses.replace(parts[0], stop=parts[-1].stop))]


def is_tied(c: TransformerXLConfig, i: int) -> bool:
    """Whether cluster i's output projection is its input projection."""
    return i < len(c.tie_projs) and c.tie_projs[i]


def take_dense(
    tensors: Tensors, name: str, inputs: int, outputs: int, transposed: bool = False
) -> dict[str, np.ndarray]:
    """A dense layer's kernel [in, out] and bias; ``transposed``: PyTorch's ``weight`` [out, in]."""
    if transposed:
        kernel = tensors.take(f"{name}weight", (outputs, inputs)).T
    else:
        kernel = tensors.take(f"{name}kernel", (inputs, outputs))
    return {"kernel": kernel, "bias": tensors.take(f"{name}bias", (outputs,))}


def take_layer_norm(tensors: Tensors, scale: str, bias: str, width: int) -> dict[str, np.ndarray]:
    """The parameters of a layer normalisation from their names."""
    return {"scale": tensors.take(scale, (width,)), "bias": tensors.take(bias, (width,))}
