"""Segments and dilation: the speed by dilation, and the speed along the Hilbert curve."""

from collections.abc import Hashable, Iterable
from operator import attrgetter

from longseq_bench.analysis.row import Row
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.cost import ratio
from longseq_bench.reports.base import Source
from longseq_bench.reports.columns import Columns, ValueColumn, time_ratio
from longseq_bench.reports.document import Section, Spread
from longseq_bench.reports.groups import table_key
from longseq_bench.reports.sections import gains
from longseq_bench.reports.sections.gains import Reference

ALONG, CURVE = "dilated", "hilbert"
"""Implementations with the same segments and rates: along the sequence, and along the curve."""

_EXPLANATION = (
    "Speed of dilation: time of the same segments with every rate 1 divided by the row's time. "
    "Pairs without, times: pairs of those segments divided by the row's pairs.",
    "Speed of the curve: time of the same segments along the sequence divided by the row's time.",
    "Pairs seen: share of the pairs of dense attention. Uncovered: share of the (token, head) "
    "pairs without any key.",
)


def segments(source: Source) -> Section:
    """Build tables of times by segments and dilation, with the effects of dilation and curve."""
    rows = segmented(source.rows)
    found = [row for row in source.maxima if _is_segmented(row) and row.is_full_pass]
    partners = Partners(rows)

    def pairs_ratio(row: SweepRow) -> float | None:
        partner = partners.undilated(row)
        return ratio(partner.token_density, row.token_density) if partner else None

    columns: Columns = (
        *_CONFIGURATION, "tokens", "time_s", "tokens_per_s",
        ValueColumn("Pairs seen", "share", attrgetter("token_density")), "uncovered",
        ValueColumn("Speed of dilation", "ratio", partners.over_undilated, optional=True),
        ValueColumn("Pairs without, times", "ratio", pairs_ratio, optional=True),
        ValueColumn("Speed of the curve", "ratio", partners.over_sequence, optional=True),
    )  # fmt: skip
    references = (
        Reference("every rate 1", partners.over_undilated),
        Reference("sequence", partners.over_sequence),
    )
    return Section(
        "Segments and dilation",
        _EXPLANATION,
        tables=[
            *gains.tables(source, rows, *references),
            *source.tables(found, _MAXIMA, "longest lengths"),
            *source.tables(rows, columns),
        ],
    )


class Partners:
    """Rows of the same trial without dilation, or along the sequence, and speeds over theirs."""

    def __init__(self, rows: Iterable[SweepRow]) -> None:
        self._timed = {_key(row): row for row in rows if row.time_s}

    def undilated(self, row: SweepRow) -> SweepRow | None:
        """Return the row with the same segments and every rate 1; None for that row itself."""
        partner = self._timed.get(_key(row, dilation=1))
        return None if partner is row else partner

    def over_undilated(self, row: SweepRow) -> Spread | float | None:
        """Return the speed over that of the same segments with every rate 1."""
        partner = self.undilated(row)
        return time_ratio(partner, row) if partner and row.time_s else None

    def over_sequence(self, row: SweepRow) -> Spread | float | None:
        """Return the speed along the Hilbert curve over that along the sequence."""
        partner = self._timed.get(_key(row, ALONG)) if row.implementation == CURVE else None
        return time_ratio(partner, row) if partner and row.time_s else None


def segmented(rows: Iterable[SweepRow]) -> list[SweepRow]:
    """Return the ok rows of implementations with segments and dilation."""
    return [row for row in rows if _is_segmented(row) and row.status == "ok"]


def _is_segmented(row: Row) -> bool:
    return "segments" in row.options and "dilation" in row.options


def _key(row: SweepRow, implementation: str = "", dilation: int | None = None) -> Hashable:
    """Return the key of a row, or of the same row with another implementation or dilation."""
    options = {name: _as_text(value) for name, value in row.options.items()}
    if dilation is not None:
        options["dilation"] = ", ".join([str(dilation)] * len(options["dilation"].split(", ")))
    same = table_key(row), row.tokens, row.world_size, row.keep, row.allocator
    return implementation or row.implementation, same, *sorted(options.items())


def _as_text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


_CONFIGURATION: Columns = (
    "label", ValueColumn("Segments", "text", lambda row: _as_text(row.options["segments"])),
    ValueColumn("Dilation", "text", lambda row: _as_text(row.options["dilation"])), "world_size",
)  # fmt: skip
_MAXIMA: Columns = (*_CONFIGURATION, "max_tokens", "limited_by", "peak_bytes")
