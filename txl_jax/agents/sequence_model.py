"""The model as a recurrent Flax module, for programs that scan a carry of their own."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from txl_jax.agents.acting import check_for_agents, refuse_arguments_of_core
from txl_jax.config import TransformerXLConfig
from txl_jax.model.inputs import check_array, size, tree_like
from txl_jax.model.memory import Memory
from txl_jax.model.transformer_xl import TransformerXL

Carry = tuple[tuple[jax.Array, ...], jax.Array]


class SequenceModel(nn.Module):
    """Transformer-XL with an explicit carry: a call runs one step of acting, or a learning window.

    The outputs of acting and learning are equal up to rounding. The carry is the memory: hidden
    states [B,M,D] of each layer in the compute dtype, and the number of real states, int32 [B]. A
    program can store the carry, and shuffle, select or reset its rows. The parameters are those of
    ``TransformerXL.core``. In memorax, this module is the ``torso`` of a network.

    Example:
      >>> import jax, jax.numpy as jnp, txl_jax, txl_jax.agents as agents
      >>> cfg = txl_jax.TransformerXLConfig(n_layer=2, d_model=8, same_length="tf")
      >>> model, x, begins = agents.SequenceModel(cfg, 4), jnp.ones((3, 5, 8)), jnp.zeros((3, 5))
      >>> variables = model.init(jax.random.key(0), x, begins)
      >>> (hidden, filled), y = model.apply(variables, x, begins)
      >>> y.shape, [h.shape for h in hidden], filled.tolist()
      ((3, 5, 8), [(3, 4, 8), (3, 4, 8)], [4, 4, 4])

    ``cfg`` are the settings of the model, with a ``same_length`` window. ``mem_len`` is M, the
    number of steps that the memory keeps. Raises ConfigError for a model without memory or without
    a window.
    """

    cfg: TransformerXLConfig
    mem_len: int

    def __post_init__(self):
        """Checks the settings."""
        check_for_agents(self.cfg)
        size("mem_len", self.mem_len, int(self.cfg.same_length == "pytorch"))
        super().__post_init__()

    @nn.nowrap
    def initialize_carry(self, key: Any, input_shape: tuple[int, ...]) -> Carry:
        """Returns the empty carry for inputs of shape (B, ...); the key is not used."""
        mems = TransformerXL(self.cfg, parent=None).init_mems(input_shape[0], self.mem_len)
        return tuple(mems.hidden), mems.filled

    @nn.compact
    def __call__(self, inputs, mask=None, initial_carry: Carry | None = None, **unused):
        """Returns the carry after T steps, and their outputs [B,T,D] without dropout.

        Args:
          inputs: floats [B,T,D], any T.
          mask: bool or numbers [B,T], not 0 at the first step of an episode; ``None``: all 0.
          initial_carry: the carry before these steps; ``None`` is an empty one.
          unused: arguments that a program gives to all its sequence models, such as ``action``.
        """
        core, m = TransformerXL(self.cfg), self.mem_len
        nn.share_scope(self, core)  # the parameters have no scope of their own
        refuse_arguments_of_core(unused)
        check_array("inputs", inputs, "floats", ("B", "T", self.cfg.d_model))
        b, t = inputs.shape[:2]
        if mask is not None:
            check_array("mask", mask := jnp.asarray(mask), "bool or numbers", (b, t))
        hidden = jax.ShapeDtypeStruct((b, m, self.cfg.d_model), jnp.dtype(core.cfg.dtype))
        like = (hidden,) * self.cfg.n_layer, jax.ShapeDtypeStruct((b,), jnp.int32)
        carry = tree_like("initial_carry", initial_carry, like, "see initialize_carry")
        layers, filled = jax.lax.stop_gradient(carry)
        past, begins = Memory(jnp.stack(layers), filled), None if mask is None else mask != 0
        states, new, mems = core.core_and_inputs(inputs, past, reset=begins)
        # Each layer's new memory is computed here: XLA would copy ``mems.hidden`` to split it.
        newest = lambda old, x: jnp.concatenate([old[:, t:], x[:, max(t - m, 0) :]], axis=1)
        return (tuple(map(newest, layers, new)), mems.filled), states
