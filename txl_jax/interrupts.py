"""Ends a command at once, with one line and exit code 130, if Ctrl-C is pressed while it starts.

Python's default, an exception in the main thread, is not enough here. Libraries print it as a
traceback or swallow it during their import, and native code that waits for other processes does
not return to Python. Therefore a thread waits for the signal and ends the process. No file
has been written by then.
"""

import contextlib
import os
import signal
import sys
import threading

EXIT_CODE = 130
_MESSAGE = "interrupted"
_wakeup_fd: int | None = None


def is_command() -> bool:
    """Whether this process is ``txl``, or a command of this package started with ``python -m``.

    This is False in a program that imports the package, which may have its own signal handlers.
    """
    commands = {"txl_jax.main", "txl_jax.convert"}
    return is_script() or (sys.argv[:1] == ["-m"] and not commands.isdisjoint(sys.orig_argv))


def is_script() -> bool:
    """Whether this process is the command ``txl``."""
    return bool(sys.argv) and os.path.basename(sys.argv[0]) in ("txl", "txl.exe")


def exit_on_interrupt() -> None:
    """Makes Ctrl-C end the process; does nothing if Ctrl-C is ignored, as under ``nohup``."""
    global _wakeup_fd
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    read, _wakeup_fd = os.pipe()
    os.set_blocking(_wakeup_fd, False)
    # An empty handler: Python writes the signal's number to the pipe and raises nothing.
    signal.signal(signal.SIGINT, lambda number, frame: None)
    signal.set_wakeup_fd(_wakeup_fd)
    threading.Thread(target=_exit_on_sigint, args=(read,), daemon=True).start()


def restore_keyboard_interrupt() -> None:
    """Makes Ctrl-C raise KeyboardInterrupt again, once the command has started."""
    global _wakeup_fd
    if _wakeup_fd is None:
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.set_wakeup_fd(-1)
    os.close(_wakeup_fd)
    _wakeup_fd = None


def report_interrupt() -> int:
    """Prints one line that reports the interrupt, and returns the exit code."""
    print(_MESSAGE, file=sys.stderr, flush=True)
    return EXIT_CODE


def _exit_on_sigint(read: int) -> None:
    """Ends the process when the pipe delivers SIGINT; returns when the pipe is closed."""
    while number := os.read(read, 1):
        if number[0] == signal.SIGINT:
            with contextlib.suppress(OSError):  # Ctrl-C has also ended the reader, as in `| tee`
                os.write(2, f"{_MESSAGE}\n".encode())
            os._exit(EXIT_CODE)
    os.close(read)
