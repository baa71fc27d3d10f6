"""Builds the learning-rate schedule and the optimizer from the config."""

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from txl_jax.config import AverageConfig, ExperimentConfig, OptimizerConfig, optax_rules
from txl_jax.model.layout import stack_layers, unstack_layers
from txl_jax.training.muon import scale_by_muon_and_adam


def schedule(
    c: OptimizerConfig, steps: int, average: AverageConfig | None = None, ratio: float = 1.0
) -> optax.Schedule:
    """Returns the learning rate as a function of the update t = 0, 1, .. ``steps`` - 1.

    With w = ``warmup_steps``, r = ``learning_rate``, and n = ``steps``:

        t < w           r (t+1) / w
        cosine          r (m + (1-m) (1 + cos(pi (t-w) / (n-w))) / 2),  m = ``min_ratio``
        inverse_sqrt    r sqrt(w / (t+1))
        constant        r

    The cosine begins at the end of warm-up, as in the TensorFlow code and NVIDIA's code. Warm-up
    includes the first update, unlike in the authors' PyTorch code. If ``average.swa_lr_ratio`` is a
    number a, then n is ``average.swa_start``, and the rate from update n on is a times the rate of
    the schedule at n. ``ratio`` multiplies all rates, except that the cosine schedule still ends at
    r m.
    """
    peak, low, w = c.learning_rate * ratio, c.min_ratio / ratio, c.warmup_steps
    end_ratio = average.swa_lr_ratio if average else None
    n = average.swa_start if average and end_ratio is not None else steps

    def scheduled(t):
        if c.schedule == "cosine":
            progress = jnp.clip((t - w) / max(n - w, 1), 0.0, 1.0)
            shape = low + (1 - low) * 0.5 * (1 + jnp.cos(jnp.pi * progress))
        elif c.schedule == "inverse_sqrt":
            shape = jnp.sqrt(w / jnp.maximum(t + 1, w))
        else:
            shape = jnp.ones_like(t)
        return peak * jnp.where(t < w, (t + 1) / max(w, 1), shape)

    def rate(t):
        t = jnp.asarray(t, jnp.float32)
        now = scheduled(t)
        if end_ratio is None:
            return now
        return jnp.where(t < n, now, end_ratio * scheduled(jnp.float32(n)))

    return rate


def make_optimizer(exp: ExperimentConfig) -> optax.GradientTransformation:
    """Builds the optimizer: clipping, L2, update rule, weight decay, and :func:`schedule`.

    With ``train.skip_spikes``, the first part of the optimizer's state is :class:`RecentNorm`.
    """
    c = exp.optimizer
    parts = [clip_by_norm(c.clip_norm) if c.clip_norm else optax.identity()]
    if c.l2:
        parts.append(optax.add_decayed_weights(c.l2))
    parts += _optax_rule(exp) if optax_rules.is_optax(c.name) else _own_rule(exp)
    optimizer = optax.chain(*parts)
    return optax.chain(recent_norm(), optimizer) if exp.train.skip_spikes else optimizer


def _own_rule(exp: ExperimentConfig) -> list[optax.GradientTransformation]:
    """Returns the transformations of adam, lamb or muon, weight decay and learning rate."""
    c, rate = exp.optimizer, schedule(exp.optimizer, exp.train.steps, exp.average)
    muon = functools.partial(scale_by_muon_and_adam, c.momentum)
    scale = {"adam": optax.scale_by_adam, "lamb": scale_by_lamb, "muon": muon}[c.name]
    parts = [scale(b1=c.b1, b2=c.b2, eps=c.eps)]
    if c.weight_decay:
        parts.append(optax.add_decayed_weights(c.weight_decay))
    if c.embedding_ratio == 1:
        return [*parts, optax.scale_by_learning_rate(rate)]
    # embedding tables have their own rate, as in the authors' Penn Treebank release
    tables = schedule(c, exp.train.steps, exp.average, c.embedding_ratio)
    parts.append(_scale_where(lambda path: not is_embedding(path), rate))
    return [*parts, _scale_where(is_embedding, tables)]


