"""What each table of a report must hold: which rows, and each cell by its column's name.

CELLS      by kind of table: column -> what its cell says, of a row's figures
EXPECTED   by section: the book -> the tables that it must have, in order
A new column needs a line in CELLS; a new table one in both.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from longseq_bench.core.units import format_bytes, format_seconds, format_share, parse_bytes
from longseq_bench.reports.document import format_cell
from tests.reports.oracle import (
    WORST_FIRST,
    Book,
    Exponent,
    Figure,
    Search,
    Swept,
    exponents,
    largest,
    on_rank,
    over,
)

Items = Sequence[Any]
DASH = "—"
USES = {
    "a conversation": 2**13, "a long article": 2**15, "a book": 2**18, "a code repository": 2**20,
    "a shelf of books": 2**23,
}  # fmt: skip


class Expected(NamedTuple):
    """A table that must be there. kind: its columns, in CELLS."""

    kind: str
    title: str
    rows: Items


def big(text: str) -> str:
    """Beginning with a capital."""
    return text[:1].upper() + text[1:]


def cell(value: Any, kind: str) -> str:
    """A value as every report writes it."""
    return format_cell(value, kind)


def percent(share: float) -> str:
    """Of an interval's end: two digits below 10 %, whole ones above."""
    return f"{100 * share:.0f}" if share >= 0.0995 or share == 0 else f"{100 * share:.2g}"


def within(value: float, ends: tuple[float, float] | None, kind: str) -> str:
    """A figure and how far off its interval's farther end is."""
    if ends is None:
        return cell(value, kind)
    off = max(ends[1] - value, value - ends[0]) / value if value else 0.0
    return f"{cell(value, kind)} ±{percent(off)} %"


def time_of(row: Swept) -> str:
    """A median time; a single sample has no interval."""
    return DASH if row.time is None else within(row.time, row.ends, "seconds")


def ratio_of(one: Swept, other: Swept) -> str:
    """A time over another, with what both intervals leave possible."""
    ends = None
    if one.ends and other.ends:
        ends = one.ends[0] / other.ends[1], one.ends[1] / other.ends[0]
    return within((one.time or 0) / (other.time or 1), ends, "ratio")


def joined(each: Sequence[float | None] | None, write: Callable[[float], str]) -> str:
    """A figure a rank."""
    return " · ".join(DASH if v is None else write(v) for v in each) if each else DASH


def sizes(each: Sequence[float | None] | None) -> str:
    """Bytes of each rank."""
    return joined(each, format_bytes)


def shares(share: float | None, low: float | None, high: float | None) -> str:
    """A share and between what it lies."""
    told = format_share(share or 0.0)
    return told if low is None else f"{told} ({format_share(low)} to {format_share(high or 0.0)})"


def of(row: Any, kind: str, *names: str) -> dict[str, str]:
    """Measurements of a row by their names."""
    return {name: cell(row.most(name), kind) for name in names}


Cells = dict[str, Callable[[Any], str]]

_SWEPT: Cells = {
    "Implementation": lambda r: r.label,
    "Tokens": lambda r: cell(r.tokens, "tokens"),
    "Ranks": lambda r: str(r.ranks),
    "Status": lambda r: r.status,
    "Time": time_of,
    "Tokens/s": lambda r: cell(r.tokens_a_second, "count"),
    "Peak memory": lambda r: cell(r.peak, "bytes"),
    "Imbalance": lambda r: cell(r.imbalance, "ratio"),
    "Exposed": lambda r: cell(r.exposed and r.exposed[0], "share"),
    "Speed-up": lambda r: cell(r.speedup, "ratio"),
    "Efficiency": lambda r: cell(over(r.speedup, r.ranks), "share"),
    "Effective FLOP/s": lambda r: cell(over(r.most("flops"), r.time), "flop_rate"),
    "Max error": lambda r: cell(r.most("max_error"), "error"),
    "Density asked": lambda r: cell(r.most("density_asked"), "share"),
    "Density achieved": lambda r: cell(r.most("density_achieved"), "share"),
    "Compute only": lambda r: cell(r.compute, "seconds"),
    "Communication only": lambda r: cell(r.communication, "seconds"),
    "Standard attention's": lambda r: cell(r.standard[0], "bytes"),
    "Which is": lambda r: r.standard[1],
    "Times less": lambda r: cell(r.saving, "ratio"),
}
_FOUND: Cells = {
    "Implementation": lambda s: s.label,
    "Ranks": lambda s: str(s.ranks),
    "Max tokens": lambda s: cell(s.tokens, "tokens"),
    "Limited by": lambda s: s.limited_by,
    "Peak memory": lambda s: cell(s.peak, "bytes"),
    "Imbalance": lambda s: cell(s.imbalance, "ratio"),
    "Runs": lambda s: f"{s.runs:,}",
}


def some(cells: Cells, *names: str) -> Cells:
    """Those of the cells."""
    return {name: cells[name] for name in names}


def held(row: Any) -> str:
    """The most query tokens that a rank holds."""
    found = [m for r in (row.records if isinstance(row, Swept) else row.at) for m in [r.outcome]]
    own = [s for outcome in found for s in outcome.samples("own_tokens")]
    return cell(round(max(own)) if own else None, "tokens")


def positive(name: str) -> Callable[[Swept], str]:
    """A share that says nothing where it is 0."""
    return lambda r: cell(r.most(name) or None, "share")


def configuration(name: str) -> Callable[[Figure], str]:
    """An option, its values with spaces between."""

    def told(figure: Figure) -> str:
        value = figure.options[name]
        return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)

    return told


