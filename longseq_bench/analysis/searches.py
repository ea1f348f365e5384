"""Rows of searches for the longest length, with the purposes probe, edge and confirm."""

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from longseq_bench.analysis.labels import Labels, index_short_labels, settings_key
from longseq_bench.analysis.row import Row, declare, identity
from longseq_bench.analysis.runs import (
    SEVERITY,
    Runs,
    find_check_limits,
    group_by,
    imbalance,
    pass_seconds,
)
from longseq_bench.core.cost import floor_bytes, floor_tokens
from longseq_bench.core.model import Phase, Record, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRow(Row):
    """A search for the longest length: a bracket and its limit.

    Tokens are those of all ranks. Budget and peak are those of one rank.
    """

    limited_by: str | None = declare(
        "Limited by", "text", "What ended the search: memory, time, hang, ...", "search"
    )
    confirmations: int = declare(
        "Confirmations", "count", "Further passes of the result, in fresh processes.", "search"
    )
    runs: int = declare("Runs", "count", "Runs of the search, retries included.", "search")
    max_tokens: int = declare(
        "Max tokens", "tokens", "Longest length of which most runs passed; 0: none.", "search"
    )
    first_failure: int | None = declare(
        "First failure", "tokens", "Shortest failed length above Max tokens.", "search"
    )
    wrong_tokens: int | None = declare(
        "Wrong from", "tokens", "Shortest length with a wrong output; none above counts.", "search"
    )
    failure_phase: Phase | None = declare("Phase", "text", "Phase of the first failure.")
    failure_reason: str | None = declare("Reason", "text", "Reason of the first failure.")
    floor_tokens: int | None = declare(
        "Floor", "tokens", "Length whose floor fills the memory budgets of all ranks."
    )
    fraction_of_floor: float | None = declare(
        "Fraction of floor", "share", "Bytes that exact attention needs / budgets of all ranks."
    )
    bytes_per_token: float | None = declare(
        "Bytes/token", "bytes", "Peak memory divided by the tokens of all ranks."
    )
    predicted_tokens: int | None = declare(
        "Predicted", "tokens", "Longest length predicted before the first run.", "search"
    )
    wall_s: float = declare("Wall time", "seconds", "Duration of all runs together.", "search")
    pass_time_s: float | None = declare(
        "Time", "seconds", "A pass of the longest length: of timed ones, else of one.", "search"
    )
    time_edge: int | None = declare(
        "Late from",
        "tokens",
        "Length whose pass would take the time limit, where time is the limit.",
    )
    pass_spread: float | None = declare(
        "Spread", "share", "Half the range of the times of that length, over their median."
    )
    fits_tokens: int | None = declare(
        "Fits in memory", "tokens", "Longest length of the same search with --fit-only."
    )
    fit_predicted_tokens: int | None = declare(
        "Predicted to fit", "tokens", "Longest length that memory allows, by prediction."
    )
    fit_time_s: float | None = declare(
        "Time if it fits", "seconds", "Predicted time of a pass of the length predicted to fit."
    )

    @property
    def tokens(self) -> int:
        """The longest length, under the field name that rows of sweeps use."""
        return self.max_tokens

    @property
    def fails_from(self) -> float:
        """The length from which longer ones failed, or would take longer than the time limit."""
        late_from = self.time_edge and self.time_edge * (1 + TIME_NOISE)
        return late_from or self.first_failure or math.inf

    @property
    def time_key(self) -> Hashable:
        """Equal for searches that differ only in time budget and fit_only."""
        same = (self.implementation, self.memory_budget, self.keep, self.allocator)
        return same, self.world_size, self.workload_key, self.options_key


SEARCH_PURPOSES = ("probe", "edge", "confirm")
"""Purposes of the records of a search for the longest length."""

TIME_NOISE, WIDEST_BRACKET = 0.05, 0.16
"""Lengths that time limits and that differ by less are no answer of their own. A failure that is
further away than a bracket is wide (search/bracket.py) is not what limits a length."""

LIMITED_BY: dict[Status, str] = {
    "oom": "memory",
    "timeout": "time",
    "hang": "hang",
    "limit": "kernel limit",
    "wrong": "numerics",
    "crashed": "crash",
    "error": "error",
    "unsupported": "unsupported",
}
UNFINISHED = "unfinished"
"""In place of a limit: no length failed yet, and the longest has not passed again."""


def search_rows(records: Iterable[Record], labels: Labels | None = None) -> list[SearchRow]:
    """Return one row per search for the longest length, in file order.

    labels: by settings_key; those of these rows if None.
    """
    steps = (record for record in records if record.purpose in SEARCH_PURPOSES)
    found = [merge_search(group) for group in group_by(steps, _search_key).values()]
    # a search without a failed or without a passed length found no limit
    bounded = [row for row in found if row.fit_only and row.max_tokens and row.first_failure]
    fits = {row.time_key: row.max_tokens for row in bounded}
    labels = index_short_labels(found) if labels is None else labels
    return [
        replace(
            row,
            label=labels[settings_key(row)],
            fits_tokens=None if row.fit_only else fits.get(row.time_key),
        )
        for row in found
    ]


