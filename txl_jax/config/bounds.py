"""The largest values of settings.

They are many times those of any published recipe, and small enough for int32 arithmetic on the
device and for tracing. A machine holds less; device_memory.py checks that.
"""

import numpy as np

SEED = 2**32 - 1
"""JAX keys have 32 bits: larger seeds would repeat the keys of smaller ones."""
STEPS = 1_000_000_000
"""Updates, segments and what is counted in them; the step is an int32."""
TOKENS = 1_000_000_000_000
"""Tokens of a text; the text itself is the limit."""
LENGTH = 1_000_000
"""Tokens of a segment, a memory or a context, and distances between tokens."""
ROWS = 1_000_000
"""Streams, prompts or windows computed together."""
LAYERS = 1_000
HEADS = 10_000
WIDTH = 100_000
INNER_WIDTH = 1_000_000
WORDS = 10_000_000
"""Symbols of a vocabulary."""
CLUSTERS = 100
"""Tail clusters of an adaptive softmax, and factors between their widths."""
DEVICES = 1_000_000
ITEMS = 1_000
"""Entries of a list, runs in one program and mixed softmaxes."""
BELOW_1 = 0.999999
"""The largest probability; float32 rounds numbers nearer to 1 to 1."""
FLOAT32 = (float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max))
"""The smallest and the largest positive number that float32 holds without loss of digits."""
