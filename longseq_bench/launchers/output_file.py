"""The file that a child process prints to. It has no name, so it can't be left behind."""

import fcntl
import os
import tempfile
from multiprocessing.reduction import DupFd
from operator import methodcaller
from typing import Any

from longseq_bench.core.errors import LauncherError
from longseq_bench.core.scratch import explain_full_disk

PRINTED_BYTES = 4000
"""Bytes of the end of the output that are read by default."""


class OutputFile:
    """The output of a child, in the parent.

    Pass it among the arguments of the child's process: in the child it is an open file descriptor
    (int).

    Raises LauncherError if it can't be created, for example because the disk is full.
    """

    def __init__(self) -> None:
        try:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        except OSError as error:
            reason = f"{error.strerror or error}{explain_full_disk(error)}"
            raise LauncherError(
                f"the output of a child can't be kept in a file: {reason}"
            ) from error
        # append: a process that opens /dev/stdout again has its own offset
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        fcntl.fcntl(self._file, fcntl.F_SETFL, flags | os.O_APPEND)

    def fileno(self) -> int:
        """Return the descriptor in this process."""
        return self._file.fileno()

    def __reduce__(self) -> tuple[Any, ...]:
        return methodcaller("detach"), (DupFd(self.fileno()),)

    def size(self) -> int:
        """Return the number of bytes written so far."""
        return os.fstat(self.fileno()).st_size

    def tail(self, start: int = 0, max_bytes: int = PRINTED_BYTES) -> str:
        """Return the end of the output, at most `max_bytes`, from byte `start` on."""
        size = self.size()
        start = max(start, size - max_bytes)
        # pread: the offset is shared with the process that prints
        return os.pread(self.fileno(), size - start, start).decode(errors="replace")

    def close(self) -> None:
        """Close this end. The process that prints is not affected."""
        self._file.close()
