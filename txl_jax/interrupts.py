"""Ends a command immediately on Ctrl-C during its start, before it has written any file.

Python's default, an exception in the main thread, is not enough here. Libraries print it as a
traceback or swallow it during their import, and native code that waits for other processes does
not return to Python.
"""

import os
import signal
import sys

EXIT_CODE = 130


def is_command() -> bool:
    """Whether this process is ``txl``, or a command of this package started with ``python -m``.

    This is False in a program that imports the package, which can have its own signal handlers.
    """
    commands = {"txl_jax.main", "txl_jax.convert"}
    return is_script() or (sys.argv[:1] == ["-m"] and not commands.isdisjoint(sys.orig_argv))


def is_script() -> bool:
    """Whether this process is the command ``txl``."""
    return bool(sys.argv) and os.path.basename(sys.argv[0]) in ("txl", "txl.exe")


def exit_on_interrupt() -> None:
    """Makes Ctrl-C end the process, unless the process ignores Ctrl-C or has a handler for it.

    For example, a shell script starts its background jobs with this signal ignored.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def restore_keyboard_interrupt() -> None:
    """Makes Ctrl-C raise KeyboardInterrupt again, once the command has started."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def report_interrupt() -> int:
    """Prints one line that reports the interrupt, and returns the exit code."""
    print("interrupted", file=sys.stderr, flush=True)
    return EXIT_CODE
