"""A cache for functions of one immutable object, which may not be hashable."""

from collections.abc import Callable
from functools import wraps
from typing import TypeVar

A = TypeVar("A")
V = TypeVar("V")

MAX_KEPT = 10_000
"""Maximum number of objects that a cache keeps."""


def cached_by_identity(function: Callable[[A], V]) -> Callable[[A], V]:
    """Call the function once for each object. Many records share their parts (core/interning.py).

    The cache keeps the objects too: while it does, no other object has the same id.
    """
    known: dict[int, tuple[V, A]] = {}

    @wraps(function)
    def cached(item: A) -> V:
        found = known.get(id(item))
        if found is None:
            if len(known) == MAX_KEPT:
                known.clear()
            found = known[id(item)] = function(item), item
        return found[0]

    return cached
