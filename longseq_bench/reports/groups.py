"""Groups of rows that may be compared, and their descriptions."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from operator import attrgetter

from longseq_bench.analysis.grouping import group_by
from longseq_bench.analysis.row import R, Row
from longseq_bench.core.units import format_bytes, format_seconds, format_share
from longseq_bench.reports.wording import format_range

SAME_TABLE = (
    "fingerprint", "device", "mode", "dtype", "causal", "batch", "heads", "kv_heads", "head_dim",
    "memory_budget", "time_budget", "threads", "fit_only",
)  # fmt: skip
SIMILAR_DENSITY = 0.9
"""Fraction of the highest density; rows at or above it are treated as equally sparse."""

table_key: Callable[[Row], Hashable] = attrgetter(*SAME_TABLE)
"""Key that is equal for rows of one table."""


def group_by_workload(rows: Iterable[R]) -> list[list[R]]:
    """Group rows that differ in length, implementation and ranks only, in order of appearance."""
    return list(group_by(rows, table_key).values())


def describe_workload(row: Row, machines: Mapping[str, str]) -> str:
    """Describe a group in words: "forward, float32, causal, batch 1, 8 heads of 64, cpu"."""
    heads = f"{row.heads} heads of {row.head_dim}"
    if row.kv_heads != row.heads:
        heads += f" ({row.kv_heads} for k, v)"
    mask = "causal" if row.causal else "not causal"
    words = [row.mode, row.dtype, mask, f"batch {row.batch}", heads, row.device]
    if row.threads:
        words.append(f"{row.threads} thread{'s' if row.threads > 1 else ''} a rank")
    if row.memory_budget:
        words.append(f"{format_bytes(row.memory_budget)} budget a rank")
    if row.time_budget:
        words.append(f"{format_seconds(row.time_budget)} a pass at most")
    if machines[row.fingerprint]:
        words.append(f"machine {machines[row.fingerprint]}")
    return ", ".join(words)


def capitalize_first(words: str) -> str:
    """Return the words with a capital first letter."""
    return words[0].upper() + words[1:]


def group_by_ranks(rows: Iterable[R]) -> dict[int, list[R]]:
    """Group rows by their number of ranks, ascending: only rows of one group are compared."""
    return dict(sorted(group_by(rows, lambda row: row.world_size).items()))


def ranks_suffix(ranks: int) -> str:
    """Return " on 2 ranks"; "" for one rank."""
    return f" on {ranks} ranks" if ranks > 1 else ""


def has_several_ranks(rows: Iterable[Row]) -> bool:
    """Return True if any row ran on several ranks."""
    return any(row.world_size > 1 for row in rows)


def longest_shared(rows: Iterable[R]) -> list[R]:
    """Return the rows of the longest length that several have; else of the longest."""
    by_length = group_by(rows, attrgetter("tokens"))
    shared = [tokens for tokens, some in by_length.items() if len(some) > 1]
    return by_length[max(shared or by_length)]


def group_by_density(rows: Iterable[R]) -> list[list[R]]:
    """Group rows of similar density, the densest group first.

    The rows of a group have at least SIMILAR_DENSITY of its highest density, in input order.
    """
    found: list[list[R]] = []
    rest = list(rows)
    while rest:
        minimum = SIMILAR_DENSITY * max(row.density for row in rest)
        found.append([row for row in rest if row.density >= minimum])
        rest = [row for row in rest if row.density < minimum]
    return found


def density_suffix(rows: Sequence[Row]) -> str:
    """Return the range of densities: " of density 9.4 % to 10.0 %"; "" for exact attention."""
    ends = format_range([row.density for row in rows], format_share)
    return f" of density {ends}" if rows[0].is_sparse else ""


def split_by_sparsity(rows: Iterable[R]) -> dict[str, list[R]]:
    """Split rows into "exact" and "sparse"; a group without rows is left out.

    The two compute different things, so they are not compared with each other.
    """
    found = group_by(rows, lambda row: "sparse" if row.is_sparse else "exact")
    return dict(sorted(found.items()))
