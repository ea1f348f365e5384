"""Attention functions of the user: `path/to/file.py:function` or `package.module:function`.

The parent reads the signature from the source (own_signature.py) and never imports the file. A
child imports it (attention/own_function.py). The hash of the file's bytes is part of a trial, so
an edited file is measured anew. Paths are relative to the current folder.
"""

import hashlib
import os
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.machinery import BuiltinImporter, PathFinder
from pathlib import Path

from longseq_bench.core.errors import UserError, nearest
from longseq_bench.core.own_signature import Signature, read_signature
from longseq_bench.core.plain_text import has_surrogate
from longseq_bench.core.user_files import read_file

FORM = "write path/to/file.py:function or module:function"


@dataclass(frozen=True)
class OwnFunction:
    """A function of the user, as its source describes it.

    name: as in a trial.  function: its own name.  file: its source.  module: dotted name, or None
    if the user named a file.  source: 16 hex digits, the hash of the file's bytes.
    """

    name: str
    function: str
    file: Path
    module: str | None
    source: str
    signature: Signature

    @property
    def place(self) -> str:
        """File and line of the definition: "my_attention.py:12"."""
        return f"{self.file}:{self.signature.line}"


def is_own(name: str) -> bool:
    """Return True if the name of an implementation names a function of the user."""
    return ":" in name or name.endswith(".py")


def canonical_name(name: str) -> str:
    """Return one spelling of a name: ./a.py:f -> a.py:f; any other name stays as it is."""
    place, colon, function = name.rpartition(":")
    if not colon or not _is_path(place):
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


def source_of(name: str) -> str | None:
    """Return the hash of an own function's file; None for any other implementation."""
    return read_own_function(name).source if is_own(name) else None


def read_own_function(name: str) -> OwnFunction:
    """Return what the source says about an own function.

    Raises UserError for a file or function that is not there, or that can't be called with q, k
    and v.
    """
    place, colon, function = name.rpartition(":")
    if not colon or not place or not function.strip().isidentifier():
        written = name if name.endswith(".py") else (place or "path/to/file.py")
        raise UserError(
            f"implementation {name!r} names no function; write {written.strip(':')}:FUNCTION"
        )
    if has_surrogate(name):
        raise UserError(f"implementation {name!r} is not UTF-8, as records are; rename its file")
    function = function.strip()
    module = None if _is_path(place) else place
    file = _find_module(place, name) if module else Path(place).expanduser()
    content = _read(file, name)
    return OwnFunction(
        name=canonical_name(name), function=function, file=file, module=module,
        source=hashlib.sha256(content).hexdigest()[:16],
        signature=read_signature(content, str(file), function),
    )  # fmt: skip


def search_path() -> list[str]:
    """Return the folders in which modules of own functions are searched: also the current one."""
    return list(dict.fromkeys([*sys.path, os.getcwd()]))


def _is_path(place: str) -> bool:
    return place.endswith(".py") or "/" in place or os.sep in place


def _read(file: Path, name: str) -> bytes:
    try:
        return read_file(file, UserError)
    except FileNotFoundError:
        raise UserError(f"there is no file {file} (implementation {name}); {_hint(file)}") from None
    except IsADirectoryError:
        raise UserError(f"{file} is a folder (implementation {name}); {FORM}") from None
    except OSError as error:
        raise UserError(f"{file} can't be read: {error.strerror}") from None
    except ValueError:  # a null byte, or half of a character; its text depends on Python's version
        raise UserError(f"{file} can't be read: no file can have this name") from None


def _hint(file: Path) -> str:
    folder = file.parent
    if not folder.is_dir():
        return f"there is no folder {folder} in {os.getcwd()} either"
    files = sorted(path.name for path in folder.glob("*.py"))
    if close := nearest(file.name, files):
        return f"did you mean {folder / close}?"
    where = os.getcwd() if folder == Path() else folder
    return f"{where} has {', '.join(files[:8])}" if files else f"{where} has no .py file"


def _find_module(module: str, name: str) -> Path:
    """Return the source of a module without importing its packages. Raises UserError."""
    if not all(part.isidentifier() for part in module.split(".")):
        raise UserError(f"implementation {name!r} can't be read; {FORM}")
    top, *inner = module.split(".")
    # whether a module such as math is part of the interpreter depends on who built it
    spec = PathFinder.find_spec(top, search_path()) or BuiltinImporter.find_spec(top)
    if spec is None:
        raise UserError(
            f"there is no module {top} (implementation {name}) on Python's path or in "
            f"{os.getcwd()}; install it, or {FORM.removesuffix(' or module:function')}"
        )
    files = [Path(spec.origin)] if spec.origin else []
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    for part in inner:
        packages = [folder / part for folder in folders if (folder / part).is_dir()]
        candidates = [p / "__init__.py" for p in packages] + [f / f"{part}.py" for f in folders]
        files, folders = [file for file in candidates if file.is_file()], packages
    sources = [file for file in files if file.suffix == ".py"]
    if not sources:
        raise UserError(
            f"module {module} (implementation {name}) has no Python source that can be found "
            "without importing it; write path/to/file.py:function"
        )
    return sources[0]
