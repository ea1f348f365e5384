"""Stdout that may lose its reader, or have no room: found where it is written, and nowhere else."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, TextIO

from longseq_bench.core.errors import OutputError


class Unread(Exception):
    """Who read our output went away (| head): nothing is wrong with us. code: how we end then.

    No OSError, of which the libraries in between make an exit code of their own.
    """

    code = 0


class _Watched:
    """A stream whose faults in writing tell what they are."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            give_up(self._stream, error)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            give_up(self._stream, error)


def give_up(stream: TextIO, error: OSError) -> NoReturn:
    """Let nothing more be written there, at the end of the process neither, and say why.

    Raises Unread where the reader went away, else OutputError.
    """
    with suppress(OSError):  # of a stream without a file
        file, nowhere = stream.fileno(), os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, file)
        os.close(nowhere)
    if isinstance(error, BrokenPipeError) or error.errno == errno.EPIPE:
        raise Unread from None
    raise OutputError(f"the output can't be written: {error.strerror or error}") from None


@contextmanager
def watched() -> Iterator[None]:
    """What is printed on stdout inside raises Unread or OutputError where it can't be written."""
    before = sys.stdout
    if before is not None:  # as it is where a process was started without one
        sys.stdout = _Watched(before)
    try:
        yield
    finally:
        sys.stdout = before


@contextmanager
def ends(code: int) -> Iterator[None]:
    """The exit code is this also where nobody reads what is shown inside."""
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except Unread as unread:
        unread.code = code
        raise
