"""Converts models of the authors' TensorFlow code to models of this project, without tensorflow.

Apart from those of :data:`LAYER`, the variables in the scope ``transformer/`` are:

    original code                                       this project
    r_w_bias, r_r_bias          [N,H] or [L,N,H]        u, v
    adaptive_embed/{lookup_table,proj_W}                embedding, embedding_projection
    adaptive_embed/cutoff_i/{lookup_table,proj_W}       embedding_i, embedding_projection_i
    adaptive_softmax/bias, adaptive_softmax/cutoff_i/b  softmax_bias (div_val 1: all in one) or _i
    adaptive_softmax/cutoff_i/proj [d_i,D]              softmax_projection_i
    adaptive_softmax/cutoff_0/cluster_{W,b}             cluster_weight, cluster_bias

The output weights are always those of the embedding. A model without cutoffs also shares the
embedding's projection.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from txl_jax.checkpoint.errors import ModelFormatError
from txl_jax.config import TransformerXLConfig
from txl_jax.convert import arguments
from txl_jax.convert.table import Entry, layer_entries, read_params, view
from txl_jax.model.adaptive import clusters

LAYER = {
    "qkv": "rel_attn/qkv/kernel",
    "attention/position": "rel_attn/r/kernel",
    "attention/output": "rel_attn/o/kernel",
    "norm_attention/scale": "rel_attn/LayerNorm/gamma",
    "norm_attention/bias": "rel_attn/LayerNorm/beta",
    "feed_forward/inner/kernel": "ff/layer_1/kernel",
    "feed_forward/inner/bias": "ff/layer_1/bias",
    "feed_forward/outer/kernel": "ff/layer_2/kernel",
    "feed_forward/outer/bias": "ff/layer_2/bias",
    "norm_feed_forward/scale": "ff/LayerNorm/gamma",
    "norm_feed_forward/bias": "ff/LayerNorm/beta",
}
"""The names of a layer's variables after ``transformer/layer_i/``. Kernels are [in, out]."""

IGNORED = ("tgt_len", "mem_len", "tie_weight", "use_tpu", "init", "init_range", "dataset")
"""Flags that do not affect the parameters. The original ties the weights for any ``tie_weight``."""
SCOPE = "transformer/"
SLOTS = ("Adam", "Adam_1", "ExponentialMovingAverage")
"""The last part of the name of each optimizer variable."""


def config_from_tensorflow(args: Mapping[str, Any]) -> TransformerXLConfig:
    """Converts the flags of ``train.py`` or ``train_gpu.py`` to a model configuration.

    ``args`` has the flags by name, with ``n_token`` and ``cutoffs``, or with ``vocab_size`` and
    ``cutoffs`` from 0 to V as in ``corpus-info.json``. Defaults are those of the TensorFlow code.
    Raises ModelFormatError if a flag is missing or unknown.
    """
    args = arguments.given(args, IGNORED)
    if "vocab_size" in args:
        args["n_token"] = args.pop("vocab_size")
    names = ("untie_r", "div_val", "proj_same_dim", "init_std", "proj_init_std")
    what = "flags of the authors' TensorFlow model"
    settings = arguments.take_settings(args, what, *names, dropout=0.1, dropatt=0.1)
    if settings["cutoffs"][:1] == (0,):
        settings["cutoffs"] = settings["cutoffs"][1:-1]
    shared = bool(args.pop("proj_share_all_but_first", False))
    tails = len(settings["cutoffs"])
    cfg = TransformerXLConfig(
        **settings,
        same_length="tf" if args.pop("same_length", False) else False,
        tie_projs=(False, *[shared] * tails) if tails else (True,),
        norm_epsilon=1e-12,
    )
    if args:
        raise ModelFormatError(f"these are no {what}: {arguments.quoted(args)}; remove them")
    return cfg


def params_from_tensorflow(
    variables: Mapping[str, np.ndarray], cfg: TransformerXLConfig
) -> dict[str, Any]:
    """Converts the variables of a checkpoint to parameters of ``TransformerXL(cfg)``.

    ``variables`` has float32 arrays by name, and optimizer variables are ignored. ``cfg`` comes
    from :func:`config_from_tensorflow`. Raises ModelFormatError, which names all variables that are
    missing or unknown, or have a wrong shape.
    """
    arguments.check_convertible(cfg)
    wanted = {name: array for name, array in variables.items() if is_parameter(name)}
    return read_params(table(cfg), wanted)


def table(c: TransformerXLConfig) -> list[Entry]:
    """Lists the variables of a model that are parameters."""
    shape = (c.n_layer,) * c.untie_r + (c.n_head, c.d_head)
    entries = [*_vocabulary(c), Entry("r_w_bias", shape, {"u": view()})]
    entries.append(Entry("r_r_bias", shape, {"v": view()}))
    for i in range(c.n_layer):
        layer = f"layer_{i}"
        entries += layer_entries(c, LAYER, layer, f"{layer}/", transposed=False)
    return [entry._replace(name=SCOPE + entry.name) for entry in entries]


def is_parameter(name: str) -> bool:
    """Tells whether a variable of a checkpoint is a parameter of the model."""
    return name.startswith(SCOPE) and name.rpartition("/")[2] not in SLOTS


def _vocabulary(c: TransformerXLConfig) -> list[Entry]:
    entries = []
    for i, (end, part) in enumerate(arguments.parameter_clusters(c)):
        scope = f"adaptive_embed/cutoff_{i}/" if c.div_val > 1 else "adaptive_embed/"
        table = (part.size, part.width)
        entries.append(Entry(f"{scope}lookup_table", table, {f"embedding{end}": view()}))
        if part.projected:
            shape, places = (part.width, c.d_model), {f"embedding_projection{end}": view()}
            entries.append(Entry(f"{scope}proj_W", shape, places))
    softmax = "adaptive_softmax/cutoff_{}/"
    for i, part in enumerate(clusters(c)):
        name = softmax.format(i) + "b" if c.cutoffs else "adaptive_softmax/bias"
        path = f"softmax_bias_{i}" if c.div_val > 1 else "softmax_bias"
        entries.append(Entry(name, (part.size,), {path: view()}))
    for i, width, tied in arguments.projected_outputs(c):
        if not tied:
            places = {f"softmax_projection_{i}": view()}
            entries.append(Entry(f"{softmax.format(i)}proj", (width, c.d_model), places))
    if c.cutoffs:
        shape, head = (len(c.cutoffs), clusters(c)[0].width), softmax.format(0)
        entries.append(Entry(f"{head}cluster_W", shape, {"cluster_weight": view()}))
        entries.append(Entry(f"{head}cluster_b", shape[:1], {"cluster_bias": view()}))
    return entries
