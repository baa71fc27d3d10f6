"""Generates ``probe``, a random text in which answers repeat a symbol from d tokens before.

The text is a sequence of episodes, each with its own distance d:

    < B . . . . . . > B         d = 8: the answer B comes 8 tokens after B was shown
      |<----- d ----->|         ``<`` and ``>`` are markers; the points are noise

A model that predicts B after ``>`` has remembered the symbol for d tokens.
"""

import string

import numpy as np

from txl_jax.config import ProbeTextConfig
from txl_jax.data.sources.source import BLOCK, SPLITS, Source

SHOW, ASK = "<", ">"  # the markers before a symbol to remember and before its repetition
NOISE, ANSWERS = "." + string.ascii_lowercase, string.ascii_uppercase  # data.probe sets how many


def find(c: ProbeTextConfig) -> Source:
    """Generates the corpus of these settings, which is the same on every machine."""
    texts = {}
    for number, split in enumerate(SPLITS):
        size = c.tokens if split == "train" else c.tokens // 10
        text = draw(c, np.random.default_rng([c.seed, number]), size).encode()
        texts[split] = [text[start : start + BLOCK] for start in range(0, len(text), BLOCK)]
    label = f"answers {c.shortest} to {c.longest} tokens back, seed {c.seed}"
    return Source("probe", {}, texts, counted=SPLITS, label=label)


def draw(c: ProbeTextConfig, rng: np.random.Generator, size: int) -> str:
    """Draws as many complete episodes of random distances as fit in ``size`` tokens."""
    most = size // (c.shortest + 2) + 1
    distances = rng.integers(c.shortest, c.longest, size=most, endpoint=True)
    fit = int(np.searchsorted(np.cumsum(distances + 2), size, side="right"))
    return episodes(c, rng, distances[:fit])


def episodes(c: ProbeTextConfig, rng: np.random.Generator, distances: np.ndarray) -> str:
    """Draws an episode of d + 2 tokens for each distance d; returns all as one text."""
    ends = np.cumsum(distances + 2)
    starts = ends - (distances + 2)
    noise, answers = (np.array(list(s)) for s in (NOISE[: c.noise], ANSWERS[: c.symbols]))
    text = rng.choice(noise, size=int(ends[-1]) if len(ends) else 0)
    text[starts], text[ends - 2] = SHOW, ASK
    text[starts + 1] = text[ends - 1] = rng.choice(answers, size=len(distances))
    return "".join(text)


def alphabet(c: ProbeTextConfig) -> str:
    """Returns every symbol that the text can have."""
    return SHOW + ASK + NOISE[: c.noise] + ANSWERS[: c.symbols]
