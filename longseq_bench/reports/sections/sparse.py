"""Sparse attention: the skipped share of the pairs, and the time saved by it."""

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter

from longseq_bench.analysis.row import require
from longseq_bench.analysis.runs import group_by
from longseq_bench.analysis.scaling import HIGH_EFFICIENCY
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.cost import ratio
from longseq_bench.core.units import format_share, format_tokens
from longseq_bench.reports import charts
from longseq_bench.reports.base import Source
from longseq_bench.reports.columns import Columns, ValueColumn, optional
from longseq_bench.reports.document import MAX_FINDINGS, Section, Spread, format_ratio
from longseq_bench.reports.sections.segments import Partners, segmented
from longseq_bench.reports.wording import format_range

TITLE = "Sparse and dilated attention"
MAX_LENGTHS = 3
"""Maximum number of lengths with a finding: those with the most rows."""
_EXPLANATION = (
    "Density of pairs: computed pairs divided by those of dense attention; a pair computed twice "
    "counts twice. Achieved density of swept lengths: kept share of the visible blocks, or pairs.",
    "Dense time: exact attention by the kernel in Dense kernel, on the same inputs, in turn with "
    "the sparse passes, on one rank only. Share of ideal: dense time times the density of the work "
    "divided by the time; 100 %: skipped work costs nothing.",
    "Preparation time: not part of Time, except for patterns that depend on the inputs.",
)


def sparse(source: Source) -> Section:
    """Build a table per workload of the sparse rows, and a map of their speeds over dense."""
    rows = [row for row in source.rows if row.is_sparse]
    with_sparsity = [row for row in source.rows if "sparsity" in row.options]
    drawn = [
        *charts.of_each_workload(source, with_sparsity, charts.speed_over_dense),
        *charts.share_of_ideal(source, rows),
    ]
    return Section(
        TITLE,
        [*_EXPLANATION, *_explain_high_share(rows)],
        points=_findings(rows, segmented(source.rows)),
        tables=source.tables(rows, _COLUMNS),
        charts=drawn[: charts.MAX_CHARTS],
    )


def _findings(sparse_rows: Sequence[SweepRow], dilated: Sequence[SweepRow]) -> list[str]:
    """Return what sparsity and dilation bring; of many findings the shortest and longest length."""
    lengths, others = list(_over_dense(sparse_rows)), list(_of_dilation(dilated))
    if len(lengths) + len(others) > MAX_FINDINGS:
        lengths = [lengths[0], lengths[-1]]
    return lengths + others


def _over_dense(rows: Sequence[SweepRow]) -> Iterator[str]:
    """Yield a finding per length on the speeds over dense attention."""
    by_length = group_by((r for r in rows if r.speed_over_dense), attrgetter("tokens"))
    most = sorted(by_length, key=lambda tokens: (-len(by_length[tokens]), tokens))
    for tokens in sorted(most[:MAX_LENGTHS]):
        speeds = [require(row.speed_over_dense) for row in by_length[tokens]]
        at, dense = f"At {format_tokens(tokens)} tokens", "dense attention"
        if any(row.dense_source != "measured" for row in by_length[tokens]):
            dense += ", whose time is partly computed"
        yield _describe(at, "sparse", speeds, dense)


def _of_dilation(rows: Sequence[SweepRow]) -> Iterator[str]:
    """Yield a finding on the speed of dilation, and one on that of the Hilbert curve."""
    partners = Partners(rows)
    speedups: tuple[tuple[str, str, Callable[[SweepRow], Spread | float | None], str], ...] = (
        ("Dilation", "dilated", partners.over_undilated, "the same segments with every rate 1"),
        ("Hilbert curve", "hilbert", partners.over_sequence, "the same segments in sequence order"),
    )
    for start, kind, speedup, reference in speedups:
        known = [(row, found) for row in rows if (found := speedup(row)) is not None]
        if known:
            speeds = [one.value if isinstance(one, Spread) else one for _, one in known]
            shares = [_pairs_kept(partners, row) for row, _ in known] if kind == "dilated" else []
            pairs = [share for share in shares if share is not None]
            yield _describe(start, kind, speeds, reference, pairs)
        if kind == "dilated":
            yield from _without_keys([row for row, _ in known])


def _without_keys(rows: Sequence[SweepRow]) -> Iterator[str]:
    """Yield a finding on the tokens to which dilated rows give no output, if there are any."""
    shares = [row.uncovered for row in rows if row.uncovered]
    if shares:
        share = format_range(shares, format_share)
        yield (
            f"Dilation: {share} of (token, head) pairs see no key in {len(shares):,} of these "
            f"{len(rows):,} rows; their output is zero."
        )


def _pairs_kept(partners: Partners, row: SweepRow) -> float | None:
    """Return the share of the pairs of the same segments without dilation that a row computes."""
    return ratio(row.token_density, require(partners.undilated(row)).token_density)


def _describe(
    start: str, kind: str, speeds: Sequence[float], reference: str, pairs: Sequence[float] = ()
) -> str:
    count = f"{len(speeds):,} {kind} row{'s' * (len(speeds) != 1)}"
    has = "have" if len(speeds) != 1 else "has"
    speed = format_range(speeds, format_ratio)
    share = f", with {format_range(pairs, format_share)} of its pairs" if pairs else ""
    return f"{start}: {count} {has} {speed} the speed of {reference}{share}."


def _explain_high_share(rows: Sequence[SweepRow]) -> list[str]:
    """Return a sentence on the highest share of ideal above 110 %; nothing without one."""
    row = max(rows, key=lambda row: row.share_of_ideal or 0.0, default=None)
    share = row.share_of_ideal if row else None
    if row is None or share is None or share <= HIGH_EFFICIENCY:
        return []
    return [
        f"Share of ideal above 110 % ({row.name} at {format_tokens(row.tokens)} tokens: "
        f"{format_share(share)}): its kernel does more FLOPs per second than the "
        "dense baseline's, or other load slowed the dense passes."
    ]


def _share_words(row: SweepRow) -> str | None:
    """Return the share of ideal, with its bounds if they are known."""
    if row.share_of_ideal is None:
        return None
    share = format_share(row.share_of_ideal)
    if row.share_low is None:
        return share
    return f"{share} ({format_share(row.share_low)} to {format_share(require(row.share_high))})"


_COLUMNS: Columns = (
    ValueColumn("Implementation", "text", attrgetter("name")), "tokens", "token_density",
    "plan_time_s", "time_s", "dense_time_s", "dense_source", "dense_kernel", "speed_over_dense",
    ValueColumn("Share of ideal", "text", _share_words), *optional(SweepRow, "share_of_peak"),
)  # fmt: skip
