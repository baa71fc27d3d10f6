"""Muon: every matrix of a layer moves by an orthogonal step (Jordan 2024).

With the gradient g of a matrix of n inputs and m outputs, and b = ``optimizer.momentum``:

    momentum    s <- b s + g
    step        0.2 sqrt(max(n, m)) orthogonal(b s + g)

``orthogonal`` moves all singular values of a matrix near 1 with five Newton-Schulz iterations
(kellerjordan.github.io/posts/muon). The factor 0.2 sqrt(max(n, m)) gives the step the root mean
square of Adam's steps, so learning rates are comparable (Liu et al. 2025, "Muon is scalable for LLM
training", section 2.2). Adam updates the other parameters: embeddings, softmax, biases and
LayerNorms.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

ITERATIONS = 5
COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""The coefficients of the Newton-Schulz iteration (Jordan 2024)."""
ADAM_SIZE = 0.2
"""The root mean square of Adam's steps (Liu et al. 2025)."""

MATRICES = {
    **dict.fromkeys(("query", "key", "value", "position"), (1, 2)),  # [D,N,H]
    "output": (2, 1),  # [N,H,D]
    "kernel": (1, 1),  # [D,F], [F,D]
    **dict.fromkeys(("from_output", "from_input"), (1, 2)),  # [D,3,D], three matrices as one
}
"""For each matrix of a layer, the number of its input axes and of its output axes. Stacked layers
have one more axis. A key is the last part of a parameter's path."""


def scale_by_muon_and_adam(
    momentum: float, b1: float, b2: float, eps: float
) -> optax.GradientTransformation:
    """Scales the updates of layers' matrices by Muon, and those of other parameters by Adam."""

    def rule(path: tuple[Any, ...], leaf: jax.Array) -> str:
        names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        return "muon" if names[0].startswith("layer") and names[-1] in MATRICES else "adam"

    rules = {
        "muon": optax.chain(optax.trace(momentum, nesterov=True), orthogonal_steps()),
        "adam": optax.scale_by_adam(b1, b2, eps),
    }
    return optax.partition(rules, lambda tree: jax.tree_util.tree_map_with_path(rule, tree))


def orthogonal_steps() -> optax.GradientTransformation:
    """Makes the updates of matrices orthogonal, with the root mean square of Adam's steps.

    One loop runs the iterations of all matrices, so that small matrix products run in parallel. An
    update of three layers of width 128 takes 110 to 113 ms with this loop. It takes 116 to 118 ms
    if matrices of the same shape are stacked into one array instead (measured, medians of
    alternating processes, two busy cores).
    """

    @optax.stateless
    def steps(updates, params=None):
        wide = jax.tree_util.tree_map_with_path(_as_normalised_matrices, updates)
        iterate = lambda _, matrices: jax.tree.map(_newton_schulz, matrices)
        wide = jax.lax.fori_loop(0, ITERATIONS, iterate, wide)
        scaled = jax.tree.map(lambda x: x * ADAM_SIZE * max(x.shape[-2:]) ** 0.5, wide)
        return jax.tree_util.tree_map_with_path(_as_leaf, updates, scaled)

    return steps


def _newton_schulz(x: jax.Array) -> jax.Array:
    """Maps singular values s of matrices to a s + b s^3 + c s^5, (a, b, c) = COEFFICIENTS."""
    a, b, c = COEFFICIENTS
    square = x @ x.mT
    return a * x + (b * square + c * (square @ square)) @ x


def _as_normalised_matrices(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
    """Reshapes a parameter with n inputs and m outputs to [n,m], or to [m,n] if n > m.

    Stacked layers keep a leading axis. Each matrix is divided by its Frobenius norm, so that no
    singular value is above 1.
    """
    *layers, n, m = _shape(path, leaf)
    matrices = leaf.reshape(*layers, n, m)
    matrices = matrices.mT if n > m else matrices
    return matrices / (jnp.linalg.norm(matrices, axis=(-2, -1), keepdims=True) + 1e-8)


def _as_leaf(path: tuple[Any, ...], leaf: jax.Array, wide: jax.Array) -> jax.Array:
    """Undoes the reshape of :func:`_as_normalised_matrices`."""
    *_, n, m = _shape(path, leaf)
    return (wide.mT if n > m else wide).reshape(leaf.shape)


def _shape(path: tuple[Any, ...], leaf: jax.Array) -> tuple[int, ...]:
    """Returns a parameter's numbers of inputs and outputs, (n, m), or (layers, n, m) if stacked."""
    inputs, outputs = MATRICES[jax.tree_util.keystr(path[-1:], simple=True)]
    layers, n, m = np.split(leaf.shape, [leaf.ndim - inputs - outputs, leaf.ndim - outputs])
    return (*map(int, layers), int(np.prod(n)), int(np.prod(m)))