def sparsity(figure: Figure) -> str:
    """The sparsity asked."""
    return f"{float(str(figure.options['sparsity'])):.6g}"


def up(value: float | None) -> str:
    """A sparsity that passed: what is told did too."""
    return DASH if value is None else f"{math.ceil(value * 1e5) / 1e5:.5f}"


def down(value: float | None) -> str:
    """A sparsity that failed."""
    return DASH if value is None else f"{math.floor(value * 1e5) / 1e5:.5f}"


class Fit(NamedTuple):
    """How time or memory of an implementation grows."""

    label: str
    quantity: str
    tokens: Exponent | None
    ranks: Exponent | None
    formula: float | None
    several: bool
    points: int


def fits(group: Sequence[Swept], quantities: Sequence[str] = ("time", "memory")) -> list[Fit]:
    """Of each implementation that is known at three lengths or more."""
    found = []
    for rows in by(lambda r: r.but_ranks, (r for r in group if r.ok)):
        for quantity in quantities:
            value = "time" if quantity == "time" else "peak"
            known = [r for r in rows if getattr(r, value)]
            if len({r.tokens for r in known}) > 2:
                found.append(_fit(known, quantity, [getattr(r, value) for r in known]))
    return found


def _fit(rows: Sequence[Swept], quantity: str, values: Sequence[float]) -> Fit:
    several = len({r.ranks for r in rows}) > 1
    columns = [[math.log(r.tokens) for r in rows]] + [[math.log(r.ranks) for r in rows]] * several
    found = exponents(columns, [math.log(v) for v in values])
    tokens, ranks = (found[0], found[1] if several else None) if found else (None, None)
    formula: float | None = 2.0 if rows[0].implementation == "dense" else 1.0
    if quantity == "time":
        work = [(math.log(r.tokens), math.log(f)) for r in rows if (f := r.most("flops"))]
        formula = None
        if len({x for x, _ in work}) > 1:
            slopes = exponents([[x for x, _ in work]], [y for _, y in work])
            formula = slopes[0][0] if slopes else None
    return Fit(rows[0].label, quantity, tokens, ranks, formula, several, len(rows))


def exponent(one: Exponent | None) -> str:
    """To two digits after the point, with its interval."""
    if one is None:
        return DASH
    told = [f"{round(end, 2) + 0.0:.2f}" for end in one if end is not None]
    return told[0] if len(told) == 1 else f"{told[0]} ({told[1]} to {told[2]})"


def by(same: Callable[[Any], Any], items: Iterable[Any]) -> list[list[Any]]:
    """Items of which something is the same, in order of first appearance."""
    found: dict[Any, list[Any]] = defaultdict(list)
    for item in items:
        found[same(item)].append(item)
    return list(found.values())


class Point(NamedTuple):
    """Where a search over ranks could have come to, and came to."""

    search: Search
    expected: int | None


class Pair(NamedTuple):
    """A row and what it stands beside."""

    row: Any
    other: Any
    extra: Any = None


def least_sparse(rows: Items) -> list[Any]:
    """Those that see most, to within a tenth."""
    most = max(seen(r) for r in rows)
    return [r for r in rows if seen(r) >= 0.9 * most]


def as_much(rows: Items) -> list[list[Any]]:
    """Apart by what they see: those that see most, to within a tenth, then so of the others."""
    rows, found = list(rows), []
    while rows:
        found.append(least_sparse(rows))
        rows = [r for r in rows if r not in found[-1]]
    return found


def seen(figure: Any) -> float:
    """The density of a row, or of a search at its maximum; 1 where nothing is said of it."""
    records = figure.records if isinstance(figure, Swept) else figure.at
    kept = largest(records, "density_achieved")
    return 1.0 if kept is None or not kept < 1 else kept


def density_words(figure: Any) -> str:
    """The density where something is skipped."""
    return f", density {format_share(seen(figure))}" if seen(figure) < 1 else ""


def reach(search: Search) -> str:
    """A maximum with its budget."""
    own = search.trial.memory_budget
    under = f" under {format_bytes(own)} a rank" if own else ""
    return f"{search.tokens:,} tokens{under}"


def evidence(rows: Items, searches: Items, tokens: int) -> tuple[str, str, str]:
    """Who takes a length, how that is known, and how far each goes: those that took least at the
    shortest length timed more than once that is long enough, as far as they can be told apart, else
    who reached farthest; of sparse ones those that skip least."""
    long = [r for r in rows if r.tokens >= tokens]
    timed = [r for r in long if r.time and r.ends]
    reached = [s for s in searches if s.tokens >= tokens]
    if timed:
        shortest = min(r.tokens for r in timed)
        at = sorted(least_sparse([r for r in timed if r.tokens == shortest]), key=lambda r: r.time)
        best = [r for r in at if r.ends[0] <= at[0].ends[1]]
        each = [
            time_of(r) + (f", peak {format_bytes(r.peak)}" if r.peak else "") + density_words(r)
            for r in best
        ]
        end = "; they can't be told apart" if len(best) > 1 else ""
        told = f"ran at {cell(shortest, 'tokens')}: {', '.join(each)}{end}"
    elif reached:
        best = [max(least_sparse(reached), key=lambda s: s.tokens)]
        told = f"takes {reach(best[0])}{density_words(best[0])}; {limit(best[0])}"
    elif long:
        best = [max(least_sparse(long), key=lambda r: r.tokens)]
        at_most = f"ran at {cell(best[0].tokens, 'tokens')}{density_words(best[0])}"
        told = f"{at_most}, not timed more than once"
    else:
        return DASH, DASH, DASH
    names = list(dict.fromkeys(r.name for r in best))
    ends = [farthest(name, rows, searches) for name in names]
    return " or ".join(r.name for r in best), told, ", ".join(filter(None, ends)) or DASH


