"""The contract of a meter, and the registry of meters.

A meter is one file: a module in this folder, or in another package, whose entry point in the group
`longseq_bench.meters` names the class. docs/extending.md has an example. Its role says when:

- memory: around the checked pass. The worker takes the available one with the highest priority,
  and its measurements must include `peak` in bytes.
- time: around every timed pass (a subclass of `Clock`).
- extra: every available one runs around every complete timed pass, outside the clock. It returns
  one sample per pass, and its measurements are added to the record.

tests/meters/test_contract.py tests every meter of the registry.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from longseq_bench.core.errors import UnsupportedError
from longseq_bench.core.model import Measurement
from longseq_bench.core.registry import Registry

Role = Literal["memory", "time", "extra"]
Workspace = Callable[[Any, tuple[Any, ...], dict[str, Any]], int]
"""Bytes that an operator, given its arguments, allocates outside torch's tensors while it runs."""


def no_workspace(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return 0: the operator allocates nothing outside torch's tensors."""
    return 0


@dataclass(frozen=True)
class MeterContext:
    """The trial that a meter has to measure.

    device: the torch device type of the trial; `meta` in a dry run.
    maps_files: whether the inputs are in memory-mapped files on the host.
    workspace: bytes that an operator allocates where no tensor shows it.
    data_limit: bytes of the heap above which an allocation fails in the measured code, if the
        system enforces such a limit there.
    """

    device: str = "cpu"
    maps_files: bool = False
    workspace: Workspace = no_workspace
    data_limit: int | None = None


ON_CPU = MeterContext()


class Meter(ABC):
    """A context manager around the code that it measures. It may be entered several times.

    name: the display name, written to the record.
    priority: among several available meters of memory, or of time, the highest is used.
    """

    name: ClassVar[str]
    role: ClassVar[Role]
    priority: ClassVar[int] = 0

    def __init__(self, context: MeterContext = ON_CPU) -> None:
        self.context = context

    @classmethod
    def unavailable_reason(cls, context: MeterContext = ON_CPU) -> str | None:
        """Return why this meter can't measure here, or None. It must not raise."""
        return None

    def __enter__(self) -> Meter:
        self.start()
        return self

    def __exit__(self, *raised: Any) -> None:
        self.stop()

    @abstractmethod
    def start(self) -> None:
        """Begin to measure."""

    @abstractmethod
    def stop(self) -> None:
        """End the measurement."""

    @abstractmethod
    def measurements(self) -> list[Measurement]:
        """Return the results in SI units. Valid after `stop`."""


METERS: Registry[type[Meter]] = Registry("meter", __package__, "longseq_bench.meters")


def available_meters(role: Role, context: MeterContext) -> list[Meter]:
    """Return every meter of a role that can measure here, the highest priority first."""
    known = [METERS.get(n) for n in METERS.names() if METERS.unavailable_reason(n) is None]
    usable = [m for m in known if m.role == role and m.unavailable_reason(context) is None]
    return [make(context) for make in sorted(usable, key=lambda m: -m.priority)]


def find_meter(role: Role, context: MeterContext) -> Meter:
    """Return the available meter of a role with the highest priority.

    Raises:
        UnsupportedError: no meter of that role can measure here.
    """
    found = available_meters(role, context)
    if not found:
        raise UnsupportedError(f"no {role} meter can measure on device={context.device}")
    return found[0]
