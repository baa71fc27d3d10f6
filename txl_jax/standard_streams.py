"""Standard streams that do not end a run if they are closed, cannot be written or have no reader.

A command calls :func:`open_standard_streams` before it opens a file. Its streams then behave like
this:

    closed at the start (``2>&-``)     not used for other files; output is lost as on a full disk
    the reader has ended (``| head``)  further output is dropped
    cannot be written (a full disk)    this output is dropped; later output is written again

A command whose result is its standard output ends if this output is lost. If the reader has ended,
the exit code is 141, as a shell reports for other programs. A mode with other results calls
:func:`drop_unwritten_output` and does all its work.

In a program of the user, the streams belong to the user and are not changed. This package prints to
:func:`stdout` and :func:`stderr`, which raise no error there.
"""

import errno
import io
import os
import select
import stat
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TextIO, cast

READER_ENDED = 141  # 128 + SIGPIPE

_streams: dict[str, TextIO] = {}  # the streams of a command, by name


class _Descriptor(io.FileIO):
    """A file descriptor for output. If ``drops``, data that cannot be written is dropped.

    ``lost`` is the first error that did not come from a reader that has ended. Nothing can be
    written if ``closed_at_start``.
    """

    def __init__(self, number: int, drops: bool, closed_at_start: bool = False):
        super().__init__(number, "w", closefd=False)
        self.drops, self.lost = drops, cast(OSError | None, None)
        self.closed_at_start = closed_at_start

    def write(self, data: Any) -> int:
        """Writes all data, and waits for a slow reader also if the descriptor does not block."""
        left = memoryview(data).cast("B")
        size = len(left)
        try:
            if self.closed_at_start:
                raise OSError(errno.EBADF, "closed", "standard output")
            while left:
                if (written := super().write(left)) is None:
                    select.select([], [self], [])
                left = left[written or 0 :]
        except OSError as error:
            ended, raises = self._reader_ended(error.errno), not self.drops
            self.lost = self.lost or (None if ended else error)
            self.drops = True  # Python writes the same data again when it ends
            if raises:
                raise (SystemExit(READER_ENDED) if ended else error) from error
        return size

    def _reader_ended(self, number: int | None) -> bool:
        """Whether an error means that a pipe has no reader or that the terminal was closed."""
        terminal = stat.S_ISCHR(os.fstat(self.fileno()).st_mode)
        return number in (errno.EPIPE, errno.ECONNRESET) or (terminal and number == errno.EIO)


class _Tolerant:
    """A stream of the user, or ``None``, that can be printed to without an error."""

    def __init__(self, stream: TextIO | None):
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes the text or drops it."""
        try:
            if self._stream is not None:
                self._stream.write(text)
        except Exception:  # a stream may raise any type; lost output must not end a run
            pass
        return len(text)

    def flush(self) -> None:
        """Flushes the stream if possible."""
        try:
            if self._stream is not None:
                self._stream.flush()
        except Exception:
            pass

    def isatty(self) -> bool:
        """Whether the stream is a terminal."""
        try:
            return self._stream is not None and self._stream.isatty()
        except Exception:
            return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __eq__(self, other: object) -> bool:  # tqdm writes above the bars of the same stream
        return isinstance(other, _Tolerant) and self._stream is other._stream

    def __hash__(self) -> int:
        return id(self._stream)


def open_standard_streams() -> None:
    """Opens those of the descriptors 0 to 2 that are closed, and replaces the output streams.

    A stream that is not Python's own is kept. ``sys.stdin`` stays ``None`` if it was closed.
    """
    closed = set()
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            closed.add(number)
            null = os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
            os.set_inheritable(null, True)
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if name not in _streams and (stream is None or _is_pythons_own(stream, name)):
            descriptor = _Descriptor(number, name == "stderr", number in closed)
            _streams[name] = _text_stream(descriptor, stream)
            setattr(sys, name, _streams[name])


def _is_pythons_own(stream: Any, name: str) -> bool:
    if stream is not getattr(sys, f"__{name}__") or not isinstance(stream, io.TextIOWrapper):
        return False
    return isinstance(getattr(stream.buffer, "raw", stream.buffer), io.FileIO)


def _text_stream(descriptor: _Descriptor, before: Any) -> TextIO:
    """Returns a text stream with the settings of the stream ``before``."""
    if before is None:
        return io.TextIOWrapper(io.BufferedWriter(descriptor), "utf-8", "backslashreplace")
    before.flush()
    unbuffered = before.write_through  # python -u
    buffer: Any = descriptor if unbuffered else io.BufferedWriter(descriptor)
    settings = {"line_buffering": before.line_buffering, "write_through": unbuffered}
    return io.TextIOWrapper(buffer, before.encoding, before.errors, "\n", **settings)


def drop_unwritten_output(may_be_closed: bool = True) -> None:
    """Lets a command with other results go on if its standard output cannot be written.

    If ``may_be_closed``, a standard output that was closed at the start does not count as lost.
    """
    if descriptor := _stdout_descriptor():
        descriptor.drops = True
        descriptor.closed_at_start = descriptor.closed_at_start and not may_be_closed


def _stdout_descriptor() -> _Descriptor | None:
    buffer: Any = getattr(_streams.get("stdout"), "buffer", None)
    return getattr(buffer, "raw", buffer)


def run_command(command: Callable[[], int | None]) -> NoReturn:
    """Calls ``command()`` and exits with its exit code, or with 2 if output on a disk was lost."""
    open_standard_streams()
    try:
        try:
            code: Any = command()
        except SystemExit as end:
            code = end.code
        stdout().flush()
    except OSError as error:  # while help or the last output is written
        if error is not getattr(_stdout_descriptor(), "lost", None):
            raise
        code = 0
    lost = getattr(_stdout_descriptor(), "lost", None)
    if lost and not code:
        print(f"error: standard output: {lost.strerror}; output was lost", file=stderr())
        code = 2
    sys.exit(code)


def stdout() -> TextIO:
    """Returns standard output for the lines of a run. In a user's program it raises no error."""
    return _printable("stdout")


def stderr() -> TextIO:
    """Returns standard error, which raises no error."""
    return _printable("stderr")


def say(text: object) -> None:
    """Prints a line on standard error at once."""
    print(text, file=stderr(), flush=True)


def _printable(name: str) -> TextIO:
    stream = getattr(sys, name)
    own = stream is not None and stream is _streams.get(name)
    return stream if own else cast(TextIO, _Tolerant(stream))


def check_stdin() -> None:
    """Raises OSError if standard input is closed."""
    if sys.stdin is None:
        raise OSError(errno.EBADF, "standard input is closed")


def read_stdin() -> bytes:
    """Returns all bytes of standard input; raises OSError if it is closed."""
    check_stdin()
    return sys.stdin.buffer.read()
