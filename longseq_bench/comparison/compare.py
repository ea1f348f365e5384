"""Two sets of records beside each other: what became slower, larger, shorter or broken.

Pure: from records to a Comparison, all in SI units; ratios are the second side over the first. The
test of times is in significance.py, what is the same trial in matching.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean, median
from typing import Any, Literal

from longseq_bench.analysis.rows import (
    SEVERITY,
    Row,
    add_labels,
    maximum_of,
    per_iteration,
    sweep_rows,
)
from longseq_bench.comparison.significance import Shift, shifts
from longseq_bench.comparison.trial_matching import (
    HARDWARE,
    SOFTWARE,
    Matched,
    differing,
    searches,
    timed_trials,
)
from longseq_bench.core.errors import UserError
from longseq_bench.core.model import Record, Status
from longseq_bench.core.units import format_bytes, format_seconds, format_tokens

LEVEL, LEAST = 0.05, 0.01
"""Of a whole comparison, the chance of a false alarm; the least effect that is told."""
MEMORY_LEAST = 0.01
TIME_SLACK = 0.1
"""A maximum that time limits moves with the noise of single passes, of which nothing is known."""
BUSIER, STOLEN = 0.5, 0.05
"""Of the cores, by how much load may differ; of the processor's time in a second, how much."""

MORE_ROUNDS = "sweep with rounds: 3 or more"


@dataclass(frozen=True)
class Timed:
    """A trial that has times on both sides.

    a_rounds, b_rounds: seconds, a process's median pass, of the slowest rank; a_s, b_s: their
    geometric means.  shift: ratio, interval and test; None where undecided, with the reason.
    ratio: there also where undecided.  note: what differs of how it was run.
    """

    what: Row
    a_rounds: tuple[float, ...]
    b_rounds: tuple[float, ...]
    a_s: float
    b_s: float
    ratio: float
    shift: Shift | None
    verdict: Literal["slower", "faster", "same", "undecided"]
    reason: str = ""
    note: str = ""


@dataclass(frozen=True)
class Peaks:
    """Peak memory of a trial in bytes: the largest over ranks and rounds, and their ratio. more,
    less: the rounds of one side all lie beyond those of the other, by 1 % at least."""

    what: Row
    a_bytes: int
    b_bytes: int
    ratio: float
    verdict: Literal["more", "less", "same"]


@dataclass(frozen=True)
class Bracket:
    """The longest length that passed, the shortest above it that failed, and what limited it."""

    max_tokens: int
    first_failure: int | None
    limited_by: str

    @property
    def end(self) -> float:
        return math.inf if self.first_failure is None else self.first_failure


@dataclass(frozen=True)
class Maxima:
    """A search on both sides. ratio: None where nothing passed with A."""

    what: Row
    a: Bracket
    b: Bracket
    ratio: float | None
    verdict: Literal["longer", "shorter", "same", "undecided"]
    reason: str = ""


@dataclass(frozen=True)
class Turned:
    """A trial that ended otherwise. budgets: for lack of memory or time, under unlike budgets."""

    what: Row
    a_status: Status
    b_status: Status
    a_reason: str | None
    b_reason: str | None
    verdict: Literal["broken", "mended", "otherwise"]
    budgets: bool = False


@dataclass(frozen=True)
class Difference:
    """What is not the same of the two sides' machines and software, in words."""

    name: str
    a: str
    b: str


@dataclass(frozen=True)
class Comparison:
    """Two result sets beside each other; `said` sums them up in sentences.

    a, b: what the user calls them.  failed_alike: trials that ended the same way without a time.
    level: the chance that any `slower` or `faster` of it is noise.  least: the least of them.
    unlike: what both have, but on unlike machines, so that it is not compared; machines: what these
    differ in, in words.
    """

    a: str
    b: str
    level: float
    least: float
    timed: tuple[Timed, ...]
    peaks: tuple[Peaks, ...]
    maxima: tuple[Maxima, ...]
    turned: tuple[Turned, ...]
    failed_alike: int
    only_a: tuple[Row, ...]
    only_b: tuple[Row, ...]
    unlike: tuple[Row, ...]
    machines: str
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]
    records: tuple[tuple[Record, ...], tuple[Record, ...]]

    @property
    def said(self) -> list[str]:
        """What came of it, a sentence a question."""
        return [*_times_said(self), *_rest_said(self)]


