"""Optional packages that have a kernel: find out if one is installed, and if its functions fit.

A package is recognised by the name under which pip installed it. The module is not enough:
flash-attn-4 makes a folder `flash_attn`, which flash-attn 2 has as well.
"""

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from longseq_bench.core.errors import UnsupportedError


@dataclass(frozen=True)
class Package:
    """A package that the user installs.

    distribution: its name for pip.  module: where its functions are.  install: one command.
    parameters: by function, the parameters that the kernel gives, with spaces between them.
    """

    distribution: str
    module: str
    install: str
    parameters: Mapping[str, str] = field(default_factory=dict)

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
        try:
            module = importlib.import_module(self.module)
        except Exception as error:  # whatever a version of it raises with this torch
            raise UnsupportedError(
                f"{self.distribution} is installed but can't be imported ({error}); install it "
                f"again for this torch: {self.install}"
            ) from error
        for name, given in self.parameters.items():
            if not _accepts(getattr(module, name, None), given.split()):
                raise UnsupportedError(
                    f"{name} of the installed {self.distribution} takes other parameters than "
                    f"{given}; install the current version: {self.install}"
                )
        return module


def _accepts(function: Any, given: list[str]) -> bool:
    """Return True if a function or a custom operator can be called with these parameters alone."""
    try:
        # a custom operator is an object that holds its function
        signature = inspect.signature(getattr(function, "_init_fn", function))
        signature.bind(**dict.fromkeys(given))
    except (TypeError, ValueError):
        return False
    return True
