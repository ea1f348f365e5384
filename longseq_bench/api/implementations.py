"""The implementations of a call: names, functions, and either with options."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from longseq_bench.api.functions import name_function
from longseq_bench.core.catalogue import Catalogue
from longseq_bench.core.errors import UserError
from longseq_bench.core.model import OptionValue
from longseq_bench.core.options import unknown_option
from longseq_bench.core.own_functions import canonical_name

Named = str | Callable[..., Any]
"""A name of `longseq list`, `path/to/file.py:function`, or the function itself."""

Options = Mapping[str, Any]
One = Named | tuple[Named, Options] | Mapping[Named, Options]
Implementations = One | Sequence[One]
"""One or several implementations; a pair (which, {option: value}) or a mapping sets options."""

FORM = 'write "ring", a function, ("block-sparse", {"sparsity": 0.99}), or a list of these'


def read_implementations(
    given: Implementations, folder: Path | None
) -> list[tuple[str, dict[str, Any]]]:
    """Return names and options. Functions that have no file are written below `folder`.

    Raises UserError for anything else, and for a function that can't be sent to another process.
    """
    pairs = [
        (one if isinstance(one, str) else name_function(one, folder), dict(options or {}))
        for one, options in _pairs(given)
    ]
    if not pairs:
        raise UserError(f"no implementation is given; {FORM}")
    return pairs


def choose_options(
    catalogue: Catalogue, chosen: Sequence[tuple[str, Options]], shared: Options
) -> list[tuple[str, dict[str, OptionValue]]]:
    """Return each implementation with all of its options, each combination once.

    shared: options for every implementation that has them. Raises UserError if none has one, and
    for an unknown name, option or value.
    """
    chosen = [(canonical_name(name), own) for name, own in chosen]
    known = {n: {s.name for s in catalogue.entry(n, "--impl").options} for n, _ in chosen}
    for name in shared:
        if not any(name in options for options in known.values()):
            every = {o for options in known.values() for o in options}
            raise unknown_option(name, shared[name], every, ", ".join(known))
    filled: list[tuple[str, dict[str, OptionValue]]] = []
    for name, own in chosen:
        usable = {k: v for k, v in shared.items() if k in known[name]}
        one = name, catalogue.options(name, {**usable, **own})
        if one not in filled:
            filled.append(one)
    return filled


def _pairs(given: Any) -> Iterator[tuple[Any, Any]]:
    """Yield names or functions, and their options."""
    match given:
        case Mapping():
            for one, options in given.items():
                yield from _pairs((one, options or {}))
        case (str() | Callable() as one, Mapping() as options) if isinstance(given, tuple):
            yield one, options
        case list() | tuple():
            for item in given:
                yield from _pairs(item)
        case str() | Callable():
            yield given, {}
        case _:
            raise UserError(f"{given!r} is no implementation; {FORM}")
