"""Transformer-XL as the memory of agents: acting step by step, and learning on windows.

    memory ──Actor.start──▶ actor ──step──▶ outputs [B,D], new states [L,B,D] ──▶ StateBuffer
       ▲                                                                             │
       └────── memory before any step ◀── StateBuffer.memory ◀───────────────────────┘

To learn on a window of steps, a program runs ``core`` from the memory before the window's first
step. The outputs then equal the actor's outputs, up to rounding. This needs a config with a
``same_length`` window.

A program that has a carry of its own can use :class:`SequenceModel` instead of :class:`Actor` and
:class:`StateBuffer`.

Example:
  >>> import jax, jax.numpy as jnp, txl_jax
  >>> from txl_jax import agents
  >>> cfg = txl_jax.TransformerXLConfig(n_layer=2, d_model=8, same_length="tf")
  >>> model, M, T, B = txl_jax.TransformerXL(cfg), 4, 3, 2
  >>> buffer = agents.StateBuffer.start(model.init_mems(B, M), steps=T)
  >>> inputs, begins = jnp.ones((B, T, 8)), jnp.zeros((B, T), bool)
  >>> variables = model.init(jax.random.key(0), inputs, buffer.memory(M), method="core")
  >>> actor, states = agents.Actor.start(model, variables, buffer.memory(M)), []
  >>> for t in range(T):
  ...     outputs, actor, new = actor.step(inputs[:, t], begins[:, t])
  ...     states.append(new)
  >>> buffer = buffer.add(jnp.stack(states, axis=2), begins)
  >>> window, _ = model.apply(variables, inputs, buffer.memory(M, before=M), method="core")
  >>> bool(jnp.allclose(window[:, -1], outputs, atol=1e-5))
  True
"""

from txl_jax.agents.acting import Actor
from txl_jax.agents.buffer import StateBuffer
from txl_jax.agents.sequence_model import SequenceModel

__all__ = ["Actor", "SequenceModel", "StateBuffer"]
