"""Numbers that nothing can measure: infinite, not a number, negative, or far too large.

A record with one of them was damaged or forged, so it is not read. A trial whose meter returns one
ends with status `error`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import inf, isfinite
from operator import attrgetter
from typing import Any

from longseq_bench.core.bounds import MAX_TOKENS
from longseq_bench.core.identity_cache import cached_by_identity
from longseq_bench.core.model import (
    Environment,
    OptionValue,
    Outcome,
    Record,
    TrialPrediction,
    Workload,
)

LIMIT = 2.0**64
FLOP_LIMIT = 2.0**128
"""FLOPs are computed, not measured: dense attention over 2^28 tokens already has more than 2^64."""

MAX_RANKS = 2**20

ERRORS = frozenset({"max_error", "error_of_allowed", "bias", "wire_error"})
"""Measurements that are infinite if an output is: only in a trial that failed."""

_NUMBERS = (
    "trial.world_size", "trial.repeats", "trial.time_cap", "trial.round", "trial.seed",
    "trial.workload.seq_len", "trial.workload.batch", "trial.workload.heads",
    "trial.workload.kv_heads", "trial.workload.head_dim", "trial.workload.v_head_dim",
    "trial.workload.new_tokens", "wall_s", "processes",
)  # fmt: skip
_OPTIONAL = ("trial.memory_budget", "trial.time_budget", "trial.threads", "predicted_tokens")
_ENVIRONMENT = ("cores", "memory_bytes", "clock_mhz", "load", "power_limits_w", "sm_clocks_mhz")
_numbers, _optional = attrgetter(*_NUMBERS), attrgetter(*_OPTIONAL)


def find_impossible_number(record: Record) -> str | None:
    """Return the name and value of a number of a record that can't be; None without one."""
    trial, ranks = record.trial, record.trial.world_size
    if not _are_possible(record):
        known = [*zip(_NUMBERS, _numbers(record), strict=True)]
        known += zip(_OPTIONAL, _optional(record), strict=True)
        tokens = trial.workload.seq_len
        if _most_tokens(trial.workload) < tokens < LIMIT:
            return f"trial.workload.seq_len is {_format(tokens)}"
        return _first_impossible(known) or f"trial.world_size is {_format(ranks)}"
    if record.purpose == "density" and not _is_share(trial.options.get("sparsity")):
        return f"trial.options.sparsity is {str(trial.options.get('sparsity'))[:60]!r}"
    return (
        _find_in_options(trial.options)
        or (record.foreseen and _first_impossible(_predicted(record.foreseen)))
        or _find_in_environment(record.environment)
        or find_impossible_sample(record.outcome, ranks)
    )


def _are_possible(record: Record) -> bool:
    """Return True if the numbers of _NUMBERS and _OPTIONAL are possible.

    Written out, and without what the models check, because records are many. NaN compares False.
    """
    trial = record.trial
    return (
        trial.world_size <= MAX_RANKS
        and trial.repeats < LIMIT
        and trial.round < LIMIT
        and 0 <= trial.seed < LIMIT
        and trial.time_cap < LIMIT
        and 0 <= record.wall_s < LIMIT
        and 0 <= record.processes < LIMIT
        and (trial.memory_budget or 0) < LIMIT
        and (trial.time_budget or 0) < LIMIT
        and (trial.threads or 0) < LIMIT
        and 0 <= (record.predicted_tokens or 0) < LIMIT
        and _is_workload_possible(trial.workload)
    )


@cached_by_identity
def _is_workload_possible(w: Workload) -> bool:
    most = max(w.batch, w.heads, w.kv_heads, w.head_dim, w.v_head_dim, w.new_tokens)
    return w.seq_len <= _most_tokens(w) and most < LIMIT


def _most_tokens(w: Workload) -> float:
    """Return the maximum sequence length; drawn documents are drawn again to count their pairs."""
    mask = w.visibility
    return min(MAX_TOKENS, mask.most_tokens) if mask.distribution else MAX_TOKENS


def find_impossible_sample(outcome: Outcome, ranks: int) -> str | None:
    """Return the name and value of a sample that can't be measured; None without one."""
    taken = [one.samples for one in outcome.measurements if one.samples]
    of_ranks = {one.rank for one in outcome.measurements}
    # a sum that is small and no NaN has small terms
    is_known = not taken or (min(map(min, taken)) >= 0 and sum(map(sum, taken)) < LIMIT)
    if is_known and (not of_ranks or (min(of_ranks) >= 0 and max(of_ranks) < ranks)):
        return None
    for one in outcome.measurements:
        may_be_infinite = one.name in ERRORS and outcome.status != "ok"
        limit = FLOP_LIMIT if one.unit.startswith("FLOP") else LIMIT
        for sample in one.samples:
            if not 0 <= sample < limit and (isfinite(sample) or not may_be_infinite):
                return f"{one.name[:60]!r} has the sample {_format(sample)}"
        if not 0 <= one.rank < ranks:
            return f"{one.name[:60]!r} is of rank {_format(one.rank)}; ranks: {ranks}"
    return None


@cached_by_identity
def _find_in_environment(environment: Environment) -> str | None:
    return _first_impossible(_environment_numbers(environment))


def _environment_numbers(environment: Environment) -> Iterator[tuple[str, Any]]:
    for name in _ENVIRONMENT:
        value = getattr(environment, name)
        for number in value if isinstance(value, tuple) else (value,):
            yield f"environment.{name}", number


@cached_by_identity
def _find_in_options(options: Mapping[str, OptionValue]) -> str | None:
    numbers = ((n, v) for n, v in options.items() if isinstance(v, float) and not isfinite(v))
    return next((f"trial.options.{name[:60]} is {value}" for name, value in numbers), None)


def _is_share(value: OptionValue) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def _predicted(foreseen: TrialPrediction) -> Iterator[tuple[str, Any]]:
    for name in ("peak_bytes", "outside_bytes", "seconds"):
        yield f"foreseen.{name}", getattr(foreseen, name)


def _first_impossible(numbers: Iterable[tuple[str, Any]]) -> str | None:
    for name, value in numbers:
        if value is not None and not 0 <= value < LIMIT:
            return f"{name} is {_format(value)}"
    return None


def _format(value: float) -> str:
    return "2^64 or more" if value >= LIMIT and value != inf else f"{value:.6g}"