def compare(
    a: Sequence[Record], b: Sequence[Record], names: tuple[str, str] = ("A", "B"),
    level: float = LEVEL, least: float = LEAST, across: bool = False,
) -> Comparison:  # fmt: skip
    """The second set of records beside the first.

    level: the chance of any false alarm among all rows.  least: of a ratio, what is told.
    across: trials of unlike machines too.
    Raises UserError where no trial is in both, or only on unlike machines.
    """
    trials, sought = timed_trials(a, b, across), searches(a, b, across)
    pairs = [*trials.pairs, *sought.pairs]
    unlike = [*trials.unlike, *sought.unlike]
    if not pairs:
        raise _nothing_in_common(a, b, unlike)
    trial_rows = [_trial_row(p.a) for p in trials.pairs]
    search_rows = [maximum_of(p.a) for p in sought.pairs]
    alone = [
        _rows(trials.only_a, sought.only_a), _rows(trials.only_b, sought.only_b),
        _rows([p.a for p in trials.unlike], [p.a for p in sought.unlike]),
    ]  # fmt: skip
    add_labels([*trial_rows, *search_rows, *chain(*alone)])
    both = list(zip(trials.pairs, trial_rows, strict=True))
    timed = _timed(both, level, least)
    turned = [t for pair, what in both if (t := _turned(pair, what))]
    failed = sum(_status(p.a) == _status(p.b) != "ok" for p in trials.pairs)
    sides = tuple(r for p in pairs for r in p.a), tuple(r for p in pairs for r in p.b)
    return Comparison(
        *names, level, least, tuple(timed), tuple(p for one in both if (p := _peaks(*one))),
        tuple(map(_maxima, sought.pairs, search_rows)), tuple(turned), failed,
        tuple(alone[0]), tuple(alone[1]), tuple(alone[2]), _machines(unlike),
        tuple(_differences(*sides)),
        (*_with_itself(pairs), *_notes(a, b, sides, both, timed, least)), sides,
    )  # fmt: skip


def regressions(found: Comparison, share: float) -> list[str]:
    """A sentence each on what became worse by this share at least: slower by the test, more memory,
    a shorter maximum; and on what no longer runs."""
    return list(_regressions(found, share))


def _regressions(found: Comparison, share: float) -> Iterator[str]:
    for t in found.timed:
        if t.verdict == "slower" and t.ratio - 1 >= share:
            yield f"{called(t.what)} is {percent(t.ratio - 1)} slower"
    for p in found.peaks:
        if p.verdict == "more" and p.ratio - 1 >= share:
            yield f"{called(p.what)} takes {percent(p.ratio - 1)} more memory"
    for m in found.maxima:
        if m.verdict == "shorter" and m.ratio is not None and 1 - m.ratio >= share:
            yield f"{called(m.what)} reaches {percent(1 - m.ratio)} fewer tokens"
    for one in found.turned:
        if one.verdict == "broken" and not one.budgets:
            yield f"{called(one.what)} is no longer ok: {one.b_status}: {one.b_reason}"


def check_gate(found: Comparison) -> None:
    """Raises UserError where a gate would pass what it can't see: on unlike machines."""
    if found.unlike:
        raise UserError(
            f"{_kinds(found.unlike)} in both, but on unlike machines{found.machines}; --fail-on "
            "would pass that unseen, --across compares it"
        )


def unseen(found: Comparison, share: float) -> int:
    """Of how many timed trials a slow-down by this share could not have been told from noise."""
    return sum(t.shift is None or max(t.shift.seen_from, found.least) > share for t in found.timed)


def called(what: Row) -> str:
    """What a sentence calls a trial or a search."""
    ranks = f" on {what['world_size']} ranks" if what["world_size"] > 1 else ""
    tokens = f" at {format_tokens(what['tokens'])}" if "tokens" in what else ""
    return f"{what['label']}{ranks}{tokens}{_shape(what)}"


def percent(share: float) -> str:
    """A difference as a percentage, two digits."""
    value = 100 * share
    return f"{value:.0f} %" if value >= 9.95 else f"{value:.2g} %"


