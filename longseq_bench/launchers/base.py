"""The contract of a launcher, and the registry of launchers.

A launcher is one file: a module in this folder, or in another package, whose entry point in the
group `longseq_bench.launchers` names the class. docs/extending.md has an example.
tests/launchers/test_contract.py tests every launcher of the registry.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from longseq_bench.core.catalogue import Catalogue
from longseq_bench.core.model import Device, DryRunEstimate, Outcome, Place, Trial
from longseq_bench.core.registry import Registry

DRY_RUN_LIMIT_S = 10.0
"""Time limit of a dry run, for all of its trials."""

OnPhase = Callable[[str, str], None]
"""Called with (phase, part) when a trial enters a phase."""


@dataclass(frozen=True)
class LaunchResult:
    """The outcome of a trial, and the number of child processes: one per rank and attempt.

    place: the worker that ran it, if several ran trials side by side.
    """

    outcome: Outcome
    processes: int = 1
    place: Place | None = None


class Launcher(ABC):
    """Base of launchers, which run trials one at a time in processes. A context manager.

    profile: file for the profile of a pass of the next trial that times passes; "": none.
    """

    profile = ""

    @abstractmethod
    def catalogue(self, own: Sequence[str] = ()) -> Catalogue:
        """Return what can run here. Raises LauncherError if no process answers.

        own: names of functions of the user that are described too.
        """

    @abstractmethod
    def check(self, trials: Sequence[Trial]) -> None:
        """Check the options and world sizes of trials before any of them runs.

        Raises UserError if options contradict each other, or if an implementation can run none of
        its trials with their world sizes.
        """

    @abstractmethod
    def dry_run(
        self,
        trials: Sequence[Trial],
        limit: float = DRY_RUN_LIMIT_S,
        capability: tuple[int, int] | None = None,
    ) -> list[DryRunEstimate]:
        """Predict what each trial needs, without running it and without a device.

        limit: seconds for all of them; after it the estimates are `unsupported`, with this reason.
        capability: compute capability of the GPU; None: any.
        """

    @abstractmethod
    def run(self, trial: Trial, on_phase: OnPhase) -> LaunchResult:
        """Run one trial to its end. Every failure is an outcome; no process is left behind."""

    def devices(self, device: Device) -> list[str]:
        """Return what workers share out: GPUs by UUID, each once, or cores by number."""
        from longseq_bench.core.cpus import own_cores
        from longseq_bench.core.gpus import read_visible_gpus  # it loads psutil: not for reports

        if device == "cpu":
            return own_cores()
        return list({gpu.index: gpu.uuid for gpu in reversed(read_visible_gpus().visible)}.values())

    def close(self) -> None:  # noqa: B027  (a launcher without processes has nothing to close)
        """End everything that this launcher started."""

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *raised: Any) -> None:
        self.close()


LAUNCHERS: Registry[type[Launcher]] = Registry("launcher", __package__, "longseq_bench.launchers")
