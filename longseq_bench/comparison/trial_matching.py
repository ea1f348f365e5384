"""Match the trials and searches of two sets of records.

Trials match even if round, seed, repeats and time cap differ: these describe how often a trial was
measured, not the trial. Searches match even if they ran different lengths. Machines match by
hardware; their software may differ, because a comparison is often about software. So may the file
of an own function: before and after an edit.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from itertools import product
from typing import Any

from longseq_bench.analysis.labels import short_name
from longseq_bench.analysis.runs import group_by
from longseq_bench.analysis.searches import SEARCH_PURPOSES
from longseq_bench.core.model import Record
from longseq_bench.core.units import format_bytes

HARDWARE = ("host", "cpu", "cores", "memory_bytes", "gpus", "driver")
SOFTWARE = (
    "commit", "longseq", "torch", "cuda", "cudnn", "nccl", "triton", "python", "os", "variables",
    "power_limits_w",
)  # fmt: skip
"""Software and settings. Differences are reported, and don't keep trials from matching."""
_NAMES = {
    "memory_bytes": "memory", "gpus": "GPUs", "cpu": "CPU", "cuda": "CUDA", "cudnn": "cuDNN",
    "nccl": "NCCL", "triton": "Triton", "power_limits_w": "power limits in W",
}  # fmt: skip
MEMORY_TOLERANCE = 0.01
"""Relative: the memory that a kernel reserves for itself changes with its version."""
Runs = list[Record]
"""The runs of one trial, or of one search."""
Pair = tuple[Runs, Runs]


def is_search(record: Record) -> bool:
    """Return True for a step of a search for the longest length."""
    return record.purpose in SEARCH_PURPOSES


def match(
    a: Iterable[Record], b: Iterable[Record], any_machine: bool = False
) -> tuple[list[Pair], list[Pair], list[Runs], list[Runs]]:
    """Match trials and searches with the same environment, else on the same machine.

    Budgets do not change a time: a trial matches one with other budgets if none has the same.
    Where a side has several candidates, the one measured last is used.
    any_machine: also match trials of different machines, if the same machine has none.
    Returns pairs, pairs that match in all but their machine, and the runs of A only and of B only;
    in each the trials come first.
    """
    sides = [
        sorted((r for r in side if r.purpose == "measure" or is_search(r)), key=is_search)
        for side in (a, b)
    ]
    machines: dict[str, Record] = {}
    for fingerprint, one in {r.environment.fingerprint: r for r in (*sides[0], *sides[1])}.items():
        alike = (r for r in machines.values() if not find_differences([r], [one], HARDWARE))
        machines[fingerprint] = next(alike, one)

    def key(record: Record, place: str, any_file: bool, any_budget: bool) -> Hashable:
        fingerprint = record.environment.fingerprint
        places = {"environment": fingerprint, "machine": id(machines[fingerprint]), "any": None}
        return places[place], _identity(record, any_file, any_budget)

    first = ("environment", False, False)
    left = [
        sorted(
            group_by(side, lambda r: key(r, *first)).values(),
            key=lambda runs: max(r.started_at for r in runs),
        )
        for side in sides
    ]
    pairs, different_machines = list[Pair](), list[Pair]()
    for step in (first, *product(("machine", "any"), (False, True), (False, True))):
        by_key_a, by_key_b = ({key(runs[0], *step): runs for runs in side} for side in left)
        matched = [(runs, by_key_b[k]) for k, runs in by_key_a.items() if k in by_key_b]
        target = different_machines if step[0] == "any" and not any_machine else pairs
        target += matched
        taken = {id(runs) for pair in matched for runs in pair}
        left = [[runs for runs in side if id(runs) not in taken] for side in left]
    order = {id(record): i for side in sides for i, record in enumerate(side)}
    for found in (pairs, different_machines):
        found.sort(key=lambda pair: order[id(pair[0][0])])
    only_a, only_b = (sorted(side, key=lambda runs: order[id(runs[0])]) for side in left)
    return pairs, different_machines, only_a, only_b


def _identity(record: Record, any_file: bool, any_budget: bool) -> Hashable:
    """Return a key of the trial, or of the search, which has budgets but no length of its own."""
    trial = record.trial.at(1) if is_search(record) else record.trial
    same: dict[str, Any] = {"round": 0, "seed": 0, "repeats": 0, "time_cap": 1.0}
    if any_budget and not is_search(record):
        same |= {"memory_budget": None, "time_budget": None}
    if any_file and trial.source is not None:
        same |= {"implementation": f"own:{short_name(trial.implementation)}", "source": None}
    return is_search(record), trial.model_copy(update=same).key


def find_differences(
    a: Sequence[Record], b: Sequence[Record], fields: Sequence[str]
) -> list[tuple[str, str, str]]:
    """Return name, values of A and values of B, as text, of each field of machines that differs."""
    found = []
    for field in fields:
        values = [getattr(record.environment, field) for record in (*a, *b)]
        if field == "memory_bytes" and min(values) >= (1 - MEMORY_TOLERANCE) * max(values):
            continue
        texts = [_format_value(field, value) for value in values]
        one, other = dict.fromkeys(texts[: len(a)]), dict.fromkeys(texts[len(a) :])
        if one.keys() != other.keys():
            found.append((_NAMES.get(field, field), "; ".join(one), "; ".join(other)))
    return found


def _format_value(field: str, value: Any) -> str:
    if field == "memory_bytes":
        return format_bytes(value)
    texts = [] if value is None else [str(value)]
    if isinstance(value, dict):
        texts = [f"{name}={one}" for name, one in sorted(value.items())]
    elif isinstance(value, tuple):
        texts = [f"{n} × {one}" for one, n in Counter(value).items()]
    return ", ".join(texts) or "none"
