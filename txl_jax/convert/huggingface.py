"""Converts models of Hugging Face's TransfoXL (``transfo-xl-wt103``), in both directions.

The library uses the authors' PyTorch code with some differences. Names begin with ``transformer.``.
Each layer stores u and v; if the layers share them, these are copies. The logit of tail i is in
column ``cutoffs[0]+i-1`` of the head, as in TF. Attention is always relative.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from txl_jax.config import TransformerXLConfig
from txl_jax.convert import arguments
from txl_jax.convert.pytorch import FREQUENCIES, constants
from txl_jax.convert.pytorch import table as pytorch_table
from txl_jax.convert.table import Entry, read_params, view, write_state

PREFIX = "transformer."
"""The prefix of all tensors except those of the softmax. ``module.`` can precede this prefix."""
NAMES = ("pre_lnorm", "init_std", "proj_init_std")
"""Keys that have the same name and meaning in this project, in addition to the model's sizes."""
DEFAULTS: dict[str, Any] = {"dropout": 0.1, "dropatt": 0.0, "untie_r": True, "div_val": 4}
"""Further keys with the same name and meaning. A missing key has the value given here."""


def is_huggingface_name(name: str) -> bool:
    """Tells whether a tensor has a name of Hugging Face's library."""
    return name.removeprefix("module.").startswith(PREFIX)


def config_from_huggingface(config: Mapping[str, Any]) -> TransformerXLConfig:
    """Converts a ``config.json`` with the keys of ``TransfoXLConfig`` to a model configuration.

    ``tie_projs`` or, if this is missing, ``proj_share_all_but_first`` selects tied projections.
    Keys that do not affect the model are ignored. Raises ModelFormatError if a key is missing or
    not supported.
    """
    c = {"clamp_len": 1000, **arguments.given(config)}
    if "n_token" in c:
        c.setdefault("vocab_size", c["n_token"])
    arguments.require_one_of("attn_type", c.get("attn_type", 0), (0,))
    what = "keys of config.json"
    settings = arguments.take_settings(c, what, *NAMES, size="vocab_size", **DEFAULTS)
    shared = bool(c.get("proj_share_all_but_first", True))
    n_clusters = len(settings["cutoffs"]) + 1
    return TransformerXLConfig(
        **settings,
        same_length="pytorch" if c.get("same_length", True) else False,
        tie_weight=c.get("tie_word_embeddings", c.get("tie_weight", True)),
        tie_projs=tuple(c.get("tie_projs") or [False] + [shared] * n_clusters)[:n_clusters],
        norm_epsilon=c.get("layer_norm_epsilon", 1e-5),
    )


def params_from_huggingface(
    state_dict: Mapping[str, np.ndarray], cfg: TransformerXLConfig
) -> dict[str, Any]:
    """Converts the state of a ``TransfoXLLMHeadModel`` to parameters of ``TransformerXL(cfg)``.

    ``cfg`` comes from :func:`config_from_huggingface`. Raises ModelFormatError for the errors of
    :func:`~txl_jax.convert.pytorch.params_from_pytorch`, for a state without the softmax
    (``TransfoXLModel``), and for u and v that differ between layers although ``untie_r`` is False.
    """
    arguments.check_convertible(cfg)
    return read_params(table(cfg), state_dict, ignored=(PREFIX + FREQUENCIES,))


def config_to_huggingface(
    cfg: TransformerXLConfig, *, tgt_len: int, mem_len: int, ext_len: int = 0
) -> dict[str, Any]:
    """Converts a model's configuration to a ``config.json`` of ``TransfoXLLMHeadModel``.

    The lengths are in tokens. Settings that matter only in training, other than ``dropout``,
    ``dropatt`` and those of the initial weights, have no key. Raises ModelFormatError for a setting
    that the library lacks.
    """
    forms = {"attention": ("relative",), "same_length": (False, "pytorch")}
    arguments.check_forms(cfg, "Hugging Face's TransfoXL", forms)
    return {
        "model_type": "transfo-xl",
        "architectures": ["TransfoXLLMHeadModel"],
        **arguments.give_settings(cfg, *NAMES, *DEFAULTS, size="vocab_size"),
        **{"tgt_len": tgt_len, "ext_len": ext_len, "mem_len": mem_len},
        "same_length": bool(cfg.same_length),
        "tie_word_embeddings": cfg.tie_weight,
        "layer_norm_epsilon": cfg.norm_epsilon,
    }


def params_to_huggingface(params: Any, cfg: TransformerXLConfig) -> dict[str, np.ndarray]:
    """Converts parameters of ``TransformerXL(cfg)`` to a state of a ``TransfoXLLMHeadModel``.

    The state has float32 arrays. A tied tensor is under each of its names. Raises ModelFormatError,
    which names all parameters that are missing or unknown, or have a wrong shape.
    """
    arguments.check_convertible(cfg)
    frequencies = {PREFIX + name: array for name, array in constants(cfg).items()}
    return write_state(table(cfg), params) | frequencies


def table(c: TransformerXLConfig) -> list[Entry]:
    """Lists the parameters in the state: the authors' table, with this library's changes."""
    entries = []
    for entry in pytorch_table(c, "kimiyoung"):
        path = next(iter(entry.places))
        if path in ("u", "v"):
            names = [f"{PREFIX}layers.{i}.dec_attn.{entry.name}" for i in range(c.n_layer)]
            if c.untie_r:
                own = {path: view(1, c.n_head, c.d_head)}
                entries += [Entry(name, entry.shape[1:], own) for name in names]
                continue
            entry = entry._replace(aliases=dict.fromkeys(names, "untie_r is False"))
        elif path in ("cluster_weight", "cluster_bias"):
            entry = entry._replace(places={path: view()})
        name = entry.name if entry.name.startswith("crit.") else PREFIX + entry.name
        entries.append(entry._replace(name=name))
    return entries
