"""Hugging Face's TransfoXL (``transfo-xl-wt103``) as models of this project.

    config.json ──config_from_huggingface──▶ cfg
    its state_dict, as numpy ──params_from_huggingface(·, cfg)──▶ params

The library took over the authors' PyTorch code with TF's weights. What differs from the former:
names below ``transformer.``, u and v inside each layer (also where all layers share them), the
logit of tail i at column ``cutoffs[0]+i-1`` as in TF, and memory that starts as zeros which are
attended to. ``same_length`` is PyTorch's, M keys. Only the relative form of attention exists.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from txl_jax.checkpoint.errors import ModelFormatError
from txl_jax.config import TransformerXLConfig
from txl_jax.convert.pytorch import params_from_pytorch
from txl_jax.convert.tensors import one_of, required

REQUIRED = ("vocab_size", "n_layer", "d_model", "n_head", "d_head", "d_inner")


def config_from_huggingface(config: Mapping[str, Any]) -> TransformerXLConfig:
    """The configuration of the model that ``config.json`` describes.

    Args:
      config: keys of ``TransfoXLConfig``; those of the library around it are passed over. Which
        projections are tied stands in ``tie_projs``, else in ``proj_share_all_but_first``.

    Raises:
      ModelFormatError: a key that is missing or asks for what is not supported.
    """
    c = dict(config)
    if "vocab_size" not in c and "n_token" in c:
        c["vocab_size"] = c["n_token"]
    required(c, REQUIRED, "keys of config.json")
    one_of("attn_type", c.get("attn_type", 0), (0,))
    cutoffs, clamp_len = tuple(c.get("cutoffs") or ()), c.get("clamp_len", 1000)
    shared = [False] + [bool(c.get("proj_share_all_but_first", True))] * len(cutoffs)
    d_embed = c.get("d_embed")
    return TransformerXLConfig(
        vocab_size=c["vocab_size"],
        n_layer=c["n_layer"],
        d_model=c["d_model"],
        n_head=c["n_head"],
        d_head=c["d_head"],
        d_inner=c["d_inner"],
        d_embed=None if d_embed == c["d_model"] else d_embed,
        dropout=c.get("dropout", 0.1),
        dropatt=c.get("dropatt", 0.0),
        pre_lnorm=c.get("pre_lnorm", False),
        untie_r=c.get("untie_r", True),
        same_length="pytorch" if c.get("same_length", True) else False,
        clamp_len=clamp_len if clamp_len > 0 else -1,
        cutoffs=cutoffs,
        div_val=c.get("div_val", 4),
        tie_weight=c.get("tie_word_embeddings", c.get("tie_weight", True)),
        tie_projs=tuple(c.get("tie_projs") or shared)[: len(cutoffs) + 1],
        init_std=c.get("init_std", 0.02),
        proj_init_std=c.get("proj_init_std", 0.01),
        norm_epsilon=c.get("layer_norm_epsilon", 1e-5),
    )


def params_from_huggingface(
    state_dict: Mapping[str, np.ndarray], cfg: TransformerXLConfig
) -> dict[str, Any]:
    """The parameters of ``TransformerXL(cfg)`` from a ``TransfoXLLMHeadModel``'s state.

    Args:
      state_dict: arrays by name. Without the softmax (``TransfoXLModel`` alone) it is refused.
      cfg: from :func:`config_from_huggingface`. With ``untie_r`` False the u and v of all
        layers must be equal.

    Raises:
      ModelFormatError: as :func:`~txl_jax.convert.pytorch.params_from_pytorch`.
    """
    state = dict(state_dict)
    for name in ("r_w_bias", "r_r_bias"):
        _collect(state, name, cfg)
    renamed = {name.removeprefix("transformer."): array for name, array in state.items()}
    for name in ("crit.cluster_weight", "crit.cluster_bias"):
        if name in renamed:  # to the order of the authors' PyTorch code
            renamed[name] = np.asarray(renamed[name])[::-1]
    return params_from_pytorch(renamed, cfg)


def _collect(state: dict[str, np.ndarray], name: str, c: TransformerXLConfig) -> None:
    """Puts a bias that stands in every layer at the top, where PyTorch's code has it."""
    of_layer = [f"transformer.layers.{n}.dec_attn.{name}" for n in range(c.n_layer)]
    found = {layer: state.pop(layer) for layer in of_layer if layer in state}
    if c.untie_r:
        missing = [layer for layer in of_layer if layer not in found]
        if missing:
            raise ModelFormatError(
                f"the state does not fit the configuration: {missing[0]} is missing"
            )
        state[f"transformer.{name}"] = np.stack([found[layer] for layer in of_layer])
        return
    for layer, bias in found.items():
        if not np.array_equal(bias, state.setdefault(f"transformer.{name}", bias)):
            raise ModelFormatError(
                f"the state does not fit the configuration: {layer} differs from that of other"
                " layers, and untie_r is False"
            )
