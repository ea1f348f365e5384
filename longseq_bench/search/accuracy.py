"""Errors of past predictions, from records that have both the prediction and the measurement."""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from longseq_bench.core.model import Record, Trial
from longseq_bench.search.prediction import pass_seconds


class Accuracy(NamedTuple):
    """Errors of the predictions for one kind of trial: predicted over measured, less 1.

    missed: runs that were predicted to fit and ran out of memory.
    """

    implementation: str
    mode: str
    world_size: int
    device: str
    dtype: str
    keep: str
    memory_errors: tuple[float, ...]
    time_errors: tuple[float, ...]
    missed: int

    def matches(self, trial: Trial) -> bool:
        """Return True if a prediction for this trial is of this kind."""
        return self[:6] == _kind(trial)


def find_accuracy(records: Iterable[Record]) -> list[Accuracy]:
    """Return the errors of the predictions in records, by kind of trial."""
    kinds: dict[TrialKind, tuple[list[float], list[float]]] = {}
    missed: Counter[TrialKind] = Counter()
    for record in records:
        outcome, trial, prediction = record.outcome, record.trial, record.foreseen
        if prediction is None or trial.fit_only:
            continue
        memory_errors, time_errors = kinds.setdefault(_kind(trial), ([], []))
        needed = prediction.budget_bytes
        fits = needed and needed <= (trial.memory_budget or 0)
        missed[_kind(trial)] += bool(fits and outcome.status == "oom")
        if outcome.status != "ok":
            continue
        if prediction.peak_bytes and (peak := outcome.largest("peak")):
            memory_errors.append(prediction.peak_bytes / peak - 1)
        if prediction.seconds and (seconds := pass_seconds(record)):
            time_errors.append(prediction.seconds / seconds - 1)
    return [
        Accuracy(*key, tuple(memory), tuple(time), missed[key])
        for key, (memory, time) in sorted(kinds.items())
        if memory or time or missed[key]
    ]


TrialKind = tuple[str, str, int, str, str, str]


def _kind(trial: Trial) -> TrialKind:
    w = trial.workload
    return trial.implementation, w.mode, trial.world_size, trial.device, w.dtype, trial.keep
