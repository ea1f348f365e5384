"""Trials that run in processes of their own, by the launcher of the session."""

from typing import Any

import pytest

from longseq_bench.core.model import OptionValue, Outcome, Trial
from longseq_bench.core.registry import is_own
from longseq_bench.launchers.local import LocalLauncher
from longseq_bench.meters.memory import HeapPeak
from tests.make import trial

MIB = 2**20
exact = pytest.mark.skipif(
    HeapPeak.unavailable_reason() is not None, reason="no exact heap peak here"
)


def complete(
    launcher: LocalLauncher, name: str, tokens: int = 2048,
    options: dict[str, OptionValue] | None = None, **fields: Any,
) -> Trial:  # fmt: skip
    """A trial with default options: one pass of two heads on one thread."""
    known = {"repeats": 0, "heads": 2, "threads": 1, **fields}
    catalogue = launcher.catalogue([name] if is_own(name) else ())
    return trial(name, tokens, catalogue.options(name, options or {}), **known)


def run_trial(launcher: LocalLauncher, of: Trial) -> Outcome:
    return launcher.run(of, lambda phase, part: None).outcome


def run(launcher: LocalLauncher, name: str, *shape: Any, **fields: Any) -> Outcome:
    """The outcome of a trial that `complete` makes."""
    return run_trial(launcher, complete(launcher, name, *shape, **fields))


def passed(outcome: Outcome) -> Outcome:
    assert (outcome.status, outcome.reason) == ("ok", None)
    return outcome
