"""Models of the authors' PyTorch code, and of NVIDIA's port of it, as models of this project.

    kwargs of MemTransformerLM ──config_from_pytorch──▶ cfg ──▶ TransformerXL(cfg)
    its state_dict, as numpy ───params_from_pytorch(·, cfg)──▶ params ──▶ {"params": params}

Nothing here needs torch: :func:`params_from_pytorch` takes
``{name: t.float().numpy() for name, t in model.state_dict().items()}``. :data:`LAYER` has the names
of a layer's tensors. Other differences:

    theirs                                              ours
    r_w_bias, r_r_bias       [N,H] or [L,N,H]           u, v; ``shaw``: u in its layer
    r_emb, r_bias            distance 0 in the last row distance, distance_bias: in row 0
                             last token in the last row positions: the same (absolute_per_layer)
    word_emb, crit                                      embedding.., softmax.. per cluster
    crit.cluster_weight, cluster_bias [C,..]            rows reversed: there tail i's logit is
                                                        column -i of the head, here cutoffs[0]+i-1

With ``div_val`` 1 there is one embedding, and only output projections are per cluster. NVIDIA's
``crit.shared_out_projs.i`` is a second name of the embedding's projections.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from txl_jax.checkpoint.errors import ModelFormatError
from txl_jax.checkpoint.tensors import Tensors
from txl_jax.config import AttentionForm, TransformerXLConfig, Window
from txl_jax.convert import arguments
from txl_jax.model.adaptive import clusters

LAYER = {
    "qkv": "dec_attn.qkv_net.weight",
    "q": "dec_attn.q_net.weight",
    "kv": "dec_attn.kv_net.weight",
    "attention/position": "dec_attn.r_net.weight",
    "attention/output": "dec_attn.o_net.weight",
    "norm_attention/scale": "dec_attn.layer_norm.weight",
    "norm_attention/bias": "dec_attn.layer_norm.bias",
    "feed_forward/inner/kernel": "pos_ff.CoreNet.0.weight",
    "feed_forward/inner/bias": "pos_ff.CoreNet.0.bias",
    "feed_forward/outer/kernel": "pos_ff.CoreNet.3.weight",
    "feed_forward/outer/bias": "pos_ff.CoreNet.3.bias",
    "norm_feed_forward/scale": "pos_ff.layer_norm.weight",
    "norm_feed_forward/bias": "pos_ff.layer_norm.bias",
}
"""The names of a layer's tensors after ``layers.i.``; a kernel is [out, in]."""

SAME_LENGTH: dict[str, Window] = {"kimiyoung": "pytorch", "nvidia": "tf"}
"""``same_length=True`` in each code base: NVIDIA's lets a query attend to one key more."""
ATTENTION: tuple[AttentionForm, ...] = ("relative", "shaw", "absolute", "absolute_per_layer")
"""The names here of the original's ``attn_type`` 0 to 3."""
LENGTHS = ("tgt_len", "ext_len", "mem_len")
"""Their sum is the number of rows in the position table of ``shaw`` and ``absolute_per_layer``."""
IGNORED = ("adapt_inp", "dtype")
"""Arguments that do not affect parameters; the second is NVIDIA's."""


def config_from_pytorch(constructor_args: Mapping[str, Any]) -> TransformerXLConfig:
    """The configuration of the model that the original's constructor would build.

    ``constructor_args``: keywords of ``MemTransformerLM`` with the original's defaults (0 for
    ``dropout`` and ``dropatt``), and two more: ``impl``, ``"kimiyoung"`` (the default) or
    ``"nvidia"``, and ``untie_r``, whether each layer has its own u and v (TF). Raises
    ModelFormatError if an argument is missing, unknown, or not supported.
    """
    args = {name: value for name, value in constructor_args.items() if name not in IGNORED}
    names = ("pre_lnorm", "untie_r", "div_val", "tie_weight")
    what = "constructor arguments of the original"
    settings = arguments.take_settings(args, what, *names, dropout=0.0, dropatt=0.0)
    impl, attn_type = args.pop("impl", "kimiyoung"), args.pop("attn_type", 0)
    arguments.require_one_of("impl", impl, SAME_LENGTH)
    arguments.require_one_of("attn_type", attn_type, range(len(ATTENTION)))
    attention, n_positions = ATTENTION[attn_type], None
    if attention in ("shaw", "absolute_per_layer"):
        needed = f"arguments that attn_type = {attn_type} needs"
        arguments.require(args, ("tgt_len", "mem_len"), needed)
        n_positions = sum(args.get(name) or 0 for name in LENGTHS)
    for name in LENGTHS:
        args.pop(name, None)
    cfg = TransformerXLConfig(
        **settings,
        attention=attention,
        same_length=SAME_LENGTH[impl] if args.pop("same_length", False) else False,
        n_positions=n_positions,
        # the original ignores entries for more clusters than there are
        tie_projs=tuple(args.pop("tie_projs", None) or (False,))[: len(settings["cutoffs"]) + 1],
        sample_softmax=max(args.pop("sample_softmax", -1), 0),
    )
    if args:
        raise ModelFormatError(f"not {what}: {arguments.quoted(args)}")
    return cfg


