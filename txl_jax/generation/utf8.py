"""Which byte may follow which, so that a model of bytes writes text: UTF-8 as an automaton.

State 0: between characters; the others: inside of one, so many bytes to come.

    1, 2, 3  so many continuation bytes, 80 to BF
    4        after E0: A0 to BF, then 1          5  after ED: 80 to 9F, then 1
    6        after F0: 90 to BF, then 2          7  after F4: 80 to 8F, then 2

(RFC 3629, section 4: no overlong forms, no surrogates, nothing above U+10FFFF.)
"""

from typing import NamedTuple

import numpy as np

from txl_jax.data.vocab import Vocab

_STEPS = (
    (0, 0x00, 0x7F, 0),
    (0, 0xC2, 0xDF, 1),
    (0, 0xE0, 0xE0, 4),
    (0, 0xE1, 0xEC, 2),
    (0, 0xED, 0xED, 5),
    (0, 0xEE, 0xEF, 2),
    (0, 0xF0, 0xF0, 6),
    (0, 0xF1, 0xF3, 3),
    (0, 0xF4, 0xF4, 7),
    (1, 0x80, 0xBF, 0),
    (2, 0x80, 0xBF, 1),
    (3, 0x80, 0xBF, 2),
    (4, 0xA0, 0xBF, 1),
    (5, 0x80, 0x9F, 1),
    (6, 0x90, 0xBF, 2),
    (7, 0x80, 0x8F, 2),
)
"""From a state, the bytes from one to another lead to a state."""


class Automaton(NamedTuple):
    """States S of a text, and what each token does to them.

    Attributes:
      allowed: bool [S,V]; every state allows at least one token.
      after: int32 [S,V], the next state.
    """

    allowed: np.ndarray
    after: np.ndarray

    def state_after(self, ids: np.ndarray) -> int:
        """The state after a text; what is not allowed in it counts as a new beginning."""
        state = 0
        for token in ids[-4:]:  # no character is longer
            state = int(self.after[state, token]) if self.allowed[state, token] else 0
        return state


def automaton(vocab: Vocab) -> Automaton:
    """Of a vocabulary of bytes. A character that its bytes cannot end is not begun."""
    values = np.array([int(symbol) for symbol in vocab.symbols])
    states = 1 + max(state for state, *_ in _STEPS)
    allowed = np.zeros((states, len(values)), bool)
    after = np.zeros((states, len(values)), np.int32)
    for state, first, last, then in _STEPS:
        of = (first <= values) & (values <= last)
        allowed[state, of], after[state, of] = True, then
    for _ in range(states):
        alive = np.asarray(allowed.any(axis=1))
        allowed &= alive[after]
    if not allowed[0].any():
        allowed[0] = True  # bytes that are no text at all: anything goes
        after[0] = 0
    allowed[~allowed.any(axis=1)] = True  # never entered
    return Automaton(allowed, after)
