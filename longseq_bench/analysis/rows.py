"""Records -> tidy rows: medians with their interval, maxima, speed relative to a baseline.

sweep_rows, maximum_rows   lists of plain dicts; need no pandas
rows, maxima, relative     the same as DataFrames
sweep_json, maxlen_json    the same as JSON

A row never holds a time that was not measured as one: `pass_time`, the single pass of a fit
probe, is not taken for `time`, and a trial that is not ok in every round shows no time at all.

Over ranks: an iteration takes as long as its slowest rank, so an iteration that a rank's sample is
missing from has no time; sizes are the largest rank's, and each rank's own figure is kept.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import median
from typing import TYPE_CHECKING, Any

from longseq_bench.core.cost import attention_flops, floor_bytes, floor_tokens
from longseq_bench.core.dense_reference import ratio, share_interval, share_of_ideal, standard_bytes
from longseq_bench.core.errors import UnknownNameError, UserError
from longseq_bench.core.interning import no_collecting
from longseq_bench.core.model import Measurement, OptionValue, Record, Status, Trial, Workload
from longseq_bench.core.stats import median_interval

if TYPE_CHECKING:
    import pandas

Row = dict[str, Any]

SWEEP_FIELDS = (
    "implementation", "options", "tokens", "world_size", "device", "dtype", "mode", "causal",
    "status", "reason", "phase", "time_s", "time_low_s", "time_high_s", "samples", "cpu_time_s",
    "plan_time_s", "peak_bytes", "tokens_per_s", "flops", "max_error", "density_asked",
    "density_achieved", "batch", "heads", "kv_heads", "head_dim", "tokens_per_rank",
    "compute_time_s", "communication_time_s", "exposed_share", "bytes_sent", "bytes_formula",
    "wire_error", "rank_times", "rank_peaks", "imbalance", "speedup", "efficiency",
    "effective_flops", "sparsity_asked", "token_density", "uncovered", "dense_time_s",
    "dense_low_s", "dense_high_s", "dense_source", "speed_over_dense", "share_of_ideal",
    "share_low", "share_high", "dense_flops", "dense_peak_bytes", "dense_memory_source",
    "memory_reduction", "keep", "allocator", "alloc_retries",
)  # fmt: skip
"""What a program reads of a swept row. `tokens` and `tokens_per_s` count those of all ranks.

