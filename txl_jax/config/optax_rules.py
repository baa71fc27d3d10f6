"""Checks and builds the optimizers of optax that ``optimizer.name`` names.

optax takes a second to import, so it is imported only if ``optimizer.name`` is not one of
this project's own rules.
"""

import functools
import inspect
import json
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from txl_jax.config.errors import refusal
from txl_jax.messages import argument, nearest, nearest_or_all, one_line

OWN_RULES = ("adam", "lamb", "muon")
_NAME, _ARGUMENTS = "optimizer.name", "optimizer.arguments"
_UNSUPPORTED = "which this program does not support; name another optimizer"


def is_optax(name: str) -> bool:
    """Whether ``optimizer.name`` names an optimizer of optax, ``optax.…``."""
    return name not in OWN_RULES


def has_argument(name: str, of: str) -> bool:
    """Whether the function of optax that makes the optimizer has an argument named ``of``."""
    return of in inspect.signature(_function(name)).parameters


def own_rate(name: str, rate: float) -> str | None:
    """Returns a note if the default learning rate of an optimizer of optax is not ``rate``."""
    if not is_optax(name):
        return None
    default = inspect.signature(_function(name)).parameters["learning_rate"].default
    if not isinstance(default, float) or default == rate:
        return None
    flag = argument("config.optimizer.learning_rate", default)
    own = f"the default of {name} is {default:g}; to use that, give {flag}"
    return f"note: the learning rate is {rate:g}, and {own}"


def build(name: str, arguments: Mapping[str, Any], rate: Any) -> Any:
    """Returns the optimizer of optax with a learning rate, which is a number or a schedule."""
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in arguments.items()}
    return _function(name)(learning_rate=rate, **values)


def check(name: str, arguments: Mapping[str, Any], constant: bool) -> None:
    """Raises ConfigError unless training can use an optimizer and these arguments.

    ``constant`` says whether the learning rate is one number for all steps. The check traces an
    update of small arrays, without running it, to find out whether the optimizer works.
    """
    if not is_optax(name):
        if arguments:
            rule = f"is for optimizers of optax, and {_NAME} is {name!r}; set optimizer.b1, b2, eps"
            raise refusal(_ARGUMENTS, dict(arguments), f"{rule} or momentum instead")
        return
    known = {key: p.default for key, p in inspect.signature(_function(name)).parameters.items()}
    del known["learning_rate"]
    for key, value in arguments.items():
        where = f"{_ARGUMENTS}.{key}"
        if key == "learning_rate":
            raise refusal(where, value, "set optimizer.learning_rate instead, which has a schedule")
        if key not in known:
            usable = nearest_or_all(key, known)
            raise refusal(where, value, f"{name} has no such argument; {usable}")
        if fault := _out_of_range(key, value, known[key]):
            raise refusal(where, value, fault)
    if fault := _fault(name, json.dumps(arguments), constant):
        raise refusal(_NAME, name, fault)


def _out_of_range(key: str, value: Any, default: Any) -> str:
    """Returns the rule that an argument's value breaks, judged by the argument's name, or ""."""
    if isinstance(default, bool) and not isinstance(value, bool):
        return "must be true or false"  # any text, also "no", would count as true
    if key == "mask" or key.endswith("_mask"):
        return "must be a function, which no setting can name; leave the argument out"
    if not isinstance(value, int | float):
        return ""
    if re.fullmatch(r"b\d|decay|.*_decay_rate|decay_rate|momentum", key) and not 0 <= value < 1:
        return "must be at least 0 and below 1: each update keeps this share of a running mean"
    if re.fullmatch(r"eps\w*|weight_decay|clipping_threshold", key) and value < 0:
        return "must be at least 0"
    return ""


@functools.lru_cache(maxsize=64)
def _fault(name: str, arguments: str, constant: bool) -> str:
    """Returns why an optimizer cannot be used, or ""."""
    import jax
    import jax.numpy as jnp
    from optax import contrib

    shapes = {"bias": (4,), "embedding": (8, 4), "kernel": (4, 6), "query": (4, 2, 3)}
    tree = {key: jax.ShapeDtypeStruct(shape, jnp.float32) for key, shape in shapes.items()}

    def state_after_update(tree: Any) -> Any:
        rate: Any = 1e-3 if constant else lambda step: jnp.full((), 1e-3)
        optimizer = build(name, json.loads(arguments), rate)
        return optimizer.update(tree, optimizer.init(tree), tree)[1]

    try:
        with warnings.catch_warnings(action="ignore"):  # the error says what is wrong
            state = jax.eval_shape(state_after_update, tree)
    except Exception as error:
        what = f"{'' if constant else 'a schedule of the learning rate and '}these arguments"
        return f"cannot be used with {what}: {type(error).__name__}: {one_line(error)}"
    own = lambda node: isinstance(node, contrib.ScheduleFreeState)
    if any(map(own, jax.tree.leaves(state, is_leaf=own))):
        return f"trains other parameters than those to evaluate, {_UNSUPPORTED}"
    if any(jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in jax.tree.leaves(state)):
        return f"keeps a random generator in its state, {_UNSUPPORTED}"
    return ""


def _function(name: str) -> Callable[..., Any]:
    """Returns the function of optax that makes an optimizer, or raises ConfigError."""
    found = _functions()
    if name not in found:
        leaf = lambda known: known.rpartition(".")[2].lower()
        own = () if name.lower().startswith("optax.") else OWN_RULES
        leaves = {leaf(known): known for known in reversed([*own, *found])}
        near = leaves.get(nearest(leaf(name), leaves) or "")
        rule = "must be 'adam', 'lamb', 'muon', or an optimizer of optax, such as 'optax.lion'"
        raise refusal(_NAME, name, rule + (f"; the nearest name is {near!r}" if near else ""))
    return found[name]


@functools.cache
def _functions() -> dict[str, Callable[..., Any]]:
    """Returns the functions of optax that make an optimizer, by name."""
    import optax
    from optax import contrib

    return {
        f"{prefix}.{name}": function
        for prefix, module in (("optax", optax), ("optax.contrib", contrib))
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if "learning_rate" in inspect.signature(function).parameters
        and not name.startswith("scale_by_")
    }
