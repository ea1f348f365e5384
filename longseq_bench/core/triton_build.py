"""Requirements of Triton to compile the launcher of a kernel: C compiler, Python's headers."""

import os
import shutil
import sysconfig
from pathlib import Path


def c_compiler() -> str | None:
    """Return the command of the C compiler: CC, otherwise gcc or clang; None without any."""
    return os.environ.get("CC") or next(filter(shutil.which, ("gcc", "clang")), None)


def python_header() -> Path:
    """Return the path that Python.h should have."""
    # Debian's default scheme names a folder without headers; Triton avoids it too
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    return Path(sysconfig.get_path("include", scheme)) / "Python.h"


def find_missing() -> list[tuple[str, str]]:
    """Return what is missing on this machine, each with what to do about it."""
    found, compiler, header = [], c_compiler(), python_header()
    if compiler is None or not shutil.which(compiler.split()[0]):
        what = f"CC={compiler} was not found" if compiler else "there is no gcc or clang"
        found.append((what, "install gcc"))
    if not header.is_file():
        remedy = "install Python's headers (python3-dev or python3-devel)"
        found.append((f"there is no {header}", remedy))
    return found
