"""Errors that libraries print go to a file of the workdir, so that this program's line is read.

One save that fails makes Orbax log the error in each of its threads, asyncio report every future
whose result nobody has asked for, and Python print what threads of tensorstore cannot raise:
hundreds to thousands of lines, some of them after the program's own message. The program raises
that error itself, as one line. The details are kept for those who look for the cause:

    <workdir>/library.log            of all processes

The file is made with the first such error. Where it cannot be written, on a full disk, the details
are dropped.
"""

import contextlib
import logging
import os
import sys
from typing import Any

FILE = "library.log"
_LOGGERS = ("absl", "asyncio")
"""Orbax logs with absl's logger."""


def keep_library_errors(workdir: str) -> None:
    """From now on errors of libraries are appended to a file of ``workdir``.

    For the command, which owns its process: it replaces the handlers of two loggers and the hook
    for exceptions that cannot be raised. Warnings of JAX and all else stay as they are.
    """
    handler = _ToFile(os.path.join(workdir, FILE))
    for logger in map(logging.getLogger, _LOGGERS):
        logger.handlers, logger.propagate = [handler], False

    def unraisable(about: Any) -> None:
        exc_info = (about.exc_type, about.exc_value, about.exc_traceback)
        message = {"msg": about.err_msg or "cannot be raised", "exc_info": exc_info}
        handler.handle(logging.makeLogRecord(message))

    sys.unraisablehook = unraisable


class _ToFile(logging.Handler):
    """Appends records to a file that is opened for each of them; there are none in a good run."""

    def __init__(self, path: str):
        super().__init__(logging.ERROR)
        self.setFormatter(logging.Formatter("%(asctime)s %(threadName)s %(message)s"))
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError), open(self._path, "a", encoding="utf-8") as file:
            file.write(self.format(record) + "\n")
