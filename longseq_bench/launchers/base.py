"""The contract of a launcher."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from longseq_bench.core.catalogue import Catalogue
from longseq_bench.core.model import Foresight, Outcome, Trial

DRY_RUN_LIMIT_S = 10.0
"""How long trials that are about to be run may be walked without data."""

OnPhase = Callable[[str, str], None]
"""Told (phase, part) as a trial goes on."""


@dataclass(frozen=True)
class LaunchResult:
    """What a trial came to, and how many child processes it took: one a rank, a retry as many."""

    outcome: Outcome
    processes: int = 1


class Launcher(ABC):
    """Runs trials one at a time, each in processes of its own; a context manager."""

    @abstractmethod
    def catalogue(self) -> Catalogue:
        """What can be run here. Raises LauncherError where no process answers."""

    @abstractmethod
    def check(self, trials: Sequence[Trial]) -> None:
        """Raises UserError for the first trial whose options make no sense together, and for an
        implementation that suits the ranks of none of its trials."""

    @abstractmethod
    def dry_run(self, trials: Sequence[Trial], limit: float = DRY_RUN_LIMIT_S) -> list[Foresight]:
        """What each trial would take, without running it; no device is needed. What is not known
        after so many seconds is said to be so."""

    @abstractmethod
    def run(self, trial: Trial, on_phase: OnPhase) -> LaunchResult:
        """Run one trial to its end, whatever that is. Leaves no process behind."""

    def close(self) -> None:  # noqa: B027  (a launcher without processes has nothing to close)
        """End what it started."""

    def __enter__(self) -> Launcher:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
