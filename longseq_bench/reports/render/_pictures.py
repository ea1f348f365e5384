"""Find out whether vl-convert can draw here: with too little room it ends the whole process."""

import mmap
import resource
from functools import cache

from longseq_bench.core.units import format_bytes

ADDRESS_BYTES = 65 << 30
"""Address space that the JavaScript engine of vl-convert reserves at its start."""
_EMPTY = {"mark": "point", "data": {"values": []}}


@cache
def unavailable_reason() -> str:
    """Return why no picture can be drawn in this process, or an empty string."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and not _can_reserve(ADDRESS_BYTES):
        needed, found = format_bytes(ADDRESS_BYTES), format_bytes(limit)
        return f"they need {needed} of address space, and the limit (`ulimit -v`) is {found}"
    return _draw_nothing()


def _can_reserve(size: int) -> bool:
    """Return True if so much address space is free; no memory is used."""
    try:
        mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0).close()
    except (OSError, ValueError, OverflowError):
        return False
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
