"""Detect a closed or full stdout or stderr; print symbols that they can't encode as ASCII."""

import codecs
import errno
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, TextIO

from longseq_bench.core.errors import OutputError


class StdoutClosed(Exception):
    """Stdout was closed by its reader (EPIPE, as by `| head`), which is not an error.

    code: the exit code to end with. Not an OSError, because libraries turn those into exit codes.
    """

    code = 0


class _WatchedStream:
    """A stream whose write errors become StdoutClosed or OutputError, or are dropped.

    on_error: takes the stream and the error of a write.
    """

    def __init__(self, stream: TextIO, on_error: Callable[[TextIO, OSError], object]) -> None:
        self._stream, self._on_error = stream, on_error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._on_error(self._stream, error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._on_error(self._stream, error)


def stop_writing(stream: TextIO, error: OSError) -> NoReturn:
    """Discard later output of a stream, also at the end of the process, and raise the reason.

    Raises StdoutClosed if the reader closed it, else OutputError.
    """
    _discard(stream)
    if isinstance(error, BrokenPipeError) or error.errno == errno.EPIPE:
        raise StdoutClosed from None
    raise OutputError(f"the output can't be written: {error.strerror or error}") from None


def _discard(stream: TextIO, _: OSError | None = None) -> None:
    """Discard later output of a stream, also at the end of the process."""
    with suppress(OSError):  # a stream without a file
        fd, devnull = stream.fileno(), os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, fd)
        os.close(devnull)


_ASCII = {
    "×": "x", "±": "+/-", "≈": "~", "µ": "u", "…": "...", "—": "-", "–": "-", "−": "-", "•": "*",
    "·": ".", "†": "+", "²": "^2", "≥": ">=", "≤": "<=", "→": "->", "═": "=", "─": "-", "│": "|",
    "’": "'", "“": '"', "”": '"', **dict(zip("▁▂▃▄▅▆▇█", "_.,-~=+#", strict=True)),
}  # fmt: skip
"""Substitutes for the symbols that tables and sentences have."""
_SUBSTITUTE = "longseq-ascii"


def _substitute(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_ASCII.get(c, "?") for c in error.object[error.start : error.end]), error.end


codecs.register_error(_SUBSTITUTE, _substitute)


@contextmanager
def ascii_symbols() -> Iterator[None]:
    """Print characters that stdout or stderr can't encode as ASCII symbols within the block."""
    streams = [s for s in (sys.stdout, sys.stderr) if isinstance(s, io.TextIOWrapper)]
    before = [stream.errors for stream in streams]
    for stream in streams:
        stream.reconfigure(errors=_SUBSTITUTE)
    try:
        yield
    finally:
        for stream, errors in zip(streams, before, strict=True):
            with suppress(ValueError, OSError):  # closed, or what is buffered can't be written
                stream.reconfigure(errors=errors)


def open_missing_streams() -> None:
    """Open /dev/null in place of stdin, stdout and stderr that the process was started without.

    Else the next file that is opened takes the number of a stream, and what a library or a child
    prints goes to it.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    # without stderr, print(file=None) writes errors to stdout
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


@contextmanager
def watch_stdout() -> Iterator[None]:
    """Make failed writes to stdout raise StdoutClosed or OutputError within the block."""
    before = sys.stdout
    if before is not None:  # None in a process that was started without one
        sys.stdout = _WatchedStream(before, stop_writing)
    try:
        yield
    finally:
        sys.stdout = before


@contextmanager
def optional_stderr() -> Iterator[None]:
    """Go on without stderr within the block if it is closed or full: it has progress and notes."""
    before = sys.stderr
    if before is not None:
        sys.stderr = _WatchedStream(before, _discard)
    try:
        yield
    finally:
        sys.stderr = before


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
