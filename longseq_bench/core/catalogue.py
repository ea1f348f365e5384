"""What can be run here, as data: the child looks, the parent reads.

The parent never imports an implementation; it asks a child for this once and checks names,
options and devices against it.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from longseq_bench.core.errors import UnknownNameError
from longseq_bench.core.model import Frozen, OptionValue
from longseq_bench.core.options import OptionSpec, fill


class Entry(Frozen):
    """One implementation: `unavailable` maps a device to the reason why it can't run there."""

    summary: str
    options: tuple[OptionSpec, ...] = ()
    unavailable: dict[str, str] = Field(default_factory=dict)
    source: str = "built-in"


class DeviceInfo(Frozen):
    """One kind of device: `unavailable` is the reason why there is none."""

    name: str = ""
    unavailable: str | None = None
    dtypes: tuple[str, ...] = ()
    free_bytes: int = 0
    total_bytes: int = 0
    count: int = 0


class Catalogue(Frozen):
    """Implementations and devices of this machine, by name."""

    implementations: dict[str, Entry]
    devices: dict[str, DeviceInfo]

    def entry(self, name: str, place: str = "") -> Entry:
        """The implementation of that name. Raises UnknownNameError with the nearest one."""
        if name not in self.implementations:
            raise UnknownNameError("implementation", name, self.implementations, place)
        return self.implementations[name]

    def options(self, name: str, given: dict[str, Any]) -> dict[str, OptionValue]:
        """All options of an implementation, coerced and filled in with defaults.

        Raises UserError (bad value) or UnknownNameError (no such option).
        """
        return fill(self.entry(name).options, given, owner=name)
