"""Ctrl-C while a command starts: one line and exit code 130, at once.

Python's own way, an exception in the main thread, is not enough here. Libraries print it as a
traceback or lose it while they are imported, and native code that waits for other processes does
not return to Python. So a thread waits for the signal and ends the process. Nothing has been
written by then.
"""

import os
import signal
import sys
import threading

_COMMANDS = {"txl_jax.main", "txl_jax.convert"}
_MESSAGE = "interrupted"
EXIT_CODE = 130

_wakeup: int | None = None


def is_command() -> bool:
    """Whether Python is just loading ``python -m txl_jax.main`` or ``txl_jax.convert``.

    False in a program that imports this package: its signals are its own.
    """
    return sys.argv[:1] == ["-m"] and not _COMMANDS.isdisjoint(sys.orig_argv)


def end_at_once() -> None:
    """From here on Ctrl-C ends the process; not where it is ignored, as after ``nohup``."""
    global _wakeup
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    read, _wakeup = os.pipe()
    os.set_blocking(_wakeup, False)
    signal.signal(signal.SIGINT, _leave_to_thread)
    signal.set_wakeup_fd(_wakeup)
    threading.Thread(target=_wait, args=(read,), daemon=True).start()


def raise_again() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt; the start is over."""
    global _wakeup
    if _wakeup is None:
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.set_wakeup_fd(-1)
    os.close(_wakeup)
    _wakeup = None


def report() -> int:
    """Prints the one line; the exit code."""
    print(_MESSAGE, file=sys.stderr, flush=True)
    return EXIT_CODE


def _leave_to_thread(number: int, frame: object) -> None:
    """Makes Python write the signal's number to the pipe, and raises nothing."""


def _wait(read: int) -> None:
    """Ends the process when SIGINT is in the pipe; returns when the pipe is closed."""
    while number := os.read(read, 1):
        if number[0] == signal.SIGINT:
            os.write(2, f"{_MESSAGE}\n".encode())
            os._exit(EXIT_CODE)
    os.close(read)
