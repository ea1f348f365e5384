"""The first screen: key figures, and one line per implementation with its time and longest length.

A best row is named only if its interval does not overlap with those of others.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import inf
from operator import attrgetter
from typing import NamedTuple

from longseq_bench.analysis.labels import speeds
from longseq_bench.analysis.row import require
from longseq_bench.analysis.runs import group_by
from longseq_bench.analysis.searches import SearchRow
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.units import format_bytes, format_seconds, format_share, format_tokens
from longseq_bench.reports.base import Source
from longseq_bench.reports.columns import (
    ValueColumn,
    build_table,
    speedup_with_interval,
    time_or_status,
    time_with_interval,
)
from longseq_bench.reports.document import (
    MAX_ANSWER_ROWS,
    MAX_FIGURES,
    Cell,
    KeyFigure,
    Section,
    Spread,
    format_cell,
    format_ratio,
)
from longseq_bench.reports.groups import (
    MAX_NAMES,
    TIE,
    UNCONFIRMED,
    USUAL,
    common_length,
    ends_first,
    find_longest_ties,
    find_ties,
    format_limit,
    format_range,
    group_by_density,
    has_several_ranks,
    in_brackets,
    join_names,
    join_words,
    most_shared,
    name_status,
    split_by_sparsity,
    table_key,
)
from longseq_bench.reports.sections.by_length import answer_figures
from longseq_bench.reports.sections.lengths import chart_time
from longseq_bench.reports.sections.ranks import find_shared

ALL = "All implementations"
WIDE = 1.5
"""End of an interval, as a multiple of its time, from which a key figure is called unstable."""


class Line(NamedTuple):
    """The line of an implementation; its fastest and its longest variant may differ.

    timed: its fastest row at the common length; if none was ok there, a row that failed.
    passed: its longest row that was ok.  failed: its first row above it, which failed.
    longest: its longest search.  where: the workload of this, if it is not that of most searches.
    """

    implementation: str
    timed: SweepRow | None
    passed: SweepRow | None
    failed: SweepRow | None
    longest: SearchRow | None
    where: str

    @property
    def has_run(self) -> bool:
        """False if every row and search was unsupported."""
        failed, found = self.failed, self.longest
        return bool(
            self.passed
            or (failed and failed.status != "unsupported")
            or (found and (found.max_tokens or found.limited_by != "unsupported"))
        )

    @property
    def rank(self) -> tuple[float, int]:
        """Order by time, then by length; those without a time come last."""
        row = self.timed
        cost = row.time_s if row and row.is_ok and row.time_s else inf
        return cost, -(self.longest.max_tokens if self.longest else 0)


def all_implementations(source: Source) -> Section:
    """Build a line per implementation, the fastest first; per label if there is only one.

    Times are at the workload and length that most implementations share. Exact and sparse attention
    are in one table, so the share of the pairs has a column.
    """
    names = dict.fromkeys(record.trial.implementation for record in source.records)
    noun = "implementation" if len(names) > 1 else "variant"
    key = attrgetter("implementation" if len(names) > 1 else "label")
    if len(names) == 1:
        names = dict.fromkeys(map(key, [*source.rows, *source.maxima])) or names
    swept = most_shared(row for row in source.rows if row.is_full_pass)
    searched = most_shared(row for row in source.maxima if row.is_full_pass)
    at, by_name = common_length(swept, key), group_by(swept, key)
    timed_labels = {row.label for row in at if row.is_ok and row.time_s}
    wanted = (name for name in (source.baseline_label, *USUAL) if name in timed_labels)
    if base := next(wanted, None):
        at = [replace(row, speed=one) for row, one in zip(at, speeds(at, base), strict=True)]
    timed = {name: min(some, key=ends_first) for name, some in group_by(at, key).items()}
    shared, every = group_by(searched, key), group_by(source.maxima, key)
    lines = []
    for name in names:
        found = shared.get(name) or every.get(name, [])
        best = max(found, key=lambda row: (row.is_full_pass, row.max_tokens), default=None)
        where = source.workload(best) if best and name not in shared else ""
        lines.append(Line(name, timed.get(name), *_find_end(by_name.get(name, ())), best, where))
    lines = sorted((line for line in lines if line.has_run), key=attrgetter("rank"))

    title = f"One line per {noun}"
    if at:
        tokens = format_tokens(at[0].tokens)
        title += f"; time and peak memory at {tokens} tokens{source.where(at[0])}"
        title += f", relative to {base}" if base else ""
    if searched and (words := source.workload(searched[0])):
        title += f"; longest: {words}"
    is_swept = any(line.passed and not line.longest for line in lines)
    columns = [one for one in _COLUMNS if one.heading != "Longest swept" or is_swept]
    table = build_table(title, columns, lines)
    if len(table.columns) < 2:
        return Section(ALL)
    named = {line.timed.name for line in lines[:MAX_ANSWER_ROWS] if line.timed}
    chart = chart_time([row for row in swept if row.name in named], "")
    return Section(ALL, tables=[table], charts=[chart] if chart else [])


def _find_end(rows: Sequence[SweepRow]) -> tuple[SweepRow | None, SweepRow | None]:
    """Return the longest row that was ok, and the next longer row of its label, which failed."""
    ordered = sorted(rows, key=attrgetter("tokens"))
    passed = max((r for r in ordered if r.is_ok), key=attrgetter("tokens"), default=None)
    if passed is None:
        return None, next(iter(ordered), None)
    longer = (r for r in ordered if r.tokens > passed.tokens and r.name == passed.name)
    return passed, next(longer, None)


def _name(line: Line) -> str:
    best = line.timed or line.longest
    return best.name if best else line.implementation


def _density(line: Line) -> float | str | None:
    """Return the share of the pairs; "sparse" for a search, which records no such share."""
    row = line.timed
    if row and row.is_ok:
        return row.token_density if row.is_sparse else None
    return "sparse" if line.longest and line.longest.is_sparse else None


def _longest(line: Line) -> Cell:
    """Return "90,000 (ring, 10 min limit)": the name only if it is not that of the line."""
    if line.longest is None:
        return None
    tokens = f"{line.longest.max_tokens:,}" if line.longest.max_tokens else "none passed"
    variant = "" if line.longest.name == _name(line) else line.longest.name
    return tokens + in_brackets(join_words(variant, line.where))


def _longest_swept(line: Line) -> str | None:
    """Return "32k", with the failure above it: "32k, timeout at 64k"; None without rows."""
    passed = format_tokens(line.passed.tokens) if line.passed else ""
    failed = line.failed
    end = f"{name_status(failed.status)} at {format_tokens(failed.tokens)}" if failed else ""
    return join_words(passed, end) or None


_COLUMNS = (
    ValueColumn("Implementation", "text", _name),
    ValueColumn("Pairs seen", "share", _density),
    ValueColumn("Time", "seconds", lambda line: line.timed and time_or_status(line.timed), 2),
    ValueColumn("Relative speed", "ratio", lambda line: line.timed and line.timed.speed),
    ValueColumn("Unstable", "text", lambda line: line.timed and line.timed.unstable),
    ValueColumn("Check", "text", lambda line: line.timed and line.timed.check_limits),
    ValueColumn(
        "Peak memory",
        "bytes",
        lambda line: line.timed.peak_bytes if line.timed and line.timed.is_ok else None,
        1,
        help="The largest peak of any rank.",
    ),
    ValueColumn("Longest swept", "text", _longest_swept),
    ValueColumn("Max tokens", "text", _longest, 3),
    ValueColumn("Time at max", "seconds", lambda line: line.longest and line.longest.pass_time_s),
    ValueColumn("Limited by", "text", lambda line: line.longest and line.longest.limited_by),
    ValueColumn(
        "Fraction of floor", "share", lambda line: line.longest and line.longest.fraction_of_floor
    ),
)


# ---- key figures: the longest, the fastest, the least memory, what ranks bring -------------------

Figures = Iterator[KeyFigure]


def longest(source: Source) -> Figures:
    """Yield the longest lengths of searches, of exact and of sparse attention; else of sweeps."""
    found = split_by_sparsity(r for r in source.maxima if r.is_full_pass and r.max_tokens)
    for kind, rows in found.items():
        best = max(rows, key=lambda row: row.max_tokens)
        ties = find_longest_ties([row for row in rows if table_key(row) == table_key(best)])
        names = join_names(row.claim_name for row in ties) + (f": {TIE}" if len(ties) > 1 else "")
        times = [row.pass_time_s for row in ties if row.pass_time_s]
        took = f"{format_range(times, format_seconds)} a pass" if times else ""
        words = join_words(f"{names}{source.where(ties[0])}", took, _cause(ties[0]))
        tokens = f"{format_tokens(ties[0].max_tokens)} tokens"
        yield KeyFigure(f"Longest{_kind(kind, found)}", tokens, words)
    if found:
        return
    swept = most_shared(row for row in source.rows if row.is_full_pass)
    if most := max((row.tokens for row in swept if row.is_ok), default=0):
        tried = {row.name for row in swept}
        passed = {row.claim_name for row in swept if row.is_ok and row.tokens == most}
        failed = any(row.tokens > most for row in swept)
        end = "all longer ones failed" if failed else "the longest tried"
        many = f"{len(passed)} of {len(tried)} passed"
        names = join_names(sorted(passed)) if len(passed) <= MAX_NAMES else many
        words = f"{names}{source.where(swept[0])}; {end}"
        yield KeyFigure("Longest swept", f"{format_tokens(most)} tokens", words)


def _kind(kind: str, found: Iterable[str]) -> str:
    """Return ", exact" or ", sparse" for a label if there are figures of both."""
    return f", {kind}" if len({*found}) > 1 else ""


def _cause(row: SearchRow) -> str:
    """Return what limits a search: "stopped by memory", "stopped by the 30 s limit; ..."."""
    words = "no longer length failed"
    if row.wrong_tokens:
        words = f"WRONG from {format_tokens(row.wrong_tokens)} tokens on"
    elif row.first_failure is not None or row.limited_by == "time":
        is_limit = row.limited_by == "time" and row.time_budget
        limit = f"the {format_limit(require(row.time_budget))} limit" if is_limit else ""
        words = f"stopped by {limit or row.limited_by}"
    if (row.fits_tokens or 0) > row.max_tokens:
        words += f"; {format_tokens(require(row.fits_tokens))} would fit in memory"
    return words if row.confirmations else f"{words}, {UNCONFIRMED}"


# ---- how fast, in what memory: at the length and workload that most implementations share --------


def _shared(source: Source) -> list[SweepRow]:
    rows = common_length(most_shared(row for row in source.rows if row.is_full_pass))
    return [row for row in rows if row.is_ok]


def fastest_of_kinds(source: Source) -> Figures:
    """Yield the least time of exact and of sparse attention."""
    found = split_by_sparsity(row for row in _shared(source) if row.time_s)
    for kind, rows in found.items():
        best, words = describe_fastest(rows, source.baseline_label)
        value = format_cell(time_with_interval(best), "seconds")
        words += source.where(best)
        yield KeyFigure(f"Fastest{_kind(kind, found)}", value, words)


def describe_fastest(rows: Iterable[SweepRow], baseline: str | None = None) -> tuple[SweepRow, str]:
    """Return the fastest of timed rows of one length, and a sentence; ties where intervals overlap.

    Of ties it is the one whose interval ends first. It is compared with the rows of similar density
    that were timed more than once: with the baseline, else with the next.
    """
    first, *others = sorted(rows, key=lambda row: require(row.time_s))
    same = next(group for group in group_by_density([first, *others]) if first in group)
    timed = [row for row in same if row.samples > 1]
    ties = [first]
    if first.samples > 1:
        ties = sorted(find_ties(timed, "time_low_s", "time_high_s"), key=ends_first)
    best = ties[0]
    density = f" ({format_share(best.token_density)} seen)" if best.token_density else ""
    at = f"{density if best.is_sparse else ''} at {format_tokens(best.tokens)}"
    words = f"{join_names(row.claim_name for row in ties)}{at}"
    if best.samples < 2:
        return best, f"{words}, one pass, no interval"
    if best.unstable or (require(best.time_high_s) > WIDE * require(best.time_s)):
        words += ", unstable"
    if len(ties) > 1:
        return best, f"{words}: {TIE}"
    if len(timed) == 1:
        which = " at this density" if best.is_sparse else " more than once"
        return best, f"{words}, the only one timed{which if others else ''}"
    usual = (row for name in (baseline, *USUAL) for row in timed[1:] if row.label == name)
    other = next(usual, timed[1])
    ratio = format_ratio(require(other.time_s) / require(best.time_s))
    return best, f"{words}, {ratio} as fast as {other.name}"


def least_memory(source: Source) -> Figures:
    """Yield the lowest peak."""
    if known := [row for row in _shared(source) if row.peak_bytes]:
        peak = min(require(row.peak_bytes) for row in known)
        names = join_names(row.claim_name for row in known if row.peak_bytes == peak)
        value = f"{format_bytes(peak)}{' a rank' if has_several_ranks(known) else ''}"
        words = f"{names} at {format_tokens(known[0].tokens)}{source.where(known[0])}"
        yield KeyFigure("Least memory", value, words)


# ---- what ranks bring ----------------------------------------------------------------------------


def best_speedup(source: Source) -> Figures:
    """Yield the highest speed-up over one rank, at the length and workload that most share."""
    rows = find_shared(source)
    if not rows:
        return
    ties, best = find_ties(rows, "speedup_low", "speedup_high", largest=True), rows[0]
    ratio = require(speedup_with_interval(best))
    interval = "(one pass, no interval)"
    if isinstance(ratio, Spread):
        interval = f"({format_ratio(ratio.low)} to {format_ratio(ratio.high)})"
    words = f"{best.claim_name} at {format_tokens(best.tokens)}{source.where(best)}"
    if len(ties) > 1:
        words += f"; {TIE} from {len(ties) - 1} more"
    label = "Best speed-up" if require(best.speedup) >= 1 else "Least slow-down"
    yield KeyFigure(label, f"{format_ratio(require(best.speedup))} {interval}", words)


def key_figures(source: Source) -> list[KeyFigure]:
    """Return the answer of a report in at most MAX_FIGURES figures."""
    if answers := list(answer_figures(source)):
        return answers[:MAX_FIGURES]
    found = longest, fastest_of_kinds, best_speedup, least_memory
    return [figure for find in found for figure in find(source)][:MAX_FIGURES]
