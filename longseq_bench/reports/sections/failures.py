"""Failed runs with their reasons, figures to distrust, and searches in words."""

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from operator import itemgetter

from longseq_bench.analysis.row import R
from longseq_bench.analysis.runs import REMEDY, group_by
from longseq_bench.analysis.searches import SearchRow
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.model import SDPA, Outcome, Record
from longseq_bench.core.units import format_bytes, format_seconds, format_share, format_tokens
from longseq_bench.reports.base import Source
from longseq_bench.reports.document import Cell, Section, format_ratio
from longseq_bench.reports.groups import (
    UNCONFIRMED,
    format_limit,
    join_names,
    join_words,
    name_status,
    others_on_gpu,
)

_FAILED = (
    "Implementation, Tokens: tokens, Ranks: count, Asked for, Status, Phase, Reason, Runs: count"
)
_ALLOCATION = re.compile(
    r"(?P<ranks>(?:every )?rank[^:]*: )?.*?ried to allocate (?P<size>\d+ bytes|[\d.]+ [KMGT]iB)\b"
)


def failures(source: Source) -> Section:
    """Build the section on failed runs and figures to distrust, with equal failures counted."""
    failed = [record for record in source.records if record.outcome.status != "ok"]
    counted = Counter(_describe(source, failed)).items()
    rows = ((*cells, count) for cells, count in counted)
    suspects = ((row.fingerprint, row.name, row.tokens, why) for _, row, why in _suspects(source))
    tables = [
        source.table("Figures to distrust", "Implementation, Tokens: tokens, Warning", suspects),
        source.table("Runs that were not ok", _FAILED, rows),
    ]
    by_status = Counter(record.outcome.status for record in failed).most_common()
    counts = ", ".join(f"{count:,} {name_status(status)}" for status, count in by_status)
    points = [f"{len(failed):,} of {len(source.records):,} runs were not ok: {counts}."]
    if steps := sum(record.purpose != "measure" for record in failed):
        points.append(f"Steps of searches, which end with a failure: {steps:,} of them.")
    shown = [table for table in tables if table.rows]
    return Section("Failures", points=points if failed else (), tables=shown)


def _suspects(source: Source) -> Iterator[tuple[str, SweepRow | SearchRow, str]]:
    """Yield figures to distrust: the finding that each belongs to, its row, and what is wrong."""
    every: list[SweepRow | SearchRow] = [*source.rows, *source.maxima]
    for row in (row for row in every if row.alloc_retries):
        retried = "CUDA's allocator freed its cache and retried"
        yield f"{retried} (thrashing)", row, f"{retried}; times: {row.alloc_retries:,.0f}"
    for swept in source.rows:
        for rank, counted, stated in swept.bytes_unlike or ():
            words = f"rank {rank} sent {counted:,} B in a pass; the formula gives {stated:,} B"
            yield "Bytes sent differ from their formula", swept, words
    for swept in (row for row in source.rows if row.unstable):
        finding = "Unstable times, run these again on an idle machine"
        yield finding, swept, f"unstable: {swept.unstable}; {REMEDY}"


def _describe(source: Source, failed: Iterable[Record]) -> Iterator[tuple[Cell, ...]]:
    """Yield the machine and the cells of failed records; the unsupported ones come last."""
    for record in sorted(failed, key=lambda record: record.outcome.status == "unsupported"):
        trial, outcome = record.trial, record.outcome
        what = source.label(trial), trial.workload.seq_len, trial.world_size, record.purpose
        reason = _shortened(outcome) or "none was recorded"
        place = record.environment.fingerprint
        yield place, *what, outcome.status, outcome.phase, reason


def _shortened(outcome: Outcome) -> str | None:
    """Return the reason of a failure; of an allocator's text, the ranks and the refused size."""
    found = _ALLOCATION.match(outcome.reason or "") if outcome.status == "oom" else None
    if found is None:
        return outcome.reason
    number, _, unit = found["size"].partition(" ")
    size = format_bytes(int(number)) if unit == "bytes" else found["size"]
    return f"{found['ranks'] or ''}could not allocate {size}{others_on_gpu(outcome.reason)}"


# ---- what to distrust on a first screen, and searches in words -----------------------------------


def wrong_outputs(source: Source) -> Iterator[str]:
    """Yield a sentence on the trials whose output was wrong."""
    wrong = (r.trial for r in source.records if r.outcome.status == "wrong")
    finding = "Wrong output, no speed is shown"
    yield from _count((finding, source.label(trial), trial.workload.seq_len) for trial in wrong)


def suspicions(source: Source) -> Iterator[str]:
    """Yield sentences on thrashing, miscounted bytes and unstable times."""
    yield from _count((finding, row.name, row.tokens) for finding, row, _ in _suspects(source))


