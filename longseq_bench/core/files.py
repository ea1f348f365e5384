"""Files: a folder for the temporary ones of this process, and those that are read whole."""

import atexit
import os
import shutil
import stat
import tempfile
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from longseq_bench.core.errors import ConfigError, LauncherError
from longseq_bench.core.units import format_bytes

SOCKET_PATH_BYTES = 103
"""Longest path of a Unix socket: Linux has 107, macOS 103."""

SOCKET_BYTES = len("/longseq-12345678/listener-12345678")
_SHORT_FOLDERS = ("/tmp", "/var/tmp")

_own: dict[int, Path] = {}
"""The folder of this process, by process id."""


def scratch_folder() -> Path:
    """Return this process's folder for temporary files; it is deleted when the process ends.

    The path of a socket in it fits: with a long TMPDIR the folder is below /tmp or /var/tmp.

    Raises:
        LauncherError: there is no such folder that can be written.
    """
    own = _own.get(os.getpid())
    if own is None or not own.is_dir():
        own = _own[os.getpid()] = _create()
        atexit.register(_delete, os.getpid())
    return own


def private_folder() -> Path:
    """Return a temporary folder of this user, which stays and which nobody else can write.

    Raises OSError if it can't be made, or belongs to another user.
    """
    folder = Path(tempfile.gettempdir()) / f"longseq-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    is_private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o022
    if status.st_uid != os.getuid() or not is_private:
        raise PermissionError(f"{folder} belongs to another user")
    return folder


def _create() -> Path:
    problems = []
    for parent in (tempfile.gettempdir(), *_SHORT_FOLDERS):
        try:
            if len(os.fsencode(parent)) + SOCKET_BYTES > SOCKET_PATH_BYTES:
                raise OSError("the path is too long for a socket")
            return Path(tempfile.mkdtemp(prefix="longseq-", dir=parent))
        except OSError as error:
            problems.append(f"{error.strerror or error} ({parent})")
    raise LauncherError(
        f"there is no folder for temporary files: {problems[0]}; set TMPDIR to a folder that can "
        f"be written and has at most {SOCKET_PATH_BYTES - SOCKET_BYTES} characters"
    )


def _delete(pid: int) -> None:
    """Delete the folder at the end of the process that owns it, not of one that it forked."""
    if pid == os.getpid() and (own := _own.pop(pid, None)):
        shutil.rmtree(own, ignore_errors=True)


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


def read_text(path: Path) -> str:
    """Return the stripped text of a file; "" if it can't be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
