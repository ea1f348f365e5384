"""Longest lengths on other hardware, computed from the bytes per token measured here."""

from longseq_bench.analysis.row import require
from longseq_bench.core.hardware import profiles
from longseq_bench.core.units import format_bytes
from longseq_bench.reports.assemble import missing_section
from longseq_bench.reports.base import Source
from longseq_bench.reports.document import Column, Section, Table
from longseq_bench.reports.groups import group_by_workload

_SAID = (
    "Computed, not measured: the memory of one device over the bytes a token of a search here that "
    "memory ended on one rank. As if a kernel there held what it holds here, which "
    "needs not be so; neither its time nor its kernels' limits are in it. longseq plan predicts "
    "these too."
)


def projected(source: Source) -> Section:
    """Build a table per workload of maxima that memory limits, with a column per profile."""
    known = [
        row
        for row in source.maxima
        if row.world_size == 1 and row.limited_by == "memory" and row.bytes_per_token
        if row.is_full_pass and not row.offloads
    ]
    if not known:
        return missing_section(
            "On other hardware, computed", "search on one rank that memory ended",
            "longseq maxlen --impl ring --memory-budget 64MiB",
        )  # fmt: skip
    others = list(profiles().values())
    names = [f"{one.name}, {format_bytes(one.memory)}" for one in others]
    columns = (
        Column("Implementation"), Column("Bytes/token", "bytes"),
        *(Column(name, "tokens") for name in names),
    )  # fmt: skip
    tables = [
        Table(
            source.title(group[0]),
            columns,
            tuple(
                (
                    row.label, row.bytes_per_token,
                    *(int(one.memory / require(row.bytes_per_token)) for one in others),
                )
                for row in group
            ),
        )
        for group in group_by_workload(known)
    ]  # fmt: skip
    return Section("On other hardware, computed", [_SAID], tables=tables)