def _optax_rule(exp: ExperimentConfig) -> list[optax.GradientTransformation]:
    """Returns the optax optimizer of the config, with its learning rate and weight decay.

    If ``embedding_ratio`` is not 1, embedding tables have a separate optimizer.
    """
    c = exp.optimizer

    def rule(ratio: float) -> optax.GradientTransformation:
        rate: Any = schedule(c, exp.train.steps, exp.average, ratio)
        if c.schedule == "constant" and not c.warmup_steps and exp.average.swa_lr_ratio is None:
            rate = c.learning_rate * ratio  # some optimizers take no schedule
        own = optax_rules.build(c.name, c.arguments, rate)
        if not c.weight_decay:
            return own
        scaled = (optax.add_decayed_weights(c.weight_decay), optax.scale_by_learning_rate(rate))
        return _sum_of(own, optax.chain(*scaled))

    if c.embedding_ratio == 1:
        return [for_each_layer(rule(1.0))]
    group = lambda path, _: "embeddings" if is_embedding(path) else "others"
    groups = functools.partial(jax.tree_util.tree_map_with_path, group)
    rules = {"others": rule(1.0), "embeddings": rule(c.embedding_ratio)}
    return [for_each_layer(optax.partition(rules, groups))]


def _sum_of(
    optimizer: optax.GradientTransformation, decay: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Adds the weight decay, computed from zero gradients, to the updates of an optimizer."""

    def update(gradient, state, params=None):
        updates, own = optimizer.update(gradient, state[0], params)
        decays, rest = decay.update(optax.tree.zeros_like(gradient), state[1], params)
        return optax.tree.add(updates, decays), (own, rest)

    return optax.GradientTransformation(lambda p: (optimizer.init(p), decay.init(p)), update)


def for_each_layer(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Gives an optimizer one tree of parameters for each layer, even if layers are stacked.

    Optimizers such as Adafactor use statistics of a whole array, and their state has other axes
    than the parameters. With a tree for each layer, results and checkpoints do not depend on
    ``scan_layers``. The trees are named ``one_layer_n``, so model/layout.py does not stack them.
    """

    def apart(tree):
        layers = unstack_layers(tree).items()
        return {f"one_{name}" if name.startswith("layer_") else name: x for name, x in layers}

    def update(gradient, state, params):
        updates, state = optimizer.update(apart(gradient), state, apart(params))
        joined = {name.removeprefix("one_"): tree for name, tree in updates.items()}
        return (stack_layers(joined) if "layers" in gradient else joined), state

    return optax.GradientTransformation(lambda params: optimizer.init(apart(params)), update)


def clip_by_norm(largest: float) -> optax.GradientTransformation:
    """Scales gradients so that their global L2 norm is at most ``largest``.

    ``optax.clip_by_global_norm`` divides every entry. This function multiplies by one factor, like
    the authors' code. XLA can fuse the multiplication with other operations, which saves 3 to 7% of
    an update (measured: 12 layers of width 512, two cores).
    """

    @optax.stateless
    def clip(updates, params=None):
        norm = optax.tree.norm(updates)
        factor = jnp.where(norm < largest, 1.0, largest / norm)
        return jax.tree.map(lambda x: x * factor.astype(x.dtype), updates)

    return clip


def _scale_where(
    chosen: Callable[[tuple[Any, ...]], bool], rate: optax.Schedule
) -> optax.GradientTransformation:
    """Multiplies updates by the negative learning rate where ``chosen(path)`` is true."""
    scale = optax.scale_by_learning_rate(rate)

    def update(updates, state, params=None):
        scaled, state = scale.update(updates, state)
        pick = lambda path, before, after: after if chosen(path) else before
        return jax.tree_util.tree_map_with_path(pick, updates, scaled), state

    return optax.GradientTransformation(scale.init, update)


def is_embedding(path: tuple[Any, ...]) -> bool:
    """Tells whether a parameter is an embedding table, named ``embedding`` or ``embedding_i``."""
    return re.fullmatch(r"embedding(_\d+)?", jax.tree_util.keystr(path, simple=True)) is not None


class RecentNorm(NamedTuple):
    """The mean of recent gradient norms, float32 [], and the number of norms so far, int32 [].

    The norm of a skipped update is not counted.
    """

    mean: jax.Array
    seen: jax.Array


def recent_norm() -> optax.GradientTransformation:
    """Returns a transformation that tracks the recent gradient norm and changes no gradient.

    Its state is :class:`RecentNorm`. The mean is that of all norms up to the hundredth. From then
    on, each new norm enters with weight 1/100.
    """

    def init(params):
        return RecentNorm(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32))

    def update(gradient, state, params=None):
        seen = state.seen + 1
        mean = state.mean + (optax.tree.norm(gradient) - state.mean) / jnp.minimum(seen, 100)
        return gradient, RecentNorm(mean, seen)

    return optax.GradientTransformation(init, update)


