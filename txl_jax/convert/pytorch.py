"""Models of the authors' PyTorch code, and of NVIDIA's port of it, as models of this project.

    kwargs of MemTransformerLM ──config_from_pytorch──▶ cfg ──▶ TransformerXL(cfg)
    its state_dict, as numpy ───params_from_pytorch(·, cfg)──▶ params ──▶ {"params": params}

Nothing here needs torch: ``{name: t.float().numpy() for name, t in model.state_dict().items()}``
is what :func:`params_from_pytorch` takes. How the two layouts differ:

    theirs                                              ours
    dec_attn.qkv_net.weight  [3*N*H, D] q, k, v stacked query, key, value  [D,N,H]
    dec_attn.r_net.weight    [N*H, D]                   position           [D,N,H]
    dec_attn.o_net.weight    [D, N*H]                   output             [N,H,D]
    pos_ff.CoreNet.{0,3}     Linear, weight [out, in]   inner, outer       kernel [in, out]
    r_w_bias, r_r_bias       [N,H] or [L,N,H]           u, v
    crit.out_layers.0.bias   [V]                        softmax_bias
    crit.out_layers.0.weight [V,D] another name of      softmax_weight, absent when tied
                             the embedding when tied
"""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from txl_jax.config import TransformerXLConfig, Window

SAME_LENGTH: dict[str, Window] = {"kimiyoung": "pytorch", "nvidia": "tf"}
"""What ``same_length=True`` means in each code base: NVIDIA's lets a query see one key more."""

ATTENTION: dict[int, Literal["relative"]] = {0: "relative"}
"""``attn_type`` of the original by the name it has here."""

REQUIRED = ("n_token", "n_layer", "n_head", "d_model", "d_head", "d_inner")

IGNORED = ("tgt_len", "ext_len", "mem_len", "adapt_inp", "tie_projs", "dtype")
"""Arguments that do not shape the models supported here: lengths are given to a model by its
inputs and its memory, ``adapt_inp`` is unused in the original, ``tie_projs`` speaks of projections
that exist only where ``d_embed`` or ``div_val`` asks for them, ``dtype`` (NVIDIA) is how it is run.
"""

BUFFERS = ("pos_emb.inv_freq",)
"""Entries of a state that are not parameters; they may be there or not."""


def config_from_pytorch(constructor_args: Mapping[str, Any]) -> TransformerXLConfig:
    """The configuration of the model that the original's constructor would build.

    Args:
      constructor_args: keywords of ``MemTransformerLM``; those left out take the original's
        defaults, and ``dropout`` and ``dropatt``, which have none there, take 0. Two more may be
        among them: ``impl``, ``"kimiyoung"`` (the default) or ``"nvidia"``, and ``untie_r``, true
        where u and v have a row for each layer (TF's option).

    Raises:
      ValueError: an argument that is missing, unknown, or asks for what is not supported.
    """
    args = dict(constructor_args)
    for name in IGNORED:
        args.pop(name, None)
    missing = [name for name in REQUIRED if name not in args]
    if missing:
        raise ValueError(f"constructor arguments of the original are missing: {_list(missing)}")
    n_token, d_model = args.pop("n_token"), args.pop("d_model")
    impl = _one_of("impl", args.pop("impl", "kimiyoung"), SAME_LENGTH)
    attention = _one_of("attn_type", args.pop("attn_type", 0), ATTENTION)
    _only("cutoffs", tuple(args.pop("cutoffs", ())), (), "an adaptive softmax")
    _only("div_val", args.pop("div_val", 1), 1, "clusters of different widths")
    d_embed = args.pop("d_embed", None)
    if d_embed is not None:
        _only("d_embed", d_embed, d_model, "an embedding narrower or wider than d_model")
    if args.get("sample_softmax", -1) > 0:
        _only("sample_softmax", args["sample_softmax"], -1, "a sampled softmax")
    args.pop("sample_softmax", None)
    window: Window = SAME_LENGTH[impl] if args.pop("same_length", False) else False
    clamp_len = args.pop("clamp_len", -1)
    cfg = TransformerXLConfig(
        vocab_size=n_token,
        n_layer=args.pop("n_layer"),
        d_model=d_model,
        n_head=args.pop("n_head"),
        d_head=args.pop("d_head"),
        d_inner=args.pop("d_inner"),
        dropout=args.pop("dropout", 0.0),
        dropatt=args.pop("dropatt", 0.0),
        attention=ATTENTION[attention],
        pre_lnorm=args.pop("pre_lnorm", False),
        untie_r=args.pop("untie_r", False),
        same_length=window,
        clamp_len=clamp_len if clamp_len > 0 else -1,
        tie_weight=args.pop("tie_weight", True),
    )
    if args:
        raise ValueError(f"not constructor arguments of the original: {_list(args)}")
    return cfg


