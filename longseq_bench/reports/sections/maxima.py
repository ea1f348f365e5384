"""Longest lengths: a table a workload, a row a search."""

from __future__ import annotations

from collections.abc import Iterator

from longseq_bench.analysis.row import require
from longseq_bench.analysis.search_row import SearchRow
from longseq_bench.reports import section_charts
from longseq_bench.reports.base import Source
from longseq_bench.reports.document import Section
from longseq_bench.reports.fields import Field, of_ranks, plain, rows_table
from longseq_bench.reports.groups import grouped, spread_out

_MAXIMA = (
    plain("Implementation", "text", "label"),
    of_ranks("Ranks", "count", "world_size"),
    plain("Max tokens", "tokens", "max_tokens"),
    plain("Memory alone", "tokens", "fits_tokens", False),
    plain("Elsewhere", "count", "published_tokens", False),
    Field("Times that", "ratio", lambda row: _beside(row), False),
    of_ranks("Tokens a rank", "tokens", "tokens_per_rank"),
    plain("First failure", "tokens", "first_failure"),
    plain("Limited by", "text", "limited_by"),
    plain("Phase", "text", "failure_phase"),
    plain("Fraction of floor", "share", "fraction_of_floor"),
    plain("Peak memory", "bytes", "peak_bytes"),
    Field("Least peak", "bytes", lambda row: row.least_peak_bytes, False, True),
    of_ranks("Imbalance", "ratio", "imbalance"),
    plain("Bytes/token", "bytes", "bytes_per_token"),
    plain("Predicted", "tokens", "predicted_tokens"),
    plain("Runs", "count", "runs"),
    plain("Confirmations", "count", "confirmations"),
)


def maxima(source: Source) -> Section:
    """A table a workload of every search, and their bars."""
    said = [
        "Max tokens is the longest length of which every run passed, first failure the shortest "
        "failed one above it. Fraction of floor: the bytes that no exact attention can do without "
        "at that length, over the budget. Confirmations are further passes in fresh processes."
    ]
    if spread_out(source.maxima):
        said.append(
            "With several ranks: max tokens are those of all ranks, tokens a rank the most that "
            "one holds; the floor is set against the budgets of all ranks together; budget, peak "
            "and bytes/token (peak over all tokens) are a rank's, imbalance is the largest peak "
            "over the least."
        )
    said += list(_settings_said(source))
    groups = grouped(source.maxima)
    tables = [rows_table(g, source, _MAXIMA) for g in groups]
    pictures = section_charts.maxima(source)
    return Section("Longest lengths", said, tables=tables, charts=pictures)


def _settings_said(source: Source) -> Iterator[str]:
    """What settings make of a maximum that must not be taken for another."""
    rows = source.maxima
    if any(row.fit_only for row in rows):
        yield (
            "Fits only, and memory alone: passes whose loops were cut short, under the same "
            "budget; whether memory is there is known, and nothing was checked or timed."
        )
    if any(row.keep == "inputs" for row in rows):
        yield (
            "Recomputed: between forward and backward only q, k and v are kept; what forward left "
            "is computed again."
        )
    if any(row.keep == "nothing" for row in rows):
        yield (
            "Over its inputs: results lie where inputs did that are no longer needed, so it takes "
            "less than the floor, which counts both."
        )
    if any(row.options.get("offload", "none") != "none" for row in rows):
        yield (
            "Offloaded: q, k, v and the output lie in the host's memory, so the device's budget "
            "and the floor don't bound their length."
        )
    if any(row.published_tokens is not None for row in rows):
        yield f"Elsewhere: {source.elsewhere_said}."


def _beside(row: SearchRow) -> float | None:
    """Of what was run as a whole and left its inputs alone."""
    alike = row.published_tokens and not row.fit_only and row.keep != "nothing"
    return row.max_tokens / require(row.published_tokens) if alike else None
