"""Acting: one step of all environments at a time, from the projected memory."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import flax.struct
import jax

from txl_jax.config import ConfigError, TransformerXLConfig
from txl_jax.messages import fields_repr
from txl_jax.model.inputs import check_array
from txl_jax.model.layout import unstack_layers
from txl_jax.model.memory import Cache, Memory
from txl_jax.model.transformer_xl import TransformerXL


def check_for_agents(c: TransformerXLConfig) -> None:
    """Raises ConfigError if the model has no memory, or if acting and learning would differ."""
    if c.memory_free:
        raise ConfigError(
            f"model.attention = {c.attention!r}: acting needs a memory; use 'relative'"
        )
    if not c.same_length:
        raise ConfigError(
            "model.same_length = False: acting and learning would differ, because acting sees"
            " mem_len earlier steps and the last step of a training window sees more; use 'tf'"
            " (each step sees mem_len earlier ones) or 'pytorch' (one fewer)"
        )


def refuse_arguments_of_core(names: Iterable[str]) -> None:
    """Raises TypeError for arguments of ``core`` that a sequence model renames or lacks."""
    reasons = {"mems": "give initial_carry", "carry": "give initial_carry"}
    reasons |= {"reset": "give mask", "begins": "give mask"}
    reasons |= dict.fromkeys(("train", "lengths"), "use TransformerXL with method='core'")
    for name in names:
        if name in reasons:
            raise TypeError(f"SequenceModel() has no argument {name!r}: {reasons[name]}")


class Actor(flax.struct.PyTreeNode):
    """The model's parameters, and the memory that is projected with them: the carry of acting.

    Both are kept together, so that no step uses a memory that was projected with older parameters.
    After an update, make a new actor with :meth:`start`. An actor is a pytree for ``jax.jit``,
    ``jax.vmap`` and the carry of ``jax.lax.scan``, which updates the actor in place.

    Attributes:
      variables: what ``model.apply`` takes, with one tree for each layer.
      cache: the projected memory.
      model: the model with unrolled layers.
    """

    __repr__ = fields_repr

    variables: Any
    cache: Cache
    model: TransformerXL = flax.struct.field(pytree_node=False)

    @classmethod
    def start(cls, model: TransformerXL, variables: Any, mems: Memory) -> "Actor":
        """Returns an actor of B environments whose memory is ``mems``, after projecting it.

        ``variables`` are those of ``model``, which can have ``scan_layers``.

        Raises:
          ConfigError: the model has no memory, or no ``same_length`` window.
        """
        c = model.cfg
        check_for_agents(c)
        if c.scan_layers:
            variables = unstack_layers(variables)
            model = model.clone(cfg=dataclasses.replace(c, scan_layers=False))
        cache: Any = model.apply(variables, mems, seg_len=1, method="init_cache")
        return cls(variables, cache, model)

    def step(self, inputs: jax.Array, begins: jax.Array) -> tuple[jax.Array, "Actor", jax.Array]:
        """Returns a step's outputs, the next actor, and the states that a memory would store.

        Args:
          inputs: floats [B,D], the encoded observations.
          begins: bool [B], whether the observation is the first of an episode.

        Returns:
          outputs: [B,D], the output of the last layer without dropout.
          actor: the actor for the next step.
          states: [L,B,D] in the compute dtype, the input of every layer.
        """
        rows = self.cache.filled.shape[0]
        check_array("inputs", inputs, "floats", (rows, self.model.cfg.d_model))
        check_array("begins", begins, "bool", inputs.shape[:1])
        step: Any = self.model.apply(
            self.variables, inputs[:, None], self.cache, reset=begins, method="core_and_inputs"
        )
        outputs, states, cache = step
        return outputs[:, 0], self.replace(cache=cache), states[:, :, 0]