def merge_search(records: Sequence[Record]) -> SearchRow:
    """Merge the steps of one search: a bracket and what limited it.

    `max_tokens` is the longest length that passed (`has_passed`) below every wrong output, or 0.
    `first_failure` is the shortest failed length above it; other failures below it do not lower it.
    `confirmations` is the number of passes at the maximum beyond the first.
    Raises ValueError if the records are not the steps of exactly one search.
    """
    steps = [record for record in records if record.purpose in SEARCH_PURPOSES]
    # a comparison also merges steps that differ in the name of their model
    if len({_search_key(record, "model") for record in steps}) != 1:
        raise ValueError("merge_search takes the probe, edge and confirm records of one search")
    by_length = group_by(steps, lambda record: record.trial.workload.seq_len)
    all_wrong = (r.trial.workload.seq_len for r in steps if r.outcome.status == "wrong")
    wrong = min(all_wrong, default=None)
    passed = [n for n, runs in by_length.items() if has_passed(runs)]
    longest = max((n for n in passed if wrong is None or n < wrong), default=0)
    failed = min((n for n in by_length if n > longest), default=None)
    at_maximum = Runs(r for r in by_length.get(longest, []) if r.outcome.fits)
    peak, peaks = at_maximum.largest("peak"), at_maximum.each_rank_size("peak")
    predictions = (r.predicted_tokens for r in steps if r.purpose in ("probe", "edge"))
    outcomes = (r.outcome for r in steps if r.trial.workload.seq_len == failed)
    worst = min(outcomes, key=lambda outcome: SEVERITY.index(outcome.status), default=None)
    # without a failure the search confirmed the length of its ceiling, or it was interrupted
    no_limit = "ceiling" if len(at_maximum.records) > 1 else UNFINISHED
    # a confirmation below the edge that it was asked with: a longer pass would be late
    edges = [r.predicted_tokens or 0 for r in at_maximum.records if r.purpose == "confirm"]
    time_edge = max(edges, default=0)
    is_open = failed is None or failed > (1 + WIDEST_BRACKET) * time_edge
    by_time = bool(steps[0].trial.time_budget) and is_open and time_edge > longest
    trial, floor, needed = steps[0].trial, None, 0
    times = [s for r in at_maximum.records if (s := pass_seconds(r)) is not None]
    time_s = median(times) if times else None
    foreseen = next((r.foreseen for r in steps if r.foreseen and r.foreseen.fits_tokens), None)
    if budgets := trial.world_size * (trial.memory_budget or 0):
        floor = floor_tokens(trial.workload, budgets)
        needed = floor_bytes(trial.at(longest).workload) if longest else 0
    return SearchRow(
        **identity(steps[0]),
        peak_bytes=at_maximum.largest_size("peak"),
        tokens_per_rank=at_maximum.largest_size("own_tokens"),
        rank_peaks=peaks,
        imbalance=imbalance(peaks or []),
        alloc_retries=at_maximum.largest("alloc_retries"),
        outside_allocator_bytes=at_maximum.largest_size("outside_allocator"),
        density_achieved=at_maximum.largest("density_achieved"),
        check_limits=find_check_limits(at_maximum.records),
        confirmations=max(len(at_maximum.records) - 1, 0),
        max_tokens=longest,
        first_failure=failed,
        wrong_tokens=wrong,
        limited_by="time" if by_time else LIMITED_BY[worst.status] if worst else no_limit,
        failure_phase=worst.phase if worst else None,
        failure_reason=worst.reason if worst else None,
        floor_tokens=floor,
        fraction_of_floor=needed / budgets if budgets else None,
        bytes_per_token=None if peak is None else peak / longest,
        predicted_tokens=next((n for n in predictions if n is not None), None),
        pass_time_s=time_s,
        time_edge=time_edge if by_time else None,
        pass_spread=(max(times) - min(times)) / 2 / time_s if time_s else None,
        fit_predicted_tokens=foreseen.fits_tokens if foreseen else None,
        fit_time_s=_time_if_it_fits(at_maximum.records, time_s),
        runs=sum(max(1, r.processes // r.trial.world_size) for r in steps),
        wall_s=sum(r.wall_s for r in steps),
    )


def _time_if_it_fits(records: Sequence[Record], time_s: float | None) -> float | None:
    """Return the predicted time of a length that fits, corrected by what the maximum took."""
    for foreseen in (record.foreseen for record in records):
        if foreseen and foreseen.fits_seconds and foreseen.seconds and time_s:
            return foreseen.fits_seconds * time_s / foreseen.seconds
    return None


def has_passed(runs: Sequence[Record]) -> bool:
    """Return True if runs of one trial passed: most met the time limit, and none failed otherwise.

    This is the same as a median time within the limit: one slow run of three is noise.
    """
    timeouts = sum(r.outcome.status == "timeout" for r in runs)
    passes = sum(bool(r.outcome.fits) for r in runs)
    return passes + timeouts == len(runs) and passes > timeouts


def _search_key(record: Record, *names: str) -> Hashable:
    # without repeats: probes run one pass, other steps run more
    same = record.trial.key_without("seq_len", "round", "seed", "repeats", "time_cap", *names)
    return same, record.environment.fingerprint
