"""Failures of the processes around a trial, such as a killed fork server.

They say nothing about the implementation. A launcher runs such a trial once more; if it fails in
this way again, the record has this fact, and resuming runs the trial again.
"""

from longseq_bench.core.model import Outcome, Phase

FACT = "environment_failure"


def environment_failure(reason: str, phase: Phase | None = None) -> Outcome:
    """Return the outcome of a trial that something other than the trial has ended."""
    return Outcome(status="error", reason=reason, phase=phase, facts={FACT: True})


def is_environment_failure(outcome: Outcome) -> bool:
    """Return True if the outcome says nothing about the trial, so that it has to run again."""
    return bool(outcome.facts.get(FACT))
