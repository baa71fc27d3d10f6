"""Models of the authors' PyTorch code, and of NVIDIA's port of it, as models of this project.

    kwargs of MemTransformerLM ──config_from_pytorch──▶ cfg ──▶ TransformerXL(cfg)
    its state_dict, as numpy ───params_from_pytorch(·, cfg)──▶ params ──▶ {"params": params}

Nothing here needs torch: :func:`params_from_pytorch` takes
``{name: t.float().numpy() for name, t in model.state_dict().items()}``. The two layouts:

    theirs                                              ours
    dec_attn.qkv_net.weight  [3*N*H, D] q, k, v stacked query, key, value  [D,N,H]
    dec_attn.{q,kv}_net.weight  the same, in two        (the absolute forms)
    dec_attn.r_net.weight    [N*H, D]                   position           [D,N,H]
    dec_attn.o_net.weight    [D, N*H]                   output             [N,H,D]
    pos_ff.CoreNet.{0,3}     Linear, weight [out, in]   inner, outer       kernel [in, out]
    r_w_bias, r_r_bias       [N,H] or [L,N,H]           u, v; ``shaw``: u in its layer
    r_emb, r_bias            distance 0 in the last row distance, distance_bias: in row 0
                             last token in the last row positions: the same (absolute_per_layer)

    word_emb, crit                                      embedding.., softmax.. per cluster
    crit.cluster_weight, cluster_bias [C,..]            rows reversed: there tail i's logit is
                                                        column -i of the head, here cutoffs[0]+i-1

With ``div_val`` 1 there is one embedding, and only output projections are per cluster. NVIDIA's
names: ``crit.out_layers_biases.i``, untied ``crit.out_layers_weights.i``, and
``crit.shared_out_projs.i`` as a second name of the embedding's projections. A model trained with a
sampled softmax has ``out_layer`` in place of ``crit``.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from txl_jax.checkpoint.errors import ModelFormatError
from txl_jax.checkpoint.tensors import Tensors
from txl_jax.config import AttentionForm, TransformerXLConfig, Window
from txl_jax.convert.arguments import (
    SHAPE,
    check_convertible,
    is_tied,
    parameter_clusters,
    quoted,
    require,
    require_one_of,
    take_dense,
    take_layer_norm,
    take_settings,
)
from txl_jax.model.adaptive import clusters

SAME_LENGTH: dict[str, Window] = {"kimiyoung": "pytorch", "nvidia": "tf"}
"""``same_length=True`` in each code base: NVIDIA's lets a query attend to one key more."""

ATTENTION: tuple[AttentionForm, ...] = ("relative", "shaw", "absolute", "absolute_per_layer")
"""The names here of the original's ``attn_type`` 0 to 3."""

LENGTHS = ("tgt_len", "ext_len", "mem_len")
"""Their sum is the number of rows in the position table of ``shaw`` and ``absolute_per_layer``."""

IGNORED = ("adapt_inp", "dtype")
"""Arguments that do not affect parameters; the second is NVIDIA's."""

BUFFERS = ("pos_emb.inv_freq",)
"""Optional entries of a state that are not parameters."""


def config_from_pytorch(constructor_args: Mapping[str, Any]) -> TransformerXLConfig:
    """The configuration of the model that the original's constructor would build.

    Args:
      constructor_args: keywords of ``MemTransformerLM`` with the original's defaults; the default
        of ``dropout`` and ``dropatt`` is 0. Two more are accepted: ``impl``, ``"kimiyoung"`` (the
        default) or ``"nvidia"``, and ``untie_r``, whether each layer has its own u and v (TF).

    Raises:
      ModelFormatError: an argument is missing, unknown, or not supported.
    """
    args = {name: value for name, value in constructor_args.items() if name not in IGNORED}
    require(args, ("n_token", *SHAPE), "constructor arguments of the original")
    impl, attn_type = args.pop("impl", "kimiyoung"), args.pop("attn_type", 0)
    require_one_of("impl", impl, SAME_LENGTH)
    require_one_of("attn_type", attn_type, range(len(ATTENTION)))
    attention, n_positions = ATTENTION[attn_type], None
    if attention in ("shaw", "absolute_per_layer"):
        require(args, ("tgt_len", "mem_len"), f"arguments that attn_type = {attn_type} needs")
        n_positions = sum(args.get(name) or 0 for name in LENGTHS)
    for name in LENGTHS:
        args.pop(name, None)
    names = ("pre_lnorm", "untie_r", "div_val", "tie_weight")
    settings = take_settings(args, *names, dropout=0.0, dropatt=0.0)
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
        raise ModelFormatError(f"not constructor arguments of the original: {quoted(args)}")
    return cfg


