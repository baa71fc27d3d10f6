"""The largest values of integer settings.

They are many times what any published recipe uses, and small enough that int32 arithmetic on the
device and the tracing of a program cannot fail. What a machine can hold is less, and is checked
against its memory (machine.py).
"""

SEED = 2**32 - 1
"""JAX makes its keys from 32 bits: larger seeds would repeat the keys of smaller ones."""

STEPS = 1_000_000_000
"""Updates, segments and what is counted in them; the step is an int32."""

TOKENS = 1_000_000_000_000
"""How much of a text is used; the text itself is the limit."""

LENGTH = 1_000_000
"""Tokens of a segment, a memory or a context, and distances between tokens."""

ROWS = 1_000_000
"""Streams, prompts or windows at a time."""

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
"""Entries of any setting that is a list, and runs or softmaxes side by side."""
