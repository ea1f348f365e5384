"""Reports of records, as files for people and for programs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from longseq_bench.core.errors import StoreError, keep_lines
from longseq_bench.core.model import Record

if TYPE_CHECKING:
    from longseq_bench.reports.base import Files
    from longseq_bench.reports.document import Document

__all__ = ["documents", "write_documents"]

ALL, AUTO = "all", "auto"
"""Names that mean several kinds: every kind, and every kind that the records have rows for."""


def write_documents(
    reports: Sequence[Document],
    out_dir: str | Path,
    formats: Sequence[str] = ("md", "csv"),
    attachments: bool = True,
) -> list[Path]:
    """Write reports in each format into `out_dir`; return the paths of the main files.

    The folder is created if it is missing. A summary is `report.<format>`, another kind is
    `<kind>.<format>`. Some formats put charts and tables into a folder next to the main file.
    attachments: write these folders too.
    Raises UnknownNameError for an unknown format, and StoreError if `out_dir` can't be written.
    All reports are rendered before the first is written.
    """
    from longseq_bench.reports.base import FORMATS

    renderers = [FORMATS.get(name) for name in formats]
    rendered = []
    for report in reports if attachments else [report.without_charts() for report in reports]:
        for render in renderers:
            files = render(report)
            kept = {file: text for file, text in files.items() if attachments or "/" not in file}
            rendered.append(kept)
    try:
        return [_write(Path(out_dir), files) for files in rendered]
    except OSError as error:
        raise StoreError(f"report folder {out_dir} can't be written: {error.strerror}") from None


def documents(
    records: Sequence[Record],
    kinds: Sequence[str] = ("summary",),
    baseline: str | None = None,
    notes: Sequence[str] = (),
    configs: Mapping[str, str] | None = None,
) -> list[Document]:
    """Return reports as documents, not yet in a format. kinds: names of kinds, `all`, or `auto`.

    baseline: the label or implementation whose speed is 1.  notes: sentences for the top of each
    report, such as those from reading the records.  configs: texts of configs by path.
    Raises UnknownNameError for an unknown kind or baseline, StoreError if there is no record.
    """
    from longseq_bench.reports.base import KINDS, Source

    if not records:
        raise StoreError("there is no record to report on")
    names = [name for kind in kinds for name in (KINDS.names() if kind in (ALL, AUTO) else [kind])]
    builders = [KINDS.get(name) for name in dict.fromkeys(names)]
    source = Source(records, baseline, tuple(notes), configs or {})
    reports = [build(source) for build in builders]
    return [r for r in reports if AUTO not in kinds or r.kind in kinds or r.has_rows]


_GENERATED_NAME = re.compile(r"\d\d+-[a-z0-9-]*")


def _write(folder: Path, files: Files) -> Path:
    """Write the files of one report in one format.

    Files of an earlier report in its subfolders are deleted; their names identify them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    subfolders = {(path.parent, path.suffix) for path in map(Path, files) if path.parent != Path()}
    for subfolder, suffix in subfolders:
        (folder / subfolder).mkdir(exist_ok=True)
        for old in (folder / subfolder).glob(f"*{suffix}"):
            if _GENERATED_NAME.fullmatch(old.stem) and old.is_file():
                old.unlink()
    for name, text in files.items():
        # a page has its texts cleaned in the template: its scripts must stay as they were hashed
        kept = text if name.endswith(".html") else keep_lines(text)
        path = folder / name
        path.write_text(kept, encoding="utf-8", errors="backslashreplace", newline="\n")
    return folder / next(iter(files))