# ---- what is compared ------------------------------------------------------------------------


def _timed(both: Sequence[tuple[Matched, Row]], level: float, least: float) -> list[Timed]:
    """Rows with times on both sides; those with several processes a side are tested together."""
    sides = [(what, pair, _medians(pair.a), _medians(pair.b)) for pair, what in both]
    known = [one for one in sides if one[2] and one[3] and not one[0]["fit_only"]]
    tested = [(a, b) for _, _, a, b in known if min(len(a), len(b)) > 1]
    found = iter(shifts(tested, level))
    rows = []
    for what, pair, a, b in known:
        shift = next(found) if min(len(a), len(b)) > 1 else None
        a_s, b_s = (math.exp(fmean(map(math.log, side))) for side in (a, b))
        rows.append(Timed(
            what, a, b, a_s, b_s, b_s / a_s, shift, _verdict(shift, level, least),
            "" if shift else _too_few(a, b), _unlike_budgets(pair) or "",
        ))  # fmt: skip
    return rows


def _verdict(
    shift: Shift | None, level: float, least: float
) -> Literal["slower", "faster", "same", "undecided"]:
    if shift is None:
        return "undecided"
    if shift.adjusted > level or abs(math.log(shift.ratio)) < math.log1p(least):
        return "same"
    return "slower" if shift.ratio > 1 else "faster"


def _too_few(a: Sequence[float], b: Sequence[float]) -> str:
    if len(a) == len(b) == 1:
        return f"one process a side; {MORE_ROUNDS}"
    return f"{'A' if len(a) == 1 else 'B'} has one process only; {MORE_ROUNDS}"


def _medians(runs: Sequence[Record]) -> tuple[float, ...]:
    """Each process's median pass; none where any run of the trial is not ok."""
    if _status(runs) != "ok":
        return ()
    times = (per_iteration(record, "time") for record in runs)
    return tuple(median(found) for found in times if found and _sound(found))


def _sound(times: Sequence[float]) -> bool:
    return all(0 < t < math.inf for t in times)


def _peaks(pair: Matched, what: Row) -> Peaks | None:
    if _status(pair.a) != "ok" or _status(pair.b) != "ok":
        return None
    a, b = (
        [p for r in side if (p := r.outcome.largest("peak")) and math.isfinite(p)]
        for side in (pair.a, pair.b)
    )
    if not a or not b:
        return None
    verdict: Literal["more", "less", "same"] = "same"
    if min(b) >= (1 + MEMORY_LEAST) * max(a):
        verdict = "more"
    elif min(a) >= (1 + MEMORY_LEAST) * max(b):
        verdict = "less"
    return Peaks(what, round(max(a)), round(max(b)), max(b) / max(a), verdict)


def _maxima(pair: Matched, what: Row) -> Maxima:
    a, b = (_bracket(maximum_of(side)) for side in (pair.a, pair.b))
    ratio = b.max_tokens / a.max_tokens if a.max_tokens else None
    if max(a.max_tokens, b.max_tokens) < min(a.end, b.end):
        return Maxima(what, a, b, ratio, "same")
    by_time = "time" in (a.limited_by, b.limited_by)
    shorter, longer = sorted((a.max_tokens, b.max_tokens))
    if by_time and longer < (1 + TIME_SLACK) * shorter:
        why = f"limited by time: one search a side can't tell {percent(TIME_SLACK)} from noise"
        return Maxima(what, a, b, ratio, "undecided", why)
    return Maxima(what, a, b, ratio, "longer" if b.max_tokens > a.max_tokens else "shorter")


def _bracket(row: Row) -> Bracket:
    return Bracket(row["max_tokens"], row["first_failure"], row["limited_by"])


def _turned(pair: Matched, what: Row) -> Turned | None:
    a, b = (_worst(side).outcome for side in (pair.a, pair.b))
    if a.status == b.status:
        return None
    verdict: Literal["broken", "mended", "otherwise"] = "otherwise"
    if "ok" in (a.status, b.status):
        verdict = "broken" if a.status == "ok" else "mended"
    failed = b.status if a.status == "ok" else a.status
    budgets = failed in ("oom", "timeout") and _unlike_budgets(pair) is not None
    return Turned(what, a.status, b.status, a.reason, b.reason, verdict, budgets)


