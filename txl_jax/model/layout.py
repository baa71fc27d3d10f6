"""The two layouts of the layers' parameters: one tree for each layer, or one stacked tree.

    a tree for each layer               stacked (``scan_layers``)
    layer_0/norm_attention/bias [D]     layers/norm_attention/bias [L,D]
    layer_1/norm_attention/bias [D]

Checkpoints, conversions and :func:`txl_jax.load` use one tree for each layer.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

Tree = TypeVar("Tree")
_ONE, _ALL = "layer_", "layers"


def stack_layers(tree: Tree) -> Tree:
    """Returns parameters in which one stacked tree ``layers`` replaces the trees ``layer_n``.

    ``tree`` can also be a tree that contains such parameters.
    """

    def stack(node: Mapping[str, Any]) -> dict[str, Any]:
        n_layer = sum(name.startswith(_ONE) for name in node)
        layers = [node[f"{_ONE}{n}"] for n in range(n_layer)]
        rest = {name: value for name, value in node.items() if not name.startswith(_ONE)}
        return {**rest, _ALL: jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)}

    return _each(tree, f"{_ONE}0", stack)


def unstack_layers(tree: Tree) -> Tree:
    """Undoes :func:`stack_layers`."""

    def unstack(node: Mapping[str, Any]) -> dict[str, Any]:
        n_layer = jax.tree.leaves(node[_ALL])[0].shape[0]
        rest = {name: value for name, value in node.items() if name != _ALL}
        one = lambda n: jax.tree.map(lambda leaf: leaf[n], node[_ALL])
        return {**rest, **{f"{_ONE}{n}": one(n) for n in range(n_layer)}}

    return _each(tree, _ALL, unstack)


def _each(tree: Any, key: str, change: Callable[[Mapping[str, Any]], dict[str, Any]]) -> Any:
    """Applies ``change`` to every dict of the tree that has the key."""
    has_key = lambda node: isinstance(node, Mapping) and key in node
    return jax.tree.map(lambda x: change(x) if has_key(x) else x, tree, is_leaf=has_key)
