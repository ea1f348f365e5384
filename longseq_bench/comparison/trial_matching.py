"""Which trials of two sets of records are the same trial on the same machine.

A trial is the same whatever its round, seed, repeats and time cap: these say how often it was
looked at. A search for the longest is the same whatever lengths it ran. Machines are the same by
what they are made of; the software on them may differ, since that is what is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from longseq_bench.analysis.rows import SEARCH
from longseq_bench.core.model import Environment, Record

HARDWARE = ("host", "cpu", "cores", "memory_bytes", "gpus", "driver")
SOFTWARE = ("commit", "longseq", "torch", "python", "os", "variables")
SAME_MEMORY = 0.01
"""Of a machine: what a kernel keeps for itself changes with its version."""

_BUDGETS = ("memory_budget", "time_budget")


@dataclass(frozen=True)
class Matched:
    """Runs of one trial, or of one search, on both sides."""

    a: tuple[Record, ...]
    b: tuple[Record, ...]


@dataclass(frozen=True)
class Matching:
    """Pairs, and the groups of records on each side that have no partner. unlike: pairs that only
    differ in their machines, which are neither of them: `across` takes them for pairs."""

    pairs: tuple[Matched, ...]
    unlike: tuple[Matched, ...]
    only_a: tuple[tuple[Record, ...], ...]
    only_b: tuple[tuple[Record, ...], ...]


def timed_trials(a: Sequence[Record], b: Sequence[Record], across: bool = False) -> Matching:
    """Trials of sweeps. Budgets change no time, so those of unlike budgets are the same where there
    is none of like ones. across: on unlike machines too, where there is none on the same."""
    strict, loose = _trial_key, _trial_but_budgets
    machine = _machines([*a, *b])
    keys: list[Callable[[Record], Hashable]] = [
        lambda r: (strict(r), r.environment.fingerprint),
        lambda r: (strict(r), machine(r)),
        lambda r: (loose(r), machine(r)),
    ]
    ours, theirs = ([r for r in side if r.purpose == "measure"] for side in (a, b))
    return _matched(ours, theirs, keys, [strict, loose], across)


def searches(a: Sequence[Record], b: Sequence[Record], across: bool = False) -> Matching:
    """Searches for the longest, each with its budgets."""
    machine = _machines([*a, *b])
    keys: list[Callable[[Record], Hashable]] = [
        lambda r: (_search_key(r), r.environment.fingerprint),
        lambda r: (_search_key(r), machine(r)),
    ]
    ours, theirs = ([r for r in side if r.purpose in SEARCH] for side in (a, b))
    return _matched(ours, theirs, keys, [_search_key], across)


def differing(
    a: Iterable[Environment], b: Iterable[Environment], names: Sequence[str]
) -> dict[str, tuple[list[Any], list[Any]]]:
    """Each of the names whose values are not the same on both sides, with those values."""
    sides = [list(a), list(b)]
    found = {}
    for name in names:
        one, other = (_distinct(getattr(e, name) for e in side) for side in sides)
        alike = name == "memory_bytes" and _near([*one, *other])
        if not alike and sorted(map(repr, one)) != sorted(map(repr, other)):
            found[name] = (one, other)
    return found


def _matched(
    a: Sequence[Record], b: Sequence[Record], keys: Sequence[Callable[[Record], Hashable]],
    anywhere: Sequence[Callable[[Record], Hashable]], across: bool,
) -> Matching:  # fmt: skip
    """Pairs by the first key under which both sides have a group; by the last measured one where a
    side has several. anywhere: keys that know no machine, of what is left."""
    left = [list(_groups(side, keys[0]).values()) for side in (a, b)]
    pairs: list[Matched] = []
    unlike: list[Matched] = []
    for key in (*keys, *anywhere):
        ours, theirs = ({key(g[0]): g for g in sorted(side, key=_ended)} for side in left)
        both = [(group, theirs[k]) for k, group in ours.items() if k in theirs]
        found = unlike if key in anywhere and not across else pairs
        found += [Matched(tuple(one), tuple(other)) for one, other in both]
        taken = {id(group) for pair in both for group in pair}
        left = [[g for g in side if id(g) not in taken] for side in left]
    order = {id(record): i for i, record in enumerate(a)}
    for made in (pairs, unlike):
        made.sort(key=lambda pair: order[id(pair.a[0])])
    alone = (tuple(tuple(g) for g in side) for side in left)
    return Matching(tuple(pairs), tuple(unlike), *alone)


def _groups(
    records: Sequence[Record], key: Callable[[Record], Hashable]
) -> dict[Hashable, list[Record]]:
    groups: dict[Hashable, list[Record]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups


def _ended(group: Sequence[Record]) -> str:
    return max(record.started_at for record in group)


def _machines(records: Sequence[Record]) -> Callable[[Record], int]:
    """Numbers the machines of some records."""
    seen: list[Environment] = []
    known: dict[str, int] = {}
    for record in records:
        e = record.environment
        if e.fingerprint not in known:
            number = next((i for i, one in enumerate(seen) if _same_machine(one, e)), len(seen))
            known[e.fingerprint] = number
            seen += [e] * (number == len(seen))
    return lambda record: known[record.environment.fingerprint]


def _same_machine(one: Environment, other: Environment) -> bool:
    return not differing([one], [other], HARDWARE)


def _near(sizes: Sequence[int]) -> bool:
    return max(sizes) - min(sizes) <= SAME_MEMORY * max(sizes)


def _distinct(values: Iterable[Any]) -> list[Any]:
    return list({repr(value): value for value in values}.values())


def _trial_key(record: Record) -> Hashable:
    return record.trial.model_copy(update=_LOOKED_AT).key


def _trial_but_budgets(record: Record) -> Hashable:
    return record.trial.model_copy(update=_LOOKED_AT | dict.fromkeys(_BUDGETS)).key


def _search_key(record: Record) -> Hashable:
    return record.trial.at(1).model_copy(update=_LOOKED_AT).key


_LOOKED_AT = {"round": 0, "seed": 0, "repeats": 0, "time_cap": 1.0}