def params_from_pytorch(
    state_dict: Mapping[str, np.ndarray], cfg: TransformerXLConfig
) -> dict[str, Any]:
    """The parameters of ``TransformerXL(cfg)`` from a state of the original, float32 numpy arrays.

    Args:
      state_dict: arrays by the names of the authors' code or of NVIDIA's (told apart by the name
        of the output bias). Gradients by those names convert just as well.
      cfg: from :func:`config_from_pytorch`; tensors that do not fit it are refused.

    Raises:
      ValueError: naming every tensor that is missing, is not known, has the wrong shape, or
        should equal the embedding and does not.
    """
    c = cfg
    if c.vocab_size is None:
        raise ValueError("cfg.vocab_size is None: a model of the original has a vocabulary")
    tensors = _Tensors(state_dict)
    per_layer = (c.n_layer,) if c.untie_r else ()
    params = {
        "u": tensors.take("r_w_bias", (*per_layer, c.n_head, c.d_head)),
        "v": tensors.take("r_r_bias", (*per_layer, c.n_head, c.d_head)),
        **_vocabulary(tensors, c, c.vocab_size),
    }
    for n in range(c.n_layer):
        params[f"layer_{n}"] = {
            "attention": _attention(tensors, c, f"layers.{n}.dec_attn."),
            "norm_attention": _layer_norm(tensors, c, f"layers.{n}.dec_attn.layer_norm."),
            "feed_forward": _feed_forward(tensors, c, f"layers.{n}.pos_ff.CoreNet."),
            "norm_feed_forward": _layer_norm(tensors, c, f"layers.{n}.pos_ff.layer_norm."),
        }
    tensors.finish()
    return params


def _vocabulary(tensors: "_Tensors", c: TransformerXLConfig, v: int) -> dict[str, Any]:
    nvidia = "crit.out_layers_biases.0" in tensors
    bias = "crit.out_layers_biases.0" if nvidia else "crit.out_layers.0.bias"
    weight = "crit.out_layers_weights.0" if nvidia else "crit.out_layers.0.weight"
    shape = (v, c.d_model)
    embedding = tensors.take("word_emb.emb_layers.0.weight", shape)
    found = {"embedding": embedding, "softmax_bias": tensors.take(bias, (v,))}
    if not c.tie_weight:
        found["softmax_weight"] = tensors.take(weight, shape)
    elif weight in tensors and not np.array_equal(tensors.take(weight, shape), embedding):
        tensors.problems.append(f"{weight} differs from the embedding, and tie_weight is True")
    return found


def _attention(tensors: "_Tensors", c: TransformerXLConfig, prefix: str) -> dict[str, Any]:
    d, n, h = c.d_model, c.n_head, c.d_head
    qkv = tensors.take(prefix + "qkv_net.weight", (3 * n * h, d)).T.reshape(d, 3, n, h)
    return {
        "query": qkv[:, 0],
        "key": qkv[:, 1],
        "value": qkv[:, 2],
        "position": tensors.take(prefix + "r_net.weight", (n * h, d)).T.reshape(d, n, h),
        "output": tensors.take(prefix + "o_net.weight", (d, n * h)).T.reshape(n, h, d),
    }


def _feed_forward(tensors: "_Tensors", c: TransformerXLConfig, prefix: str) -> dict[str, Any]:
    return {
        "inner": {
            "kernel": tensors.take(prefix + "0.weight", (c.d_inner, c.d_model)).T,
            "bias": tensors.take(prefix + "0.bias", (c.d_inner,)),
        },
        "outer": {
            "kernel": tensors.take(prefix + "3.weight", (c.d_model, c.d_inner)).T,
            "bias": tensors.take(prefix + "3.bias", (c.d_model,)),
        },
    }


def _layer_norm(tensors: "_Tensors", c: TransformerXLConfig, prefix: str) -> dict[str, Any]:
    return {
        "scale": tensors.take(prefix + "weight", (c.d_model,)),
        "bias": tensors.take(prefix + "bias", (c.d_model,)),
    }


class _Tensors:
    """A state being read: remembers what was taken, and says everything that is wrong at once."""

    def __init__(self, state_dict: Mapping[str, np.ndarray]):
        self.left = dict(state_dict)
        self.problems: list[str] = []

    def __contains__(self, name: str) -> bool:
        return name in self.left

    def take(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """The tensor as float32; zeros in its place where there is a problem with it."""
        if name not in self.left:
            self.problems.append(f"{name} {list(shape)} is missing")
            return np.zeros(shape, np.float32)
        tensor = np.asarray(self.left.pop(name))
        if tensor.shape != shape:
            self.problems.append(f"{name} is {list(tensor.shape)}, expected {list(shape)}")
            return np.zeros(shape, np.float32)
        return tensor.astype(np.float32)

    def finish(self) -> None:
        """Raises ValueError with all problems, tensors that nothing took among them."""
        extra = [name for name in self.left if name not in BUFFERS]
        problems = self.problems + [f"{name} is not known" for name in extra]
        if problems:
            raise ValueError("the state does not fit the configuration: " + "; ".join(problems))


def _one_of(argument: str, value: Any, supported: Mapping[Any, Any]) -> Any:
    if value not in supported:
        raise ValueError(f"{argument} = {value!r} is not supported; supported: {_list(supported)}")
    return value


def _only(argument: str, value: Any, supported: Any, meaning: str) -> None:
    if value != supported:
        raise ValueError(
            f"{argument} = {value!r} ({meaning}) is not supported; supported: {supported!r}"
        )


def _list(names) -> str:
    return ", ".join(repr(name) for name in names)
