"""The host's memory: freed blocks stay with the process, so a CPU does not clear them each step."""

import ctypes

# Parameters of mallopt in glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory for the next allocation; elsewhere nothing changes.

    On a CPU, a compiled program allocates its temporary arrays at every call. By default glibc
    returns large blocks to Linux, which clears all pages again at the next call. On two cores of an
    AMD EPYC that was 6 to 10% of an update of the quickstart, 13 to 16% with configs/ptb_small.py,
    and 38 to 63% with 2 layers of 32 (each measured twice; RESULTS.md has more). The largest
    resident size was 0.98 to 1.19 of what it was.

    One arena for all threads (M_ARENA_MAX) would keep blocks over 64 MB too, which takes 8% less
    time with 6 layers of 256. But the threads then wait for each other: an update of 3 layers of
    128 takes 9 to 21% longer, and the resident size is up to 1.7 times as large.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, -1)  # never
