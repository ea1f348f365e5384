"""Match the trials and searches of two sets of records.

Trials match even if round, seed, repeats and time cap differ: these describe how often a trial was
measured, not the trial. Searches match even if they ran different lengths. Machines match by
hardware; their software may differ, because a comparison is often about software. So may the file
of an own function: before and after an edit.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from longseq_bench.analysis.labels import short_name
from longseq_bench.analysis.runs import group_by
from longseq_bench.analysis.searches import SEARCH_PURPOSES
from longseq_bench.core.model import Record, Trial

HARDWARE = ("host", "cpu", "cores", "memory_bytes", "gpus", "driver")
SOFTWARE = (
    "commit", "longseq", "torch", "cuda", "cudnn", "nccl", "triton", "python", "os", "variables",
    "power_limits_w",
)  # fmt: skip
"""Software and settings. Differences are reported, and don't keep trials from matching."""
MEMORY_TOLERANCE = 0.01
"""Relative: the memory that a kernel reserves for itself changes with its version."""

_REPETITION = {"round": 0, "seed": 0, "repeats": 0, "time_cap": 1.0}
_NO_BUDGETS = {"memory_budget": None, "time_budget": None}
_Key = Callable[[Record], Hashable]


@dataclass(frozen=True)
class MatchedPair:
    """The runs of one trial, or of one search, on both sides."""

    a: Sequence[Record]
    b: Sequence[Record]


@dataclass(frozen=True)
class Matching:
    """Matched pairs, and the groups of records without a partner.

    different_machines: pairs that match in all but their machine; they are in no other field.
    """

    pairs: Sequence[MatchedPair]
    different_machines: Sequence[MatchedPair]
    only_a: Sequence[Sequence[Record]]
    only_b: Sequence[Sequence[Record]]


def match_trials(a: Sequence[Record], b: Sequence[Record], any_machine: bool = False) -> Matching:
    """Match the trials of sweeps.

    Budgets do not change a time: a trial matches one with other budgets if none has the same.
    any_machine: also match trials of different machines, if the same machine has none.
    """
    side_a, side_b = ([r for r in side if r.purpose == "measure"] for side in (a, b))
    keys: list[_Key] = [
        lambda r: r.trial.model_copy(update=_REPETITION).key,
        lambda r: r.trial.model_copy(update=_REPETITION | _NO_BUDGETS).key,
        lambda r: _of_any_file(r.trial).model_copy(update=_REPETITION).key,
        lambda r: _of_any_file(r.trial).model_copy(update=_REPETITION | _NO_BUDGETS).key,
    ]
    return _match(side_a, side_b, keys, any_machine)


def match_searches(a: Sequence[Record], b: Sequence[Record], any_machine: bool = False) -> Matching:
    """Match the searches for the longest length, each with its budgets."""
    side_a, side_b = ([r for r in side if r.purpose in SEARCH_PURPOSES] for side in (a, b))
    keys: list[_Key] = [
        lambda r: r.trial.at(1).model_copy(update=_REPETITION).key,
        lambda r: _of_any_file(r.trial).at(1).model_copy(update=_REPETITION).key,
    ]
    return _match(side_a, side_b, keys, any_machine)


def _of_any_file(trial: Trial) -> Trial:
    """Return the trial with the name of an own function alone; any other trial as it is."""
    if trial.source is None:
        return trial
    name = f"own:{short_name(trial.implementation)}"
    return trial.model_copy(update={"implementation": name, "source": None})


def find_differences(
    a: Iterable[Record], b: Iterable[Record], names: Sequence[str]
) -> dict[str, tuple[list[Any], list[Any]]]:
    """Return the fields of the environments that differ, each with the values of both sides."""
    sides = [[record.environment for record in side] for side in (a, b)]
    found = {}
    for name in names:
        one, other = (
            list({repr(v): v for v in (getattr(e, name) for e in side)}.values()) for side in sides
        )
        sizes = [*one, *other]
        if name == "memory_bytes" and max(sizes) - min(sizes) <= MEMORY_TOLERANCE * max(sizes):
            continue
        if sorted(map(repr, one)) != sorted(map(repr, other)):
            found[name] = (one, other)
    return found


def _match(
    a: Sequence[Record], b: Sequence[Record], keys: Sequence[_Key], any_machine: bool
) -> Matching:
    """Match groups by the first key that both sides share.

    Each key is tried with the same environment, then with the same machine, then without either.
    Where a side has several groups of a key, the one measured last is used.
    """
    machine = _machine_number([*a, *b])

    def last(group: Sequence[Record]) -> str:
        return max(record.started_at for record in group)

    same: list[_Key] = [
        lambda r: (keys[0](r), r.environment.fingerprint),
        *(lambda r, key=key: (key(r), machine(r)) for key in keys),
    ]
    left = [list(group_by(side, same[0]).values()) for side in (a, b)]
    pairs: list[MatchedPair] = []
    different_machines: list[MatchedPair] = []
    for key in (*same, *keys):
        by_key_a, by_key_b = ({key(g[0]): g for g in sorted(side, key=last)} for side in left)
        matched = [(group, by_key_b[k]) for k, group in by_key_a.items() if k in by_key_b]
        target = different_machines if key in keys and not any_machine else pairs
        target += [MatchedPair(*groups) for groups in matched]
        matched_ids = {id(group) for pair in matched for group in pair}
        left = [[g for g in side if id(g) not in matched_ids] for side in left]
    order = {id(record): i for i, record in enumerate(a)}
    for found in (pairs, different_machines):
        found.sort(key=lambda pair: order[id(pair.a[0])])
    return Matching(pairs, different_machines, *left)


def _machine_number(records: Sequence[Record]) -> Callable[[Record], int]:
    """Number the machines of the records; machines with the same hardware share a number."""
    machines: dict[Hashable, list[tuple[int, Record]]] = {}
    numbers: dict[str, int] = {}
    count = 0
    for fingerprint, one in {r.environment.fingerprint: r for r in records}.items():
        hardware, step = _hardware(one)
        # every pair would take minutes for a file of thousands of machines
        near = (known for i in range(-2, 3) for known in machines.get((hardware, step + i), ()))
        same = [i for i, m in near if not find_differences([m], [one], HARDWARE)]
        numbers[fingerprint] = min(same, default=count)
        if not same:
            machines.setdefault((hardware, step), []).append((count, one))
            count += 1
    return lambda record: numbers[record.environment.fingerprint]


def _hardware(record: Record) -> tuple[Hashable, int]:
    """Return a key of the hardware, and its memory in steps of the tolerance."""
    values = (getattr(record.environment, name) for name in HARDWARE if name != "memory_bytes")
    memory = max(record.environment.memory_bytes, 1)
    return tuple(map(repr, values)), int(math.log(memory) / math.log1p(MEMORY_TOLERANCE))