def _status(runs: Sequence[Record]) -> Status:
    return _worst(runs).outcome.status


def _worst(runs: Sequence[Record]) -> Record:
    return min(runs, key=lambda record: SEVERITY.index(record.outcome.status))


def _unlike_budgets(pair: Matched) -> str | None:
    a, b = pair.a[0].trial, pair.b[0].trial
    said = []
    if a.memory_budget != b.memory_budget:
        sizes = (_or_none(t.memory_budget, format_bytes) for t in (a, b))
        said.append(f"memory budgets {' and '.join(sizes)}")
    if a.time_budget != b.time_budget:
        limits = (_or_none(t.time_budget, format_seconds) for t in (a, b))
        said.append(f"time budgets {' and '.join(limits)}")
    return "; ".join(said) or None


def _or_none(value: Any, write: Any) -> str:
    return "none" if value is None else str(write(value))


def _trial_row(runs: Sequence[Record]) -> Row:
    return sweep_rows(runs[:1])[0]


def _rows(trials: Iterable[Sequence[Record]], sought: Iterable[Sequence[Record]]) -> list[Row]:
    return [*map(_trial_row, trials), *map(maximum_of, sought)]


# ---- what is told beside it --------------------------------------------------------------------

_ALONE = "a run shows no difference to itself"
_CALLED = {"memory_bytes": "memory", "gpus": "GPUs", "cpu": "CPU"}


def _differences(a: Sequence[Record], b: Sequence[Record]) -> Iterator[Difference]:
    ours, theirs = ([r.environment for r in side] for side in (a, b))
    for name, values in differing(ours, theirs, (*HARDWARE, *SOFTWARE)).items():
        yield Difference(_CALLED.get(name, name), *(_values(name, side) for side in values))


def _machines(unlike: Sequence[Matched]) -> str:
    """What the machines of pairs differ in, in brackets. Pair by pair: two that changed places are
    the same on both sides taken together."""
    sides = [(pair.a[0].environment, pair.b[0].environment) for pair in unlike]
    words = dict.fromkeys(
        f"{_CALLED.get(name, name)} {_values(name, one)} and {_values(name, other)}"
        for a, b in {(a.fingerprint, b.fingerprint): (a, b) for a, b in sides}.values()
        for name, (one, other) in differing([a], [b], HARDWARE).items()
    )
    return f" ({_list(list(words), separator='; ')})" if words else ""


def _values(name: str, values: Sequence[Any]) -> str:
    return "; ".join(_value(name, value) for value in values)


def _value(name: str, value: Any) -> str:
    if name == "memory_bytes":
        return format_bytes(value)
    if isinstance(value, dict):
        return ", ".join(f"{k}={v}" for k, v in sorted(value.items())) or "none"
    if isinstance(value, tuple):
        return ", ".join(f"{n} × {one}" for one, n in Counter(value).items()) or "none"
    return "none" if value is None else str(value)


def _notes(
    a: Sequence[Record], b: Sequence[Record], sides: tuple[Sequence[Record], Sequence[Record]],
    both: Sequence[tuple[Matched, Row]], timed: Sequence[Timed], least: float,
) -> Iterator[str]:  # fmt: skip
    yield from _unsound(both)
    yield from _moved_together(timed, least)
    yield from _order(*sides)
    yield from _load(*sides)
    yield from _stolen([pair for pair, _ in both])
    for name, side in zip("AB", sides, strict=True):
        commits = list(dict.fromkeys(c for r in side if (c := r.environment.commit)))
        if len(commits) > 1:
            yield f"{name} has records of {len(commits)} commits, taken together: {_list(commits)}."
    left = sum(r.purpose == "density" for r in (*a, *b))
    if left:
        yield f"Searches for the least sparsity are not compared ({left} records)."


def _with_itself(pairs: Sequence[Matched]) -> Iterator[str]:
    shared = [one for pair in pairs if (one := _shared(pair))]
    if len(shared) == len(pairs) and all(one == "all" for one in shared):
        yield f"The records compared are the same on both sides: {_ALONE}."
    elif shared:
        yield (
            f"{len(shared)} of {_counted(len(pairs), 'trial or search', 'trials and searches')} "
            f"{'has' if len(shared) == 1 else 'have'} records that are on both sides: {_ALONE}."
        )


