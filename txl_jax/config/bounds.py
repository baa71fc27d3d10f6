"""The largest values of settings.

These values are many times those of any published recipe, and small enough for int32
arithmetic on the device and for tracing. device_memory.py checks the memory of the device.
"""

SEED = 2**32 - 1
"""The largest seed; JAX keys have 32 bits, and larger seeds would repeat keys of smaller ones."""
STEPS = 1_000_000_000
"""The largest number of updates or segments; the step is an int32."""
TOKENS = 1_000_000_000_000
"""The largest number of tokens of a text, far above the size of any corpus."""
LENGTH = 1_000_000
"""The largest length of a segment, a memory or a context, and distance between tokens."""
ROWS = 1_000_000
"""The largest number of streams, prompts or windows that are computed together."""
LAYERS = 1_000
HEADS = 10_000
WIDTH = 100_000
INNER_WIDTH = 1_000_000
WORDS = 10_000_000
"""The largest number of symbols of a vocabulary."""
CLUSTERS = 100
"""The largest number of tail clusters of an adaptive softmax, and factor between their widths."""
DEVICES = 1_000_000
ITEMS = 1_000
"""The largest number of entries of a list, of runs in one program and of mixed softmaxes."""
BELOW_1 = 0.999999
"""The largest probability below 1; float32 rounds numbers that are nearer to 1 up to 1."""
