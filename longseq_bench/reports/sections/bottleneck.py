"""Bottlenecks by measurement: memory, compute or communication."""

from collections import Counter
from collections.abc import Iterable
from operator import attrgetter

from longseq_bench.analysis.row import require
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.units import format_share
from longseq_bench.reports.base import SWEEP_RANKS, Source
from longseq_bench.reports.columns import Columns, ValueColumn
from longseq_bench.reports.document import Section
from longseq_bench.reports.sections.findings import describe_limit

MAX_CAUSES = 4
"""Maximum number of bottlenecks in a sentence; the tables have all."""
_EXPLANATION = (
    "Trials: communication if it adds more than half of the time, compute if it adds less, either "
    "if the interval includes one half. Searches: the limit of the first failure."
)


def bottleneck(source: Source) -> Section:
    """Build a row per trial or search on several ranks: its bottleneck, and the evidence."""
    swept = find_timed(source)
    found = [r for r in source.maxima if r.world_size > 1 and r.is_full_pass]
    tables = [
        *source.tables(swept, _SWEPT), *source.tables(found, _SEARCHED, "longest lengths")
    ]  # fmt: skip
    points = [
        *_count("trials on several ranks", map(find_bottleneck, swept)),
        *_count("searches on several ranks", (str(row.limited_by) for row in found)),
    ]
    missing = "trial on several ranks with separately timed communication", SWEEP_RANKS
    return Section("Bottlenecks", [_EXPLANATION], points, tables, missing=missing)


def find_timed(source: Source) -> list[SweepRow]:
    """Return the trials on several ranks whose communication was timed separately."""
    return [r for r in source.rows if r.world_size > 1 and r.exposed_share is not None]


def _count(kind: str, found: Iterable[str]) -> list[str]:
    """Return a sentence with the number of each bottleneck, the most frequent first; or none."""
    counts = Counter(found)
    words = ", ".join(f"{name} in {n:,}" for name, n in counts.most_common(MAX_CAUSES))
    return [f"Of {counts.total():,} {kind}: {words}."] if counts else []


def find_bottleneck(row: SweepRow) -> str:
    """Name the bottleneck of a row, by the share of its time that communication adds."""
    low, high = row.exposed_low, row.exposed_high
    if low is not None and high is not None and low < 0.5 < high:
        return "either"
    return "communication" if require(row.exposed_share) > 0.5 else "compute"


def _evidence(row: SweepRow) -> str:
    words = f"exposed {format_share(require(row.exposed_share))}"
    if find_bottleneck(row) != "either":
        return words
    low, high = format_share(require(row.exposed_low)), format_share(require(row.exposed_high))
    return f"{words} ({low} to {high})"


_SWEPT: Columns = (
    "label", "world_size", "tokens", "time_s", "compute_time_s", "communication_time_s",
    "exposed_share", ValueColumn("Bottleneck", "text", find_bottleneck),
    ValueColumn("By", "text", _evidence),
)  # fmt: skip
_SEARCHED: Columns = (
    "label", "world_size", ValueColumn("Tokens", "tokens", lambda row: row.max_tokens or None),
    ValueColumn("Bottleneck", "text", attrgetter("limited_by")),
    ValueColumn("By", "text", describe_limit),
)  # fmt: skip
