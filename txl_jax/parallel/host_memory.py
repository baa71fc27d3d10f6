"""The host's memory: freed blocks stay with the process, so a CPU does not clear them each step."""

import ctypes

# Parameters of mallopt in glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory for the next allocation; elsewhere nothing changes.

    On a CPU, a compiled program allocates its temporary arrays at every call. By default glibc
    returns large blocks to Linux, which clears all pages again at the next call. That was 2% of the
    time of an update of the quickstart, 14% with configs/ptb_small.py, and 7 to 9% with the 12
    layers of configs/enwik8_12l.py and 2 x 256 tokens (measured twice: one core of an Intel Xeon,
    other programs beside it). The largest resident size was 0.6 to 1.1 of what it was.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_ARENA_MAX, 1)  # other arenas cannot hold a block over 64 MB
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, -1)  # never
