"""The `compare --json` document: SI units, null for values that are unknown or not finite."""

from dataclasses import asdict
from typing import Any

from longseq_bench.analysis.searches import SearchRow
from longseq_bench.comparison.model import Comparison, TimeComparison
from longseq_bench.comparison.summary import find_regressions, summarize
from longseq_bench.comparison.verdict import decide
from longseq_bench.comparison.wording import ComparedRow
from longseq_bench.reports.render.json import finite

SCHEMA = 1
_IDENTITY = (
    "implementation", "options", "tokens", "device", "world_size", "dtype", "mode", "new_tokens",
    "causal", "mask", "batch", "heads", "kv_heads", "head_dim", "v_head_dim", "model", "threads",
    "memory_budget", "time_budget", "fit_only", "keep", "allocator", "requested_dense_kernel",
)  # fmt: skip


def json_document(result: Comparison, fail_on: float | None) -> dict[str, Any]:
    """Return the comparison as data; fail_on: the smallest share listed in `worse`."""
    verdict = decide(result, fail_on)
    document: dict[str, Any] = finite({
        "schema": SCHEMA,
        "verdict": verdict.word,
        "reason": verdict.reason,
        "rounds_enough": verdict.rounds,
        "a": result.a,
        "b": result.b,
        "level": result.level,
        "least": result.min_change,
        "fail_on": fail_on,
        "worse": None if fail_on is None else list(find_regressions(result, fail_on)),
        "summary": summarize(result),
        "notes": result.caveats,
        "times": [_time(result, t) for t in result.times],
        "peaks": [_flatten(result, one) for one in result.peaks],
        "maxima": [_flatten(result, one) for one in result.maxima],
        "turned": [_flatten(result, one) for one in result.status_changes],
        "failed_alike": result.failed_alike,
        "only_a": [_identify(result, row) for row in result.only_a],
        "only_b": [_identify(result, row) for row in result.only_b],
        "unlike_machines": [_identify(result, row) for row in result.other_machines],
        "differences": [asdict(one) for one in result.differences],
    })  # fmt: skip
    return document


def _time(result: Comparison, t: TimeComparison) -> dict[str, Any]:
    sides = {
        f"{side}{suffix}": getattr(row, name)
        for side, row in (("a", t.a), ("b", t.b))
        for suffix, name in (("_s", "time_s"), ("_low_s", "time_low_s"), ("_high_s", "time_high_s"))
    }
    names = ("a_rounds", "b_rounds", "ratio", "verdict", "reason", "note")
    fields = _identify(result, t.row) | sides | {name: getattr(t, name) for name in names}
    estimated = {
        "low": "low", "high": "high", "p": "p_value", "adjusted": "adjusted_p",
        "seen_from": "detectable", "free": "degrees_of_freedom",
    }  # fmt: skip
    return fields | {name: getattr(t.estimate, field, None) for name, field in estimated.items()}


def _flatten(result: Comparison, one: Any) -> dict[str, Any]:
    fields = asdict(one)
    del fields["row"]
    return _identify(result, one.row) | fields


def _identify(result: Comparison, row: ComparedRow) -> dict[str, Any]:
    values = {name: getattr(row, name) for name in _IDENTITY}
    values["label"] = result.program_label(row)
    return values | {"tokens": None} if isinstance(row, SearchRow) else values
