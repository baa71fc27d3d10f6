"""Converts constructor arguments in both directions, with functions that all formats share."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from txl_jax.checkpoint.errors import ModelFormatError
from txl_jax.config import TransformerXLConfig
from txl_jax.model.adaptive import Cluster, clusters

SHAPE = ("n_layer", "d_model", "n_head", "d_head", "d_inner")
CONVERTED = {
    *SHAPE,
    *("vocab_size", "d_embed", "dropout", "dropatt", "attention", "pre_lnorm", "untie_r"),
    *("same_length", "clamp_len", "n_positions", "cutoffs", "div_val", "tie_weight", "tie_projs"),
    *("proj_same_dim", "norm_epsilon"),
    # These matter only in training or for how results are computed.
    *("dropout_input", "dropout_output", "dropout_qkv", "dropout_embedding", "dropout_mask"),
    *("dropout_latent", "gate_bias", "sample_softmax", "init_std", "proj_init_std"),
    *("dtype", "matmul_precision", "scan_layers", "remat", "kernel"),
}
"""Settings that other programs have too, or that have no effect on scores."""


def given(args: Mapping[str, Any], ignored: Collection[str] = ()) -> dict[str, Any]:
    """Returns the arguments that are neither ignored nor null; null means the default.

    Raises ModelFormatError for a number in place of a list, or the reverse.
    """
    found = {k: v for k, v in args.items() if k not in ignored and v is not None}
    kinds: dict[str, Any] = {"cutoffs": (list, tuple), "tie_projs": (list, tuple), "clamp_len": int}
    for name, kind in kinds.items():
        if name in found and not isinstance(found[name], kind):
            wanted = "an integer" if kind is int else "a list"
            raise ModelFormatError(f"{name} = {found[name]!r}: must be {wanted}")
    return found


def take_settings(
    args: dict[str, Any], what: str, *names: str, size: str = "n_token", **defaults: Any
) -> dict[str, Any]:
    """Removes settings from ``args`` and returns them under the names of this project.

    These are the settings that all original programs have, those in ``names``, and those in
    ``defaults``, which has the original program's value of each setting that ``args`` lacks.
    ``size`` is the key of the vocabulary size. Raises ModelFormatError, with the text ``what``, if
    the size or one of :data:`SHAPE` is missing.
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


def give_settings(c: TransformerXLConfig, *names: str, size: str = "n_token") -> dict[str, Any]:
    """Returns the constructor arguments of an original program for a model of this project.

    They are ``tie_projs`` and the arguments that :func:`take_settings` removes.
    """
    ties = (*c.tie_projs, *[False] * len(c.cutoffs))[: len(c.cutoffs) + 1]
    return {
        **{name: getattr(c, name) for name in (*SHAPE, *names)},
        size: c.vocab_size,
        "d_embed": c.d_embed or c.d_model,
        "clamp_len": c.clamp_len,
        "cutoffs": list(c.cutoffs),
        "tie_projs": list(ties),
    }


def require(args: Mapping[str, object], names: Iterable[str], what: str) -> None:
    """Raises ModelFormatError if a name is missing. ``what`` describes the names in the error."""
    missing = [name for name in names if name not in args]
    if missing:
        raise ModelFormatError(f"{what} are missing: {quoted(missing)}")


def require_one_of(argument: str, value: object, supported: Iterable) -> None:
    """Raises ModelFormatError, with all supported values, if ``value`` is not one of them."""
    if value not in supported:
        raise ModelFormatError(
            f"{argument} = {value!r} is not supported; there are {quoted(supported)}"
        )


def quoted(names: Iterable) -> str:
    """Returns names in quotes, separated by commas."""
    return ", ".join(repr(name) for name in names)


def check_convertible(c: TransformerXLConfig) -> None:
    """Raises ModelFormatError if the model has settings that no other program has."""
    if c.vocab_size is None:
        raise ModelFormatError("cfg.vocab_size is None: a converted model needs a vocabulary size")
    for field in dataclasses.fields(c):
        key, value = field.name, getattr(c, field.name)
        if key not in CONVERTED and value != field.default:
            raise ModelFormatError(
                f"model.{key} = {value!r}: the other programs have no such setting; only a model"
                f" with the default {field.default!r} can be converted"
            )


def check_forms(c: TransformerXLConfig, program: str, forms: Mapping[str, Iterable]) -> None:
    """Raises ModelFormatError if ``program`` does not support the value of a setting.

    ``forms`` maps keys of settings to the values that the program supports.
    """
    check_convertible(c)
    see = "docs/converting.md has a table of the programs' settings"
    for key, supported in forms.items():
        if (value := getattr(c, key)) not in supported:
            has = f"{program} has {quoted(supported)} only"
            raise ModelFormatError(f"model.{key} = {value!r}: {has}; {see}")
    if clusters(c) != clusters(dataclasses.replace(c, proj_same_dim=True)):
        always = f"with div_val above 1, {program} projects embeddings of width d_model too"
        raise ModelFormatError(f"model.proj_same_dim = False: {always}; {see}")


def parameter_clusters(c: TransformerXLConfig) -> list[tuple[str, Cluster]]:
    """Returns each cluster that has its own parameters, with the suffix of the parameters' names.

    With ``div_val`` 1 there is only one cluster, of all symbols.
    """
    parts = clusters(c)
    if c.div_val > 1:
        return [(f"_{i}", part) for i, part in enumerate(parts)]
    return [("", dataclasses.replace(parts[0], stop=parts[-1].stop))]


def projected_outputs(c: TransformerXLConfig) -> list[tuple[int, int, bool]]:
    """Lists clusters with an output projection: index, width, whether the embedding shares it."""
    parts = [(i, part.width) for i, part in enumerate(clusters(c)) if part.projected]
    return [(i, width, i < len(c.tie_projs) and c.tie_projs[i]) for i, width in parts]
