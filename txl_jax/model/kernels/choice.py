"""One function for attention; which implementation runs is a name."""

import jax

from txl_jax.model.kernels import reference, xla
from txl_jax.model.kernels.dropping import Dropping
from txl_jax.model.masks import Visible
from txl_jax.model.positions import Positions

IMPLEMENTATIONS = ("auto", "reference", "xla", "cudnn", "triton", "pallas_tpu")


def attend(
    q: jax.Array,
    k: jax.Array,
    val: jax.Array,
    positions: Positions,
    visible: Visible,
    dropping: Dropping | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """What each query gathers from the values it may see: [N,B,T,H] in the values' dtype.

    Args:
      q: [N,B,T,H], divided by sqrt(H).
      k, val: [N,B,K,H], of memory and segment, oldest first; K = M + T.
      positions: u, v [N,H], r [N,K,H] of the distances K-1 .. 0, b [N,K]; u, v and b are divided
        by sqrt(H).
      visible: who may attend to whom; every query sees at least itself.
      dropping: dropout of the weights.
      implementation: of :data:`IMPLEMENTATIONS`; ``auto``: the best that this form has here.

    Raises:
      ValueError: an implementation that is not for this form, or not there.
    """
    if implementation == "auto":
        implementation = "xla"
    function = {"reference": reference.attend, "xla": xla.attend}[implementation]
    return function(q, k, val, positions, visible, dropping)
