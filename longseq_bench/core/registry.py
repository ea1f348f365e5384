"""Registries by name: built-ins found by scanning a package, plug-ins by entry point.

A module that can't be imported is an error only when it is requested. Its name stays listed with
the reason, so that `longseq list` can explain why it is not available here.
"""

import importlib
import os
import pkgutil
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar

from longseq_bench.core.errors import UnknownNameError, UnsupportedError

T = TypeVar("T")


class Registry(Generic[T]):
    """A registry of objects of one kind, by name.

    kind: the word for it in messages ("implementation").
    package: dotted name; its modules are imported on first use and register themselves,
        except those whose names begin with _.
    group: entry-point group through which other packages add objects.
    """

    def __init__(self, kind: str, package: str, group: str | None = None) -> None:
        self.kind, self._package, self._group = kind, package, group
        self._objects: dict[str, T] = {}
        self._reasons: dict[str, str] = {}
        self._plugins: dict[str, str] = {}
        self._points: list[EntryPoint] | None = None
        self._scanned = False

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that registers an object; a duplicate name is a programming error."""

        def add(obj: T) -> T:
            if name in self._objects and self._objects[name] is not obj:
                raise ValueError(f"two {self.kind}s are called {name!r}")
            self._objects[name] = obj
            return obj

        return add

    def get(self, name: str) -> T:
        """Return the object of that name.

        Raises UnknownNameError with the nearest name, or UnsupportedError with the reason if the
        name is known but can't be imported here.
        """
        self._scan()
        if name in self._objects:
            return self._objects[name]
        if name in self._reasons:
            raise UnsupportedError(f"{self.kind} {name!r} is not available: {self._reasons[name]}")
        raise UnknownNameError(self.kind, name, self.names())

    def names(self) -> list[str]:
        """Return all names, also those that can't be used here."""
        self._scan()
        return sorted({*self._objects, *self._reasons})

    def unavailable_reason(self, name: str) -> str | None:
        """Return the reason why a name can't be imported here; None if it can."""
        self._scan()
        return self._reasons.get(name)

    def plugin_module(self, name: str) -> str | None:
        """Return the module that a plug-in's entry point names; None for a built-in."""
        self._scan()
        return self._plugins.get(name)

    def load_built_ins(self) -> None:
        """Import every module of the package and of its subpackages, and find the plug-ins.

        No plug-in is imported: this may run in the fork server, plug-ins load in a child only.
        """
        package = importlib.import_module(self._package)
        for module in pkgutil.walk_packages(package.__path__, f"{self._package}."):
            name = module.name.rpartition(".")[2]
            if name.startswith("_"):
                continue
            try:
                importlib.import_module(module.name)
            except ImportError as error:
                self._reasons[name.replace("_", "-")] = f"{type(error).__name__}: {error}"
        self._points = list(entry_points(group=self._group)) if self._group else []

    def _scan(self) -> None:
        if self._scanned:
            return
        if self._points is None:
            self.load_built_ins()
        for point in self._points or ():
            self._plugins[point.name] = point.module
            try:
                self.register(point.name)(point.load())
            except Exception as error:  # a broken plug-in is a reason, not the end of the tool
                self._reasons[point.name] = f"{type(error).__name__}: {error}"
        self._scanned = True


# ---- functions of the user: `path/to/file.py:function`, `module:function`, a notebook's pickle ---
# Only a child imports them. The hash of the file's bytes is part of a trial, so an edited file is
# measured anew. Paths are relative to the current folder.

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
