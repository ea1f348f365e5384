"""Function objects as implementations: named by their file, or sent as source.

The processes that measure import a file (core/own_functions.py). A function of a module is named by
that module's file. One of a notebook or script, or inside another function, is written to a
file of its own, with imports of the modules that it uses.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import inspect
import os
import symtable
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from longseq_bench.core.errors import StoreError, UserError
from longseq_bench.core.own_functions import read_own_function
from longseq_bench.core.scratch import scratch_folder

FOLDER = "functions"
"""Subfolder of a results folder for the functions that were sent."""

_PLAIN = (bool, int, float, str, bytes, type(None))
_MAIN = ("__main__", "__mp_main__")


def name_function(function: Callable[..., Any], folder: Path | None) -> str:
    """Return the name of a function as an implementation, `file.py:function`.

    folder: where a function without a usable file is written; None: a folder that is deleted when
    this process ends. Raises UserError for a function that can't be sent: the sentence names what
    it lacks.
    """
    plain = inspect.unwrap(function)
    if not isinstance(plain, FunctionType) or inspect.ismethod(function):
        kind = "a class" if inspect.isclass(function) else f"a {type(function).__name__}"
        raise UserError(f"{function!r} is {kind}; give a function that is defined by def")
    if plain.__name__ == "<lambda>":
        raise UserError("a lambda can't be sent to another process; define the function by def")
    has_file = "<locals>" not in plain.__qualname__ and plain.__module__ not in _MAIN
    if function is not plain and not _is_decorated(function, plain, has_file):
        raise UserError(
            f"{plain.__name__} is wrapped, and a wrapper can't be sent; write it as a decorator, "
            f"such as @torch.compile above def {plain.__name__}"
        )
    if has_file:
        return _name_by_file(plain)
    return _write(plain, getattr(function, "pattern", None), folder)


def _is_decorated(function: Any, plain: FunctionType, has_file: bool) -> bool:
    """Return True if the wrapper of a function is part of its definition."""
    if has_file:
        return getattr(sys.modules.get(plain.__module__), plain.__name__, None) is function
    (definition,) = ast.parse(_source(plain)).body
    return bool(getattr(definition, "decorator_list", []))


def _name_by_file(function: FunctionType) -> str:
    """Return module:function for a module of a package, else the path of its file."""
    file, name = inspect.getsourcefile(function), function.__qualname__
    if file is None or "." in name:
        raise UserError(f"{name} is not at the top level of a Python file; define it there by def")
    if "." in function.__module__:
        by_module = f"{function.__module__}:{name}"
        try:
            found = read_own_function(by_module)
        except UserError:
            found = None
        if found and os.path.samefile(found.file, file):
            return by_module
    return f"{_short(Path(file))}:{name}"


def _write(function: FunctionType, pattern: Any, folder: Path | None) -> str:
    """Write the function, and its pattern if it has one, to a file; return its name."""
    sent = [function, *([inspect.unwrap(pattern)] if callable(pattern) else [])]
    sources = [_source(one) for one in sent]
    own = {one.__name__ for one in sent}
    lines: dict[str, None] = {}
    for one, source in zip(sent, sources, strict=True):
        lines |= dict.fromkeys(_definitions(one, source, own))
    names = [one.__name__ for one in sent]
    link = [f"{names[0]}.pattern = {names[1]}\n"] if len(names) > 1 else []
    head = ["from __future__ import annotations\n", "\n".join(sorted(lines, key=_imports_first))]
    text = "\n\n".join(part for part in (*head, *sources, *link) if part)
    content = text.encode()
    path = (folder / FOLDER if folder else scratch_folder()) / (
        f"{names[0]}-{hashlib.sha256(content).hexdigest()[:8]}.py"
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise StoreError(f"the function can't be written to {path}: {error.strerror}") from None
    return f"{_short(path)}:{names[0]}"


def _source(function: FunctionType) -> str:
    try:
        return textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        raise UserError(
            f"the source of {function.__name__} can't be found ({function.__code__.co_filename}); "
            f"write it to a file and name it file.py:{function.__name__}"
        ) from None


def _short(path: Path) -> str:
    """Return a path relative to the current folder, if it is below it."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


# ---- names that a function uses ----------------------------------------------------------------


def _definitions(function: FunctionType, source: str, own: set[str]) -> Iterator[str]:
    """Yield a line of code for each name that the source uses but does not define.

    Raises UserError, which lists all names for which there is no such line.
    """
    values = {**function.__globals__, **_closure(function)}
    missing = []
    for name in sorted(_free_names(source) - own):
        if name not in values:
            if not hasattr(builtins, name):
                missing.append(f"`{name}`, which is not defined")
        elif line := _definition(name, values[name]):
            yield line
        else:
            missing.append(f"`{name}`, which is defined in {_place(function, name)}")
    if missing:
        inside = "it" if len(missing) == 1 else "them"
        raise UserError(
            f"{function.__name__} uses {' and '.join(missing)}; put {inside} inside the function, "
            f"or all of it in a file and name it file.py:{function.__name__}"
        )


def _free_names(source: str) -> set[str]:
    """Return the global names that the source refers to, except in annotations."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
    tables = [symtable.symtable(ast.unparse(tree), "<function>", "exec")]
    free: set[str] = set()
    for table in tables:
        tables += table.get_children()
        top = table.get_type() == "module"
        for symbol in table.get_symbols():
            is_own = symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()
            if symbol.is_referenced() and (not is_own if top else symbol.is_global()):
                free.add(symbol.get_name())
    return free


def _closure(function: FunctionType) -> dict[str, Any]:
    names, cells = function.__code__.co_freevars, function.__closure__ or ()
    found = {}
    for name, cell in zip(names, cells, strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # assigned later
            continue
    return found


def _definition(name: str, value: Any) -> str | None:
    """Return a line that defines a name with this value; None if there is none."""
    if isinstance(value, ModuleType):
        module = value.__name__
        if module in _MAIN or sys.modules.get(module) is not value:
            return None
        return f"import {module}" if module == name else f"import {module} as {name}"
    if _is_plain(value):
        return f"{name} = {value!r}"
    place, inside = getattr(value, "__module__", None), str(getattr(value, "__name__", ""))
    if not isinstance(place, str) or place in _MAIN or not inside.isidentifier():
        return None
    if getattr(sys.modules.get(place), inside, None) is not value:
        return None
    return f"from {place} import {inside}" + (f" as {name}" if name != inside else "")


def _is_plain(value: Any) -> bool:
    """Return True for a value that its repr defines: numbers, words, and tuples of them."""
    if isinstance(value, tuple):
        return type(value) is tuple and all(map(_is_plain, value))
    if type(value) not in _PLAIN:
        return False
    return not isinstance(value, float) or value - value == 0


def _imports_first(line: str) -> tuple[bool, str]:
    return not line.startswith(("import ", "from ")), line


def _place(function: FunctionType, name: str) -> str:
    if name in function.__code__.co_freevars:
        return "the function around it"
    if "get_ipython" in function.__globals__:
        return "the notebook"
    return "the script" if function.__module__ in _MAIN else function.__module__
