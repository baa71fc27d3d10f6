"""Settings of the synthetic text that ``--mode=probe`` asks about."""

import dataclasses

from txl_jax.config.bounds import LENGTH, SEED
from txl_jax.config.fields import at_least, rule


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbeTextConfig:
    """The text of ``data.name='probe'`` (data/sources/probe.py); the section ``data.probe``.

    Attributes:
      shortest, longest: the distance from an answer back to the symbol that it repeats, in tokens,
        is drawn uniformly from these and all between, anew in each episode.
      symbols: C, what an answer may be; chance is 1/C.
      noise: how many symbols noise is drawn from; with 1 nothing but the answers is to be learnt.
      tokens: of the train split, at most; ``valid`` and ``test`` have a tenth of it each.
      seed: of the drawing.
    """

    shortest: int = at_least(2, 3, LENGTH)
    longest: int = at_least(2, 64, LENGTH)
    symbols: int = rule(
        8, "must be from 2 to 26, there is a letter for each", lambda v: 2 <= v <= 26, 26
    )
    noise: int = rule(
        1, "must be from 1 to 26, there is a letter for each", lambda v: 1 <= v <= 26, 26
    )
    tokens: int = at_least(1000, 1_000_000, 1_000_000_000)
    seed: int = at_least(0, 0, SEED)
