"""Converts models of the authors' PyTorch code and of NVIDIA's port, in both directions.

This module does not need torch: :func:`params_from_pytorch` takes
``{name: t.float().numpy() for name, t in model.state_dict().items()}``. Besides the names in
:data:`LAYER`, these tensors correspond:

    original code                                       this project
    r_w_bias, r_r_bias       [N,H] or [L,N,H]           u, v; ``shaw``: only u, one in each layer
    r_emb, r_bias            distance 0 in the last row distance, distance_bias: in row 0
    r_emb                    last token in the last row positions (absolute_per_layer): same rows
    word_emb, crit                                      embedding.., softmax.. per cluster
    crit.cluster_weight, cluster_bias [C,..]            rows reversed: the logit of tail i is column
      (the logit of tail i is column -i of the head)    cutoffs[0]+i-1 of the head

With ``div_val`` 1, there is one embedding, and only output projections are per cluster. In NVIDIA's
code, ``crit.shared_out_projs.i`` is a second name of the embedding's projections.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from txl_jax.checkpoint.errors import ModelFormatError
from txl_jax.config import AttentionForm, TransformerXLConfig, Window
from txl_jax.convert import arguments
from txl_jax.convert.table import Entry, View, layer_entries, read_params, view, write_state
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
"""This project's names for ``attn_type`` 0 to 3 of the original."""
LENGTHS = ("tgt_len", "ext_len", "mem_len")
"""Lengths whose sum is the number of table rows for ``shaw`` and ``absolute_per_layer``."""
IGNORED = ("adapt_inp", "dtype")
"""Arguments that do not affect the parameters. ``dtype`` exists only in NVIDIA's code."""
NAMES = ("pre_lnorm", "div_val", "tie_weight")
"""Arguments that have the same name and meaning in this project, besides the model's sizes."""
RATES: dict[str, Any] = {"dropout": 0.0, "dropatt": 0.0}
"""Further arguments with the same name and meaning. A missing one has the value given here."""
PROGRAM = {"kimiyoung": "the authors' PyTorch code", "nvidia": "NVIDIA's code"}
FREQUENCIES = "pos_emb.inv_freq"
"""The name of a tensor that is not a parameter, because its values are always the same."""


def config_from_pytorch(constructor_args: Mapping[str, Any]) -> TransformerXLConfig:
    """Converts keywords of the original's ``MemTransformerLM`` to a model configuration.

    Defaults are the original's (0 for ``dropout`` and ``dropatt``). Two more keywords are allowed:
    ``impl`` is ``"kimiyoung"`` (the default) or ``"nvidia"``, and ``untie_r`` gives each layer its
    own u and v, as in TF. Raises ModelFormatError if one of the keywords is missing, unknown, or
    not supported.
    """
    args = arguments.given(constructor_args, IGNORED)
    what = "constructor arguments of MemTransformerLM"
    settings = arguments.take_settings(args, what, *NAMES, "untie_r", **RATES)
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
        raise ModelFormatError(f"these are no {what}: {arguments.quoted(args)}; remove them")
    return cfg


def params_from_pytorch(
    state_dict: Mapping[str, np.ndarray], cfg: TransformerXLConfig
) -> dict[str, Any]:
    """Converts a state of the original to parameters of ``TransformerXL(cfg)``: float32 arrays.

    ``state_dict`` has numpy arrays, or their gradients, under the authors' or NVIDIA's names.
    ``cfg`` comes from :func:`config_from_pytorch`. Raises ModelFormatError, which names all tensors
    that are missing or unknown, have a wrong shape, or differ from the tensor to which they are
    tied.
    """
    arguments.check_convertible(cfg)
    if cfg.sample_softmax:  # the authors' code then has another name for the output layer
        moved = lambda name: re.sub("^out_layer", "crit.out_layers.0", name)
        state_dict = {moved(name): array for name, array in state_dict.items()}
    impl = "nvidia" if is_nvidia(state_dict) else "kimiyoung"
    return read_params(table(cfg, impl), state_dict, ignored=(FREQUENCIES,))


def config_to_pytorch(
    cfg: TransformerXLConfig, *, tgt_len: int, mem_len: int, ext_len: int = 0, impl: str
) -> dict[str, Any]:
    """Converts a model's configuration to keywords of the original's ``MemTransformerLM``.

    ``impl`` is ``"kimiyoung"`` or ``"nvidia"``. The lengths are in tokens. If the model has a table
    of positions, the sum of the lengths must be the number of rows of this table. Then ``ext_len``
    and ``mem_len`` are shortened if they are too large, and ``tgt_len`` is the remainder. The
    original's ``reset_length`` can change the lengths. Settings that matter only in training, other
    than ``dropout`` and ``dropatt``, have no keyword. Raises ModelFormatError for a setting that
    the original lacks.
    """
    c, windows = cfg, (False, SAME_LENGTH[impl])
    forms = {"attention": ATTENTION, "same_length": windows, "untie_r": (False,)}
    arguments.check_forms(c, PROGRAM[impl], {**forms, "norm_epsilon": (1e-5,)})
    if c.n_positions is not None:
        ext_len = min(ext_len, c.n_positions - 1)
        mem_len = min(mem_len, c.n_positions - 1 - ext_len)
        tgt_len = c.n_positions - ext_len - mem_len
    return {
        **arguments.give_settings(c, *NAMES, *RATES),
        "attn_type": ATTENTION.index(c.attention),
        "same_length": bool(c.same_length),
        **dict(zip(LENGTHS, (tgt_len, ext_len, mem_len), strict=True)),
        **({"dtype": None} if impl == "nvidia" else {}),  # required, but without effect
    }