def _shared(pair: Matched) -> Literal["", "some", "all"]:
    """Which records of a pair are the same run on both sides."""
    if {r.started_at for r in pair.a}.isdisjoint(r.started_at for r in pair.b):
        return ""
    # written out, since what is not a number equals nothing
    ours, theirs = ({r.model_dump_json() for r in side} for side in (pair.a, pair.b))
    return "all" if ours == theirs else "some" if ours & theirs else ""


def _unsound(both: Sequence[tuple[Matched, Row]]) -> Iterator[str]:
    """How many processes have no median though they have passes, and of which trials."""
    left = [
        (called(what), [_unsound_runs(pair.a), _unsound_runs(pair.b)])
        for pair, what in both if not what["fit_only"]
    ]  # fmt: skip
    if named := [name for name, counts in left if any(counts)]:
        of_a, of_b = (sum(counts[i] for _, counts in left) for i in (0, 1))
        yield (
            f"Left out of the times: {_counted(of_a, 'process', 'processes')} of A and {of_b} of B "
            f"({_list(named)}), with a pass whose time is not a finite number above zero."
        )


def _unsound_runs(runs: Sequence[Record]) -> int:
    """Processes of a trial that went well, with times that are none."""
    if _status(runs) != "ok":
        return 0
    return sum(not _sound(per_iteration(record, "time")) for record in runs)


def _moved_together(timed: Sequence[Timed], least: float) -> Iterator[str]:
    """One shift of all rows: none is beyond half and twice of the middle one."""
    logs = [math.log(t.ratio) for t in timed]
    if len(logs) < 3 or abs(middle := median(logs)) < math.log1p(least):
        return
    if all(0.5 <= x / middle <= 2 for x in logs):
        moved = f"{percent(math.expm1(abs(middle)))} {'slower' if middle > 0 else 'faster'}"
        yield (
            f"All {len(logs)} trials moved together: B is {moved} in the middle one. "
            "What is common to all is as likely the machine as the code."
        )  # fmt: skip


def _order(a: Sequence[Record], b: Sequence[Record]) -> Iterator[str]:
    of_a, of_b = ([r.started_at for r in side] for side in (a, b))
    first = "A" if max(of_a) < min(of_b) else "B" if max(of_b) < min(of_a) else None
    if first:
        other = "AB".replace(first, "")
        yield (
            f"All of {first} was measured before {other} (A from {min(of_a)}, B from {min(of_b)}): "
            "what drifted in between is in the ratios."
        )


def _load(a: Sequence[Record], b: Sequence[Record]) -> Iterator[str]:
    loads = [[r.environment.load[0] for r in side if r.environment.load] for side in (a, b)]
    if not all(loads):
        return
    of_a, of_b = map(median, loads)
    if abs(of_a - of_b) > BUSIER * a[0].environment.cores:
        yield (
            f"The machine's load was {of_a:.1f} with A and {of_b:.1f} with B (1 minute, median): "
            "other work may have run beside one of them."
        )


def _stolen(pairs: Sequence[Matched]) -> Iterator[str]:
    """What a second of a pass had of the processors; less where others took them."""
    ratios = [
        theirs / ours for p in pairs if (ours := _busy(p.a)) and (theirs := _busy(p.b))
    ]  # fmt: skip
    if ratios and abs(moved := median(ratios) - 1) > STOLEN:
        way = "less" if moved < 0 else "more"
        yield (
            f"With B a pass had {percent(abs(moved))} {way} processor time a second than with A "
            "(in the middle trial): it waited, or ran on another number of cores."
        )


def _busy(runs: Sequence[Record]) -> float | None:
    used, took = (
        [x for r in runs for x in per_iteration(r, name)] for name in ("cpu_time", "time")
    )
    return median(used) / median(took) if used and took and median(took) else None


# ---- in sentences ------------------------------------------------------------------------------


