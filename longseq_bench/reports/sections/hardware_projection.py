"""Longest lengths on other hardware, computed from the bytes per token measured here."""

from functools import partial

from longseq_bench.analysis.row import require
from longseq_bench.analysis.searches import SearchRow
from longseq_bench.core.hardware import Hardware, profiles
from longseq_bench.core.units import format_bytes
from longseq_bench.reports.base import Source
from longseq_bench.reports.columns import Columns, ValueColumn
from longseq_bench.reports.document import Section

_EXPLANATION = (
    "Computed, not measured: the memory of one device divided by the bytes per token of a search "
    "on one rank that memory limited. It assumes the same bytes per token on that hardware and "
    "ignores time and kernel limits; longseq plan predicts these too."
)


def projected(source: Source) -> Section:
    """Build a table per workload of maxima that memory limits, with a column per profile."""
    known = [
        row
        for row in source.maxima
        if row.world_size == 1 and row.limited_by == "memory" and row.bytes_per_token
        if row.is_full_pass and not row.offloads
    ]
    others = [
        ValueColumn(f"{one.name}, {format_bytes(one.memory)}", "tokens", partial(_tokens, one))
        for one in profiles().values()
    ]
    columns: Columns = ("label", "bytes_per_token", *others)
    tables = source.tables(known, columns)
    return Section("On other hardware, computed", [_EXPLANATION], tables=tables)


def _tokens(hardware: Hardware, row: SearchRow) -> int:
    return int(hardware.memory / require(row.bytes_per_token))
