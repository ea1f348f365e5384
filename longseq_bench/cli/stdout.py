"""Detect a stdout that is closed or full, when something is written to it."""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, TextIO

from longseq_bench.core.errors import OutputError


class StdoutClosed(Exception):
    """Stdout was closed by its reader (EPIPE, as by `| head`), which is not an error.

    code: the exit code to end with. Not an OSError, because libraries turn those into exit codes.
    """

    code = 0


class _WatchedStream:
    """A stream whose write errors become StdoutClosed or OutputError."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            stop_writing(self._stream, error)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            stop_writing(self._stream, error)


def stop_writing(stream: TextIO, error: OSError) -> NoReturn:
    """Discard later output of a stream, also at the end of the process, and raise the reason.

    Raises StdoutClosed if the reader closed it, else OutputError.
    """
    with suppress(OSError):  # a stream without a file
        fd, devnull = stream.fileno(), os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, fd)
        os.close(devnull)
    if isinstance(error, BrokenPipeError) or error.errno == errno.EPIPE:
        raise StdoutClosed from None
    raise OutputError(f"the output can't be written: {error.strerror or error}") from None


@contextmanager
def watch_stdout() -> Iterator[None]:
    """Make failed writes to stdout raise StdoutClosed or OutputError within the block."""
    before = sys.stdout
    if before is not None:  # None in a process that was started without one
        sys.stdout = _WatchedStream(before)
    try:
        yield
    finally:
        sys.stdout = before


@contextmanager
def keep_exit_code(code: int) -> Iterator[None]:
    """End with this exit code even if stdout is closed while the block prints."""
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except StdoutClosed as closed:
        closed.code = code
        raise
