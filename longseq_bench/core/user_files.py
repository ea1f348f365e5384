"""Files that a user names: a regular file, or a pipe such as /dev/stdin, up to a size."""

import os
import stat
from pathlib import Path

from longseq_bench.core.errors import ConfigError
from longseq_bench.core.units import format_bytes

MAX_FILE_BYTES = 16 << 20
"""Largest file that is read whole. Records are not: they are read line by line."""
MAX_TABLE_BYTES = 2 << 20
"""The same for YAML that Python's own parser reads, in about 9 s per MiB."""

_contents: dict[tuple[int, int], bytes] = {}
"""What pipes delivered, by device and inode: a command reads its config more than once."""


def read_text_file(path: Path, encoding: str = "utf-8", max_bytes: int = MAX_FILE_BYTES) -> str:
    """Return the text of a file or of a pipe, in which each line ends as Python writes it.

    Raises ConfigError for a file that is larger, OSError and UnicodeDecodeError.
    """
    found = os.stat(path)
    place = found.st_dev, found.st_ino
    content = _contents.get(place)
    if content is None:
        with open(path, "rb") as stream:
            content = stream.read(max_bytes + 1)
    if len(content) > max_bytes:
        most = format_bytes(max_bytes)
        raise ConfigError(f"{path} has more than {most}, the most that is read; name another file")
    if stat.S_ISFIFO(found.st_mode):
        _contents[place] = content
    return content.decode(encoding).replace("\r\n", "\n").replace("\r", "\n")
