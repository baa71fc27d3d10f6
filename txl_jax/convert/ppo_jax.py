"""Converts models of ``transformerXL_PPO_JAX``, networks of agents, to models of this project.

The program (https://github.com/Reytuag/transformerXL_PPO_JAX) is a GTrXL (Parisotto et al. 2019).
Differences:

    that program                                        this project
    a query sees the M steps before it, and itself      same_length="tf"
    query bias                                          a part of u and v: both are added to queries
    key bias                                            none: it cancels in the softmax
    sinusoid of distance d + 1                          of d: W_r is rotated by one step
    gate's Dense_0 .. Dense_5: r of y, r of x,          from_output [D,3,D]: r, z, h of y;
      z of y, z of x, h of y, h of r x                  from_input [D,3,D]: r, z, h of x
    encoder                                             none: the caller computes the inputs [B,T,D]
"""

import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from txl_jax.checkpoint.errors import ModelFormatError
from txl_jax.checkpoint.tensors import Tensors
from txl_jax.config import TransformerXLConfig
from txl_jax.convert import arguments
from txl_jax.files import decode_text

FORM: dict[str, Any] = {
    "attention": "relative",
    "untie_r": True,
    "pre_lnorm": True,
    "final_norm": False,
    "activation": "gelu",
    "attention_bias": True,
    "norm_epsilon": 1e-6,
    "same_length": "tf",
    "clamp_len": -1,
}
"""The settings that all models of that program have."""
SHAPE = ("d_model", "n_head", "n_layer")
LENGTHS = ("mem_len", "window", "rows")
"""Settings that do not affect the parameters."""


def config_from_ppo_jax(settings: Mapping[str, Any] | str | bytes) -> TransformerXLConfig:
    """Converts settings, or their JSON text, to a model configuration without a vocabulary.

    ``settings`` are ``d_model``, ``n_head``, ``n_layer``, ``gating`` and ``gating_bias``; the
    lengths ``mem_len``, ``window`` and ``rows`` are allowed. Raises ModelFormatError if a setting
    is missing or unknown, or if ``n_head`` does not divide ``d_model``.
    """
    if isinstance(settings, bytes):
        settings = decode_text(settings)
    given = dict(json.loads(settings) if isinstance(settings, str) else settings)
    what = "settings of transformerXL_PPO_JAX"
    arguments.require(given, (*SHAPE, "gating"), what)
    shape = {name: given.pop(name) for name in SHAPE}
    gating, bias = given.pop("gating"), given.pop("gating_bias", 0.0)
    unknown = [name for name in given if name not in LENGTHS]
    if unknown:
        raise ModelFormatError(f"these are no {what}: {arguments.quoted(unknown)}; remove them")
    d, n = shape["d_model"], shape["n_head"]
    if d % n:
        raise ModelFormatError(f"n_head = {n} must divide d_model = {d}")
    gate: dict[str, Any] = {"gate": "gru", "gate_bias": bias} if gating else {}
    return TransformerXLConfig(**shape, d_head=d // n, d_inner=d, **FORM, **gate)


def params_from_ppo_jax(params: Mapping[str, Any], cfg: TransformerXLConfig) -> dict[str, Any]:
    """Converts parameters of that program to parameters of ``TransformerXL(cfg)``: float32 arrays.

    ``params`` is a flat dict of arrays by path (``tf_layers_0/ln1/scale``); paths in ``encoder/``
    are ignored. Differentiate this function (``jax.vjp``) to convert gradients back. ``cfg`` comes
    from :func:`config_from_ppo_jax`. Raises ModelFormatError, which names all parameters that are
    missing or unknown, or have a wrong shape.
    """
    for key, value in FORM.items():
        if getattr(cfg, key) != value:
            raise ModelFormatError(
                f"model.{key} = {getattr(cfg, key)!r}: transformerXL_PPO_JAX has {value!r}; use"
                " the configuration of config_from_ppo_jax"
            )
    tensors = Tensors(params)
    layers = [_layer(tensors, cfg, f"tf_layers_{n}/") for n in range(cfg.n_layer)]
    tensors.finish(ignored=[name for name in params if name.startswith("encoder/")])
    biases = {name: jnp.stack([layer.pop(name) for layer in layers]) for name in "uv"}
    return {**biases, **{f"layer_{n}": layer for n, layer in enumerate(layers)}}


def _layer(tensors: Tensors, c: TransformerXLConfig, prefix: str) -> dict[str, Any]:
    """Takes the parameters of a layer, with the layer's u and v."""
    d, n, h = c.d_model, c.n_head, c.d_head
    take = lambda name, *shape: tensors.take(prefix + name, shape)
    heads = lambda name: (take(f"{name}/kernel", d, n, h), take(f"{name}/bias", n, h))
    norm = lambda name: {part: take(f"{name}/{part}", d) for part in ("scale", "bias")}
    dense = lambda name: {"kernel": take(f"{name}/kernel", d, d), "bias": take(f"{name}/bias", d)}

    def gate(name: str) -> dict[str, jax.Array]:
        kernels = [take(f"{name}/Dense_{i}/kernel", d, d) for i in range(6)]
        of_output, of_input = (jnp.stack(kernels[i::2], axis=1) for i in (0, 1))
        bias = take(f"{name}/gating_bias", d)
        return {"from_output": of_output, "from_input": of_input, "bias": bias}

    query, query_bias = heads("attention1/query")
    key, _ = heads("attention1/key")
    value, value_bias = heads("attention1/value")
    attention = {
        "query": query,
        "key": key,
        "value": value,
        "value_bias": value_bias,
        "position": _one_step_nearer(take("attention1/pos_embed_mat/kernel", d, n, h)),
        "output": take("attention1/out/kernel", n, h, d),
        "output_bias": take("attention1/out/bias", d),
    }
    gates = {"gate_attention": gate("gate1"), "gate_feed_forward": gate("gate2")} if c.gate else {}
    return {
        "u": take("attention1/r_w_bias", n, h) + query_bias,
        "v": take("attention1/r_r_bias", n, h) + query_bias,
        "attention": attention,
        "norm_attention": norm("ln1"),
        "norm_feed_forward": norm("ln2"),
        "feed_forward": {"inner": dense("dense1"), "outer": dense("dense2")},
        **gates,
    }


def _one_step_nearer(kernel: Any) -> jax.Array:
    """Returns W' [D,N,H] with R_d W' = R_(d+1) W, by the addition formulas of sine and cosine."""
    d = len(kernel)
    angle = 1.0 / 10000.0 ** (jnp.arange(0, d, 2, dtype=jnp.float32) / d)
    cos, sin = jnp.cos(angle)[:, None, None], jnp.sin(angle)[:, None, None]
    of_sin, of_cos = kernel[: d // 2], kernel[d // 2 :]
    return jnp.concatenate([cos * of_sin - sin * of_cos, sin * of_sin + cos * of_cos])