class LambState(NamedTuple):
    """The running means of the gradient and of its square, with the shapes of the parameters."""

    mu: Any
    nu: Any


def scale_by_lamb(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """Scales updates by LAMB (You et al. 2020) as in NVIDIA's Transformer-XL.

        step     m / (sqrt(v) + eps), m and v running means as in Adam, without bias correction
        update   step * min(|w|, 10) / (|step| + eps), or step where |w| is 0

    |w| and |step| are the norms of a parameter w and of its step. One norm covers all parameters
    with the same :func:`_original_tensor`. ``optax.lamb`` corrects the bias and does not clip |w|.
    """

    def init(params):
        return LambState(mu=optax.tree.zeros_like(params), nu=optax.tree.zeros_like(params))

    def update(gradient, state, params=None):
        mu = optax.tree.update_moment(gradient, state.mu, b1, 1)
        nu = optax.tree.update_moment(gradient, state.nu, b2, 2)
        step = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), mu, nu)
        weight_norm, step_norm = _tensor_norms(params), _tensor_norms(step)

        def scaled(path, leaf):
            w, s = (norms[_original_tensor(path)] for norms in (weight_norm, step_norm))
            ratio = jnp.where(w > 0, jnp.minimum(w, 10.0) / (s + eps), 1.0)
            return leaf * ratio.reshape(ratio.shape + (1,) * (leaf.ndim - ratio.ndim))

        return jax.tree_util.tree_map_with_path(scaled, step), LambState(mu, nu)

    return optax.GradientTransformation(init, update)


def _original_tensor(path: tuple[Any, ...]) -> str:
    """Returns a name, equal for parameters that are one tensor in the authors' and NVIDIA's code.

    In that code, one tensor holds the weights of queries, keys and values of a layer. Another one
    holds the position tables of all layers, and another one all content biases of ``shaw``. Here,
    stacked layers have one name, ``layers/...``.
    """
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    shared = ("attention/u", "attention/distance", "attention/distance_bias", "positions")
    layer, _, rest = name.partition("/")
    if rest in ("attention/query", "attention/key", "attention/value"):
        return f"{layer}/attention/qkv"
    return rest if rest in shared else name


def _tensor_norms(tree: Any) -> dict[str, jax.Array]:
    """Computes the L2 norm of every original tensor: [], or [L] for stacked layers."""
    squares: dict[str, jax.Array | float] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = _original_tensor(path)
        first = 1 if name.startswith("layers/") else 0
        square = jnp.sum(jnp.square(leaf), axis=range(first, leaf.ndim))
        squares[name] = squares.get(name, 0.0) + square
    return {name: jnp.sqrt(square) for name, square in squares.items()}
