"""Tables of a report that are not rows of figures: failures, machines, settings; whole, as text.

GRIDS   by section: the book -> (title, headings, rows), each cell as it must read
CODE    by section: the book -> the literal lines
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from longseq_bench.core.model import Record
from longseq_bench.core.units import format_bytes, format_seconds, format_tokens
from tests.reports.oracle import Book
from tests.reports.tables import DASH, by, tried

Grid = tuple[str, list[str], list[list[str]]]


def failures(book: Book) -> Iterator[Grid]:
    """Runs that were not ok, and what is missing from those that were; equal ones counted."""
    machine = ["Machine"] * (len(book.environments) > 1)
    headings = ["Implementation", "Tokens", "Ranks", "Asked for", "Status", "Phase", "Reason"]
    bad = (_failed(book, r) for r in book.records if r.outcome.status != "ok")
    yield from _counted("Runs that were not ok", [*machine, *headings], bad)
    headings = ["Implementation", "Tokens", "Not measured", "Reason"]
    title = "Figures that are missing from ok rows"
    missing = (
        [*_machine(book, r), book.label_of(r.trial), format_tokens(r.trial.workload.seq_len), *why]
        for r in book.records
        if r.outcome.status == "ok" and r.purpose == "measure"
        for why in _missing(r)
    )
    yield from _counted(title, [*machine, *headings], missing)


def _counted(title: str, headings: list[str], rows: Iterable[list[str]]) -> Iterator[Grid]:
    counts = Counter(map(tuple, rows))
    if counts:
        yield title, [*headings, "Runs"], [[*row, f"{n:,}"] for row, n in counts.items()]


def _machine(book: Book, record: Record) -> list[str]:
    return [book.machines[record.environment.fingerprint]] * (len(book.environments) > 1)


def _failed(book: Book, record: Record) -> list[str]:
    trial, outcome = record.trial, record.outcome
    tokens = format_tokens(trial.workload.seq_len)
    which = f" sparsity={trial.options['sparsity']}" if record.purpose == "density" else ""
    label = book.label_of(trial) + which
    what = [label, tokens, str(trial.world_size), record.purpose, outcome.status]
    why = [outcome.phase or DASH, " ".join((outcome.reason or "none was recorded").split())]
    return [*_machine(book, record), *what, *why]


def _missing(record: Record) -> Iterator[tuple[str, str]]:
    trial, outcome = record.trial, record.outcome
    facts = outcome.facts
    untimed = "" if trial.repeats else "none was asked (repeats 0)"
    reasons = {
        "time": untimed or "no timed pass was recorded",
        "peak": facts.get("heap") or "the memory meter gave no peak",
        "flops": "the implementation stated no FLOPs",
        "max_error": "the output's error was not recorded",
    }
    if trial.world_size > 1:
        reasons["compute_time"] = untimed or "no pass without communication was recorded"
        reasons["bytes_sent"] = "no bytes were counted"
    if any(kept < 1 for kept in outcome.samples("density_achieved")):
        reasons["dense_time"] = untimed or facts.get("dense", "no dense pass was recorded")
    for what, why in reasons.items():
        numbers = [math.isfinite(sample) for sample in outcome.samples(what)]
        if False in numbers:
            yield what, ("some of " if True in numbers else "") + "its samples are not finite"
        elif not numbers:
            yield what, why


def hardware(book: Book) -> Iterator[Grid]:
    """What each machine is."""
    for fingerprint, e in book.environments.items():
        seen = [r.environment for r in book.records if r.environment.fingerprint == fingerprint]
        loads = [s.load[0] for s in seen if s.load]
        clocks = [s.clock_mhz for s in seen if s.clock_mhz]
        told = {
            "Host": e.host,
            "System": e.os,
            "CPU": f"{e.cpu}, {e.cores} cores, {format_bytes(e.memory_bytes)} memory",
            "GPU": "; ".join(f"{n} × {g}" if n > 1 else g for g, n in Counter(e.gpus).items()),
            "Driver": e.driver,
            "Versions": f"longseq {e.longseq}, torch {e.torch}, Python {e.python}",
            "Commit": ", ".join(dict.fromkeys(s.commit for s in seen if s.commit)),
            "Variables": ", ".join(f"{k}={e.variables[k]}" for k in sorted(e.variables)),
            "Load, 1 minute": loads and f"{min(loads):.2f} to {max(loads):.2f}",
            "Clock": clocks and f"{min(clocks):.0f} to {max(clocks):.0f} MHz",
            "Fingerprint": fingerprint,
        }
        name = book.machines[fingerprint]
        title = f"Machine {name}" if name else ""
        yield title, ["What", "Value"], [[k, str(v)] for k, v in told.items() if v]


def how_it_ran(book: Book) -> Iterator[Grid]:
    """What trials said of themselves."""
    said: dict[tuple[str, ...], dict[str, None]] = {}
    for record in book.records:
        for name, value in record.outcome.facts.items():
            if isinstance(value, str | bool):
                key = (*_machine(book, record), book.label_of(record.trial), name)
                said.setdefault(key, {})[str(value)] = None
    rows = [[*key, " ".join("; ".join(values).split())] for key, values in said.items()]
    if rows:
        machine = ["Machine"] * (len(book.environments) > 1)
        yield "", [*machine, "Implementation", "What", "Value"], rows


def settings(book: Book) -> Iterator[Grid]:
    """How to run it again."""
    trials = [r.trial for r in book.records]

    def each(values: Iterable[Any], write: Callable[[Any], str] = str) -> str:
        return ", ".join("none" if v is None else write(v) for v in dict.fromkeys(values))

    told = {
        "Repeats at most": each(t.repeats for t in trials),
        "Timed passes stop after": each((t.time_cap for t in trials), format_seconds),
        "Time budget a pass": each((t.time_budget for t in trials), format_seconds),
        "Memory budget a rank": each((t.memory_budget for t in trials), format_bytes),
        "Threads a rank": each(t.threads or "torch's choice" for t in trials),
        "Rounds": rounds(book),
        "Seeds": each(sorted({t.seed for t in trials})),
    }
    yield "", ["Setting", "Value"], [list(item) for item in told.items()]


def rounds(book: Book) -> str:
    """Of each command's sweep on each machine; of searches where nothing was swept."""
    swept = [r for r in book.records if r.purpose == "measure"] or book.records
    sweeps = by(lambda r: (r.command, r.environment.fingerprint), swept)
    most = sorted(1 + max(r.trial.round for r in sweep) for sweep in sweeps)
    return str(most[0]) if most[0] == most[-1] else f"{most[0]} to {most[-1]}"


