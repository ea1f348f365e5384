"""Optional packages that have a kernel: find out if one is installed, and if its functions fit.

A package is recognised by the name under which pip installed it. The module is
not enough: flash-attn-4 makes a folder `flash_attn`, and flash-attn 2 has a folder
`flash_attn/cute`.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from longseq_bench.core.errors import UnsupportedError

_MANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class Package:
    """A package that the user installs.

    distribution: its name for pip.  module: where its functions are.  install: one command.
    parameters: by function, the parameters that the kernel gives, with spaces between them.
    """

    distribution: str
    module: str
    install: str
    parameters: Mapping[str, str]

    def unavailable_reason(self) -> str | None:
        """Return how to install it; None if it is installed."""
        try:
            version(self.distribution)
        except PackageNotFoundError:
            return f"the package {self.distribution} is not installed: {self.install}"
        return None

    @property
    def version(self) -> str:
        """The installed version."""
        return version(self.distribution)

    def load(self) -> Any:
        """Return the module.

        Raises UnsupportedError if it can't be imported, or if its functions need other parameters.
        """
        module = import_installed(self.distribution, self.module, self.install)
        for name, given in self.parameters.items():
            if not _accepts(getattr(module, name, None), set(given.split())):
                raise UnsupportedError(
                    f"{name} of the installed {self.distribution} takes other parameters than "
                    f"{given}; install the current version: {self.install}"
                )
        return module


def import_installed(distribution: str, module: str, install: str) -> Any:
    """Import a module of an installed distribution. Raises UnsupportedError if that fails."""
    try:
        return importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:
        raise UnsupportedError(
            f"{distribution} is installed but can't be imported ({error}); install it again for "
            f"this torch: {install}"
        ) from error


def _accepts(function: Callable[..., Any] | None, given: set[str]) -> bool:
    """Return True if a function or a custom operator can be called with these parameters alone."""
    if function is None:
        return False
    operator = getattr(function, "_opoverload", None)
    if operator is not None:
        has_default = {a.name: a.has_default_value() for a in operator._schema.arguments}
    else:
        parameters = inspect.signature(function).parameters.values()
        has_default = {p.name: p.default is not p.empty for p in parameters if p.kind not in _MANY}
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            has_default |= dict.fromkeys(given - has_default.keys(), True)
    needed = {name for name, default in has_default.items() if not default}
    return needed <= given <= set(has_default)