def farthest(name: str, rows: Items, searches: Items) -> str:
    """The longest that one is known to take."""
    swept = max((r.tokens for r in rows if r.name == name), default=0)
    own = sorted((s for s in searches if s.name == name), key=lambda s: s.tokens)
    return reach(own[-1]) if own and own[-1].tokens >= swept else f"{cell(swept, 'tokens')} swept"


def undilated(rows: Iterable[Swept], row: Swept) -> Swept | None:
    """The same segments with every rate 1."""
    rates = row.options["dilation"]
    rates = rates if isinstance(rates, tuple) else (rates,)
    if not row.time or set(rates) == {1}:
        return None
    return twin(rows, row, dilation=", ".join("1" for _ in rates))


def twin(rows: Iterable[Swept], row: Swept, implementation: str = "", **change: str) -> Any:
    """A timed row with the same options but for a change."""

    def plain(one: Swept) -> dict[str, str]:
        return {name: configuration(name)(one) for name in one.options}

    def key(one: Swept, implementation: str, options: dict[str, str]) -> Any:
        settings = (one.tokens, one.ranks, one.trial.keep, one.trial.allocator)
        return settings, implementation, options

    wanted = key(row, implementation or row.implementation, plain(row) | change)
    same = (r for r in rows if r.time and key(r, r.implementation, plain(r)) == wanted)
    return next(same, None)


def fewer_pairs(pair: Pair) -> float | None:
    """How many times as many pairs are seen without dilation."""
    return over(pair.other.pairs_seen, pair.row.pairs_seen) if pair.other else None


def works(rows: Sequence[Swept]) -> str:
    """Whether every trial was ok."""
    passed = sum(r.ok for r in rows)
    by_length = sum(r.status in ("oom", "timeout", "limit") for r in rows)
    if passed and passed + by_length == len(rows):
        return "yes"
    return "partly" if passed else "no"


def what_failed(rows: Sequence[Swept]) -> str:
    """Statuses, the worst first, and the reason where it is one."""
    bad = [r for r in rows if not r.ok]
    counts = Counter(r.status for r in bad)
    told = ", ".join(f"{counts[status]} {status}" for status in WORST_FIRST if counts[status])
    reasons = {r.outcome.reason for r in bad} - {None, ""}
    return (told + (f": {reasons.pop()}" if len(reasons) == 1 else "")) or DASH


def masks(rows: Sequence[Swept]) -> str:
    """Of the trials that were ok."""
    found = dict.fromkeys("causal" if r.workload.causal else "not causal" for r in rows if r.ok)
    return ", ".join(found) or DASH


def tried(rows: Sequence[Swept]) -> str:
    """How many were ok, and what else there was."""
    if not rows:
        return DASH
    bad = ", ".join(sorted({r.status for r in rows if not r.ok}))
    return f"{sum(r.ok for r in rows)} of {len(rows)}" + (f" ({bad})" if bad else "")


def failed_above(rows: Sequence[Swept]) -> Swept | None:
    """The shortest failed row above all that were ok."""
    longest = max((r.tokens for r in rows if r.ok), default=0)
    bad = [r for r in rows if not r.ok and r.tokens > longest]
    return min(bad, key=lambda r: r.tokens, default=None)


def held_back(row: Swept) -> str:
    """Communication where it adds more than half of the time; either where it may or may not."""
    low, high = row.exposed[1:] if row.exposed else (None, None)
    if low is not None and high is not None and low < 0.5 < high:
        return "either"
    return "communication" if row.exposed and row.exposed[0] > 0.5 else "compute"


def held_back_by(row: Swept) -> str:
    """The share exposed, and whether its interval leaves both possible."""
    share, low, high = row.exposed or (0.0, None, None)
    told = f"exposed {format_share(share)}"
    if low is None or high is None or not low < 0.5 < high:
        return told
    return f"{told} ({format_share(low)} to {format_share(high)})"


def limit(search: Search) -> str:
    """What ended a search."""
    if search.failed is None:
        return "no longer length failed, so this is where the search stopped, not a limit"
    phase = f" in {search.phase}" if search.phase else ""
    return f"limited by {search.limited_by}{phase} at {cell(search.failed, 'tokens')}"


def limit_at(search: Search) -> str:
    """Which length failed where."""
    if search.failed is None:
        return "no longer length failed"
    phase = f" in {search.phase}" if search.phase else ""
    return f"{cell(search.failed, 'tokens')} failed{phase}"


HARDWARE = {
    one["name"]: parse_bytes(one["memory"])
    for one in yaml.safe_load(Path("longseq_bench/data/hardware.yaml").read_text()).values()
}

