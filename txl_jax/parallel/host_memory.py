"""The host's memory: freed blocks stay with the process, so a CPU does not clear them each step."""

import ctypes

# Parameters of mallopt in glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory for the next allocation; elsewhere nothing changes.

    On a CPU, a compiled program allocates its temporary arrays at every call. By default glibc
    returns large blocks to Linux, which clears all pages again at the next call. The arenas of
    threads hold blocks of up to 64 MB, so larger ones are still returned.

    One arena for all threads (M_ARENA_MAX) would keep larger blocks too: 6 layers of 256 then take
    8% less time and 1.7 times the memory. But the threads wait for each other: 3 layers of 128 take
    9 to 21% longer (two cores of an AMD EPYC, two runs each; RESULTS.md has all figures).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, -1)  # never
