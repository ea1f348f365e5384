"""Trials and their outcomes in a few words, for the lines of progress."""

from collections.abc import Callable, Iterable

from longseq_bench.analysis.runs import per_iteration
from longseq_bench.analysis.short_labels import find_short_labels
from longseq_bench.core.masks import mask_words, mode_words
from longseq_bench.core.model import OptionValue, Record, Trial
from longseq_bench.core.stats import median_interval
from longseq_bench.core.units import format_bytes, format_seconds, format_tokens
from longseq_bench.reports import outcome_text
from longseq_bench.reports.document import Spread, format_cell

MAX_REASON = 100  # characters of a failure's reason that are shown; the record has all of it
_TIMED_PHASES = ("forward", "backward", "communication", "time")


def _shape(trial: Trial) -> str:
    w = trial.workload
    heads = f"heads {w.heads}/{w.kv_heads} of {w.head_dim}/{w.v_head_dim}"
    return " ".join(filter(None, (w.model, f"batch {w.batch}", heads)))


_FIELDS: tuple[Callable[[Trial], str], ...] = (
    lambda trial: f"{trial.world_size} rank{'s' if trial.world_size > 1 else ''}",
    lambda trial: trial.workload.dtype,
    lambda trial: mode_words(trial.workload.mode, trial.workload.new_tokens),
    lambda trial: mask_words(trial.workload.visibility.text),
    lambda trial: trial.device,
    _shape,
)


class Labels:
    """Short labels of trials: only what differs between them."""

    def __init__(self, trials: Iterable[Trial]) -> None:
        trials = list(trials)
        self._distinct = list({(t.implementation, repr(t.options)): t for t in trials}.values())
        self._short: dict[tuple[str, str], str] = {}
        self._fields = [words for words in _FIELDS if len({words(t) for t in trials}) > 1]

    def label(self, trial: Trial) -> str:
        """Return the implementation, its length and the other settings that differ."""
        key = trial.implementation, repr(trial.options)
        if key not in self._short:
            self._short[key] = find_short_labels([*self._distinct, trial])[-1]
        name, _, settings = self._short[key].partition(" ")
        name = f"{name} {format_tokens(trial.workload.seq_len)} {settings}".rstrip()
        return " ".join([name, *(words(trial) for words in self._fields)])


def format_option(value: OptionValue) -> str:
    """Return an option's value as it is written after -o NAME=."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def describe_outcome(record: Record) -> str:
    """Return the time of a trial with its spread, or its failure, in a few words."""
    outcome, trial = record.outcome, record.trial
    if outcome.status == "timeout" and trial.time_budget and outcome.phase in _TIMED_PHASES:
        return f"over the time limit of {format_seconds(trial.time_budget)}"
    if outcome.status != "ok":  # without the allocator's text
        reason = " ".join((outcome.reason or "").split())
        reason = reason if len(reason) <= MAX_REASON else reason[: MAX_REASON - 1] + "…"
        return outcome_text.describe_outcome(outcome.status, outcome.phase, reason)
    words = []
    if times := per_iteration(record, "time"):
        low, middle, high = median_interval(times)
        spread = format_cell(Spread(middle, low, high), "seconds")
        # one sample has no spread; that is not a spread of 0
        words.append(spread if len(times) > 1 else f"{format_seconds(middle)} (once)")
    elif passed := outcome.largest("pass_time"):
        words.append(f"one pass {format_seconds(passed)}")
    peak, bound = outcome.largest("peak"), outcome.largest("peak_bound")
    if record.purpose != "measure" and (peak or bound):
        per_rank = " per rank" if trial.world_size > 1 else ""
        size = format_bytes(peak or bound or 0)
        words.append(f"peak {'' if peak else 'at most '}{size}{per_rank}")
    return ", ".join(words)
