"""A C++ file of this package as a library, compiled once a machine for the processor it has.

No compiler is asked of anybody: where there is none, or it fails, the reason is kept and slower
ways are taken, which say so. The library lies in the user's cache, named by what went into it:
source, compiler, flags and processor, since a home folder may be shared by unlike machines.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from longseq_bench.core.errors import UnsupportedError

COMPILERS = ("g++", "clang++", "c++")
ZIG = "ziglang"
"""A compiler that pip installs (the extra `compiler`), for machines that have none."""

FLAGS = (
    "-std=c++17", "-O3", "-fno-math-errno", "-ffp-contract=fast", "-fno-exceptions", "-fno-rtti",
    "-shared", "-fPIC",
)  # fmt: skip
TUNED = (("-march=native", "-mprefer-vector-width=512"), ("-march=native",), ())
"""What a compiler is offered, in turn: not all of them know all of it."""

_LIMIT_S = 120


@functools.cache
def library(source: Path) -> ctypes.CDLL:
    """The library of a source file. Raises UnsupportedError with the reason why there is none."""
    compiler = _compiler()
    try:
        wanted = cache_folder() / f"{source.stem}-{_digest(source, compiler)}.so"
        if wanted.exists():
            with suppress(OSError):
                return ctypes.CDLL(str(wanted))
        # there is none, or one that a full disk or another user spoilt
        _compile(compiler, source, wanted)
    except (OSError, subprocess.SubprocessError) as error:
        raise UnsupportedError(f"{source.name} can't be compiled here: {error}") from None
    try:
        return ctypes.CDLL(str(wanted))
    except OSError as error:
        raise UnsupportedError(f"{wanted.name} can't be loaded: {error}") from None


def cache_folder() -> Path:
    """Where compiled files are kept: the user's cache; where that can't be written, a temporary
    folder of this user alone. Raises OSError where that is somebody else's."""
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        folder = Path(root).expanduser() / "longseq"
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, RuntimeError):
        folder = Path(tempfile.gettempdir()) / f"longseq-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o022:
            raise PermissionError(f"{folder} is not this user's own") from None
        return folder


def _compiler() -> tuple[str, ...]:
    """The command of the first compiler there is."""
    for name in COMPILERS:
        if path := shutil.which(name):
            return (path,)
    if importlib.util.find_spec(ZIG):
        # plain `cc`: for C++ it would first build a standard library, which takes minutes
        return (sys.executable, "-m", ZIG, "cc", "-x", "c++", "-nostdlib++")
    raise UnsupportedError(
        f'there is no {" or ".join(COMPILERS)} here; pip install "longseq-bench[compiler]" is one'
    )


def _compile(compiler: tuple[str, ...], source: Path, wanted: Path) -> None:
    """In a folder of its own first: ranks that start together may all compile. Raises OSError and
    subprocess.TimeoutExpired where it is not the source or an option that is at fault: a slower
    build must not be kept for that."""
    said = ""
    for tuned in TUNED:
        with tempfile.TemporaryDirectory(dir=wanted.parent) as folder:
            made = Path(folder) / wanted.name
            command = [*compiler, *FLAGS, *tuned, "-o", str(made), str(source)]
            run = subprocess.run(
                command, capture_output=True, text=True, timeout=_LIMIT_S, check=False
            )
            if run.returncode == 0:
                os.replace(made, wanted)
                return
        if run.returncode < 0 or "Killed signal" in run.stderr:
            raise OSError(f"{compiler[0]} was killed, for want of memory perhaps")
        said = next((line for line in run.stderr.splitlines() if "error" in line), run.stderr)
    raise UnsupportedError(f"{compiler[0]} can't compile {source.name}: {said.strip()[:200]}")


def _digest(source: Path, compiler: tuple[str, ...]) -> str:
    version = subprocess.run(
        [*compiler[:4], "--version"], capture_output=True, text=True, timeout=_LIMIT_S, check=False
    )
    parts = (source.read_text(), *compiler, version.stdout, str((FLAGS, TUNED)), _processor())
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=10).hexdigest()


def _processor() -> str:
    """What tells one processor's instructions from another's."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    lines = re.findall(r"^(?:model name|flags|Features|CPU part)\s*:.*$", text, re.MULTILINE)
    return platform.machine() + "\n".join(dict.fromkeys(lines))
