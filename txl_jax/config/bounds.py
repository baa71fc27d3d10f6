"""The largest values of settings, and the smallest value of settings that must be above 0.

The largest values are many times those of any published recipe, and small enough for int32
arithmetic on the device and for tracing. Whether a model fits in the device's memory is not checked
here but in device_memory.py.
"""

SEED = 2**32 - 1  # JAX keys have 32 bits; larger seeds would repeat keys of smaller seeds
STEPS = 1_000_000_000  # updates or segments; the step is an int32
TOKENS = 1_000_000_000_000  # tokens of a text, far more than any corpus has
LENGTH = 1_000_000  # tokens of a segment, memory or context, or between two tokens
ROWS = 1_000_000  # streams, prompts or windows that are computed together
LAYERS = 1_000
HEADS = 10_000
WIDTH = 100_000
INNER_WIDTH = 1_000_000
WORDS = 10_000_000  # symbols of a vocabulary
CLUSTERS = 100  # the factor between the widths of the clusters of an adaptive softmax
DEVICES = 1_000_000
ITEMS = 1_000  # runs in one program, seeds of a sweep and mixed softmaxes
BELOW_1 = 0.999999  # the largest probability below 1; float32 rounds much nearer ones to 1
SMALLEST = 1.2e-38  # the smallest number above 0; devices treat smaller float32 numbers as 0
LARGEST = 3.4e38  # the largest float32 number; larger numbers are infinite
