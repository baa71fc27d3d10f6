"""The largest values of settings, and the smallest value of those that must be above 0.

These values are many times those of any published recipe, and small enough for int32
arithmetic on the device and for tracing. device_memory.py checks the memory of the device.
"""

SEED = 2**32 - 1  # JAX keys have 32 bits; larger seeds would repeat keys of smaller ones
STEPS = 1_000_000_000  # updates or segments; the step is an int32
TOKENS = 1_000_000_000_000  # of a text, far above the size of any corpus
LENGTH = 1_000_000  # of a segment, a memory or a context, and distance between tokens
ROWS = 1_000_000  # streams, prompts or windows that are computed together
LAYERS = 1_000
HEADS = 10_000
WIDTH = 100_000
INNER_WIDTH = 1_000_000
WORDS = 10_000_000  # symbols of a vocabulary
CLUSTERS = 100  # the factor between the widths of the clusters of an adaptive softmax
DEVICES = 1_000_000
ITEMS = 1_000  # runs in one program, seeds of a sweep and mixed softmaxes
BELOW_1 = 0.999999  # the largest probability below 1; float32 rounds nearer ones up to 1
SMALLEST = 1.2e-38  # above 0; devices take smaller float32 numbers for 0
LARGEST = 3.4e38  # of float32; larger ones are infinite