CELLS: dict[str, Cells] = {
    "maxima": some(_FOUND, "Implementation", "Ranks", "Max tokens", "Limited by", "Peak memory",
                   "Imbalance", "Runs") | {
        "Memory alone": lambda s: cell(s.memory_alone, "tokens"),
        "Elsewhere": lambda s: cell(s.elsewhere, "count"),
        "Times that": lambda s: cell(over(s.tokens, s.elsewhere) if s.whole else None, "ratio"),
        "Tokens a rank": held,
        "First failure": lambda s: cell(s.failed, "tokens"),
        "Phase": lambda s: s.phase or DASH,
        "Fraction of floor": lambda s: cell(s.of_floor, "share"),
        "Least peak": lambda s: cell(s.least_peak, "bytes"),
        "Bytes/token": lambda s: cell(over(s.peak, s.tokens), "bytes"),
        "Predicted": lambda s: cell(s.predicted, "tokens"),
        "Confirmations": lambda s: str(s.confirmations),
    },
    "lengths": some(_SWEPT, "Implementation", "Tokens", "Ranks", "Status", "Time", "Exposed",
                    "Speed-up", "Efficiency", "Peak memory", "Imbalance", "Tokens/s",
                    "Effective FLOP/s", "Max error", "Density asked", "Density achieved",
                    "Compute only", "Communication only") | {
        "Tokens a rank": held,
        "Samples": lambda r: str(len(r.times)),
        "Sent a rank": lambda r: cell(r.most("bytes_sent"), "bytes"),
        "Least peak": lambda r: cell(r.least_peak, "bytes"),
        "Wire error": lambda r: cell(r.most("wire_error"), "error"),
        "Uncovered": positive("uncovered"),
        "Zero rows": positive("zero_rows"),
        "Speed": lambda r: cell(r.speed, "ratio"),
    },
    "sparse": some(_SWEPT, "Tokens", "Status", "Density asked", "Density achieved", "Time",
                   "Effective FLOP/s", "Peak memory") | {
        "Implementation": lambda r: r.name,
        "Density of pairs": lambda r: cell(r.pairs_seen, "share"),
        "Uncovered": lambda r: cell(r.most("uncovered"), "share"),
        "Plan time": lambda r: cell(r.plan, "seconds"),
        "Dense time": lambda r: cell(r.dense and r.dense[1], "seconds"),
        "Dense time is": lambda r: r.dense[0] if r.dense else DASH,
        "Speed over dense": lambda r: cell(r.dense and over(r.dense[1], r.time), "ratio"),
        "Share of ideal": lambda r: shares(*r.ideal) if r.ideal else DASH,
        "Memory reduction": lambda r: cell(r.saving, "ratio"),
        "Standard memory is": lambda r: DASH if r.saving is None else r.standard[1],
    },
    "sparsities": {
        "Implementation": lambda s: s.label,
        "Ranks": lambda s: str(s.ranks),
        "Tokens": lambda s: cell(s.tokens, "tokens"),
        "Least sparsity": lambda s: up(s.least),
        "Too dense": lambda s: down(s.too_dense),
        "Limited by": lambda s: s.limited_by or DASH,
        "Time": lambda s: cell(s.time, "seconds"),
        "Peak memory": lambda s: cell(s.peak, "bytes"),
        "Confirmations": lambda s: str(s.confirmations),
        "Runs": lambda s: str(len(s.records)),
    },
    "reached": {
        "Implementation": lambda p: p.search.label,
        "Ranks": lambda p: str(p.search.ranks),
        "Theory": lambda p: cell(p.search.floor_tokens, "tokens"),
        "Expected": lambda p: cell(p.expected, "tokens"),
        "Found": lambda p: cell(p.search.tokens, "tokens"),
        "Of expected": lambda p: cell(over(p.search.tokens, p.expected), "share"),
        "Limited by": lambda p: p.search.limited_by,
    },
    "growth": {
        "Implementation": lambda f: f.label,
        "Of": lambda f: f.quantity,
        "Tokens ^": lambda f: exponent(f.tokens),
        "By formula": lambda f: DASH if f.formula is None else f"{f.formula:z.2f}",
        "Ranks ^": lambda f: exponent(f.ranks),
        "By formula (2)": lambda f: "-1.00" if f.several else DASH,
        "Points": lambda f: str(f.points),
    },
    "each rank": some(_SWEPT, "Implementation", "Tokens", "Ranks", "Status") | {
        "Time of each rank": lambda r: joined(r.rank_times, format_seconds),
        "Peak of each rank": lambda r: sizes(r.rank_peaks),
        "Sent by each rank": lambda r: sizes(per_rank(r, "bytes_sent")),
        "By formula": lambda r: sizes(per_rank(r, "bytes_formula")),
    },
    "each rank at the maximum": some(_FOUND, "Implementation", "Max tokens", "Ranks") | {
        "Peak of each rank": lambda s: sizes(s.rank_peaks),
    },
    "by search": some(_FOUND, "Implementation", "Ranks", "Runs") | {
        "Sparsity": sparsity,
        "Longest ok": lambda s: cell(s.tokens or None, "tokens"),
        "First failure": lambda s: cell(s.failed, "tokens"),
        "Failed by": lambda s: s.limited_by,
        "Known by": lambda s: "search",
    },
    "by sweep": {
        "Implementation": lambda rows: rows[0].label,
        "Ranks": lambda rows: str(rows[0].ranks),
        "Sparsity": lambda rows: sparsity(rows[0]),
        "Longest ok": lambda rows: cell(
            max((r.tokens for r in rows if r.ok), default=None), "tokens"
        ),
        "First failure": lambda rows: cell((f := failed_above(rows)) and f.tokens, "tokens"),
        "Failed by": lambda rows: f.status if (f := failed_above(rows)) else DASH,
        "Known by": lambda rows: "sweep",
        "Runs": lambda rows: DASH,
    },
    "doubling": {
        "Implementation": lambda p: p.row.name if p.other else p.row.label,
        "Tokens": lambda p: cell(p.other and p.row.tokens, "tokens"),
        "Twice": lambda p: cell(p.other and p.other.tokens, "tokens"),
        "Time is": lambda p: ratio_of(p.other, p.row) if p.other else fitted_ratio(p.extra),
        "Which is": lambda p: "measured" if p.other else "fitted",
        "Exponent of tokens": lambda p: exponent(p.extra.tokens) if p.extra else DASH,
        "By formula": lambda p: f"{p.extra.formula:.2f}" if p.extra and p.extra.formula else DASH,
    },
    "beside standard": some(_SWEPT, "Implementation", "Tokens", "Peak memory",
                            "Standard attention's", "Which is", "Times less"),
    "memory by sparsity": some(_SWEPT, "Implementation", "Tokens", "Time", "Peak memory",
                               "Standard attention's", "Which is", "Times less") | {
        "Sparsity": sparsity,
        "Sparsity of pairs": lambda r: cell(
            None if r.pairs_seen is None else 1 - r.pairs_seen, "share"
        ),
    },
    "uses": {
        "Use case": lambda u: u[0],
        "Tokens": lambda u: cell(USES[u[0]], "tokens"),
        "Exact attention": lambda u: u[1][0],
        "Its evidence": lambda u: u[1][1],
        "Its maximum": lambda u: u[1][2],
        "Sparse attention": lambda u: u[2][0],
        "Its evidence (2)": lambda u: u[2][1],
        "Its maximum (2)": lambda u: u[2][2],
    },
    "batches": some(_SWEPT, "Implementation", "Tokens", "Ranks", "Status", "Time", "Tokens/s",
                    "Imbalance") | {
        "Batch": lambda r: str(r.workload.batch),
        "Memory of each rank": lambda r: sizes(r.rank_peaks),
    },
    "against one": {
        name: (lambda p, own=own: own(p.row))
        for name, own in some(_SWEPT, "Implementation", "Tokens", "Ranks", "Time", "Speed-up",
                              "Efficiency", "Exposed").items()
    } | {
        "Time on one": lambda p: time_of(p.other),
        "Peak on one": lambda p: cell(p.other.peak, "bytes"),
        "Peak of a rank": lambda p: cell(p.row.peak, "bytes"),
    },
    "longer": {
        "Implementation": lambda p: p.row.label,
        "Ranks": lambda p: str(p.row.ranks),
        "Max on one rank": lambda p: cell(p.other.tokens, "tokens"),
        "Max on all": lambda p: cell(p.row.tokens, "tokens"),
        "Times as long": lambda p: cell(p.row.tokens / p.other.tokens, "ratio"),
        "Limited by": lambda p: p.row.limited_by,
    },
    "segments found": some(_FOUND, "Ranks", "Max tokens", "Limited by", "Peak memory") | {
        "Implementation": lambda s: s.implementation,
        "Segments": configuration("segments"),
        "Dilation": configuration("dilation"),
    },
    "segments swept": {
        name: (lambda p, own=own: own(p.row))
        for name, own in some(_SWEPT, "Ranks", "Tokens", "Time", "Tokens/s").items()
    } | {
        "Implementation": lambda p: p.row.implementation,
        "Segments": lambda p: configuration("segments")(p.row),
        "Dilation": lambda p: configuration("dilation")(p.row),
        "Pairs seen": lambda p: cell(p.row.pairs_seen, "share"),
        "Uncovered": lambda p: cell(p.row.most("uncovered"), "share"),
        "Speed of dilation": lambda p: ratio_of(p.other, p.row) if p.other else DASH,
        "Pairs without, times": lambda p: cell(fewer_pairs(p), "ratio"),
    },
    "curve": {
        "Segments": lambda p: configuration("segments")(p.row),
        "Dilation": lambda p: configuration("dilation")(p.row),
        "Ranks": lambda p: str(p.row.ranks),
        "Tokens": lambda p: cell(p.row.tokens, "tokens"),
        "Along the sequence": lambda p: time_of(p.row),
        "Along the curve": lambda p: time_of(p.other),
        "The curve takes": lambda p: ratio_of(p.other, p.row),
    },
    "bottleneck": some(_SWEPT, "Implementation", "Ranks", "Tokens", "Time", "Compute only",
                       "Communication only", "Exposed") | {
        "Bottleneck": held_back,
        "By": held_back_by,
    },
    "bottleneck of a search": some(_FOUND, "Implementation", "Ranks") | {
        "Tokens": lambda s: cell(s.tokens or None, "tokens"),
        **dict.fromkeys(("Time", "Compute only", "Communication only", "Exposed"), lambda s: DASH),
        "Bottleneck": lambda s: s.limited_by,
        "By": limit_at,
    },
    "modes": {
        "Implementation": lambda rows: rows[0].label,
        "Ranks": lambda rows: str(rows[0].ranks),
        "Dtype": lambda rows: rows[0].workload.dtype,
        "Mode": lambda rows: rows[0].workload.mode,
        "Works": works,
        "Masks": masks,
        "Largest error": lambda rows: cell(
            max((e for r in rows if r.ok and (e := r.most("max_error")) is not None), default=None),
            "error",
        ),
        "Longest": lambda rows: cell(max((r.tokens for r in rows if r.ok), default=None), "tokens"),
        "Trials": lambda rows: str(len(rows)),
        "What failed": what_failed,
    },
    "gains": some(_SWEPT, "Implementation", "Tokens", "Ranks", "Time", "Speed-up",
                  "Efficiency") | {
        "At least": lambda r: cell(r.speedup_ends and r.speedup_ends[0], "ratio"),
        "At most": lambda r: cell(r.speedup_ends and r.speedup_ends[1], "ratio"),
        "Bytes sent a rank": lambda r: cell(r.most("bytes_sent"), "bytes"),
    },
    "projected": {
        "Implementation": lambda s: s.label,
        "Bytes/token": lambda s: cell(over(s.peak, s.tokens), "bytes"),
        **{
            f"{name}, {format_bytes(memory)}": (
                lambda s, memory=memory: cell(int(memory / (s.peak / s.tokens)), "tokens")
            )
            for name, memory in HARDWARE.items()
        },
    },
    "relative": {
        name: (lambda p, own=own: own(p.row))
        for name, own in some(_SWEPT, "Implementation", "Ranks", "Status", "Time",
                              "Max error").items()
    } | {
        "Pairs seen": lambda p: cell(p.row.pairs_seen if p.row.sparse else None, "share"),
        "Peak memory": lambda p: cell(p.row.peak if p.row.ok else None, "bytes"),
        "Relative speed": lambda p: cell(p.extra, "ratio"),
        "Relative memory": lambda p: cell(
            over(p.row.peak or None, p.other) if p.row.ok else None, "ratio"
        ),
    },
}  # fmt: skip

