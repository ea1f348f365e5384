"""The results of a run or of files: records, rows, tables, charts and reports of them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from longseq_bench import store
from longseq_bench.analysis.frames import to_frame
from longseq_bench.analysis.labels import find_baseline_label, find_short_labels
from longseq_bench.analysis.searches import SearchRow
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.api.shards import join_shards, run_folder
from longseq_bench.core.errors import StoreError, UnknownNameError, UserError
from longseq_bench.core.files import read_text_file
from longseq_bench.core.model import Record
from longseq_bench.store import RECORDS

if TYPE_CHECKING:
    import altair
    import pandas

    from longseq_bench.reports.base import Source
    from longseq_bench.reports.document import Chart, Document

Names = str | Sequence[str]


class Printed:
    """An object that is shown as the table that its command prints."""

    def table(self) -> Document | None:
        """Return the table; None if there is nothing to show."""
        raise NotImplementedError

    def __str__(self) -> str:
        from longseq_bench.reports.render.terminal import as_text

        document = self.table()
        return as_text(document, "to_pandas() has them") if document else "no records"

    __repr__ = __str__


@dataclass(frozen=True, eq=False, repr=False)
class Results(Printed):
    """Records, and what can be made of them.

    records: one for each run, in order.  folder: where they are; None: in memory only.
    baseline: implementation or label whose speed is 1.  notes: sentences on records that could not
    be read.  configs: texts of sweep files by path.
    """

    records: list[Record]
    folder: Path | None = None
    baseline: str | None = None
    notes: tuple[str, ...] = ()
    configs: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def source(self) -> Source:
        """The records as the input of a report."""
        from longseq_bench.reports.base import Source

        return Source(self.records)

    @property
    def rows(self) -> list[SweepRow]:
        """A row per trial of a sweep, its rounds merged. Times in s, memory in bytes."""
        return self.source.rows

    @property
    def maxima(self) -> list[SearchRow]:
        """A row per search for the longest length."""
        return self.source.maxima

    def to_pandas(self, table: Literal["rows", "maxima"] | None = None) -> pandas.DataFrame:
        """Return rows or maxima as a DataFrame; values that were not measured are NaN.

        The first column is the label of the row, as in reports.
        table: default: rows if there are any, else maxima. Raises UserError for another name.
        """
        if table not in (None, "rows", "maxima"):
            raise UnknownNameError("table", str(table), ("rows", "maxima"))
        is_of_rows = table == "rows" or (table is None and bool(self.rows))
        found = (self.rows, SweepRow) if is_of_rows else (self.maxima, SearchRow)
        frame = to_frame(*found)
        return frame[["label", *frame.columns.drop("label")]]

    def documents(
        self, kinds: Sequence[str] = ("summary",), baseline: str | None = None
    ) -> list[Document]:
        """Return reports that are not yet in a format. Arguments as those of `report`."""
        from longseq_bench.reports.kinds import documents

        return documents(self.records, kinds, baseline or self.baseline, self.notes, self.configs)

    def report(
        self,
        path: str | Path | None = None,
        *,
        format: Names = (),
        kind: Names = "summary",
        baseline: str | None = None,
    ) -> str | list[Path]:
        """Return a report as text, or write reports into a folder and return their paths.

        path: the folder; None: return the text.  format: md (default), html, csv, json; several for
        files.  kind: summary, extreme, devices, scaling, capabilities, implementations; for files
        also several, `all`, or `auto`: those for which there are records.
        baseline: implementation or label whose speed is 1.
        Raises UserError for an unknown format, kind or baseline, StoreError if a folder can't be
        written.
        """
        from longseq_bench.reports.base import FORMATS
        from longseq_bench.reports.kinds import write_documents

        formats = [format] if isinstance(format, str) else list(format)
        built = self.documents([kind] if isinstance(kind, str) else list(kind), baseline)
        if path is not None:
            return write_documents(built, path, formats or ("md", "csv"))
        if len(formats) > 1 or len(built) != 1:
            raise UserError("several reports or formats are files; give a path to write them to")
        files = FORMATS.get((formats or ["md"])[0])(built[0].in_one_file())
        text = next(iter(files.values()))
        if isinstance(text, bytes):
            raise UserError(f"format {formats[0]} is no text; give a path to write it to")
        return text

    @property
    def charts(self) -> list[str]:
        """Titles of the charts that `plot` can draw."""
        return list(self._charts)

    @cached_property
    def _charts(self) -> dict[str, Chart]:
        sections = [s for document in self.documents() for s in document.sections]
        return {chart.title: chart for section in sections for chart in section.charts}

    def plot(self, title: str | None = None) -> altair.LayerChart:
        """Return a chart of the report as an Altair chart.

        title: one of `charts`, or a part of it; default: the first. Raises UserError if there is
        none.
        """
        from longseq_bench.reports.render._draw import WIDTH, draw

        if not self._charts:
            raise UserError("there is no chart: the records have no two values to compare")
        found = [name for name in self._charts if title is None or title.lower() in name.lower()]
        if not found:
            raise UnknownNameError("chart", str(title), self._charts)
        return draw(self._charts[found[0]]).properties(width=WIDTH)

    def table(self) -> Document | None:
        """Return the table that the command line prints after the run; None without records."""
        from longseq_bench.reports import brief

        if not self.records:
            return None
        if answer := brief.answer_brief(self.records):
            return answer
        if all(record.purpose == "measure" for record in self.records):
            return brief.sweep_brief(self.records, self.baseline)
        return brief.search_brief(self.records)


# ---- reading results folders, folders of them, and single files ----------------------------------

CONFIG = "config.yaml"


def load(*paths: str | Path) -> Results:
    """Return the results in folders, folders of them, or `records.jsonl` files.

    Lines that could not be read are in `notes`. The baseline is that of the sweep's config, if the
    records have it. Raises StoreError if a path has no records.
    """
    if not paths:
        raise StoreError("no results are named; give a results folder or a records.jsonl file")
    from longseq_bench.config.loader import MAX_BYTES

    named = [Path(path) for path in paths]
    records, notes = read_results(named)
    folder = named[0] if named[0].is_dir() else named[0].parent
    configs = {}
    for config in (run_folder(file.parent) / CONFIG for file in record_files(named)):
        with suppress(OSError, ValueError, UserError):
            configs[str(config)] = read_text_file(config, max_bytes=MAX_BYTES)
    baseline = _find_baseline(configs.get(str(run_folder(folder) / CONFIG), ""), records)
    return Results(records, folder, baseline, tuple(notes), configs)


def read_results(paths: Iterable[Path]) -> tuple[list[Record], list[str]]:
    """Return the records of results folders and files, and notes on what could not be read.

    A folder that has no records file stands for all folders below it; the shards of a run are read
    as one. Raises StoreError if there are no records, or for shards that don't belong together.
    """
    by_run: dict[Path, list[Record]] = {}
    notes, known, copies = list[str](), set[Hashable](), 0
    for path in record_files(paths):
        run = run_folder(path.parent)
        loaded = store.load(path, may_be_empty=run != path.parent)
        # the same run in a copy of a file; equal records of one file are different runs
        new = [record for record in loaded.records if _run_of(record) not in known]
        known.update(map(_run_of, new))
        by_run.setdefault(run, []).extend(new)
        notes += loaded.notes
        copies += len(loaded.records) - len(new)
    joined = [join_shards(run, of_run) for run, of_run in by_run.items()]
    records = [record for in_order, _ in joined for record in in_order]
    notes += [note for _, missing in joined for note in missing]
    if not records:
        raise StoreError("; ".join(["the results hold no record", *notes]))
    if copies:
        notes.append(f"duplicate records ignored: {copies}")
    return records, notes


_run_of = attrgetter(
    *("started_at", "wall_s", "trial.implementation", "trial.workload.seq_len", "trial.round")
)
"""What tells runs apart; all of a record takes longer to compare."""


def record_files(paths: Iterable[Path]) -> list[Path]:
    """Return the files of records that paths refer to, each once.

    Raises StoreError for a path that cannot be searched.
    """
    files: dict[Path, Path] = {}
    for path in paths:
        try:
            below = sorted(path.rglob(RECORDS)) if path.is_dir() else []
            own = path / RECORDS if (path / RECORDS).is_file() else path
            for file in below if below and own == path else [own]:
                files.setdefault(file.resolve(), file)
        except OSError as error:
            raise StoreError(f"results {path} can't be read: {error.strerror}") from None
    return list(files.values())


def _find_baseline(config: str, records: list[Record]) -> str | None:
    from longseq_bench.config.loader import parse_config

    trials = [record.trial for record in records]
    try:
        baseline = str(parse_config(config, CONFIG).data["baseline"])
        find_baseline_label(trials, find_short_labels(trials), baseline)
    except (UserError, KeyError, TypeError):
        return None
    return baseline
