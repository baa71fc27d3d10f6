"""Converts models of the authors' PyTorch code and of NVIDIA's port to models of this project.

This module does not need torch: :func:`params_from_pytorch` takes
``{name: t.float().numpy() for name, t in model.state_dict().items()}``. Apart from :data:`LAYER`:

    original code                                       this project
    r_w_bias, r_r_bias       [N,H] or [L,N,H]           u, v; ``shaw``: u in its layer
    r_emb, r_bias            distance 0 in the last row distance, distance_bias: in row 0
    r_emb                    last token in the last row positions (absolute_per_layer): also there
    word_emb, crit                                      embedding.., softmax.. per cluster
    crit.cluster_weight, cluster_bias [C,..]            rows reversed: the logit of tail i is column
      (the logit of tail i is column -i of the head)    cutoffs[0]+i-1 of the head

With ``div_val`` 1, there is one embedding, and only output projections are per cluster. In NVIDIA's
code, ``crit.shared_out_projs.i`` is a second name of the embedding's projections.
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
"""The names of a layer's tensors after ``layers.i.``. Kernels have the shape [out, in]."""

SAME_LENGTH: dict[str, Window] = {"kimiyoung": "pytorch", "nvidia": "tf"}
"""The window of ``same_length=True`` in each code base. NVIDIA's window has one more key."""
ATTENTION: tuple[AttentionForm, ...] = ("relative", "shaw", "absolute", "absolute_per_layer")
"""The names in this project of the original's ``attn_type`` 0 to 3."""
LENGTHS = ("tgt_len", "ext_len", "mem_len")
"""Lengths whose sum is the number of table rows for ``shaw`` and ``absolute_per_layer``."""
IGNORED = ("adapt_inp", "dtype")
"""Arguments that do not affect the parameters. ``dtype`` exists only in NVIDIA's code."""


def config_from_pytorch(constructor_args: Mapping[str, Any]) -> TransformerXLConfig:
    """Converts keywords of the original's ``MemTransformerLM`` to a model configuration.

    Defaults are the original's (0 for ``dropout`` and ``dropatt``). Two more keywords are allowed:
    ``impl`` is ``"kimiyoung"`` (the default) or ``"nvidia"``, and ``untie_r`` gives each layer its
    own u and v, as in TF. Raises ModelFormatError if one is missing, unknown, or not supported.
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
        # The original ignores entries beyond the number of clusters.
        tie_projs=tuple(args.pop("tie_projs", None) or (False,))[: len(settings["cutoffs"]) + 1],
        sample_softmax=max(args.pop("sample_softmax", -1), 0),
    )
    if args:
        raise ModelFormatError(f"these are not {what}: {arguments.quoted(args)}")
    return cfg


def params_from_pytorch(
    state_dict: Mapping[str, np.ndarray], cfg: TransformerXLConfig
) -> dict[str, Any]:
    """Converts a state of the original to parameters of ``TransformerXL(cfg)``: float32 arrays.

    ``state_dict`` has numpy arrays, or their gradients, under the authors' or NVIDIA's names.
    ``cfg`` comes from :func:`config_from_pytorch`. Raises ModelFormatError, with all tensors that
    are missing or unknown, have a wrong shape, or differ from the tensor to which they are tied.
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
    tensors.finish(ignored=("pos_emb.inv_freq",))  # a constant, not a parameter
    return params


def is_nvidia(state_dict: Mapping[str, np.ndarray] | Tensors) -> bool:
    """Tells whether a state has the tensor names of NVIDIA's code."""
    return "crit.out_layers_biases.0" in state_dict


def _vocabulary(tensors: Tensors, c: TransformerXLConfig) -> dict[str, np.ndarray]:
    """Takes the parameters of embedding and softmax, and renames them to this project's names."""
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