def _count(named: Iterable[tuple[str, str, int]]) -> Iterator[str]:
    """Yield a sentence per finding, with the name and the length of the first."""
    for finding, some in group_by(dict.fromkeys(named), itemgetter(0)).items():
        at = f"{some[0][1]} at {format_tokens(some[0][2])} tokens"
        more = f"and {len(some) - 1:,} more" if len(some) > 1 else ""
        yield f"{finding}: {join_words(at, more)}; see Failures."


def never_ran(source: Source) -> str:
    """Return a sentence on the implementations that could not run here at all; "" if all could."""
    by_label = group_by(source.records, lambda record: source.label(record.trial))
    reasons = {
        name: records[0].outcome.reason or ""
        for name, records in by_label.items()
        if all(record.outcome.status == "unsupported" for record in records)
    }
    missing = [name for name, reason in reasons.items() if "is not installed" in reason]
    others = [name for name in reasons if name not in missing]
    named = ((missing, "not installed"), (others, "unsupported"))
    words = "; ".join(f"{join_names(names)} ({why})" for names, why in named if names)
    return f"Not run: {words}. Failures has the reasons." if words else ""


def index_one_rank(maxima: Iterable[R]) -> Mapping[Hashable, R]:
    """Index the maxima on one rank by search, to compare those on several ranks with them."""
    by_search = group_by((row for row in maxima if row.world_size == 1), lambda row: row.ranks_key)
    return {key: rows[0] for key, rows in by_search.items()}


SPEED_CHANGED = 0.08
"""Spread of the times of one length in two processes above which a search says so."""


def describe_search(row: SearchRow, one_rank: Mapping[Hashable, SearchRow]) -> str:
    """Return the answer of a search as a sentence.  one_rank: from `index_one_rank`."""
    runs = f"confirmed by {row.confirmations:,} further run{'s' * (row.confirmations != 1)}"
    runs = runs if row.confirmations else UNCONFIRMED
    if row.wrong_tokens:
        is_first = row.first_failure == row.wrong_tokens
        return join_words(
            f"WRONG from {format_tokens(row.wrong_tokens)} tokens on: {row.name}",
            f"right up to {format_tokens(row.max_tokens)} tokens" if row.max_tokens else "",
            runs if row.max_tokens else "no length passed",
        ) + (f"; {row.failure_reason}." if is_first else ".")
    limit = "no longer length failed: this is where the search stopped, not a limit"
    if row.first_failure is not None and not row.time_edge:
        adds = row.failure_phase and row.failure_phase != row.limited_by
        phase = f" in {row.failure_phase}" if adds else ""
        limit = f"limited by {row.limited_by}{phase} at {format_tokens(row.first_failure)}"
    elif row.limited_by == "time":
        budget, spread = format_limit(row.time_budget or 0.0), row.pass_spread or 0.0
        if row.pass_time_s:
            limit = f"limited by time: of {budget} a pass took {format_seconds(row.pass_time_s)}"
        else:  # only passes with exact accounting of memory ran, which are slower
            limit = f"limited by time: {format_tokens(row.time_edge or 0)} would take {budget}"
        if spread > SPEED_CHANGED:
            limit += (
                f" ±{format_share(spread)}: the machine's speed changed, run it again when idle"
            )
    if not row.max_tokens:
        return f"{row.name}: no length passed; {limit}."
    tokens = f"{format_tokens(row.max_tokens)} tokens"
    if row.fit_only:
        return f"{row.name}: {tokens} fit in memory; not checked or timed."
    one = one_rank.get(row.ranks_key) if row.world_size > 1 else None
    floor, gain = row.fraction_of_floor, one and one.max_tokens and row.max_tokens / one.max_tokens
    words = join_words(
        f"{row.claim_name} takes {tokens}{_model_words(row)}",
        "" if floor is None else f"{format_share(floor)} of the floor",
        f"{format_ratio(gain)} one rank's" if gain else "",
        runs,
    )
    return f"{words}; {limit}.{_memory_words(row)}"


def _model_words(row: SearchRow) -> str:
    """Return the layers of a whole model that took the tokens, the prediction, and the time."""
    if row.layers == 1:
        return ""
    foreseen = f" ({format_tokens(row.predicted_tokens)} predicted)" if row.predicted_tokens else ""
    time_s = row.pass_time_s
    took = f", {format_seconds(time_s)} for their attention in a step" if time_s else ""
    return f" in {row.model}{foreseen}{took}"


def _memory_words(row: SearchRow) -> str:
    """Return what memory alone would allow, of a search that time limits."""
    if row.limited_by != "time" or row.fits_tokens or not row.fit_predicted_tokens:
        return ""
    took = f", in {format_seconds(row.fit_time_s)} a pass" if row.fit_time_s else ""
    fits = format_tokens(row.fit_predicted_tokens)
    # one kernel call has no loops to shorten; of a step of decoding the cache is the memory
    is_one_call = row.implementation == SDPA or row.source is not None
    how = "" if is_one_call or row.mode == "decode" else "; --fit-only runs it"
    return f" Memory would allow {fits} tokens{took} (predicted{how})."
