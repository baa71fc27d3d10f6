"""An automaton that restricts byte models to valid UTF-8.

State 0 is between two characters. The other states are inside a character:

    1, 2, 3  1, 2 or 3 continuation bytes follow, each from 80 to BF
    4        after E0: A0 to BF, then state 1    5  after ED: 80 to 9F, then state 1
    6        after F0: 90 to BF, then state 2    7  after F4: 80 to 8F, then state 2

(RFC 3629, section 4: no overlong forms, no surrogates, nothing above U+10FFFF.)
"""

from typing import NamedTuple

import numpy as np

from txl_jax.data.vocab import Vocab

_TRANSITIONS = (
    *((0, 0x00, 0x7F, 0), (0, 0xC2, 0xDF, 1), (0, 0xE0, 0xE0, 4), (0, 0xE1, 0xEC, 2)),
    *((0, 0xED, 0xED, 5), (0, 0xEE, 0xEF, 2), (0, 0xF0, 0xF0, 6), (0, 0xF1, 0xF3, 3)),
    *((0, 0xF4, 0xF4, 7), (1, 0x80, 0xBF, 0), (2, 0x80, 0xBF, 1), (3, 0x80, 0xBF, 2)),
    *((4, 0xA0, 0xBF, 1), (5, 0x80, 0x9F, 1), (6, 0x90, 0xBF, 2), (7, 0x80, 0x8F, 2)),
)
"""Each entry has a state, the first and last byte of an allowed range, and the next state."""
_STATES = 8


class Automaton(NamedTuple):
    """A finite automaton over tokens, with S states."""

    allowed: np.ndarray  # the tokens that each state allows, at least one: bool [S,V]
    next_state: np.ndarray  # the state after each token, int32 [S,V]

    def state_after(self, ids: np.ndarray) -> int:
        """Returns the state after a text. A token that is not allowed resets the state to 0."""
        state = 0
        for token in ids[-4:]:  # a character has at most 4 bytes
            state = int(self.next_state[state, token]) if self.allowed[state, token] else 0
        return state


def free_automaton(vocab: Vocab) -> Automaton:
    """Returns an automaton of the shape of :func:`utf8_automaton` that allows all tokens."""
    shape = (_STATES, len(vocab))
    return Automaton(np.ones(shape, bool), np.zeros(shape, np.int32))


def utf8_automaton(vocab: Vocab) -> Automaton:
    """Builds the automaton of a byte vocabulary.

    It allows a character only if the vocabulary has all bytes of the character.
    """
    values = np.array([int(symbol) for symbol in vocab.symbols])
    allowed = np.zeros((_STATES, len(values)), bool)
    next_state = np.zeros((_STATES, len(values)), np.int32)
    for state, first, last, following in _TRANSITIONS:
        in_range = (first <= values) & (values <= last)
        allowed[state, in_range], next_state[state, in_range] = True, following
    for _ in range(_STATES):
        allowed &= np.asarray(allowed.any(axis=1))[next_state]
    if not allowed[0].any():
        next_state[0] = 0  # the vocabulary cannot write any valid text, so all bytes are allowed
    allowed[~allowed.any(axis=1)] = True  # state 0 in this case, otherwise unreachable states
    return Automaton(allowed, next_state)