def params_from_pytorch(
    state_dict: Mapping[str, np.ndarray], cfg: TransformerXLConfig
) -> dict[str, Any]:
    """The parameters of ``TransformerXL(cfg)`` from a state of the original, float32 numpy arrays.

    ``state_dict``: arrays by the authors' or NVIDIA's names; gradients are converted likewise.
    ``cfg``: from :func:`config_from_pytorch`. Raises ModelFormatError, which names every tensor
    that is missing, unknown, has the wrong shape, or differs from the one that it is tied to.
    """
    c, n, h, rows = cfg, cfg.n_head, cfg.d_head, cfg.n_positions or 0
    arguments.check_convertible(c)
    tensors = Tensors(state_dict)
    params: dict[str, Any] = _vocabulary(tensors, c)
    for i in range(c.n_layer):
        prefix = f"layers.{i}."
        params[f"layer_{i}"] = arguments.take_layer(tensors, c, LAYER, prefix, transposed=True)
    of_layers = lambda name, *shapes: tensors.take(name, *((c.n_layer, *shape) for shape in shapes))
    if c.attention == "relative":
        shape = (c.n_layer,) * c.untie_r + (n, h)
        params |= {"u": tensors.take("r_w_bias", shape), "v": tensors.take("r_r_bias", shape)}
    elif c.attention == "shaw":
        u = of_layers("r_w_bias", (n, h))
        distance = of_layers("r_emb", (rows, n, h))[:, ::-1]
        distance_bias = of_layers("r_bias", (rows, n))[:, ::-1]
        for i in range(c.n_layer):
            own = {"u": u[i], "distance": distance[i], "distance_bias": distance_bias[i]}
            params[f"layer_{i}"]["attention"] |= own
    elif c.attention == "absolute_per_layer":
        positions = of_layers("r_emb", (rows, c.d_model), (rows, n, h))  # NVIDIA's table is flat
        for i in range(c.n_layer):
            params[f"layer_{i}"]["positions"] = positions[i]
    tensors.finish(ignored=("pos_emb.inv_freq",))  # no parameter
    return params


def is_nvidia(state_dict: Mapping[str, np.ndarray] | Tensors) -> bool:
    """Whether the names are those of NVIDIA's code."""
    return "crit.out_layers_biases.0" in state_dict


def _vocabulary(tensors: Tensors, c: TransformerXLConfig) -> dict[str, np.ndarray]:
    """The parameters of embedding and softmax, by their names here."""
    bias, weight = "crit.out_layers.{}.bias", "crit.out_layers.{}.weight"
    if is_nvidia(tensors):
        bias, weight = "crit.out_layers_biases.{}", "crit.out_layers_weights.{}"
    elif c.sample_softmax and "out_layer.bias" in tensors:
        bias, weight = "out_layer.bias", "out_layer.weight"
    found: dict[str, np.ndarray] = {}
    for i, (end, part) in enumerate(arguments.parameter_clusters(c)):
        name, shape = f"word_emb.emb_layers.{i}.weight", (part.size, part.width)
        embedding = found["embedding" + end] = tensors.take(name, shape)
        found["softmax_bias" + end] = tensors.take(bias.format(i), (part.size,))
        if c.tie_weight:
            tensors.alias(weight.format(i), name, embedding, "tie_weight is True")
        else:
            found["softmax_weight" + end] = tensors.take(weight.format(i), shape)
        if part.projected:
            name = f"word_emb.emb_projs.{i}"
            matrix = tensors.take(name, (c.d_model, part.width))
            found["embedding_projection" + end] = matrix.T
            tensors.alias(f"crit.shared_out_projs.{i}", name, matrix, "is another name of it")
    for i, width, tied in arguments.projected_outputs(c):
        name = f"crit.out_projs.{i}"
        if tied:
            k, end = (i, f"_{i}") if c.div_val > 1 else (0, "")
            matrix = found["embedding_projection" + end].T
            tensors.alias(name, f"word_emb.emb_projs.{k}", matrix, f"tie_projs[{i}] is True")
        else:
            found[f"softmax_projection_{i}"] = tensors.take(name, (c.d_model, width)).T
    if c.cutoffs:
        shape = (len(c.cutoffs), clusters(c)[0].width)
        found["cluster_weight"] = tensors.take("crit.cluster_weight", shape)[::-1]
        found["cluster_bias"] = tensors.take("crit.cluster_bias", shape[:1])[::-1]
    return found