RANKS_ONLY = {
    "Ranks", "Tokens a rank", "Compute only", "Communication only", "Exposed", "Speed-up",
    "Efficiency", "Sent a rank", "Least peak", "Imbalance",
}  # fmt: skip
OPTIONAL = {
    "maxima": {"Memory alone", "Elsewhere", "Times that", *RANKS_ONLY},
    "lengths": {"Wire error", "Density asked", "Density achieved", "Uncovered", "Zero rows",
                "Speed", *RANKS_ONLY},
}  # fmt: skip
"""Columns that are left out where no row has a value, some also where all ran on one rank."""


def columns(expected: Expected) -> list[str]:
    """The columns that a table must have, in any order."""
    if expected.kind not in OPTIONAL:
        return list(CELLS[expected.kind])
    several = any(row.ranks > 1 for row in expected.rows)
    shown = []
    for name, told in CELLS[expected.kind].items():
        filled = any(told(row) != DASH for row in expected.rows)
        possible = filled and (several or name not in RANKS_ONLY)
        if possible or name not in OPTIONAL[expected.kind]:
            shown.append(name)
    return shown


def per_rank(row: Swept, name: str) -> list[float | None] | None:
    """The largest sample of each rank."""
    each = [[s for r in row.records for s in on_rank(r, name, i)] for i in range(row.ranks)]
    return [max(some) if some else None for some in each] if any(each) else None