def params_from_pytorch(
    state_dict: Mapping[str, np.ndarray], cfg: TransformerXLConfig
) -> dict[str, Any]:
    """The parameters of ``TransformerXL(cfg)`` from a state of the original, float32 numpy arrays.

    Args:
      state_dict: arrays by the names of the authors' or of NVIDIA's code; gradients by these names
        are converted in the same way.
      cfg: from :func:`config_from_pytorch`.

    Raises:
      ModelFormatError: names every tensor that is missing, unknown, has the wrong shape, or
        differs from the one that it is tied to.
    """
    c = cfg
    check_convertible(c)
    tensors = Tensors(state_dict)
    params: dict[str, Any] = {**_global_bias(tensors, c), **_vocabulary(tensors, c)}
    tables = _position_tables(tensors, c)
    for n in range(c.n_layer):
        table = {name: rows[n] for name, rows in tables.items()}
        outside = {"positions": table.pop("positions")} if "positions" in table else {}
        attention, feed_forward = f"layers.{n}.dec_attn.", f"layers.{n}.pos_ff."
        core = f"{feed_forward}CoreNet."
        params[f"layer_{n}"] = {
            "attention": _attention(tensors, c, attention) | table,
            "norm_attention": _layer_norm(tensors, c, attention),
            "feed_forward": {
                "inner": take_dense(tensors, f"{core}0.", c.d_model, c.d_inner, transposed=True),
                "outer": take_dense(tensors, f"{core}3.", c.d_inner, c.d_model, transposed=True),
            },
            "norm_feed_forward": _layer_norm(tensors, c, feed_forward),
            **outside,
        }
    tensors.finish(BUFFERS)
    return params


def is_nvidia(state_dict: Mapping[str, np.ndarray]) -> bool:
    """Whether the names are those of NVIDIA's code."""
    return "crit.out_layers_biases.0" in state_dict


def _global_bias(tensors: Tensors, c: TransformerXLConfig) -> dict[str, np.ndarray]:
    """u and v of ``relative``; other forms have none outside the layers."""
    if c.attention != "relative":
        return {}
    shape = (c.n_layer,) * c.untie_r + (c.n_head, c.d_head)
    return {"u": tensors.take("r_w_bias", shape), "v": tensors.take("r_r_bias", shape)}


def _position_tables(tensors: Tensors, c: TransformerXLConfig) -> dict[str, np.ndarray]:
    """A layer's position parameters by their names here, stacked: [L,…]."""
    size, n, h, rows = c.n_layer, c.n_head, c.d_head, c.n_positions or 0
    if c.attention == "shaw":
        return {
            "u": tensors.take("r_w_bias", (size, n, h)),
            "distance": tensors.take("r_emb", (size, rows, n, h))[:, ::-1],
            "distance_bias": tensors.take("r_bias", (size, rows, n))[:, ::-1],
        }
    if c.attention == "absolute_per_layer":  # NVIDIA's table is flat
        return {"positions": tensors.take("r_emb", (size, rows, c.d_model), (size, rows, n, h))}
    return {}


def _attention(tensors: Tensors, c: TransformerXLConfig, prefix: str) -> dict[str, np.ndarray]:
    d, n, h = c.d_model, c.n_head, c.d_head

    def heads(name: str, parts: int) -> np.ndarray:  # [D,parts,N,H]
        stacked = tensors.take(f"{prefix}{name}.weight", (parts * n * h, d))
        return stacked.T.reshape(d, parts, n, h)

    output = tensors.take(prefix + "o_net.weight", (d, n * h)).T.reshape(n, h, d)
    if c.memory_free:
        kv = heads("kv_net", 2)
        query, key, value = heads("q_net", 1)[:, 0], kv[:, 0], kv[:, 1]
        return {"query": query, "key": key, "value": value, "output": output}
    qkv = heads("qkv_net", 3)
    found = {"query": qkv[:, 0], "key": qkv[:, 1], "value": qkv[:, 2], "output": output}
    return found | ({"position": heads("r_net", 1)[:, 0]} if c.attention == "relative" else {})


def _layer_norm(tensors: Tensors, c: TransformerXLConfig, prefix: str) -> dict[str, np.ndarray]:
    name = f"{prefix}layer_norm."
    return take_layer_norm(tensors, f"{name}weight", f"{name}bias", c.d_model)


def _vocabulary(tensors: Tensors, c: TransformerXLConfig) -> dict[str, np.ndarray]:
    """The parameters of embedding and softmax, by their names here."""
    bias, weight = _output_names(tensors, c)
    found: dict[str, np.ndarray] = {}
    for i, (end, part) in enumerate(parameter_clusters(c)):
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
    return found | _output_projections(tensors, c, found) | _cluster_logits(tensors, c)


def _output_names(tensors: Tensors, c: TransformerXLConfig) -> tuple[str, str]:
    """The names of output bias and weight, with {} for the cluster."""
    if "crit.out_layers_biases.0" in tensors:
        return "crit.out_layers_biases.{}", "crit.out_layers_weights.{}"
    if c.sample_softmax and "out_layer.bias" in tensors:
        return "out_layer.bias", "out_layer.weight"
    return "crit.out_layers.{}.bias", "crit.out_layers.{}.weight"


def _output_projections(
    tensors: Tensors, c: TransformerXLConfig, found: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    own = {}
    for i, part in enumerate(clusters(c)):
        if not part.projected:
            continue
        name = f"crit.out_projs.{i}"
        if is_tied(c, i):
            k, end = (i, f"_{i}") if c.div_val > 1 else (0, "")
            matrix = found["embedding_projection" + end].T
            tensors.alias(name, f"word_emb.emb_projs.{k}", matrix, f"tie_projs[{i}] is True")
        else:
            own[f"softmax_projection_{i}"] = tensors.take(name, (c.d_model, part.width)).T
    return own


def _cluster_logits(tensors: Tensors, c: TransformerXLConfig) -> dict[str, np.ndarray]:
    n = len(c.cutoffs)
    if not n:
        return {}
    shape = (n, clusters(c)[0].width)
    return {
        "cluster_weight": tensors.take("crit.cluster_weight", shape)[::-1],
        "cluster_bias": tensors.take("crit.cluster_bias", (n,))[::-1],
    }
