"""A folder for the temporary files of this process, which a later run deletes after a kill.

TMPDIR/longseq-UID/run-XXXXXXXX belongs to the process that has a lock on it (flock, which ends with
the process). Whoever makes such a folder first deletes those that nobody has a lock on, under a
lock on the folder above.
"""

import atexit
import errno
import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from longseq_bench.core.errors import ConfigError, LauncherError
from longseq_bench.core.units import format_bytes

SOCKET_PATH_BYTES = 103
"""Longest path of a Unix socket: Linux has 107, macOS 103."""

SOCKET_BYTES = len("/run-12345678/listener-12345678")
_SHORT_FOLDERS = ("/tmp", "/var/tmp")
_FULL = {errno.ENOSPC, errno.EDQUOT}

_own: dict[int, tuple[Path, int]] = {}
"""The folder of this process and the descriptor that locks it, by process id."""


def scratch_folder() -> Path:
    """Return this process's folder for temporary files; it is deleted when the process ends.

    The path of a socket in it fits: with a long TMPDIR the folder is below /tmp or /var/tmp.

    Raises:
        LauncherError: there is no such folder that can be written.
    """
    own = _own.get(os.getpid())
    if own is None or not own[0].is_dir():
        own = _own[os.getpid()] = _create()
        atexit.register(_delete, os.getpid())
    return own[0]


def private_folder(folder: Path) -> Path:
    """Make a folder that only this user can write, if necessary, and return it.

    Raises OSError if it can't be made, or belongs to another user.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    is_private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o022
    if status.st_uid != os.getuid() or not is_private:
        raise PermissionError(f"{folder} belongs to another user")
    return folder


def user_folder(parent: str) -> Path:
    """Return the path of this user's folder below a folder for temporary files."""
    return Path(parent) / f"longseq-{os.getuid()}"


def explain_full_disk(error: BaseException) -> str:
    """Return a clause on what to do if temporary files have no room; "" for other errors."""
    if not isinstance(error, OSError) or error.errno not in _FULL:
        return ""
    folder = tempfile.gettempdir()
    return f": free space or inodes in {folder}, or set TMPDIR to a folder on another disk"


def _create() -> tuple[Path, int]:
    problems = []
    for parent in (tempfile.gettempdir(), *_SHORT_FOLDERS):
        folder = user_folder(parent)
        try:
            if len(os.fsencode(folder)) + SOCKET_BYTES > SOCKET_PATH_BYTES:
                raise OSError("the path is too long for a socket")
            return _create_locked(private_folder(folder))
        except OSError as error:
            problems.append(f"{error.strerror or error} ({folder})")
    raise LauncherError(
        f"there is no folder for temporary files: {problems[0]}; set TMPDIR to a folder that can "
        f"be written and has at most {SOCKET_PATH_BYTES - SOCKET_BYTES - 20} characters"
    )


def _create_locked(parent: Path) -> tuple[Path, int]:
    """Delete what dead processes left below `parent`, and make a folder for this one there.

    Returns the folder and the descriptor that locks it until it is closed.
    """
    lock = os.open(parent, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        for folder in parent.glob("run-*"):
            with suppress(OSError):  # its process has the lock
                descriptor = _open_locked(folder)
                shutil.rmtree(folder, ignore_errors=True)
                os.close(descriptor)
        folder = Path(tempfile.mkdtemp(prefix="run-", dir=parent))
        try:
            return folder, _open_locked(folder)
        except OSError:
            return folder, os.open(folder, os.O_RDONLY)
    finally:
        os.close(lock)


def _open_locked(folder: Path) -> int:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _delete(pid: int) -> None:
    """Delete the folder at the end of the process that owns it, not of one that it forked."""
    if pid == os.getpid() and (own := _own.pop(pid, None)):
        shutil.rmtree(own[0], ignore_errors=True)
        os.close(own[1])


# ---- files that are read whole: those of a user, and tables of the package -----------------------

MAX_FILE_BYTES = 16 << 20
"""Largest file that is read whole. Records are not: they are read line by line."""
MAX_TABLE_BYTES = 2 << 20
"""The same for YAML that Python's own parser reads, in about 9 s per MiB."""


def read_text_file(path: Path, encoding: str = "utf-8", max_bytes: int = MAX_FILE_BYTES) -> str:
    """Return the text of a file, in which each line ends as Python writes it.

    Raises ConfigError for a file that is larger, can't be read or is not UTF-8.
    """
    try:
        with open(path, "rb") as stream:
            content = stream.read(max_bytes + 1)
        if len(content) > max_bytes:
            reason = f"has more than {format_bytes(max_bytes)}, the most that is read"
            raise ConfigError(f"{path} {reason}; name another file")
        return content.decode(encoding).replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror or error}") from None


@cache
def load_table(name: str) -> Any:
    """Return the content of a YAML file of the package's folder data."""
    return yaml.safe_load(files("longseq_bench").joinpath(f"data/{name}").read_text("utf-8"))