def tables_of(kind: str, groups: Iterable[Items], title: str = "{}") -> Iterator[Expected]:
    """One a group, titled by its workload."""
    for group in groups:
        yield Expected(kind, title.format(group[0].where), group)


def pairs_of(kind: str, groups: Iterable[Sequence[Pair]], title: str = "{}") -> Iterator[Expected]:
    """The same of pairs; none where there are none."""
    for group in groups:
        if group:
            yield Expected(kind, title.format(group[0].row.where), group)


def maxima(book: Book) -> Iterator[Expected]:
    """Every search."""
    for search in book.searches:
        search.elsewhere = elsewhere(book, search)
    for one in tables_of("maxima", book.groups(book.searches)):
        yield one._replace(title=big(one.title))


def elsewhere(book: Book, search: Search) -> int | None:
    """The first figure of others that is of such a maximum."""
    for figure in book.elsewhere.maxima if book.elsewhere else ():
        named = figure.model_dump(exclude={"implementation", "tokens", "options"})
        own = {**search.trial.model_dump(), **search.workload.model_dump()}
        alike = all(value in (None, own[name]) for name, value in named.items())
        same = all(search.options.get(k) == v for k, v in figure.options.items())
        if figure.implementation == search.implementation and alike and same:
            return int(figure.tokens)
    return None


def lengths(book: Book) -> Iterator[Expected]:
    """Every measured row."""
    speeds = book.speeds(book.swept, book.baseline) if book.baseline else {}
    for row in book.swept:
        row.speed = speeds.get(id(row))
    for one in tables_of("lengths", book.groups(book.swept)):
        yield one._replace(title=big(one.title))


def many_ranks(book: Book) -> Iterator[Expected]:
    """Rows of what ran on several ranks, wherever they ran."""
    list(lengths(book))
    for group in book.groups(book.swept):
        several = {r.label for r in group if r.ranks > 1}
        rows = [r for r in group if r.label in several]
        if rows:
            yield Expected("lengths", big(rows[0].where), rows)


def sparse(book: Book) -> Iterator[Expected]:
    """Rows that skip something."""
    for one in tables_of("sparse", book.groups(r for r in book.swept if r.sparse)):
        yield one._replace(title=big(one.title))


def sparsities(book: Book) -> Iterator[Expected]:
    """Searches for the least sparsity."""
    for one in tables_of("sparsities", book.groups(book.sparsities)):
        yield one._replace(title=big(one.title))


def reached(book: Book) -> Iterator[Expected]:
    """Searches on several numbers of ranks."""
    for group in book.groups(book.searches):
        if len({s.ranks for s in group}) > 1:
            points = []
            for some in by(lambda s: s.but_ranks, group):
                alone = next((s for s in some if s.ranks == 1), None)
                for search in sorted(some, key=lambda s: s.ranks):
                    both = alone and {alone.limited_by, search.limited_by} == {"memory"}
                    expected = alone.tokens * search.ranks if both and alone.tokens else None
                    points.append(Point(search, expected))
            yield Expected("reached", big(group[0].where), points)


