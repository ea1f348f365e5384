"""Compilation of a C++ file of this package, once per machine, for its processor.

A compiler is optional: without one, or if it fails, slower kernels run and the reason is recorded.
The library is in the user's cache. Its name has a digest of source, headers beside it, compiler,
flags and processor, because different machines may share a home folder.
"""

import ctypes
import functools
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from longseq_bench.core.errors import UnsupportedError
from longseq_bench.core.files import read_text

COMPILERS = ("g++", "clang++", "c++")
ZIG = "ziglang"
"""A compiler that pip installs (the extra `compiler`), for machines without one."""

FLAGS = (
    *("-std=c++17", "-O3", "-fno-math-errno", "-ffp-contract=fast"),
    *("-fno-exceptions", "-fno-rtti", "-shared", "-fPIC"),
)
TUNING = (("-march=native", "-mprefer-vector-width=512"), ("-march=native",), ())
"""Sets of flags to try in turn: not every compiler supports them."""

_TIMEOUT_S = 120


@functools.cache
def library(source: Path) -> ctypes.CDLL:
    """Return the library of a source file, compiled if needed.

    Raises UnsupportedError with the reason if it can't be compiled or loaded.
    """
    compiler = _compiler()
    try:
        library_path = cache_folder() / f"{source.stem}-{_digest(source, compiler)}.so"
        if library_path.exists():
            with suppress(OSError):
                return ctypes.CDLL(str(library_path))
        # it does not exist yet, or it is damaged
        _compile(compiler, source, library_path)
        return ctypes.CDLL(str(library_path))
    except (OSError, subprocess.SubprocessError) as error:
        raise UnsupportedError(f"{source.name} can't be compiled here: {error}") from None


def cache_folder() -> Path:
    """Return the folder of compiled files: the user's cache, else a temporary folder that stays.

    Raises OSError if that can't be made, or belongs to another user, who could write to it.
    """
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        folder = Path(root).expanduser() / "longseq"
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, RuntimeError):
        folder = Path(tempfile.gettempdir()) / f"longseq-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.lstat().st_uid != os.getuid():
            raise PermissionError(f"{folder} belongs to another user") from None
        return folder


def _compiler() -> tuple[str, ...]:
    """Return the command of the first compiler found."""
    for name in COMPILERS:
        if path := shutil.which(name):
            return (path,)
    if importlib.util.find_spec(ZIG):
        # plain `cc`: `c++` would first build a standard library, which takes minutes
        # -P: not a module of this name in the current folder
        return (sys.executable, "-P", "-m", ZIG, "cc", "-x", "c++", "-nostdlib++")
    raise UnsupportedError(
        f'there is no {" or ".join(COMPILERS)} here; pip install "longseq-bench[compiler]" adds one'
    )


def _compile(compiler: tuple[str, ...], source: Path, library_path: Path) -> None:
    """Compile in a folder beside the result, then move it: several ranks may compile at once.

    Raises OSError and subprocess.TimeoutExpired if the compiler itself fails. It is then not tried
    with fewer flags, because the slower library would stay in the cache.
    """
    problem = ""
    # ranks end without atexit, so the folder is not that of the process
    with tempfile.TemporaryDirectory(prefix="compile-", dir=library_path.parent) as folder:
        output = Path(folder, library_path.name)
        for tuning in TUNING:
            command = [*compiler, *FLAGS, *tuning, "-o", str(output), str(source)]
            # a compiler that is killed leaves its temporary files
            run = _run(command, os.environ | {"TMPDIR": folder})
            if run.returncode == 0:
                os.replace(output, library_path)
                return
            if run.returncode < 0 or "Killed signal" in run.stderr:
                raise OSError(f"{compiler[0]} was killed, perhaps for lack of memory")
            lines = run.stderr.splitlines()
            problem = next((line for line in lines if "error" in line), run.stderr)
    raise UnsupportedError(f"{compiler[0]} can't compile {source.name}: {problem.strip()[:200]}")


def _run(
    command: list[str], environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, env=environment
    )


def _digest(source: Path, compiler: tuple[str, ...]) -> str:
    version = _run([*compiler[:5], "--version"])
    if version.returncode != 0:
        raise OSError(f"{compiler[0]} --version ended with exit code {version.returncode}")
    sources = [source, *sorted(source.parent.glob("*.h"))]
    texts = [path.read_text() for path in sources]
    parts = (*texts, *compiler, version.stdout, str((FLAGS, TUNING)), _processor())
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=10).hexdigest()


def _processor() -> str:
    """Return text that identifies the processor's instruction set."""
    text = read_text(Path("/proc/cpuinfo"))
    lines = re.findall(r"^(?:model name|flags|Features|CPU part)\s*:.*$", text, re.MULTILINE)
    return "\n".join(dict.fromkeys([platform.machine(), platform.processor(), *lines]))
