"""One small model for every value of every setting of the model.

:func:`models` includes a new setting, or a new value of a setting, automatically, so tests over
all models cover it. A setting that is a number needs a value in :data:`VALUES`.
"""

import dataclasses
import functools
import typing
from typing import Any, Literal

import tiny_models as tiny

import txl_jax

VALUES: dict[str, list[Any]] = {
    "vocab_size": [17],
    "n_layer": [3],
    "d_model": [10],
    "n_head": [4],
    "d_head": [5],
    "d_inner": [14],
    "d_embed": [5],
    **{key: [0.1] for key in ("dropout", "dropout_input", "dropout_output", "dropout_qkv")},
    **{key: [0.1] for key in ("dropout_embedding", "dropatt", "dropout_latent")},
    "gate_bias": [2.0],
    "clamp_len": [3],
    "n_positions": [6],
    "cutoffs": [(4, 9)],
    "div_val": [2],
    "tie_projs": [(True, False, True)],
    "sample_softmax": [4],
    "mixtures": [3],
    **{key: [0.1] for key in ("init_std", "proj_init_std", "norm_epsilon")},
}
"""Values other than the default, for each setting whose type does not list its values."""

_CLUSTERS: dict = {"cutoffs": (4, 9), "div_val": 2}
NEEDS: dict[str, dict] = {
    "final_norm": {"pre_lnorm": True},
    "gate_bias": {"gate": "gru"},
    "n_positions": {"attention": "shaw"},
    "dropout_latent": {"mixtures": 2},
    "div_val": _CLUSTERS,
    "tie_projs": _CLUSTERS,
    "proj_same_dim": _CLUSTERS,
    "tie_weight": {"d_embed": 5},
}
"""For each setting, the other settings that it needs to have an effect."""


def values(field: dataclasses.Field) -> list:
    """Every value that the setting's type lists, or, if it lists none, the values in ``VALUES``."""
    kind = typing.get_type_hints(txl_jax.TransformerXLConfig)[field.name]
    if kind is bool:
        return [False, True]
    if any(typing.get_origin(part) is Literal for part in (kind, *typing.get_args(kind))):
        return list(_listed(kind))
    return VALUES[field.name]


def _listed(kind: Any):
    """The values of a union of ``Literal`` types, such as ``Literal["gru"] | None``."""
    for part in typing.get_args(kind):
        if typing.get_origin(part) is Literal:
            yield from typing.get_args(part)
        else:
            yield None if part is type(None) else part


@functools.cache
def models() -> dict[str, txl_jax.TransformerXLConfig]:
    """Configurations by a name such as ``gate=gru``, each with the settings that it needs."""
    found = {}
    for field in dataclasses.fields(txl_jax.TransformerXLConfig):
        for value in values(field):
            needs = tiny.ATTENTION[value] if field.name == "attention" else {}
            needs = {**NEEDS.get(field.name, {}), **needs}
            found[f"{field.name}={value}"] = tiny.config(**{**needs, field.name: value})
    return found
