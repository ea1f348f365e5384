"""The file that a process prints to. It has no name, so nothing of it can be left behind."""

from __future__ import annotations

import fcntl
import os
import tempfile
from multiprocessing.reduction import DupFd
from typing import Any

PRINTED_BYTES = 4000
"""How much of the end of a process's output is read."""


class OutputFile:
    """What a process prints, seen from the one that starts it.

    Handed to that process among its arguments, it arrives as the number of a descriptor to print
    to.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        # a process that opens /dev/stdout again writes at an offset of its own
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        fcntl.fcntl(self._file, fcntl.F_SETFL, flags | os.O_APPEND)

    def fileno(self) -> int:
        """The descriptor in this process."""
        return self._file.fileno()

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (DupFd(self.fileno()),)

    def size(self) -> int:
        """How many bytes are in it so far."""
        return os.fstat(self.fileno()).st_size

    def tail(self, start: int = 0, most: int = PRINTED_BYTES) -> str:
        """The end of what is in it, from byte `start` on."""
        size = self.size()
        start = max(start, size - most)
        # the offset belongs to who prints: reading must not move it
        return os.pread(self.fileno(), size - start, start).decode(errors="replace")

    def close(self) -> None:
        """Read no more of it; who prints may go on."""
        self._file.close()


def _arrived(handle: Any) -> int:
    """The descriptor in the process that was started."""
    return int(handle.detach())
