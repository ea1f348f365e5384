"""Whoever a first screen names as the best is the best by the rows, of every kind of report.

A family of records differs in one quantity between three implementations, so whatever a first
screen says of only one of them is a claim about this quantity. The rows are then changed: the best
is swapped with the next, dropped, made to fail, and given an interval that overlaps.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from longseq_bench.core.model import Record
from longseq_bench.reports.base import KINDS, Source
from longseq_bench.reports.document import Document
from tests import make
from tests.reports.examples import dense_flops, spread, timing, timings, widen

Scores = Mapping[str, float]
SCORES = {"alfa": 1.9, "bravo": 1.6, "delta": 1.3}
"""Larger is better; the best is alfa, the next is bravo."""
BEST, NEXT, LAST = SCORES
NARROW, WIDE = 0.02, 0.9
LENGTHS = (4096, 8192)
MIB = 2**20
KEPT = {"density_achieved": 0.1, "density_asked": 0.1, "uncovered": 0.0}
TIE = re.compile(r"≈|\d more\b|no significant difference|\bties?\b|overlap", re.IGNORECASE)
SUPERLATIVE = re.compile(
    r"\b(fastest|longest(?! length)|least|lowest|highest|best|fewest|most)\b", re.IGNORECASE
)
NAME = re.compile("|".join(SCORES))
TIMED = re.compile(r"fastest|speed", re.IGNORECASE)
FAILED = re.compile(r"fail|out of memory|oom|no length|timeout", re.IGNORECASE)


# ---- families: records by score; width: share of the interval of each time -----------------------


def times(scores: Scores, width: float) -> list[Record]:
    """Exact attention; the score is the speed."""
    return _timed(scores, width)


def peaks(scores: Scores, width: float) -> list[Record]:
    """Exact attention of equal times; a higher score is a lower peak."""
    found = []
    for name, score in scores.items():
        for tokens in LENGTHS:
            trial = make.trial(name, tokens)
            outcome = timing(trial, tokens * 1e-5, peak=MIB * 90 / score, max_error=1e-6)
            found.append(make.record(trial, outcome))
    return found


def sparse_times(scores: Scores, width: float) -> list[Record]:
    """Sparse attention of equal density, next to dense attention; the score is the speed-up."""
    return _timed(scores, width, sparsity=0.9)


def maxima(scores: Scores, width: float) -> list[Record]:
    """Searches of exact attention; a wide bracket is open at its end."""
    return _searched(scores, width)


def sparse_maxima(scores: Scores, width: float) -> list[Record]:
    """Searches of sparse attention of equal density."""
    return _searched(scores, width, sparsity=0.9)


def speedups(scores: Scores, width: float) -> list[Record]:
    """Equal times on one rank; the score is the speed-up on two."""
    found = []
    for name, score in scores.items():
        for tokens in LENGTHS:
            one = make.trial(name, tokens)
            two, time = one.replace(world_size=2), tokens * 1e-5
            ranks = widen(timings(two, time / score), width)
            alone = timing(one, time, max_error=3e-6)
            found += [make.record(one, alone), make.record(two, ranks)]
    return found


def gains(scores: Scores, width: float) -> list[Record]:
    """Searches with equal maxima on one rank; the score is the gain of two."""
    alone = _searched(dict.fromkeys(scores, 1.0), NARROW)
    return [*alone, *_searched(scores, width, world_size=2)]


def _timed(scores: Scores, width: float, sparsity: float | None = None) -> list[Record]:
    options = {} if sparsity is None else {"sparsity": sparsity}
    found = []
    for name, score in scores.items():
        for tokens in LENGTHS:
            time, trial = tokens * 1e-5, make.trial(name, tokens, options)
            more: dict[str, Any] = {"peak": 1024.0 * tokens, "max_error": 1e-6}
            if sparsity:
                more |= {**KEPT, "flops": 0.1 * dense_flops(trial.workload)}
                more["dense_time"] = spread(time, 9)
            found.append(make.record(trial, widen(timing(trial, time / score, **more), width)))
    return found


def _searched(
    scores: Scores, width: float, sparsity: float | None = None, **fields: Any
) -> list[Record]:
    options = {} if sparsity is None else {"sparsity": sparsity}
    found = []
    for name, score in scores.items():
        of = make.trial(name, 1, options, memory_budget=512 * MIB, repeats=0, **fields)
        best = round(10_000 * score)
        samples = {"pass_time": 0.2, "peak": best * 1024.0, **(KEPT if sparsity else {})}
        ranks = make.on_ranks(*[samples] * of.world_size)
        found += [make.record(of.at(best), ranks, purpose=p) for p in ("probe", "confirm")]
        if width == NARROW:
            found.append(make.step(best + 64, "oom", of=of, purpose="edge"))
    return found


FAMILIES: dict[str, Callable[[Scores, float], list[Record]]] = {
    one.__name__: one
    for one in (times, peaks, sparse_times, maxima, sparse_maxima, speedups, gains)
}


# ---- what a first screen says --------------------------------------------------------------------


def sentences(document: Document) -> list[str]:
    """The texts that can name a winner: key figures, findings, and cells under such headings."""
    figures = [f"{f.label}: {f.value}, {f.words}" for f in document.figures]
    findings = [text for section in document.sections for text in section.points]
    named = [
        f"{column.name.partition(' (')[0]}: {cell}"
        for section in document.sections
        for table in section.tables
        for row in table.rows
        for column, cell in zip(table.columns, row, strict=True)
        if isinstance(cell, str) and SUPERLATIVE.search(column.name)
    ]
    return [*figures, *findings, *named]


def first_name(text: str) -> str | None:
    found = NAME.search(text)
    return found[0] if found else None


def is_claim(text: str) -> bool:
    """Whether a text names one implementation as the best."""
    return bool(SUPERLATIVE.search(text)) and not FAILED.search(text) and not TIE.search(text)


def claims(document: Document, name: str = BEST) -> list[str]:
    """The claims whose winner is this implementation."""
    return [text for text in filter(is_claim, sentences(document)) if first_name(text) == name]


def swap_names(text: str) -> str:
    return text.replace(BEST, "\0").replace(NEXT, BEST).replace("\0", NEXT)


def build(kind: str, records: list[Record]) -> Document:
    return KINDS.get(kind)(Source(records))


def fail(record: Record) -> Record:
    """The same record with all its measurements, but out of memory."""
    outcome = record.outcome.model_copy(update={"status": "oom", "phase": "forward"})
    return record.model_copy(update={"outcome": outcome})


def single_pass(record: Record) -> Record:
    """The same record with one sample of each time."""
    known = [
        replace(m, samples=m.samples[:1]) if m.unit == "s" else m
        for m in record.outcome.measurements
    ]
    outcome = record.outcome.model_copy(update={"measurements": tuple(known)})
    return record.model_copy(update={"outcome": outcome})


CASES = [(kind, family) for kind in sorted(KINDS.names()) for family in FAMILIES]


@pytest.mark.parametrize(("kind", "family"), CASES)
def test_a_claim_follows_its_rows(kind: str, family: str) -> None:
    make_records = FAMILIES[family]
    records = make_records(SCORES, NARROW)
    claimed = claims(build(kind, records))
    assert claimed
    assert claims(build(kind, records[::-1])) == claimed, "reversed"

    swapped = {name: SCORES[swap_names(name)] for name in SCORES}
    other = build(kind, make_records(swapped, NARROW))
    assert claims(other, NEXT) == list(map(swap_names, claimed)), "swapped"

    rest = {name: score for name, score in SCORES.items() if name != BEST}
    without = build(kind, make_records(rest, NARROW))
    assert not [text for text in sentences(without) if BEST in text], "dropped"

    failed = [fail(r) if r.trial.implementation == BEST else r for r in records]
    assert not claims(build(kind, failed)), "failed"

    for names in (SCORES, (BEST,)):
        once = [single_pass(r) if r.trial.implementation in names else r for r in records]
        timed = filter(TIMED.search, claims(build(kind, once)))
        assert not [text for text in timed if "one pass" not in text], "single pass"

    if family != "peaks":  # a peak has no interval
        assert not claims(build(kind, make_records(SCORES, WIDE))), "wide"
