"""Documents as CSV (RFC 4180): raw values, SI units, empty where unknown.

It has one row per measurement. Text that a spreadsheet would run as a formula begins with an
apostrophe.
"""

import csv
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from statistics import median
from types import MappingProxyType

from longseq_bench.core.errors import keep_lines
from longseq_bench.core.model import Record
from longseq_bench.reports.base import FORMATS, Files
from longseq_bench.reports.document import Cell, Column, Document, Table
from longseq_bench.reports.groups import split_names

MAX_NAME = 60
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


@FORMATS.register("csv")
def render(document: Document) -> Files:
    """`<stem>.csv`."""
    return {f"{document.stem}.csv": format_table(document.data)}


def slug(text: str) -> str:
    """Return text as part of a file name: lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower())[:MAX_NAME].strip("-")


def format_table(table: Table) -> str:
    """Return one line of headings, then one line per row."""
    headings = [column.name for column in table.columns]
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(
        [_text(cell) if isinstance(cell, str) else cell for cell in row]
        for row in (headings, *table.rows)
    )
    return file.getvalue()


def _text(text: str) -> str:
    """Return a text that is data in a spreadsheet: no formula, no control characters."""
    kept = keep_lines(text)
    is_formula = text.startswith(_FORMULA) or kept.startswith(_FORMULA)
    return f"'{kept}" if is_formula else kept


# ---- the tidy table: one row per measurement -----------------------------------------------------

_FIELDS = split_names(
    "started_at environment.host environment.fingerprint environment.commit purpose "
    "trial.implementation trial.options trial.workload.seq_len trial.workload.batch "
    "trial.workload.heads trial.workload.kv_heads trial.workload.head_dim "
    "trial.workload.v_head_dim trial.workload.model trial.workload.dtype trial.workload.causal "
    "trial.workload.visibility.text trial.workload.mode trial.workload.new_tokens "
    "trial.workload.sink trial.workload.latent trial.workload.kv_dtype trial.device "
    "trial.world_size trial.memory_budget trial.time_budget trial.threads trial.repeats "
    "trial.seed trial.round key outcome.status outcome.reason outcome.phase wall_s processes "
    "predicted_tokens outcome.facts trial.fit_only trial.keep trial.allocator "
    "trial.requested_dense_kernel trial.timing foreseen foreseen"
)
_NAMES = {"seq_len": "tokens", "text": "mask", "facts": "dense_source"}
_HEADINGS = [_NAMES.get(name, name) for name in (path.rpartition(".")[2] for path in _FIELDS)]
_HEADINGS[-2:] = ["foreseen_peak_bytes", "foreseen_s", "unstable"]
_MEASURED = split_names("measurement unit rank samples median smallest largest values")
_fields = attrgetter(*_FIELDS)


def samples_table(
    records: Sequence[Record], unstable: Mapping[int, str] = MappingProxyType({})
) -> Table:
    """Return all raw samples (`values`, separated by spaces) with the fields that identify them.

    unstable: why the row of a record is unstable, by the record's id.
    A record without measurements has one row without values, so that failures are included.
    """
    columns = tuple(map(Column, (*_HEADINGS, *_MEASURED)))
    rows = (row for r in records for row in _rows(r, unstable.get(id(r))))
    return Table("samples", columns, tuple(rows))


def _rows(record: Record, unstable: str | None) -> Iterator[tuple[Cell, ...]]:
    outcome, foreseen = record.outcome, record.foreseen
    values = dict(zip(_HEADINGS, _fields(record), strict=False))
    dense = outcome.facts.get("dense") if outcome.samples("dense_time") else None
    values |= {
        "options": json.dumps(record.trial.options, sort_keys=True),
        "dense_source": None if dense is None else str(dense),
        "foreseen_peak_bytes": foreseen and foreseen.peak_bytes,
        "foreseen_s": foreseen and foreseen.seconds,
        "unstable": unstable,
    }
    if not outcome.measurements:
        yield (*values.values(), *[None] * len(_MEASURED))
    for measurement in outcome.measurements:
        samples = measurement.samples
        middle = median(samples) if samples else None
        ends = min(samples, default=None), max(samples, default=None)
        what = measurement.name, measurement.unit, measurement.rank, len(samples)
        yield (*values.values(), *what, middle, *ends, " ".join(map(repr, samples)))
