"""A file that one process appends to, and that other programs should leave alone."""

import os
from hashlib import sha256
from typing import Any

_BLOCK_BYTES = 1 << 20


class WrittenFile:
    """The bytes of an open file as its writer knows them.

    An editor or `cp` may write other bytes into the same file, which then can be as long as before
    or longer. Bytes that another program appends are no such change.

    is_altered: another program changed a byte that was known.

    The methods raise OSError if the file can't be read.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._known, self._size = sha256(), 0
        self.is_altered = False
        self.take_in()

    def take_in(self) -> None:
        """Take the bytes that were appended since the last call for known."""
        found = os.fstat(self._fd)
        self.is_altered |= found.st_size < self._size
        _update(self._known, self._fd, self._size, found.st_size)
        self._size, self._changed_at = found.st_size, found.st_mtime_ns

    def examine(self, *, trust_time: bool) -> None:
        """Compare the file with the known bytes.

        trust_time: do not read a file that has the size and time of its last known change.
        """
        found = os.fstat(self._fd)
        is_as_left = (found.st_size, found.st_mtime_ns) == (self._size, self._changed_at)
        if self.is_altered or (is_as_left and trust_time):
            return
        now = sha256()
        _update(now, self._fd, 0, self._size)
        self.is_altered = now.digest() != self._known.digest()
        self.take_in()


def _update(digest: Any, fd: int, start: int, end: int) -> None:
    """Add the bytes of a file from start to end, or to the end of the file, to a digest."""
    while start < end and (block := os.pread(fd, min(_BLOCK_BYTES, end - start), start)):
        digest.update(block)
        start += len(block)
