"""Files on Python's path that hide a module which longseq needs, such as a `yaml.py` of the user.

This module imports as little as possible, because any other module may be the hidden one.
"""

import os
import sys
from collections.abc import Iterable

NEEDED = frozenset({
    "longseq_bench", "torch", "typer", "rich", "numpy", "pandas", "yaml", "pydantic", "psutil",
    "pynvml", "altair", "vl_convert", "jinja2",
    # what these need
    "annotated_doc", "annotated_types", "attr", "attrs", "click", "cuda", "dateutil", "filelock",
    "fsspec", "functorch", "jsonschema", "jsonschema_specifications", "markdown_it", "markupsafe",
    "mdurl", "mpmath", "narwhals", "networkx", "packaging", "pkg_resources", "pydantic_core",
    "pygments", "pytz", "referencing", "rpds", "setuptools", "shellingham", "six", "sympy",
    "torchgen", "triton", "typing_extensions", "typing_inspection", "tzdata",
})  # fmt: skip
"""Modules of the packages that `pip install longseq` installs."""

_INSTALLED = ("site-packages", "dist-packages")


def explain_hidden_modules() -> str:
    """Return a clause for an error, "; /a/yaml.py hides the module yaml of ..."; "" if none is."""
    return "".join(
        f"; {file} hides the module {name} of {folder}: rename it, or take {os.path.dirname(file)} "
        "out of PYTHONPATH"
        for name, file, folder in find_hidden_modules()
    )


def find_hidden_modules(path: Iterable[str] | None = None) -> list[tuple[str, str, str]]:
    """Return (module, the file that hides it, the folder that has the module itself).

    path: folders in the order in which Python searches them; None: sys.path.
    """
    standard = os.path.dirname(os.__file__)
    first: dict[str, tuple[str, str]] = {}
    hidden = []
    for folder in dict.fromkeys(sys.path if path is None else path):
        for name, file in _modules_in(folder or os.getcwd()):
            if name not in NEEDED and name not in sys.stdlib_module_names:
                continue
            if name not in first:
                first[name] = folder, file
            elif not _is_installed(first[name][0], standard) and _is_installed(folder, standard):
                hidden.append((name, first[name][1], folder))
                first[name] = folder, file
    return hidden


def _is_installed(folder: str, standard: str) -> bool:
    """Return True for a folder of the standard library or of installed packages."""
    return os.path.basename(folder) in _INSTALLED or os.path.realpath(folder).startswith(
        os.path.realpath(standard)
    )


def _modules_in(folder: str) -> Iterable[tuple[str, str]]:
    """Yield name and file of each module and package in a folder."""
    try:
        entries = sorted(os.listdir(folder))
    except OSError:
        return
    for entry in entries:
        name, dot, suffix = entry.partition(".")
        file = os.path.join(folder, entry)
        if suffix == "py" or (dot and suffix.endswith("so")):
            yield name, file
        elif not dot and os.path.isfile(os.path.join(file, "__init__.py")):
            yield name, os.path.join(file, "__init__.py")
