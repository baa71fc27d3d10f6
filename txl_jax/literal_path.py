"""The class of all path objects, which extends one of etils: no name is read as a glob pattern."""

import errno
import glob
import os
from collections.abc import Iterator
from typing import Any

from etils.epath.gpath import PosixGPath

COMMIT_MARK = "commit_success.txt"
"""The file that marks a complete checkpoint. In a bucket, Orbax writes this file last."""


class LiteralPath(PosixGPath):
    """A local path or a ``gs://`` address; see :func:`txl_jax.paths.path`, which makes them.

    In contrast, etils reads ``[``, ``*`` and ``?`` in the name of a local folder as patterns, and
    leaves out files whose names end with ``~``.
    """

    def glob(self, pattern: str) -> Iterator["LiteralPath"]:
        """Yields the files of this folder that match a pattern."""
        if self._uri_scheme:
            yield from super().glob(pattern)
        else:
            for name in glob.iglob(pattern, root_dir=self):
                yield self / name

    def iterdir(self) -> Iterator["LiteralPath"]:
        """Yields all files and folders of this folder, in arbitrary order."""
        if self._uri_scheme:
            yield from super().iterdir()
        else:
            for name in os.listdir(self):
                yield self / name

    def open(self, mode: str = "r", **settings: Any) -> Any:
        """Opens the file. The error for a missing object of a bucket names this object."""
        try:
            return super().open(mode, **settings)
        except FileNotFoundError as error:
            if error.strerror:
                raise
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self)) from error

    def rmtree(self, missing_ok: bool = False) -> None:
        """Removes a folder and all files in it.

        In a bucket, the commit mark is removed first. So a checkpoint that is partly removed never
        counts as complete.
        """
        if self._uri_scheme:
            (self / COMMIT_MARK).unlink(missing_ok=True)
        super().rmtree(missing_ok)
