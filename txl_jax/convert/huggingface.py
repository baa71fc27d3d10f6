"""Converts Hugging Face's TransfoXL (``transfo-xl-wt103``) to models of this project.

The library uses the authors' PyTorch code with some differences. Names begin with ``transformer.``.
Each layer has u and v, even if all layers share them. The logit of tail i is in column
``cutoffs[0]+i-1``, as in TF. Attention is always relative.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from txl_jax.checkpoint.errors import ModelFormatError
from txl_jax.config import TransformerXLConfig
from txl_jax.convert import arguments
from txl_jax.convert.pytorch import params_from_pytorch

PREFIX = "transformer."
"""Begins the names of all tensors except those of the softmax, also within ``module.``."""


def is_huggingface_name(name: str) -> bool:
    """Tells whether a tensor has a name of Hugging Face's library."""
    return name.removeprefix("module.").startswith(PREFIX)


def config_from_huggingface(config: Mapping[str, Any]) -> TransformerXLConfig:
    """Converts a ``config.json`` with the keys of ``TransfoXLConfig`` to a model configuration.

    ``tie_projs`` selects the tied projections, or ``proj_share_all_but_first`` if it is missing.
    Keys that do not affect the model are ignored. Raises ModelFormatError if a key is missing or
    not supported.
    """
    c = {"clamp_len": 1000, **config}
    if "n_token" in c:
        c.setdefault("vocab_size", c["n_token"])
    arguments.require_one_of("attn_type", c.get("attn_type", 0), (0,))
    defaults = {"dropout": 0.1, "dropatt": 0.0, "untie_r": True, "div_val": 4}
    names, what = ("pre_lnorm", "init_std", "proj_init_std"), "keys of config.json"
    settings = arguments.take_settings(c, what, *names, size="vocab_size", **defaults)
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
    state = {name.removeprefix(PREFIX): array for name, array in state_dict.items()}
    for name in ("r_w_bias", "r_r_bias"):
        _merge_layers(state, name, cfg)
    for name in ("crit.cluster_weight", "crit.cluster_bias"):
        if name in state:  # reversed to the order of the authors' PyTorch code
            state[name] = np.asarray(state[name])[::-1]
    return params_from_pytorch(state, cfg)


def _merge_layers(state: dict[str, np.ndarray], name: str, c: TransformerXLConfig) -> None:
    """Joins the biases of all layers into one tensor, as in the authors' PyTorch code."""
    layers = [f"layers.{n}.dec_attn.{name}" for n in range(c.n_layer)]
    found = {layer: state.pop(layer) for layer in layers if layer in state}
    problems: list[str] = []
    if c.untie_r:
        problems = [f"transformer.{layer} is missing" for layer in layers if layer not in found]
        state |= {} if problems else {name: np.stack(list(found.values()))}
    else:
        for layer, bias in found.items():
            if not np.array_equal(bias, state.setdefault(name, bias)):
                why = "differs from other layers, although untie_r is False"
                problems.append(f"transformer.{layer} {why}")
    if problems:
        raise ModelFormatError(f"the state does not fit the configuration: {problems[0]}")
