"""The implementations of a call: names, functions, and either with options."""

from __future__ import annotations

import hashlib
import inspect
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

from longseq_bench.core.catalogue import Catalogue
from longseq_bench.core.errors import StoreError, UserError
from longseq_bench.core.model import OptionValue
from longseq_bench.core.options import unknown_option
from longseq_bench.core.registry import PICKLE, canonical_name

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
    check_shared(known, shared)
    filled: list[tuple[str, dict[str, OptionValue]]] = []
    for name, own in chosen:
        usable = {k: v for k, v in shared.items() if k in known[name]}
        one = name, catalogue.options(name, {**usable, **own})
        if one not in filled:
            filled.append(one)
    return filled


def check_shared(known: Mapping[str, Collection[str]], shared: Options) -> None:
    """Raise UserError for an option that no implementation has.  known: the options of each."""
    every = {option for options in known.values() for option in options}
    for name in shared:
        if name not in every:
            raise unknown_option(name, every, ", ".join(known))


def _pairs(given: Any) -> Iterator[tuple[Any, Any]]:
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


# ---- function objects ----------------------------------------------------------------------------
# A function of a module is named by that module's file, which a child imports. One of a notebook or
# script, or inside another function, is pickled with all that it uses (cloudpickle). It is
# identified by the hash of its source, or by that of the pickle if Python does not keep the source.

FOLDER = "functions"
"""Subfolder of a results folder for the functions that were sent."""


def name_function(function: Callable[..., Any], folder: Path | None) -> str:
    """Return the name of a function as an implementation, `file.py:function`.

    folder: where a function without a usable file is written; None: a folder that is deleted when
    this process ends. Raises UserError for a function that can't be sent.
    """
    plain = inspect.unwrap(function)
    is_function = isinstance(plain, FunctionType) and not inspect.ismethod(function)
    if not is_function or plain.__name__ == "<lambda>":
        raise UserError(f"{function!r} is no function with a name; give one defined by def")
    if "<locals>" in plain.__qualname__ or plain.__module__ in ("__main__", "__mp_main__"):
        return _pickle(function, plain, folder)
    file, name = inspect.getsourcefile(plain), plain.__qualname__
    if file is None or "." in name:
        raise UserError(f"{name} is not at the top level of a Python file; define it there by def")
    place = plain.__module__ if "." in plain.__module__ else _short(Path(file))
    return f"{place}:{name}"


def _pickle(function: Callable[..., Any], plain: FunctionType, folder: Path | None) -> str:
    """Write a function to a file; return its name."""
    import cloudpickle

    name = plain.__name__
    try:
        # cloudpickle leaves out the file, which messages name
        content: bytes = cloudpickle.dumps((function, plain.__code__.co_filename))
    except Exception as error:
        raise UserError(
            f"{name} can't be sent to another process ({error}); write it to a file and name it "
            f"file.py:{name}"
        ) from None
    pattern = getattr(function, "pattern", None)
    parts = [plain, inspect.unwrap(pattern)] if callable(pattern) else [plain]
    try:
        identity = "".join(inspect.getsource(part) for part in parts).encode()
    except (OSError, TypeError):
        identity = content
    digest = hashlib.sha256(identity).hexdigest()[:16]
    try:
        path = (folder or Path(_scratch().name)) / FOLDER / f"{name}-{digest}{PICKLE}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        place = error.filename or "TMPDIR"
        raise StoreError(f"the function can't be written to {place}: {error.strerror}") from None
    return f"{_short(path)}:{name}"


_scratch = cache(lambda: tempfile.TemporaryDirectory(prefix="longseq-"))
"""Returns a folder that is deleted when this process ends."""


def _short(path: Path) -> str:
    """Return a path relative to the current folder, if it is below it."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