def params_to_pytorch(params: Any, cfg: TransformerXLConfig, *, impl: str) -> dict[str, np.ndarray]:
    """Converts parameters of ``TransformerXL(cfg)`` to a state of the original: float32 arrays.

    ``impl`` is ``"kimiyoung"`` or ``"nvidia"``. A tied tensor is under each name that it has in the
    original's ``state_dict``. Raises ModelFormatError, which names all parameters that are missing
    or unknown, or have a wrong shape.
    """
    arguments.check_convertible(cfg)
    return write_state(table(cfg, impl), params) | constants(cfg)


def constants(c: TransformerXLConfig) -> dict[str, np.ndarray]:
    """Returns the tensors of a state that are not parameters: frequencies of sinusoids [D/2]."""
    if c.attention not in ("relative", "absolute"):
        return {}
    exponents = np.arange(0, c.d_model, 2, dtype=np.float32) / np.float32(c.d_model)
    powers = np.power(10000.0, exponents.astype(np.float64))  # float32 powers are less exact
    return {FREQUENCIES: np.float32(1) / powers.astype(np.float32)}


def table(c: TransformerXLConfig, impl: str) -> list[Entry]:
    """Lists the parameters in the state of a model of the code ``impl``."""
    n, h, rows, layers = c.n_head, c.d_head, c.n_positions or 0, range(c.n_layer)
    entries = _vocabulary(c, impl)
    for i in layers:
        entries += layer_entries(c, LAYER, f"layer_{i}", f"layers.{i}.", transposed=True)

    def add(name: str, shape: tuple[int, ...], path: str, of_layer: Callable[[int], View]) -> None:
        places = {f"layer_{i}/{path}": of_layer(i) for i in layers}
        entries.append(Entry(name, (c.n_layer, *shape), places))

    if c.attention == "relative":
        shape = (c.n_layer,) * c.untie_r + (n, h)
        entries.append(Entry("r_w_bias", shape, {"u": view()}))
        entries.append(Entry("r_r_bias", shape, {"v": view()}))
    elif c.attention == "shaw":
        reversed_rows = lambda i: view(part=np.s_[i, ::-1])
        add("r_w_bias", (n, h), "attention/u", lambda i: view(part=i))
        add("r_emb", (rows, n, h), "attention/distance", reversed_rows)
        add("r_bias", (rows, n), "attention/distance_bias", reversed_rows)
    elif c.attention == "absolute_per_layer":
        row = (c.d_model,) if impl == "nvidia" else (n, h)
        add("r_emb", (rows, *row), "positions", lambda i: view(c.n_layer, rows, -1, part=i))
    return entries


def is_nvidia(state_dict: Mapping[str, np.ndarray]) -> bool:
    """Tells whether a state has the tensor names of NVIDIA's code."""
    return "crit.out_layers_biases.0" in state_dict


def _vocabulary(c: TransformerXLConfig, impl: str) -> list[Entry]:
    """Lists the parameters of embedding and softmax.

    If the output weights are tied to the embedding, NVIDIA's state has only the embedding.
    """
    authors, turned = impl != "nvidia", view(transposed=True)
    weight = "crit.out_layers.{}.weight" if authors else "crit.out_layers_weights.{}"
    bias = "crit.out_layers.{}.bias" if authors else "crit.out_layers_biases.{}"
    outputs, entries = arguments.projected_outputs(c), []
    for i, (end, part) in enumerate(arguments.parameter_clusters(c)):
        shape, aliases = (part.size, part.width), {}
        if c.tie_weight and authors:
            aliases[weight.format(i)] = "tie_weight is True"
        name = f"word_emb.emb_layers.{i}.weight"
        entries.append(Entry(name, shape, {f"embedding{end}": view()}, aliases))
        if not c.tie_weight:
            entries.append(Entry(weight.format(i), shape, {f"softmax_weight{end}": view()}))
        entries.append(Entry(bias.format(i), (part.size,), {f"softmax_bias{end}": view()}))
        if part.projected:
            of_input = lambda k, i=i: c.div_val == 1 or k == i  # div_val 1: the only projection
            tied = [k for k, _, is_tied in outputs if is_tied and of_input(k)]
            aliases = {f"crit.out_projs.{k}": f"tie_projs[{k}] is True" for k in tied}
            if not authors:
                aliases = {f"crit.shared_out_projs.{i}": "both name one tensor"}
            places = {f"embedding_projection{end}": turned}
            name, shape = f"word_emb.emb_projs.{i}", (c.d_model, part.width)
            entries.append(Entry(name, shape, places, aliases))
    for i, width, is_tied in outputs:
        if not is_tied:
            places = {f"softmax_projection_{i}": turned}
            entries.append(Entry(f"crit.out_projs.{i}", (c.d_model, width), places))
    if c.cutoffs:
        tails, reversed_rows = len(c.cutoffs), view(part=np.s_[::-1])
        shape = (tails, clusters(c)[0].width)
        entries.append(Entry("crit.cluster_weight", shape, {"cluster_weight": reversed_rows}))
        entries.append(Entry("crit.cluster_bias", (tails,), {"cluster_bias": reversed_rows}))
    return entries