def on_ranks(book: Book) -> Iterator[Grid]:
    """What works on how many ranks."""
    worlds = sorted({r.ranks for r in book.swept})
    if max(worlds, default=1) > 1:

        def place(r: Any) -> Any:
            return r.environment.fingerprint, r.trial.device, r.workload.mode

        for here in by(place, book.swept):
            machine = book.machines[here[0].environment.fingerprint]
            title = f"{here[0].workload.mode}, {here[0].trial.device}"
            title += f", machine {machine}" if machine else ""
            rows = [
                [same[0].label, *(tried([r for r in same if r.ranks == n]) for n in worlds)]
                for same in by(lambda r: r.label, here)
            ]
            names = [f"On {n} rank{'s' if n > 1 else ''}" for n in worlds]
            yield title[0].upper() + title[1:], ["Implementation", *names], rows


GRIDS: dict[str, Callable[[Book], Iterator[Grid]]] = {
    "Failures": failures,
    "Hardware and versions": hardware,
    "How each ran": how_it_ran,
    "How to reproduce": settings,
    "What works on many ranks": on_ranks,
}


def commands(book: Book) -> list[str]:
    """Those recorded."""
    return list(dict.fromkeys(r.command for r in book.records if r.command))


def hangs(book: Book) -> dict[str, tuple[list[str], list[str]]]:
    """By section: where a trial that hung ended, and where its ranks stood."""
    found = {}
    for record in book.records:
        trial, stacks = record.trial, record.outcome.facts.get("stacks")
        if record.outcome.status == "hang" and stacks:
            tokens = format_tokens(trial.workload.seq_len)
            title = f"Hang: {book.label_of(trial)} at {tokens} tokens on {trial.world_size} ranks"
            where = book.words(trial, record.environment.fingerprint)
            phase = f" in {record.outcome.phase}" if record.outcome.phase else ""
            reason = record.outcome.reason or "no reason recorded"
            said = f"{where[:1].upper()}{where[1:]}; ended{phase}: {reason}."
            found[title] = ([said], list(_standing(stacks)))
    return found


def _standing(stacks: dict[str, Sequence[str] | str]) -> Iterator[str]:
    ranks = sorted(stacks, key=int)
    lines = {
        rank: tuple(s.splitlines() if isinstance(s := stacks[rank], str) else s) for rank in ranks
    }
    for same in by(lambda rank: lines[rank], ranks):
        yield f"rank{'s' if len(same) > 1 else ''} {', '.join(same)}:"
        stack = lines[same[0]]
        yield from (f"  {line.rstrip()}" for line in stack[:16])
        if len(stack) > 16:
            yield f"  … {len(stack) - 16} more in the record"
