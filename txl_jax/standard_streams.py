"""Standard streams of a command that survive a reader that ends (``| head``) or a full disk.

Output that cannot be written is dropped. Later output is written if the disk has space again. If
the result of a command is its standard output, the command ends when this output is lost. Its exit
code is 141 if the reader has ended, as a shell reports for other programs. Otherwise the command
prints an error, and its exit code is 2. A mode with other results calls
:func:`drop_unwritten_output`, and completes its work.

The streams of a program that imports the package are not changed.
"""

import io
import os
import select
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TextIO

READER_ENDED = 141  # 128 + SIGPIPE


class _Descriptor(io.FileIO):
    """A file descriptor for output. If ``drops``, data that cannot be written is dropped.

    ``lost`` is the first error that did not come from a reader that has ended.
    """

    def __init__(self, number: int, drops: bool):
        super().__init__(number, "w", closefd=False)
        self.drops = drops
        self.lost: OSError | None = None

    def write(self, data: Any) -> int:
        """Writes data and returns the number of bytes that are written or dropped."""
        try:
            while (written := super().write(data)) is None:
                select.select([], [self], [])  # a full pipe that does not block
            return written
        except OSError as error:
            ended, raises = isinstance(error, BrokenPipeError), not self.drops
            self.lost = self.lost or (None if ended else error)
            self.drops = True  # Python writes the same data again when it ends
            if raises:
                raise (SystemExit(READER_ENDED) if ended else error) from error
            return memoryview(data).nbytes


_stdout: _Descriptor | None = None


def open_standard_streams() -> None:
    """Replaces Python's own output streams, and opens the null device for closed streams.

    A file that is opened later thus cannot get the number of a closed stream.
    """
    global _stdout
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)  # the lowest free number: that of the stream
            setattr(sys, name, os.fdopen(number, mode, closefd=False))
    _stdout = _Descriptor(1, drops=False)
    sys.stdout = _text_stream(_stdout, sys.stdout)
    sys.stderr = _text_stream(_Descriptor(2, drops=True), sys.stderr)


def _text_stream(descriptor: _Descriptor, before: Any) -> TextIO:
    """Returns a text stream with the settings of the stream ``before``."""
    unbuffered = before.write_through  # python -u
    buffer: Any = descriptor if unbuffered else io.BufferedWriter(descriptor)
    settings = {"line_buffering": before.line_buffering, "write_through": unbuffered}
    return io.TextIOWrapper(buffer, before.encoding, before.errors, "\n", **settings)


def drop_unwritten_output() -> None:
    """Lets a command continue if its standard output cannot be written.

    A command calls this function if it has other results than its standard output.
    """
    if _stdout:
        _stdout.drops = True


def run_command(command: Callable[[], int | None]) -> NoReturn:
    """Calls ``command()`` and exits with its exit code, or with 2 if output on a disk was lost."""
    try:
        try:
            code: Any = command()
        except SystemExit as end:
            code = end.code
        sys.stdout.flush()
    except OSError as error:  # from writing help or the last output
        if _stdout is None or error is not _stdout.lost:
            raise
        code = 0
    if _stdout and _stdout.lost and not code:
        say(f"error: standard output: {_stdout.lost.strerror}; output was lost")
        code = 2
    sys.exit(code)


def say(text: object) -> None:
    """Prints a line on standard error at once."""
    print(text, file=sys.stderr, flush=True)
