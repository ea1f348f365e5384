"""Rows of sweeps: the rounds and ranks of each measured trial merged into one row.

The time of a row is always a measured `time`: the single pass of a fit probe (`pass_time`) is not
used, and a trial that is not ok in every round has no time.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from statistics import median
from typing import Any

from longseq_bench.analysis.labels import Labels, index_short_labels, settings_key
from longseq_bench.analysis.row import SAME_TRIAL, SAME_WORKLOAD, fields_of, identity
from longseq_bench.analysis.runs import (
    SEVERITY,
    Runs,
    are_finite,
    busy_threads,
    find_check_limits,
    find_instability,
    group_by,
    imbalance,
    largest_over_mean,
    slowest,
)
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.cost import attention_flops, floor_bytes, mask_pairs, ratio
from longseq_bench.core.model import SDPA, Record, Workload, options_key
from longseq_bench.core.stats import median_interval

STANDARD = "dense"
"""The implementation whose memory is that of standard attention."""

Values = dict[str, Any]
"""Values of some fields of a row, by field name."""


def _merge_rules() -> dict[str, list[tuple[str, Callable[[Runs, str], float | None]]]]:
    """Return the fields that each measurement gives, and the methods that merge their samples."""
    rules: dict[str, list[tuple[str, Callable[[Runs, str], float | None]]]] = defaultdict(list)
    for field in fields_of(SweepRow).values():
        if field.merge == "median":
            rules[field.measurement].append((field.name, Runs.median))
        elif field.merge == "largest":
            merge = Runs.largest_size if field.kind in ("bytes", "tokens") else Runs.largest
            rules[field.measurement].append((field.name, merge))
    return rules


_MERGES = _merge_rules()
_UNMEASURED: Values = dict.fromkeys(field for rules in _MERGES.values() for field, _ in rules)


def sweep_rows(records: Iterable[Record], labels: Labels | None = None) -> list[SweepRow]:
    """Return one row per measured trial, its interleaved rounds merged, in file order.

    Records of purpose "measure" that differ only in round and seed, in one environment, are one
    row. The interval of a time is the 95 % interval of the median, or the whole range of fewer
    than 6 samples.  labels: by settings_key; those of these rows if None.
    """
    return [row for row, _ in sweep_rows_with_records(records, labels)]


def sweep_rows_with_records(
    records: Iterable[Record], labels: Labels | None = None
) -> list[tuple[SweepRow, list[Record]]]:
    """Return the rows of `sweep_rows`, each with the records that it merges."""
    measured = (record for record in records if record.purpose == "measure")
    groups = group_by(
        measured, lambda r: (r.trial.key_without("round", "seed"), r.environment.fingerprint)
    ).values()
    busy, merged = busy_threads(record for group in groups for record in group), []
    for group in groups:
        runs = Runs(group)
        merged.append(row := _merge(runs))
        if row["status"] == "ok":
            row["unstable"] = find_instability(runs, busy[row["fingerprint"]])
    if labels is None:
        labels = index_short_labels([group[0].trial for group in groups])
    timed = [row for row in merged if row["world_size"] == 1 and row["time_s"] is not None]
    on_one_rank = {_ranks_key(row): row for row in reversed(timed)}
    standard = _standard_peaks(merged)
    for row, group in zip(merged, groups, strict=True):
        row["label"] = labels[settings_key(group[0].trial)]
        row |= _scaling(row, on_one_rank.get(_ranks_key(row)))
        row |= _against_standard(row, standard.get(_workload_key(row)))
    return [(SweepRow(**row), group) for row, group in zip(merged, groups, strict=True)]


_workload_key, _trial_key = itemgetter("tokens", *SAME_WORKLOAD), itemgetter(*SAME_TRIAL)


def _ranks_key(values: Values) -> Hashable:
    return _workload_key(values), _trial_key(values), options_key(values["options"])


def merge_trial(records: Sequence[Record]) -> SweepRow:
    """Merge all rounds of a trial, without the fields that depend on other rows."""
    return SweepRow(**_merge(Runs(records)))


def _merge(runs: Runs) -> Values:
    worst = min(runs.records, key=lambda record: SEVERITY.index(record.outcome.status))
    workload, status = worst.trial.workload, worst.outcome.status
    timed = runs if status == "ok" else Runs([])
    measured = {
        field: merge(timed if merge is Runs.median else runs, name)
        for name in runs.measured
        for field, merge in _MERGES.get(name, ())
    }
    low, _, high = timed.interval("time")
    peaks, shares = runs.each_rank_size("peak"), runs.each_rank("work_share", max)
    values: Values = {
        **identity(worst),
        "tokens": workload.seq_len,
        "mask_density": mask_pairs(workload) / (len(workload.queries) * workload.seq_len),
        "status": status,
        "reason": worst.outcome.reason,
        "phase": worst.outcome.phase,
        "check_limits": find_check_limits(runs.records),
        **_UNMEASURED,
        **measured,
        "time_low_s": low,
        "time_high_s": high,
        "samples": len(timed.iterations("time")),
        "rank_times": timed.each_rank("time", median),
        # layouts are prepared, and timed, also where a pass fails later
        "plan_time_s": runs.median("plan_time"),
        "rank_peaks": peaks,
        "imbalance": imbalance(peaks or []),
        "work_imbalance": largest_over_mean(shares or []),
        "dense_peak_bytes": standard_bytes(workload),
    }
    values |= _traffic(runs) | _rates(values, workload, _peak_rate(timed))
    return values | _against_dense(values, timed)


def standard_bytes(workload: Workload) -> int:
    """Return the peak bytes of standard attention: several score matrices of S = B Hq N² b bytes.

    Forward: q, k, v and out (the floor), plus scores and weights: 2 S. Train: q, k, v, out, the
    gradients of out and v, plus weights, their gradient and that of the scores: 3 S. With a mask N²
    more bytes, for its pairs. The peak of attention/exact/sdpa.py on a CPU is within 0.5 % of it
    at 2,048 tokens and 4 heads.
    """
    w = workload
    pairs = len(w.queries) * w.seq_len
    scores = w.batch * w.heads * pairs * w.dtype_bytes
    tensors, copies = floor_bytes(w), 2
    if w.decode:  # q and the output
        tensors += w.batch * w.heads * w.new_tokens * (w.head_dim + w.v_head_dim) * w.dtype_bytes
    if w.train:
        # q, out and its gradient; k, v and its gradient
        elements = (w.heads + w.kv_heads) * (w.head_dim + 2 * w.v_head_dim)
        tensors = w.seq_len * w.batch * w.dtype_bytes * elements
        copies = 3
    return tensors + copies * scores + (pairs if w.causal or w.mask else 0)


def _traffic(runs: Runs) -> Values:
    """Return the bytes of ranks that differ from their formula: rank, counted, by formula.

    Every round is compared, so that a round that differs is not hidden by the others.
    """
    sides = runs.by_run("bytes_sent"), runs.by_run("bytes_formula")
    counts = [
        (rank, *map(round, both))
        for sent, stated in zip(*sides, strict=True)
        for rank in sorted(sent.keys() & stated.keys())
        for both in zip(sent[rank], stated[rank], strict=False)
        if are_finite(both)  # errors of a failed trial may be infinite
    ]
    unlike = list(dict.fromkeys(one for one in counts if one[1] != one[2]))
    return {"bytes_unlike": unlike if counts else None}


_CLOCKED = "matmul_rate", "sm_clock", "matmul_sm_clock"
SAME_CLOCK = 0.03
"""SM clocks that differ by less are equal: they step by 15 MHz, and are read between passes."""


def _peak_rate(runs: Runs) -> float | None:
    """Return the highest rate of matrix products, at the SM clock of the passes of its round."""
    found = []
    for of_round in zip(*map(runs.by_run, _CLOCKED), strict=True):
        rates, *clocks = (list(chain(*ranks.values())) for ranks in of_round)
        change = (ratio(*map(median, clocks)) if all(clocks) else None) or 1.0
        found += [r * change if abs(change - 1) > SAME_CLOCK else r for r in rates]
    return max(found, default=None)


def _rates(values: Values, workload: Workload, peak_rate: float | None) -> Values:
    time_s, flops = values["time_s"], values["flops"]
    computing = ratio(values["compute_time_s"], time_s)
    dense = attention_flops(workload)
    # both include a module's projections, which have no pairs
    projections = (values["dense_flops"] or dense) - dense
    is_known = values["density_achieved"] is not None and flops is not None
    rate, read_rate = ratio(flops, time_s), ratio(values["bytes_to_read"], time_s)
    return {
        "tokens_per_s": workload.batch * len(workload.queries) / time_s if time_s else None,
        "exposed_share": None if computing is None else max(0.0, 1 - computing),
        "effective_flops": rate,
        "share_of_peak": ratio(rate, peak_rate),
        "share_of_bandwidth": ratio(read_rate, values["copy_bandwidth"]),
        "token_density": ratio(flops - projections, dense) if is_known else None,
    }


def _against_dense(values: Values, runs: Runs) -> Values:
    """Return dense attention's time on the same inputs, and the row's own relative to it."""
    source, times = _dense_times(runs)
    if not times:
        return {}
    facts = (r.outcome.facts for r in runs.records if r.outcome.facts.get("dense") == source)
    low, middle, high = median_interval(times)
    has_interval = len(times) > 1 and values["samples"] > 1
    dense_flops = values["dense_flops"] or attention_flops(runs.records[0].trial.workload)
    density = ratio(values["flops"], dense_flops)

    def share(dense_s: float, own_s: float | None) -> float | None:
        # 1 if skipped pairs cost nothing
        return None if density is None else ratio(dense_s * density, own_s)

    return {
        "dense_time_s": middle,
        "dense_low_s": low,
        "dense_high_s": high,
        "dense_source": source,
        # records of earlier versions have torch's own choice
        "dense_kernel": str(next(facts, {}).get("dense_kernel", SDPA)),
        "speed_over_dense": ratio(middle, values["time_s"]),
        "share_of_ideal": share(middle, values["time_s"]),
        "share_low": share(low, values["time_high_s"]) if has_interval else None,
        "share_high": share(high, values["time_low_s"]) if has_interval else None,
    }


def _dense_times(runs: Runs) -> tuple[str | None, list[float]]:
    """Return the source of dense times, and the times of that source.

    If the sources of rounds differ, measured full passes are preferred to computed times.
    """
    times: dict[str, list[float]] = defaultdict(list)
    for record, ranks in zip(runs.records, runs.by_run("dense_time"), strict=True):
        if found := slowest(ranks, record.trial.world_size):
            times[str(record.outcome.facts.get("dense", "not recorded"))] += found
    source = "measured" if "measured" in times else next(iter(times), None)
    return source, times[source] if source else []


def _scaling(row: Values, one_rank: Values | None) -> Values:
    if one_rank is None or not row["time_s"]:
        return {}
    speedup = one_rank["time_s"] / row["time_s"]
    values: Values = {"speedup": speedup, "efficiency": speedup / row["world_size"]}
    if row["samples"] > 1 and one_rank["samples"] > 1 and row["time_low_s"]:
        values["speedup_low"] = ratio(one_rank["time_low_s"], row["time_high_s"])
        values["speedup_high"] = ratio(one_rank["time_high_s"], row["time_low_s"])
    return values


def _standard_peaks(rows: Sequence[Values]) -> Mapping[Hashable, int]:
    kind = itemgetter("implementation", "world_size", "keep", "fit_only")
    measured: dict[Hashable, int] = {}
    for row in rows:
        # a timeout has the peak of a full pass; only its time was too long
        is_full = row["status"] in ("ok", "timeout") and row["peak_bytes"] is not None
        if is_full and kind(row) == (STANDARD, 1, "all", False):
            measured.setdefault(_workload_key(row), row["peak_bytes"])
    return measured


def _against_standard(row: Values, measured: int | None) -> Values:
    """Return the memory of standard attention, and its ratio to the row's peak."""
    peak = row["dense_peak_bytes"] if measured is None else measured
    is_known = row["status"] == "ok" and row["world_size"] == 1
    return {
        "dense_peak_bytes": peak,
        "dense_memory_source": "computed" if measured is None else "measured",
        "memory_reduction": ratio(peak, row["peak_bytes"]) if is_known else None,
    }
