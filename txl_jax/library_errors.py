"""Imports optional packages, and writes errors that libraries log to a file of the workdir.

After one failed save, Orbax, asyncio and tensorstore print hundreds to thousands of lines, partly
after this program's own one-line message. The file ``<workdir>/library.log`` keeps these lines for
debugging. The first error creates the file. On a full disk the lines are dropped.
"""

import contextlib
import importlib
import importlib.metadata
import logging
import os
import sys
import warnings
from typing import Any

from txl_jax.files import append


def import_optional(package: str, missing: Exception) -> Any:
    """Imports and returns an optional package; raises ``missing`` if it is not installed."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise missing from error


def installed_version(package: str) -> str | None:
    """Returns the version of a package, or ``None`` if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def log_library_errors(workdir: str) -> None:
    """Appends library errors to a file of ``workdir`` from now on.

    This function replaces the handlers of two loggers and ``sys.unraisablehook``, and adds a filter
    of warnings. Only a command should call this function, because a command owns its process. Other
    loggers and JAX's warnings do not change.
    """
    handler = _AppendToFile(os.path.join(workdir, "library.log"))
    for logger in map(logging.getLogger, ("absl", "asyncio")):  # Orbax logs with absl
        logger.handlers, logger.propagate = [handler], False

    def unraisable(error: Any) -> None:
        exc_info = (error.exc_type, error.exc_value, error.exc_traceback)
        message = {"msg": error.err_msg or "unraisable exception", "exc_info": exc_info}
        handler.handle(logging.makeLogRecord(message))

    sys.unraisablehook = unraisable
    # After a failed save, Orbax can have a write that it never started. Without this filter, Python
    # would print a warning about the write on the terminal.
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)


class _AppendToFile(logging.Handler):
    """Opens the file for each record, so a run without errors creates no file."""

    def __init__(self, path: str):
        super().__init__(logging.ERROR)
        self.setFormatter(logging.Formatter("%(asctime)s %(threadName)s %(message)s"))
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record).encode(errors="backslashreplace")
        with contextlib.suppress(Exception):  # an error here must not end the run
            append(self._path, text + b"\n")