def growth(book: Book) -> Iterator[Expected]:
    """Fits of time and memory."""
    for group in book.groups(book.swept):
        if found := fits(group):
            yield Expected("growth", big(group[0].where), found)


def each_rank(book: Book) -> Iterator[Expected]:
    """What each rank took."""
    names = ("time", "peak", "bytes_sent", "bytes_formula")
    swept = [
        r
        for r in book.swept
        if r.ranks > 1 and (r.rank_times or any(per_rank(r, name) for name in names[1:]))
    ]
    for one in tables_of("each rank", book.groups(swept)):
        yield one._replace(title=big(one.title))
    found = [s for s in book.searches if s.ranks > 1 and s.rank_peaks]
    yield from tables_of("each rank at the maximum", book.groups(found), "At the maximum: {}")


def by_sparsity(book: Book) -> Iterator[Expected]:
    """Lengths of each sparsity, by search and by sweep, then the searches for the least."""
    found = [s for s in book.searches if "sparsity" in s.options]
    for group in book.groups(found):
        if rows := [s for s in group if s.whole]:
            yield Expected("by search", big(f"{group[0].where}, by search"), rows)
    swept = [r for r in book.swept if "sparsity" in r.options]
    for group in book.groups(swept):
        series = by(lambda r: (r.label, r.ranks), group)
        yield Expected("by sweep", big(f"{group[0].where}, swept"), series)
    yield from sparsities(book)


def doublings(group: Sequence[Swept]) -> list[Pair]:
    """Rows that were timed at a length and at twice that; the shortest alone of what has none."""
    growths = {f.label: f for f in fits(group, ["time"])}
    pairs = []
    for series in by(lambda r: (r.label, r.ranks), (r for r in group if r.time)):
        known = {r.tokens: r for r in series}
        twice = [(known[n], known[2 * n]) for n in sorted(known) if 2 * n in known]
        pairs += [Pair(one, two, growths.get(one.label)) for one, two in twice]
    return pairs + [
        Pair(rows[0], None, fit)
        for label, fit in growths.items()
        if fit.tokens and not any(p.row.label == label for p in pairs)
        if (rows := fitted_to(group, label))[-1].tokens >= 2 * rows[0].tokens
    ]


def fitted_to(group: Sequence[Swept], label: str) -> list[Swept]:
    """The rows of a fit, the shortest first."""
    return sorted(
        (r for r in group if r.ok and r.time and r.label == label), key=lambda r: r.tokens
    )


def fitted_ratio(fit: Fit) -> str:
    """What twice the tokens take by a fit."""
    return cell(math.exp2(fit.tokens[0]), "ratio")


def doubling(book: Book) -> Iterator[Expected]:
    """Every pair of lengths of which one is twice the other, and fits of what has none."""
    for one in pairs_of("doubling", map(doublings, book.groups(book.swept))):
        yield one._replace(title=big(one.title))


def standard(book: Book) -> Iterator[Expected]:
    """Rows beside standard attention's memory."""
    known = [r for r in book.swept if r.saving is not None and r.implementation != "dense"]
    for one in tables_of("beside standard", book.groups(known)):
        yield one._replace(title=big(one.title))


def uses(book: Book) -> Iterator[Expected]:
    """Use cases by workload, whatever the budget."""
    swept = [r for r in book.swept if r.ok and r.trial.keep != "nothing"]
    found = [s for s in book.searches if s.tokens and s.whole]
    for group in by(lambda f: (*f.plain_workload, f.trial.threads), [*found, *swept]):
        rows = []
        for use, tokens in USES.items():
            told = []
            for is_sparse in (False, True):
                of_it = [f for f in group if f.sparse == is_sparse]
                ran = [f for f in of_it if isinstance(f, Swept)]
                reached = [f for f in of_it if isinstance(f, Search)]
                told.append(evidence(ran, reached, tokens))
            rows.append((use, *told))
        if any(one[0] != DASH for row in rows for one in row[1:]):
            bare = {"memory_budget": None, "time_budget": None}
            trial = group[0].trial.model_copy(update=bare)
            title = book.words(trial, group[0].environment.fingerprint)
            yield Expected("uses", big(title), rows)


def batches(book: Book) -> Iterator[Expected]:
    """Every trial on several ranks."""
    for one in tables_of("batches", book.groups(r for r in book.swept if r.ranks > 1)):
        yield one._replace(title=big(one.title))


def memory_by_sparsity(book: Book) -> Iterator[Expected]:
    """Peaks of sparse rows."""
    known = [r for r in book.swept if "sparsity" in r.options and r.saving is not None]
    for one in tables_of("memory by sparsity", book.groups(known)):
        yield one._replace(title=big(one.title))


def longer(book: Book) -> list[list[Pair]]:
    """Searches of whole passes on several ranks, with that on one."""
    found = []
    for group in book.groups(book.searches):
        several = [s for s in group if s.ranks > 1 and s.whole]
        pairs = [Pair(s, book.alone_of(s)) for s in several]
        found.append([p for p in pairs if p.other and p.other.tokens])
    return found


def against_one(book: Book) -> Iterator[Expected]:
    """Times and maxima on several ranks, and on one."""
    for group in book.groups(book.swept):
        several = [r for r in group if r.ranks > 1 and r.speedup]
        if rows := [Pair(r, book.alone(r)) for r in several]:
            yield Expected("against one", big(group[0].where), rows)
    yield from pairs_of("longer", longer(book), "Longest lengths: {}")


