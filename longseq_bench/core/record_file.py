"""Files of records on disk: write completely, find a moved file.

A write is safe from power loss only after an fsync of the file, and a new name only after an fsync
of its folder.
"""

import os
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_BLOCK_BYTES = 1 << 20


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents; their names are on disk when this returns."""
    missing = [one for one in (folder, *folder.parents) if not one.is_dir()]
    folder.mkdir(parents=True, exist_ok=True)
    for one in missing:
        with suppress(PermissionError):  # one may create in a folder that one may not read
            sync_folder(one.parent)


def sync_folder(folder: Path) -> None:
    """Sync a folder: the name of a new file is on disk only after that."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def append_line(fd: int, line: bytes) -> None:
    """Append a line and sync it. If that fails, take it back and raise OSError.

    After half a line that could not be taken back, it starts on a line of its own.
    """
    end = os.fstat(fd).st_size
    try:
        if end and os.pread(fd, 1, end - 1) != b"\n":
            line = b"\n" + line
        write_fully(fd, line)
        os.fsync(fd)
    except OSError:
        with suppress(OSError):
            os.ftruncate(fd, end)
        raise


def write_fully(fd: int, data: bytes) -> None:
    """Write all bytes: a disk that fills up takes a part first, and the rest gives the reason."""
    while data:
        data = data[os.write(fd, data) :]


def is_file_of(fd: int, path: Path) -> bool:
    """Return True if a path leads to the open file of a descriptor."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except OSError:
        return False


def find_path(fd: int) -> Path | None:
    """Return where the file of a descriptor is now; None if it was deleted or can't be found."""
    try:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
    except OSError:
        return None
    return path if is_file_of(fd, path) else None


def save_copy(name: str, blocks: Iterable[bytes], folder: Path) -> Path | None:
    """Write a new file in the first folder that takes it, and return its path.

    The folders are the given one, the current one and that of temporary files. None if none does.
    """
    kept = list(blocks)
    for place in (folder, Path(), Path(tempfile.gettempdir())):
        with suppress(OSError):
            return _write_new(place, name, kept)
    return None


def read_blocks(fd: int) -> Iterable[bytes]:
    """Yield the content of an open file from its start."""
    start = 0
    while block := os.pread(fd, _BLOCK_BYTES, start):
        yield block
        start += len(block)


def _write_new(folder: Path, name: str, blocks: Iterable[bytes]) -> Path:
    """Write a file under a name that no file has. Raises OSError, and leaves no part of it."""
    stem, suffix = os.path.splitext(name)
    number = 1
    while (path := folder / (name if number == 1 else f"{stem}-{number}{suffix}")).exists():
        number += 1
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        for block in blocks:
            write_fully(fd, block)
        os.fsync(fd)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(fd)
    sync_folder(folder)
    return path
