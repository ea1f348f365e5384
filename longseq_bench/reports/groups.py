"""Groups of rows that may be compared, and their descriptions."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from operator import attrgetter

from longseq_bench.analysis.row import R, Row
from longseq_bench.core.units import format_bytes, format_seconds, format_share

SAME_TABLE = (
    "fingerprint", "device", "mode", "dtype", "causal", "batch", "heads", "kv_heads", "head_dim",
    "memory_budget", "time_budget", "threads", "fit_only",
)  # fmt: skip


NEAR = 0.9
"""Share of the highest density; rows at or above it are treated as equally sparse."""


table_key: Callable[[Row], Hashable] = attrgetter(*SAME_TABLE)
"""Key that is equal for rows of one table."""


def group_by_workload(rows: Iterable[R]) -> list[list[R]]:
    """Rows that differ in length, implementation and ranks only, in order of first appearance."""
    groups: dict[Hashable, list[R]] = {}
    for row in rows:
        groups.setdefault(table_key(row), []).append(row)
    return list(groups.values())


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
    """Group rows by their number of ranks, ascending: only rows on equally many are compared."""
    found: dict[int, list[R]] = defaultdict(list)
    for row in rows:
        found[row.world_size].append(row)
    return dict(sorted(found.items()))


def ranks_suffix(ranks: int) -> str:
    """Return " on 2 ranks"; "" for one rank."""
    return f" on {ranks} ranks" if ranks > 1 else ""


def has_several_ranks(rows: Iterable[Row]) -> bool:
    """Return True if any row ran on several ranks."""
    return any(row.world_size > 1 for row in rows)


def group_by_density(rows: Iterable[R]) -> list[list[R]]:
    """Group rows that skip about as much, the densest group first.

    A group has the rows whose density is at least NEAR of its densest row's, in the order given.
    """
    found: list[list[R]] = []
    rest = list(rows)
    while rest:
        least = NEAR * max(row.density for row in rest)
        found.append([row for row in rest if row.density >= least])
        rest = [row for row in rest if row.density < least]
    return found


def density_suffix(rows: Sequence[Row]) -> str:
    """Return the range of densities: " of density 9.4 % to 10.0 %"; "" for exact attention."""
    kept = [row.density for row in rows]
    ends = dict.fromkeys(format_share(one) for one in (min(kept), max(kept)))
    return f" of density {' to '.join(ends)}" if rows[0].is_sparse else ""


def split_by_sparsity(rows: Iterable[R]) -> dict[str, list[R]]:
    """Split rows into "exact" and "sparse"; a group without rows is left out.

    The two compute different things, so they are not compared with each other.
    """
    found: dict[str, list[R]] = {"exact": [], "sparse": []}
    for row in rows:
        found["sparse" if row.is_sparse else "exact"].append(row)
    return {what: some for what, some in found.items() if some}