def _times_said(found: Comparison) -> Iterator[str]:
    if not found.timed:
        return
    count = Counter(t.verdict for t in found.timed)
    parts = []
    if decided := len(found.timed) - count["undecided"]:
        parts.append(
            f"B is slower in {count['slower'] or 'none'} of {_trials(decided)}, faster in "
            f"{count['faster'] or 'none'}; {count['same'] or 'none'} the same within noise"
        )
        parts[-1] += _seen_said(found)
    if count["undecided"]:
        reasons = _list(list(dict.fromkeys(t.reason for t in found.timed if t.reason)))
        parts.append(f"{_trials(count['undecided'])} undecided: {reasons}")
    yield "; ".join(parts) + "."


def _seen_said(found: Comparison) -> str:
    seen = [
        max(t.shift.seen_from, found.least) for t in found.timed if t.shift and t.verdict == "same"
    ]
    if not seen:
        return ""
    low, high = percent(min(seen)), percent(max(seen))
    span = low if low == high else f"{low.removesuffix(' %')} to {high}"
    return f" (the smallest difference that could be seen is {span})"


def _rest_said(found: Comparison) -> Iterator[str]:
    if found.peaks:
        count = Counter(p.verdict for p in found.peaks)
        yield (
            f"Peak memory: more in {count['more'] or 'none'} of {_trials(len(found.peaks))}, "
            f"less in {count['less'] or 'none'}."
        )
    if found.maxima:
        counts = Counter(m.verdict for m in found.maxima)
        unsure = f", {counts['undecided']} undecided" if counts["undecided"] else ""
        yield (
            f"Longest lengths: shorter in {counts['shorter'] or 'none'} of "
            f"{_counted(len(found.maxima), 'search', 'searches')}, longer in "
            f"{counts['longer'] or 'none'}{unsure}."
        )
    turned = Counter(t.verdict for t in found.turned)
    if turned:
        ways = {"broken": "no longer ok", "mended": "ok only in B", "otherwise": "failed otherwise"}
        yield "Of trials that ended otherwise: " + ", ".join(
            f"{turned[verdict]} {said}" for verdict, said in ways.items() if turned[verdict]  # type: ignore[index]
        ) + "."  # fmt: skip
    if found.failed_alike:
        yield f"{_trials(found.failed_alike)} failed in both the same way."
    for name, rows in (("A", found.only_a), ("B", found.only_b)):
        if rows:
            yield f"{_counted(len(rows), 'trial or search is', 'are')} only in {name}."
    if found.unlike:
        yield (
            f"{_kinds(found.unlike)} in both, but on unlike machines{found.machines}: not "
            "compared; --across compares them."
        )


def _kinds(rows: Sequence[Row]) -> str:
    """How many trials and searches there are, with the verb."""
    n = sum("tokens" in row for row in rows)
    parts = [_trials(n)] if n else []
    parts += [_counted(len(rows) - n, "search", "searches")] if n < len(rows) else []
    return f"{' and '.join(parts)} {'is' if len(rows) == 1 else 'are'}"


def _trials(n: int) -> str:
    return _counted(n, "trial", "trials")


def _counted(n: int, one: str, several: str) -> str:
    return f"{n} {one if n == 1 else several}"


def _list(words: Sequence[str], most: int = 6, separator: str = ", ") -> str:
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return separator.join(words[:most]) + more


def _nothing_in_common(
    a: Sequence[Record], b: Sequence[Record], unlike: Sequence[Matched]
) -> UserError:
    if unlike:
        return UserError(
            f"A and B were measured on unlike machines{_machines(unlike)}; --across compares them "
            "none the less"
        )
    return UserError(f"A and B have no trial in common: A has {_has(a)}; B has {_has(b)}")


def _has(records: Sequence[Record]) -> str:
    names = list(dict.fromkeys(r.trial.implementation for r in records))
    if not any(r.purpose == "measure" for r in records):
        return f"searches of {_list(names)}"
    lengths = sorted({r.trial.workload.seq_len for r in records if r.purpose == "measure"})
    return f"{_list(names)} at {_list([format_tokens(n) for n in lengths])} tokens"


def _shape(what: Row) -> str:
    """What tells it from the same on another workload, where that is not the usual one."""
    words = [what["mode"]] if what["mode"] != "forward" else []
    words += [what["dtype"]] if what["dtype"] != "float32" else []
    words += ["causal"] if what["causal"] else []
    return f" ({', '.join(words)})" if words else ""