def segmented(figure: Figure) -> bool:
    """Whether it has segments and rates."""
    return {"segments", "dilation"} <= set(figure.options)


def dilated(book: Book) -> list[list[Pair]]:
    """Rows with segments, each with the same without dilation."""
    ok = [r for r in book.swept if segmented(r) and r.ok]
    return [[Pair(r, undilated(group, r)) for r in group] for group in book.groups(ok)]


def segments(book: Book) -> Iterator[Expected]:
    """Maxima and rows with segments."""
    found = [s for s in book.searches if segmented(s) and s.whole]
    yield from tables_of("segments found", book.groups(found), "Longest lengths: {}")
    for one in pairs_of("segments swept", dilated(book)):
        yield one._replace(title=big(one.title))


def curves(book: Book) -> list[list[Pair]]:
    """The same segments along the sequence and along the curve."""
    ok = [r for r in book.swept if segmented(r) and r.ok]
    found = []
    for group in book.groups(ok):
        straight = [r for r in group if r.implementation == "dilated" and r.time]
        pairs = [Pair(r, twin(group, r, "hilbert")) for r in straight]
        found.append([p for p in pairs if p.other])
    return found


def curve(book: Book) -> Iterator[Expected]:
    """Side by side."""
    for one in pairs_of("curve", curves(book)):
        yield one._replace(title=big(one.title))


def bottlenecks(book: Book) -> Iterator[Expected]:
    """Trials whose communication was timed apart, then searches on several ranks."""
    known = [r for r in book.swept if r.ranks > 1 and r.exposed]
    for one in tables_of("bottleneck", book.groups(known)):
        yield one._replace(title=big(one.title))
    found = [s for s in book.searches if s.ranks > 1 and s.whole]
    yield from tables_of("bottleneck of a search", book.groups(found), "Longest lengths: {}")


def modes(book: Book) -> Iterator[Expected]:
    """What worked on each machine and device."""
    for rows in by(lambda r: (r.environment.fingerprint, r.trial.device), book.swept):
        machine = book.machines[rows[0].environment.fingerprint]
        title = f"On {rows[0].trial.device}" + (f", machine {machine}" if machine else "")
        each = by(lambda r: (r.label, r.ranks, r.workload.dtype, r.workload.mode), rows)
        yield Expected("modes", title, each)


def gains(book: Book) -> Iterator[Expected]:
    """Speed-ups."""
    known = [r for r in book.swept if r.ranks > 1 and r.speedup is not None]
    for one in tables_of("gains", book.groups(known)):
        yield one._replace(title=big(one.title))


def baseline_of(book: Book) -> str:
    """That asked for; else sdpa, else dense, else the label with most timed rows."""
    timed = Counter(r.label for r in book.swept if r.time is not None)
    usual = [name for name in ("sdpa", "dense") if timed[name]]
    labels = list(dict.fromkeys(r.label for r in book.swept))
    return book.baseline or (usual or [max(labels, key=lambda label: timed[label])])[0]


def compared(book: Book) -> list[tuple[str, list[Pair]]]:
    """By workload at the length that most were ok at: rows, the baseline's peak, and the speed."""
    if not any(r.time for r in book.swept):
        return []
    base, found = baseline_of(book), []
    for group in book.groups(book.swept):
        ok = Counter(r.tokens for r in group if r.ok)
        tokens = max((r.tokens for r in group), key=lambda n: (ok[n], n))
        at = [r for r in group if r.tokens == tokens]
        named = {r.label for r in at if base in (r.label, r.implementation)}
        means = base if base in named else named.pop() if len(named) == 1 else None
        speeds = book.speeds(at, means) if means else {}
        same = [r for r in at if r.label == means and r.peak and r.ok]
        peak = min(same, key=lambda r: r.ranks).peak if same else None
        pairs = [Pair(r, peak, speeds.get(id(r))) for r in at]
        found.append((f"{at[0].where}, {cell(tokens, 'tokens')} tokens", pairs))
    return found


def relative(book: Book) -> Iterator[Expected]:
    """Beside the baseline."""
    for where, pairs in compared(book):
        yield Expected("relative", big(where), pairs)


def projected(book: Book) -> Iterator[Expected]:
    """Maxima on one rank that memory limits, whose bytes a token are known."""
    known = [
        s
        for s in book.searches
        if s.ranks == 1 and s.limited_by == "memory" and s.whole and s.tokens and s.peak
        if s.options.get("offload", "none") == "none"
    ]
    for one in tables_of("projected", book.groups(known)):
        yield one._replace(title=big(one.title))


EXPECTED: dict[str, Callable[[Book], Iterator[Expected]]] = {
    "Longest lengths": maxima,
    "Lengths swept": lengths,
    "Many ranks": many_ranks,
    "Sparse attention": sparse,
    "Least sparsities": sparsities,
    "Longest lengths over ranks": reached,
    "How time and memory grow": growth,
    "Ranks": each_rank,
    "Sparsity against length": by_sparsity,
    "Time a doubling": doubling,
    "Memory against standard attention": standard,
    "Use case, approach, maximum": uses,
    "On other hardware, computed": projected,
    "Batch, length, time and memory": batches,
    "Memory by sparsity": memory_by_sparsity,
    "Single against many": against_one,
    "Segments and dilation": segments,
    "Along the curve and along the sequence": curve,
    "Bottlenecks": bottlenecks,
    "Modes run here": modes,
    "Speed-up and efficiency by length": gains,
    "Time, memory, relative speed": relative,
}
