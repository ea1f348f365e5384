"""Reports of records, as files for people and for programs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from longseq_bench.core.errors import StoreError, UserError
from longseq_bench.core.interning import gc_disabled
from longseq_bench.core.model import Record

if TYPE_CHECKING:
    from longseq_bench.reports.base import Files
    from longseq_bench.reports.document import Document
    from longseq_bench.reports.published_results import PublishedResults

__all__ = ["documents", "write_documents"]

ALL, AUTO = "all", "auto"
"""Names that mean several kinds: every kind, and every kind that the records have rows for."""


def write_documents(
    made: Sequence[Document],
    out_dir: str | Path,
    formats: Sequence[str] = ("md", "csv"),
    attachments: bool = True,
) -> list[Path]:
    """Write reports in each format into `out_dir`; return the paths of the main files.

    The folder is created if it is missing. A summary is `report.<format>`, another kind is
    `<kind>.<format>`. Some formats put charts and tables into a folder next to the main file.
    attachments: write this folder too.
    Raises UnknownNameError for an unknown format, and StoreError if `out_dir` can't be written.
    All reports are rendered before the first is written.
    """
    from longseq_bench.reports.base import FORMATS

    renderers = {name: FORMATS.get(name) for name in formats}
    reports = []
    for document in made if attachments else [document.without_charts() for document in made]:
        for name, render in renderers.items():
            files = _checked(name, render(document))
            reports.append(files if attachments else dict(list(files.items())[:1]))
    try:
        return [_write(Path(out_dir), files) for files in reports]
    except OSError as error:
        raise StoreError(f"report folder {out_dir} can't be written: {error.strerror}") from None


def documents(
    records: Sequence[Record],
    kinds: Sequence[str] = ("summary",),
    baseline: str | None = None,
    notes: Sequence[str] = (),
    elsewhere: PublishedResults | None = None,
    configs: Mapping[str, str] | None = None,
) -> list[Document]:
    """Return reports as documents, not yet in a format. kinds: names of kinds, `all`, or `auto`.

    baseline: the label or implementation whose speed is 1.  notes: sentences to print with it,
    such as those from reading the records.  elsewhere: published maxima to show next to ours.
    configs: texts of configs by path.
    Raises UnknownNameError for an unknown kind or baseline, StoreError if there is no record.
    """
    from longseq_bench.reports.base import KINDS, Source

    if not records:
        raise StoreError("there is no record to report on")
    names = [name for kind in kinds for name in (KINDS.names() if kind in (ALL, AUTO) else [kind])]
    builders = [KINDS.get(name) for name in dict.fromkeys(names)]
    source = Source(records, baseline, tuple(notes), elsewhere, configs or {})
    with gc_disabled():
        made = [build(source) for build in builders]
    return [d for d in made if AUTO not in kinds or d.kind in kinds or d.suited]


_OURS = re.compile(r"\d\d+-[a-z0-9-]*")


def _write(folder: Path, files: Files) -> Path:
    """Write the files of one report in one format.

    Files of an earlier report in its folders are deleted; they are recognised by their names.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kinds = {(path.parent, path.suffix) for path in map(Path, files) if path.parent != Path()}
    for inner, suffix in kinds:
        (folder / inner).mkdir(exist_ok=True)
        for old in (folder / inner).glob(f"*{suffix}"):
            if _OURS.fullmatch(old.stem) and old.is_file():
                old.unlink()
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8", errors="backslashreplace")
    return folder / next(iter(files))


def _checked(name: str, files: object) -> Files:
    """Return the files that a format made; the format may come from another package.

    Raises UserError for a file that can't be written below the report's folder.
    """
    if not isinstance(files, dict) or not files:
        made = "nothing" if not files else type(files).__name__
        raise UserError(f"report format {name!r} made {made}, not texts by the names of files")
    for file, text in files.items():
        path = Path(str(file))
        if path.is_absolute() or ".." in path.parts or not isinstance(text, str):
            raise UserError(
                f"report format {name!r}: {file!r} is no text of a file below the report"
            )
    return files
