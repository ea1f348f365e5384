"""The contract of a meter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import ClassVar

from longseq_bench.core.model import Measurement


class Meter(ABC):
    """A context manager round what it measures. `measurements` may be read after it closed."""

    name: ClassVar[str]

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """Why it can't measure here; None where it can."""
        return None

    def __enter__(self) -> Meter:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def stop(self) -> None: ...

    @abstractmethod
    def measurements(self) -> list[Measurement]:
        """What it saw, in SI units."""
