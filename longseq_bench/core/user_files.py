"""Files that a user names: only regular files and pipes that are open, up to a size.

Anything else may be read forever: a FIFO without a writer, /dev/zero.
"""

import errno
import os
import re
import stat
from contextlib import suppress
from pathlib import Path

from longseq_bench.core.errors import ConfigError, UserError
from longseq_bench.core.units import format_bytes

MAX_FILE_BYTES = 16 << 20
"""Largest file that is read whole. Records are not: they are read line by line."""
MAX_TABLE_BYTES = 2 << 20
"""The same for YAML that Python's own parser reads, in about 9 s per MiB."""
_BLOCK_BYTES = 1 << 16

_KINDS = {
    stat.S_IFIFO: "a FIFO", stat.S_IFCHR: "a character device", stat.S_IFBLK: "a block device",
    stat.S_IFSOCK: "a socket",
}  # fmt: skip
_OPEN_FILE = re.compile(r"/dev/std(in|out|err)|(?:/dev|/proc/self)/fd/(\d{1,9})")
_STREAMS = {"in": 0, "out": 1, "err": 2}

_contents: dict[tuple[int, int], bytes] = {}
"""What pipes delivered, by device and inode: a command reads its config more than once."""


def open_regular(
    path: Path, flags: int, error: type[UserError], advice: str, mode: int = 0o644
) -> int:
    """Open a file, which may be a link to one, and return its descriptor.

    Raises `error`, which ends with the advice, for a FIFO, a device or a socket; and OSError.
    """
    with suppress(FileNotFoundError):
        _check_regular(path, os.stat(path), error, advice)
    # another process may replace it in between; without O_NONBLOCK, open() waits for a FIFO's peer
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, mode)
    try:
        _check_regular(path, os.fstat(fd), error, advice)
    except (UserError, OSError):
        os.close(fd)
        raise
    return fd


def read_file(
    path: Path, error: type[UserError] = ConfigError, max_bytes: int = MAX_FILE_BYTES
) -> bytes:
    """Return the content of a file, or of an open pipe: /dev/stdin, `<(command)` of a shell.

    Raises `error` for any other FIFO, a device, a socket and a file that is larger; and OSError.
    """
    pipe = _open_pipe(path)
    if pipe is not None:
        found = os.fstat(pipe)
        place = found.st_dev, found.st_ino
        if place not in _contents:
            _contents[place] = _read_limited(pipe, path, error, max_bytes)
        return _contents[place]
    advice = "not a regular file; write its content to a file and name that"
    fd = open_regular(path, os.O_RDONLY, error, advice)
    try:
        return _read_limited(fd, path, error, max_bytes)
    finally:
        os.close(fd)


def read_text_file(path: Path, encoding: str = "utf-8", max_bytes: int = MAX_FILE_BYTES) -> str:
    """Return the text of a file, in which each line ends as Python writes it.

    Raises ConfigError and OSError as read_file does, and UnicodeDecodeError.
    """
    text = read_file(path, max_bytes=max_bytes).decode(encoding)
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def write_text_file(path: Path, text: str, error: type[UserError], advice: str) -> None:
    """Write a text to a regular file, new or in place of its content.

    A character that UTF-8 lacks is escaped. Raises `error` for what is no file, and OSError.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    fd = open_regular(path, flags, error, advice, mode=0o666)
    with open(fd, "w", encoding="utf-8", errors="backslashreplace", newline="\n") as stream:
        stream.write(text)


def open_descriptor(path: Path) -> int | None:
    """Return the descriptor of this process that a path such as /dev/stdin names, else None."""
    found = _OPEN_FILE.fullmatch(str(path))
    return None if found is None else int(found[2] or _STREAMS[found[1] or "in"])


def _open_pipe(path: Path) -> int | None:
    """Return the descriptor that a path names if it is a pipe, a socket or a terminal.

    It is open, so nothing waits for a writer. A device that never ends is none of them.
    """
    fd = open_descriptor(path)
    with suppress(OSError):
        if fd is not None:
            mode = os.fstat(fd).st_mode
            return fd if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(fd) else None
    return None


def _read_limited(fd: int, path: Path, error: type[UserError], max_bytes: int) -> bytes:
    blocks, size = [], 0
    while block := os.read(fd, _BLOCK_BYTES):
        blocks.append(block)
        size += len(block)
        if size > max_bytes:
            most = format_bytes(max_bytes)
            raise error(f"{path} has more than {most}, the most that is read; name another file")
    return b"".join(blocks)


def _check_regular(path: Path, found: os.stat_result, error: type[UserError], advice: str) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        through = f", through a link to {os.path.realpath(path)}" if path.is_symlink() else ""
        raise error(f"{path} is {kind}{through}, {advice}")
