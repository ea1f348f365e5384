"""Find out whether vl-convert can draw here: with too little room it ends the whole process."""

import mmap
import os
import resource
from functools import cache

from longseq_bench.core.units import format_bytes

ADDRESS_BYTES = 65 << 30
"""Address space that the JavaScript engine of vl-convert reserves at its start."""
DESCRIPTORS = 24
"""Files that it may open."""
_EMPTY = {"mark": "point", "data": {"values": []}}


@cache
def unavailable_reason() -> str:
    """Return why no picture can be drawn in this process, or an empty string."""
    return _find_short_limit() or _draw_nothing()


def _find_short_limit() -> str:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and not _can_reserve(ADDRESS_BYTES):
        needed, found = format_bytes(ADDRESS_BYTES), format_bytes(limit)
        return f"they need {needed} of address space, and the limit (`ulimit -v`) is {found}"
    if not _can_open(DESCRIPTORS):
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return f"they need {DESCRIPTORS} more open files, and the limit (`ulimit -n`) is {limit}"
    return ""


def _can_reserve(size: int) -> bool:
    """Return True if so much address space is free; no memory is used."""
    try:
        mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0).close()
    except (OSError, ValueError, OverflowError):
        return False
    return True


def _can_open(count: int) -> bool:
    opened: list[int] = []
    try:
        for _ in range(count):
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))  # noqa: PERF401
    except OSError:
        return False
    finally:
        for fd in opened:
            os.close(fd)
    return True


def _draw_nothing() -> str:
    """Start the engine with an empty chart. It panics if a thread can't be started, for example."""
    try:
        import vl_convert

        vl_convert.vegalite_to_svg(_EMPTY)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of Rust is no Exception
        reason = " ".join(str(error).split()) or type(error).__name__
        return f"vl-convert-python does not work here ({reason[:200]})"
    return ""
