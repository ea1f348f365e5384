"""Names of attention functions of the user: `path/to/file.py:function` or `module:function`.

Only a child imports them (attention/own_source.py). The hash of the file's bytes is part of a
trial, so an edited file is measured anew. Paths are relative to the current folder. A function of a
notebook is a pickle, `functions/NAME-HASH.pkl:NAME` (api/implementations.py).
"""

import os
from collections import Counter
from collections.abc import Iterable

FORM = "write path/to/file.py:function or module:function"
PICKLE = ".pkl"


def is_own(name: str) -> bool:
    """Return True if the name of an implementation names a function of the user."""
    return ":" in name or name.endswith(".py")


def is_path(place: str) -> bool:
    """Return True if what is before the colon is a path, not a module."""
    return place.endswith((".py", PICKLE)) or "/" in place or os.sep in place


def canonical_name(name: str) -> str:
    """Return one spelling of a name: ./a.py:f -> a.py:f; any other name stays as it is."""
    place, colon, function = name.rpartition(":")
    if not colon or not is_path(place):
        return name
    return f"{os.path.normpath(os.path.expanduser(place))}:{function.strip()}"


def short_name(name: str) -> str:
    """Return the function of an own function's name; any other name stays as it is."""
    function = name.rpartition(":")[2]
    return function if function.isidentifier() else name


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Return a short name for each name, all different.

    It is the function; with its file if two have the same function; else the whole name.
    """
    distinct = list(dict.fromkeys(names))
    short = {name: short_name(name) for name in distinct}
    for longer in (_with_file, str):
        counts = Counter(short.values())
        short = {n: longer(n) if counts[text] > 1 else text for n, text in short.items()}
    return short


def _with_file(name: str) -> str:
    place, _, function = name.rpartition(":")
    return f"{os.path.basename(place)}:{function}" if place else name