tokens_per_rank: the most query tokens that one rank holds.
compute_time_s, communication_time_s: a pass with the other half switched off, slowest rank.
exposed_share: 1 - compute_time_s / time_s, at least 0: the share of the time that communication
adds to computing alone; what hides behind computing is not in it.
bytes_sent, bytes_formula: what a rank was counted to send in one pass, and what it should send by
formula, of the largest rank.  wire_error: what a compressed transfer changes in the output.
rank_times, rank_peaks: a list in the order of ranks; null for a rank that has none.
imbalance: the largest peak over the least; null with one rank or where a rank's is unknown.
speedup, efficiency: the time of the same trial on one rank over the row's, and that over the ranks;
null where it was not run so.
effective_flops: flops (of the pairs seen, and a module's projections) over time_s, FLOP/s.
sparsity_asked: 1 - density_asked.
uncovered: the share of (token, head) pairs that see nothing.
token_density: the share of the query-key pairs that dense attention sees under the same causality,
a pair seen twice counted twice; density_achieved may count blocks.
dense_time_s, dense_low_s, dense_high_s: of torch's dense attention on the same inputs, timed in
turn with the row's own passes.  dense_source: "measured", or of which part it was computed.
speed_over_dense: dense_time_s over time_s.  share_of_ideal: that times flops over those of
dense attention in its place (dense_flops, a module's projections in both), 1 where what is skipped
costs nothing; share_low, share_high: what the intervals of both times leave possible,
null where one is a single sample.
dense_peak_bytes: the peak of standard attention with its whole score matrix on one device;
dense_memory_source: "measured" where implementation `dense` ran so here, else "computed".
memory_reduction: dense_peak_bytes over peak_bytes; null over several ranks, whose peak is a part.
keep, allocator: as in Trial.  alloc_retries: how often CUDA's allocator gave back what it had
cached and asked again, the most of any run; null on a CPU.
"""
ROW_FIELDS = (
    *SWEEP_FIELDS, "memory_budget", "threads", "time_budget", "zero_rows",
    "rank_bytes", "rank_formulas", "bytes_unlike", "exposed_low", "exposed_high", "speedup_low",
    "speedup_high", "fingerprint", "host", "label",
)  # fmt: skip
"""rank_bytes, rank_formulas: bytes_sent and bytes_formula of each rank.
bytes_unlike: (rank, counted, by formula) wherever the two differ; None where nothing was counted.
exposed_low to _high, speedup_low to _high: what the intervals of the two times leave possible;
None where one of them is a single sample, which says nothing of its spread.
"""
DOCUMENT = 1
"""Schema of the documents that --json prints, which is not that of records."""

MAXLEN_FIELDS = (
    "implementation", "options", "device", "dtype", "mode", "causal", "batch", "heads", "kv_heads",
    "head_dim", "world_size", "memory_budget", "time_budget", "max_tokens", "first_failure",
    "limited_by", "failure_phase", "floor_tokens", "fraction_of_floor", "peak_bytes",
    "bytes_per_token", "predicted_tokens", "runs", "confirmations", "wall_s", "tokens_per_rank",
    "rank_peaks", "imbalance", "fit_only", "fits_tokens", "keep", "allocator", "alloc_retries",
)  # fmt: skip
"""What a program reads of a search. Tokens are those of all ranks; tokens_per_rank to imbalance are
those of the runs at the maximum, as in SWEEP_FIELDS; fit_only: of passes cut short, memory alone.
fits_tokens: of a search of whole passes, the maximum of such a one beside it; null where none ran.
The budget, the peak and bytes_per_token (peak over all tokens) are a rank's; floor_tokens is what
fits in all ranks' budgets together.
"""
MAXIMUM_FIELDS = (
    *MAXLEN_FIELDS, "failure_reason", "threads", "fingerprint", "host", "label", "density_achieved",
)  # fmt: skip

SEVERITY: tuple[Status, ...] = (
    "wrong", "crashed", "error", "hang", "limit", "oom", "timeout", "unsupported", "ok",
)  # fmt: skip
"""Worst first: where runs of one trial end differently, the worst one is told."""

LIMITED_BY: dict[Status, str] = {
    "oom": "memory",
    "timeout": "time",
    "hang": "hang",
    "limit": "kernel limit",
    "wrong": "numerics",
    "crashed": "crash",
    "error": "error",
    "unsupported": "unsupported",
}
_LARGEST = (
    "flops", "max_error", "density_asked", "density_achieved", "uncovered", "zero_rows",
    "wire_error", "dense_flops", "alloc_retries",
)  # fmt: skip
SAME_WORKLOAD = (
    "tokens", "batch", "heads", "kv_heads", "head_dim", "dtype", "causal", "mode", "device",
    "threads", "fingerprint",
)  # fmt: skip
SEARCH = ("probe", "edge", "confirm")
"""Purposes of a search for the longest length."""

STANDARD = "dense"
"""The implementation that standard attention's memory is measured by."""

SAME_BUT_RANKS = (
    "implementation", "memory_budget", "time_budget", "fit_only", "keep", "allocator",
)  # fmt: skip
"""With options and SAME_WORKLOAD: what is the same where one rank and several are compared."""


def sweep_rows(records: Iterable[Record]) -> list[Row]:
    """One dict of ROW_FIELDS a measured trial, its interleaved rounds merged, in file order.

    Records of purpose "measure" that differ in round and seed only, in one environment, are one
    row. Times in seconds, sizes in bytes, peaks the largest over ranks and rounds; time_low_s and
    time_high_s are the 95 % interval of the median, with fewer than 6 samples their whole range.
    """
    return [row for row, _ in swept(records)]


def swept(records: Iterable[Record]) -> list[tuple[Row, list[Record]]]:
    """The rows of `sweep_rows`, each with the records that it is made from, in file order."""
    with no_collecting():
        groups = list(_grouped((r for r in records if r.purpose == "measure"), _row_key))
        merged = [_merged(group) for group in groups]
        _add_scaling(merged)
        _add_standard(merged)
        add_labels(merged)
    return list(zip(merged, groups, strict=True))


def maximum_rows(records: Iterable[Record]) -> list[Row]:
    """One dict of MAXIMUM_FIELDS a search (purposes probe, edge, confirm), in file order."""
    groups = _grouped((r for r in records if r.purpose in SEARCH), _search_key)
    found = [maximum_of(group) for group in groups]
    # where nothing failed, or nothing passed, it is no limit
    bounded = [r for r in found if r["fit_only"] and r["max_tokens"] and r["first_failure"]]
    fits = {_but_time(row): row["max_tokens"] for row in bounded}
    for row in found:
        row["fits_tokens"] = None if row["fit_only"] else fits.get(_but_time(row))
    add_labels(found)
    return found


def least_sparsities(records: Iterable[Record]) -> list[Row]:
    """One a search for the least sparsity (purpose density), in file order: the implementation and
    workload; `least_sparsity`, the least that passed and never failed (None: none did), and its
    time and peak; `too_dense`, the largest that failed below it, with how; `runs`."""
    groups = _grouped((r for r in records if r.purpose == "density"), _density_key)
    found = [_least_sparsity(group) for group in groups]
    add_labels(found)
    return found


def rows(records: Iterable[Record]) -> pandas.DataFrame:
    """`sweep_rows` as a DataFrame; what was not measured is missing (NaN)."""
    return _frame(sweep_rows(records), ROW_FIELDS)


def maxima(records: Iterable[Record]) -> pandas.DataFrame:
    """`maximum_rows` as a DataFrame; what is not known is missing (NaN)."""
    return _frame(maximum_rows(records), MAXIMUM_FIELDS)


def relative(frame: pandas.DataFrame, baseline: str) -> pandas.DataFrame:
    """`rows` with a column `speed`, as `speeds` computes it."""
    import pandas

    speed = pandas.Series(speeds(plain(frame), baseline), index=frame.index, dtype=float)
    return frame.assign(speed=speed)


def speeds(table: Sequence[Row], baseline: str) -> list[float | None]:
    """The baseline's time over each row's time: 2.0 is twice as fast.

    baseline: a label ("ring chunk=1024") or an implementation that has one label only.
    Compared on one workload, device, thread count and environment; with the baseline on as many
    ranks where it was run so, else on the fewest. None where either is not ok or was not timed.
    Raises UnknownNameError or, where the name means several labels, UserError.
    """
    label = baseline_label(table, baseline)
    times: dict[tuple[Any, ...], dict[int, float]] = defaultdict(dict)
    for row in table:
        if row["label"] == label and row["status"] == "ok" and row["time_s"] is not None:
            times[_workload_of(row)].setdefault(row["world_size"], row["time_s"])
    return [_speed(row, times.get(_workload_of(row), {})) for row in table]


def plain(frame: pandas.DataFrame) -> list[Row]:
    """The rows of a DataFrame as dicts, with None for what is missing."""
    return [
        {str(name): None if _missing(value) else value for name, value in row.items()}
        for row in frame.to_dict("records")
    ]


def sweep_json(records: Iterable[Record]) -> Row:
    """{"schema", "rows"}: each row has exactly SWEEP_FIELDS; what is not a number is null."""
    return rows_json(sweep_rows(records))


def rows_json(table: Iterable[Row]) -> Row:
    """As `sweep_json`, of rows that are made already."""
    return {"schema": DOCUMENT, "rows": [_json(row, SWEEP_FIELDS) for row in table]}


def maxlen_json(records: Iterable[Record]) -> Row:
    """{"schema", "results"}: each result has exactly MAXLEN_FIELDS."""
    return maxima_json(maximum_rows(records))


def maxima_json(table: Iterable[Row]) -> Row:
    """As `maxlen_json`, of maxima that are found already."""
    return {"schema": DOCUMENT, "results": [_json(row, MAXLEN_FIELDS) for row in table]}


def maximum_of(records: Sequence[Record]) -> Row:
    """The maximum that the steps of one search came to: a bracket and what limited it.

    A length passed by `has_passed`; `max_tokens` is the longest such, 0 if
    there is none. `first_failure` is the shortest failed length above it; failures below it do
    not lower it. `confirmations` are the passes at the maximum beyond the first.
    Raises ValueError where the records are none, or not of one search.
    """
    steps = [record for record in records if record.purpose in SEARCH]
    if len({_search_key(record) for record in steps}) != 1:
        raise ValueError("maximum_of takes the probe, edge and confirm records of one search")
    by_length: dict[int, list[Record]] = defaultdict(list)
    for record in steps:
        by_length[record.trial.workload.seq_len].append(record)
    passed = [n for n, runs in by_length.items() if has_passed(runs)]
    longest = max(passed, default=0)
    failed = min((n for n in by_length if n > longest), default=None)
    at_maximum = _Runs.of([r for r in by_length.get(longest, []) if r.outcome.fits])
    peak = _largest(at_maximum, "peak")
    return {
        **_identity(steps[0]),
        "max_tokens": longest,
        **_failure(by_length[failed] if failed is not None else [], failed),
        **_against_floor(steps[0].trial, longest),
        "peak_bytes": _whole(peak),
        "bytes_per_token": None if peak is None else peak / longest,
        "predicted_tokens": _first_prediction(steps),
        "runs": sum(max(1, r.processes // r.trial.world_size) for r in steps),
        "confirmations": max(len(at_maximum.records) - 1, 0),
        "wall_s": sum(r.wall_s for r in steps),
        "alloc_retries": _largest(at_maximum, "alloc_retries"),
        "density_achieved": _largest(at_maximum, "density_achieved"),
        **_shares(at_maximum),
    }


def has_passed(runs: Sequence[Record]) -> bool:
    """Return True if runs of one trial passed: none failed but on time, and most were in time.

    Most runs in time is the same as a median time within the limit: one slow run of three is noise.
    """
    late = sum(r.outcome.status == "timeout" for r in runs)
    passes = sum(bool(r.outcome.fits) for r in runs)
    return passes + late == len(runs) and passes > late


def _density_key(record: Record) -> Hashable:
    return whichever_sparsity(record.trial), record.environment.fingerprint


def whichever_sparsity(trial: Trial) -> Hashable:
    """Equal for the runs of one search for the least sparsity."""
    options = repr(sorted(_but_sparsity(trial).items()))
    return options, trial.but_for("repeats", "round", "options")


def _but_sparsity(trial: Trial) -> dict[str, OptionValue]:
    return {k: v for k, v in trial.options.items() if k != "sparsity"}


def _least_sparsity(steps: Sequence[Record]) -> Row:
    by_sparsity: dict[float, list[Record]] = defaultdict(list)
    for step in steps:
        by_sparsity[float(str(step.trial.options["sparsity"]))].append(step)
    good = {s: runs for s, runs in by_sparsity.items() if has_passed(runs)}
    least = min(good, default=None)
    denser = [s for s in by_sparsity if s not in good and (least is None or s < least)]
    at = _Runs.of(good[least] if least is not None else [])
    runs = by_sparsity[max(denser)] if denser else []
    failed = next((r.outcome for r in reversed(runs) if not r.outcome.fits), None)
    return {
        **_identity(steps[0]),
        "options": _but_sparsity(steps[0].trial),
        "tokens": steps[0].trial.workload.seq_len,
        "least_sparsity": least,
        "too_dense": max(denser, default=None),
        "limited_by": None if failed is None else LIMITED_BY[failed.status],
        "time_s": _median_of(at, "time"),
        "peak_bytes": _whole(_largest(at, "peak")),
        "confirmations": max(len(at.records) - 1, 0),
        "runs": len(steps),
    }


def add_labels(table: Sequence[Row]) -> None:
    """Set `label`: the implementation, and those of its options that differ within the table.

    An option that a row has not is no value of it: its longseq did not have the option yet.
    """
    values: dict[tuple[str, str], set[str]] = defaultdict(set)
    for row in table:
        for name in row["options"]:
            values[row["implementation"], name].add(_option(row, name))
    for row in table:
        differing = [n for n in row["options"] if len(values[row["implementation"], n]) > 1]
        row["label"] = " ".join(
            [row["implementation"], *(f"{name}={_option(row, name)}" for name in differing)]
        ) + set_apart(row)


_SET_APART = {
    ("fit_only", True): "fits only",
    ("keep", "inputs"): "recomputed",
    ("keep", "nothing"): "over its inputs",
    ("allocator", "expandable"): "expandable segments",
}


def set_apart(row: Row) -> str:
    """Words for settings by which a figure must not be taken for another."""
    words = [said for (name, value), said in _SET_APART.items() if row.get(name) == value]
    if row["options"].get("offload", "none") != "none":
        words.append("offloaded")
    return f" ({', '.join(words)})" if words else ""


def _but_time(row: Row) -> Hashable:
    """Equal for searches that differ in time alone."""
    names = [name for name in (*SAME_BUT_RANKS, *SAME_WORKLOAD, "world_size") if name in row]
    same = [row[name] for name in names if name not in ("time_budget", "fit_only")]
    return (*same, repr(sorted(row["options"].items())))


def _grouped(
    records: Iterable[Record], key: Callable[[Record], Hashable]
) -> Iterable[list[Record]]:
    groups: dict[Hashable, list[Record]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups.values()


def _row_key(record: Record) -> Hashable:
    return record.trial.but_for("round", "seed"), record.environment.fingerprint


def _search_key(record: Record) -> Hashable:
    # How often a step was timed is no part of the question: probes take one pass, others more.
    same = record.trial.but_for("seq_len", "round", "seed", "repeats", "time_cap")
    return same, record.environment.fingerprint


_SHAPE = tuple(name for name in Workload.model_fields if name != "seq_len")


def _identity(record: Record) -> Row:
    """What was run where: the fields that rows and maxima share."""
    trial, workload = record.trial, record.trial.workload
    return {
        "implementation": trial.implementation,
        "options": dict(trial.options),
        "device": trial.device,
        "world_size": trial.world_size,
        "memory_budget": trial.memory_budget,
        "time_budget": trial.time_budget,
        "threads": trial.threads,
        "fit_only": trial.fit_only,
        "keep": trial.keep,
        "allocator": trial.allocator,
        **{name: getattr(workload, name) for name in _SHAPE},
        "fingerprint": record.environment.fingerprint,
        "host": record.environment.host,
    }


_Named = Mapping[str, Sequence[Measurement]]


@dataclass(frozen=True)
class _Runs:
    """Runs of one trial with their measurements by name, of each and of all: found once, asked
    for often."""

    records: Sequence[Record]
    named: Sequence[_Named]
    together: _Named

    @classmethod
    def of(cls, records: Sequence[Record]) -> _Runs:
        named = [_by_name(record.outcome.measurements) for record in records]
        every = chain.from_iterable(record.outcome.measurements for record in records)
        return cls(records, named, named[0] if len(named) == 1 else _by_name(every))


def _by_name(measurements: Iterable[Measurement]) -> _Named:
    named: dict[str, list[Measurement]] = {}
    for one in measurements:
        named.setdefault(one.name, []).append(one)
    return named


def _merged(records: Sequence[Record]) -> Row:
    """One row of all rounds of a trial."""
    worst = min(records, key=lambda record: SEVERITY.index(record.outcome.status))
    rounds = _Runs.of(records)
    timed = rounds if worst.outcome.status == "ok" else _Runs.of([])
    tokens = worst.trial.workload.seq_len
    row = {
        **_identity(worst),
        "tokens": tokens,
        "status": worst.outcome.status,
        "reason": worst.outcome.reason,
        "phase": worst.outcome.phase,
        **_timing(timed),
        "plan_time_s": _median_of(rounds, "plan_time"),
        "peak_bytes": _whole(_largest(rounds, "peak")),
        **dict.fromkeys(_LARGEST),
        **{name: _largest(rounds, name) for name in rounds.together.keys() & set(_LARGEST)},
        **_shares(rounds),
        **_traffic(rounds),
    }
    time_s = row["time_s"]
    row["tokens_per_s"] = worst.trial.workload.batch * tokens / time_s if time_s else None
    row["effective_flops"] = ratio(row["flops"], time_s)
    row["dense_peak_bytes"] = standard_bytes(worst.trial.workload)
    row |= _densities(row, worst.trial.workload)
    row |= _beside_dense(row, timed)
    return row


def _densities(row: Row, workload: Workload) -> Row:
    """What was asked as a sparsity, and the density in query-key pairs of what has one at all."""
    asked = row["density_asked"]
    dense = attention_flops(workload)
    # a module's projections are in both, and see no pairs
    projecting = (row["dense_flops"] or dense) - dense
    sparse = row["density_achieved"] is not None and row["flops"] is not None
    return {
        "sparsity_asked": None if asked is None else 1 - asked,
        "token_density": ratio(row["flops"] - projecting, dense) if sparse else None,
    }


def _beside_dense(row: Row, rounds: _Runs) -> Row:
    """Dense attention's time on the same inputs, and the row's own set against it."""
    source, times = _dense_times(rounds)
    low, middle, high = median_interval(times) if times else (None, None, None)
    bounded = len(times) > 1 and row["samples"] > 1
    ran = rounds.records
    whole = row["dense_flops"] or attention_flops(ran[0].trial.workload) if ran else None
    density, own = ratio(row["flops"], whole), (row["time_low_s"], row["time_high_s"])
    least, most = share_interval((low, high), density, own) if bounded else (None, None)
    return {
        "dense_time_s": middle,
        "dense_low_s": low,
        "dense_high_s": high,
        "dense_source": source,
        "speed_over_dense": ratio(middle, row["time_s"]),
        "share_of_ideal": share_of_ideal(middle, density, row["time_s"]),
        "share_low": least,
        "share_high": most,
    }


def _dense_times(rounds: _Runs) -> tuple[str | None, list[float]]:
    """Where dense times come from, and the times of that source: of rounds that differ, those
    that ran whole passes before those that computed them."""
    times: dict[str, list[float]] = defaultdict(list)
    for record, named in zip(rounds.records, rounds.named, strict=True):
        if found := _slowest(record, named.get("dense_time")):
            times[str(record.outcome.facts.get("dense", "not recorded"))] += found
    source = next((s for s in times if s == "measured"), next(iter(times), None))
    return source, times[source] if source else []


def _timing(rounds: _Runs) -> Row:
    times, computing = _iterations(rounds, "time"), _iterations(rounds, "compute_time")
    low, middle, high = median_interval(times) if times else (None, None, None)
    return {
        "time_s": middle,
        "time_low_s": low,
        "time_high_s": high,
        "samples": len(times),
        "cpu_time_s": _median_of(rounds, "cpu_time"),
        "compute_time_s": median(computing) if computing else None,
        "communication_time_s": _median_of(rounds, "communication_time"),
        "rank_times": _each_rank(rounds, "time", median),
        **_exposure(times, computing),
    }


def _exposure(times: Sequence[float], computing: Sequence[float]) -> Row:
    """The share of the time that communication adds to computing alone, and its bounds."""
    if not times or not computing:
        return dict.fromkeys(("exposed_share", "exposed_low", "exposed_high"))
    full, compute = median_interval(times), median_interval(computing)
    if not min(full):
        return dict.fromkeys(("exposed_share", "exposed_low", "exposed_high"))
    low, middle, high = (max(0.0, 1 - c / t) for c, t in zip(reversed(compute), full, strict=True))
    bounded = len(times) > 1 and len(computing) > 1
    return {
        "exposed_share": middle,
        "exposed_low": low if bounded else None,
        "exposed_high": high if bounded else None,
    }


def _shares(runs: _Runs) -> Row:
    """What each rank holds: tokens, and the peak of its memory."""
    peaks = _each_rank(runs, "peak", max)
    return {
        "tokens_per_rank": _whole(_largest(runs, "own_tokens")),
        "rank_peaks": peaks and [_whole(peak) for peak in peaks],
        "imbalance": _imbalance(peaks or []),
    }


def _imbalance(peaks: Sequence[float | None]) -> float | None:
    known = [peak for peak in peaks if peak]
    return max(known) / min(known) if len(known) == len(peaks) > 1 else None


_TRAFFIC = ("bytes_sent", "bytes_formula", "rank_bytes", "rank_formulas", "bytes_unlike")


def _traffic(rounds: _Runs) -> Row:
    """Bytes sent: counted and by formula, the largest rank's and each one's, and where they are
    not the same. Every round is looked at, so that one that differs is not hidden."""
    if rounds.together.keys().isdisjoint(("bytes_sent", "bytes_formula")):
        return dict.fromkeys(_TRAFFIC)
    pairs = [pair for named in rounds.named for pair in _counts(named)]
    counted, stated = (_each_rank(rounds, n, max) for n in ("bytes_sent", "bytes_formula"))
    return {
        "bytes_sent": _whole(_largest(rounds, "bytes_sent")),
        "bytes_formula": _whole(_largest(rounds, "bytes_formula")),
        "rank_bytes": counted and [_whole(size) for size in counted],
        "rank_formulas": stated and [_whole(size) for size in stated],
        "bytes_unlike": list(dict.fromkeys(p for p in pairs if p[1] != p[2])) if pairs else None,
    }


def _counts(named: _Named) -> Iterable[tuple[int, int, int]]:
    """(rank, bytes counted, bytes by formula) of each rank that has both."""
    if "bytes_sent" not in named or "bytes_formula" not in named:
        return
    counted, stated = (_by_rank(named[n]) for n in ("bytes_sent", "bytes_formula"))
    for rank in sorted(counted.keys() & stated.keys()):
        for one, other in zip(counted[rank], stated[rank], strict=False):
            if math.isfinite(one) and math.isfinite(other):
                yield rank, round(one), round(other)


def _add_scaling(table: Sequence[Row]) -> None:
    """Set speedup and efficiency: against the same trial on one rank, where it was timed."""
    alone: dict[Hashable, Row] = {}
    keys = [same_but_ranks(row) for row in table]
    for row, key in zip(table, keys, strict=True):
        if row["world_size"] == 1 and row["time_s"] is not None:
            alone.setdefault(key, row)
    for row, key in zip(table, keys, strict=True):
        row |= _scaling(row, alone.get(key))


def _add_standard(table: Sequence[Row]) -> None:
    """Set what standard attention takes, measured where it ran alone on the same workload, and
    how many times less the row does."""
    measured: dict[tuple[Any, ...], int] = {}
    for row in table:
        standard = row["implementation"] == STANDARD and row["world_size"] == 1
        standard = standard and (row["keep"], row["fit_only"]) == ("all", False)
        # of a timeout too a peak is that of a whole pass, and only its time was too long
        whole = row["status"] in ("ok", "timeout") and row["peak_bytes"] is not None
        if standard and whole:
            measured.setdefault(_workload_of(row), row["peak_bytes"])
    for row in table:
        peak = measured.get(_workload_of(row))
        known = row["status"] == "ok" and row["world_size"] == 1
        if peak is not None:
            row["dense_peak_bytes"] = peak
        row["dense_memory_source"] = "computed" if peak is None else "measured"
        row["memory_reduction"] = (
            ratio(row["dense_peak_bytes"], row["peak_bytes"]) if known else None
        )


def _scaling(row: Row, alone: Row | None) -> Row:
    if alone is None or not row["time_s"]:
        return dict.fromkeys(("speedup", "speedup_low", "speedup_high", "efficiency"))
    speedup = alone["time_s"] / row["time_s"]
    bounded = row["samples"] > 1 and alone["samples"] > 1 and row["time_low_s"] > 0
    return {
        "speedup": speedup,
        "speedup_low": alone["time_low_s"] / row["time_high_s"] if bounded else None,
        "speedup_high": alone["time_high_s"] / row["time_low_s"] if bounded else None,
        "efficiency": speedup / row["world_size"],
    }


def same_but_ranks(row: Row) -> Hashable:
    """Equal for rows, or for maxima, that differ in how many ranks they ran on only."""
    same = [row[name] for name in (*SAME_BUT_RANKS, *SAME_WORKLOAD) if name in row]
    return (*same, repr(sorted(row["options"].items())))


def per_iteration(record: Record, name: str) -> list[float]:
    """One sample an iteration: the largest over ranks, as the slowest rank is what one waits for.

    Iterations that not every rank of the trial finished are left out. In the measurement's own
    unit.
    """
    return _slowest(record, [m for m in record.outcome.measurements if m.name == name])


def _slowest(record: Record, taken: Sequence[Measurement] | None) -> list[float]:
    if not taken:
        return []
    if record.trial.world_size == len(taken) == 1:
        return list(taken[0].samples)
    ranks = _by_rank(taken)
    if len(ranks) < record.trial.world_size:
        return []
    return [max(together) for together in zip(*ranks.values(), strict=False)]


def _iterations(rounds: _Runs, name: str) -> list[float]:
    if name not in rounds.together:
        return []
    each = zip(rounds.records, rounds.named, strict=True)
    found = list(chain.from_iterable(_slowest(record, named.get(name)) for record, named in each))
    # of a sample that is no number nothing can be said, and so of none of them
    return found if all(map(math.isfinite, found)) else []


def _by_rank(taken: Iterable[Measurement]) -> dict[int, list[float]]:
    """Samples by rank, one run after the other."""
    ranks: dict[int, list[float]] = {}
    for measurement in taken:
        ranks.setdefault(measurement.rank, []).extend(measurement.samples)
    return ranks


def _each_rank(
    runs: _Runs, name: str, of: Callable[[list[float]], float]
) -> list[float | None] | None:
    """A figure a rank, in their order; None for a rank without, or where no rank has any."""
    taken = runs.together.get(name)
    if not taken:
        return None
    ranks = {rank: samples for rank, samples in _by_rank(taken).items() if samples}
    if not ranks:
        return None
    return [of(ranks[i]) if i in ranks else None for i in range(runs.records[0].trial.world_size)]


def _median_of(rounds: _Runs, name: str) -> float | None:
    samples = _iterations(rounds, name)
    return median(samples) if samples else None


def _largest(runs: _Runs, name: str) -> float | None:
    """The largest; not a number where any is not, which max() would hide by its order."""
    taken = runs.together.get(name)
    if not taken:
        return None
    known = [sample for one in taken for sample in one.samples]
    return math.nan if any(map(math.isnan, known)) else max(known, default=None)


def _whole(value: float | None) -> int | None:
    return None if value is None or not math.isfinite(value) else round(value)


def _failure(runs: Sequence[Record], length: int | None) -> Row:
    """What limited a search: the worst run of its first failed length."""
    outcomes = sorted((r.outcome for r in runs), key=lambda o: SEVERITY.index(o.status))
    worst = outcomes[0] if outcomes else None
    return {
        "first_failure": length,
        "limited_by": LIMITED_BY[worst.status] if worst else "ceiling",
        "failure_phase": worst.phase if worst else None,
        "failure_reason": worst.reason if worst else None,
    }


def _against_floor(trial: Trial, longest: int) -> Row:
    """The budget's floor in tokens, and the share of the budget that the maximum's floor takes."""
    if trial.memory_budget is None:
        return {"floor_tokens": None, "fraction_of_floor": None}
    needed = floor_bytes(trial.at(longest).workload) if longest else 0
    return {
        "floor_tokens": floor_tokens(trial.workload, trial.memory_budget, trial.world_size),
        "fraction_of_floor": needed / (trial.world_size * trial.memory_budget),
    }


def _first_prediction(steps: Sequence[Record]) -> int | None:
    asked = (r.predicted_tokens for r in steps if r.purpose in ("probe", "edge"))
    return next((tokens for tokens in asked if tokens is not None), None)


def _option(row: Row, name: str) -> str:
    value: OptionValue = row["options"].get(name, "")
    if type(value) is int:  # the most frequent, as JSON has it
        return str(value)
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return value if isinstance(value, str) else json.dumps(value)


def _workload_of(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in SAME_WORKLOAD)


def baseline_label(table: Sequence[Row], baseline: str) -> str:
    """The one label that a baseline means, among rows that have labels.

    Raises UnknownNameError where it means none, UserError where it means several.
    """
    labels: dict[str, str] = {row["label"]: row["implementation"] for row in table}
    if baseline in labels:
        return baseline
    named = [label for label, implementation in labels.items() if implementation == baseline]
    if len(named) > 1:
        several = ", ".join(map(repr, named))
        raise UserError(f"baseline {baseline!r} may mean {several}; name one of them")
    if not named:
        known = {*labels, *labels.values()}
        raise UnknownNameError("baseline", baseline, known, place="the results")
    return named[0]


def _speed(row: Row, times: dict[int, float]) -> float | None:
    if row["status"] != "ok" or not row["time_s"] or not times:
        return None
    return times.get(row["world_size"], times[min(times)]) / float(row["time_s"])


def _frame(table: list[Row], fields: Sequence[str]) -> pandas.DataFrame:
    import pandas

    return pandas.DataFrame([[row[name] for name in fields] for row in table], columns=list(fields))


def _missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _json(row: Row, fields: Sequence[str]) -> Row:
    def finite(value: Any) -> Any:
        if isinstance(value, list):
            return [finite(one) for one in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return {name: finite(row[name]) for name in fields}
