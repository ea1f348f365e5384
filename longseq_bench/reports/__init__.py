"""Reports: what records say, as files for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from longseq_bench.errors import StoreError
from longseq_bench.model import Record

if TYPE_CHECKING:
    from longseq_bench.reports.elsewhere import Elsewhere

__all__ = ["write_report"]


def write_report(
    records: Sequence[Record],
    out_dir: str | Path,
    formats: Sequence[str] = ("md", "csv"),
    kind: str = "summary",
    baseline: str | None = None,
    notes: Sequence[str] = (),
    elsewhere: Elsewhere | None = None,
) -> list[Path]:
    """Write `report.<format>` for each format into `out_dir`, made if need be; returns the paths.

    baseline: the label or implementation whose speed is 1.  notes: sentences to print with it,
    such as those from reading the records.  elsewhere: maxima of others to stand beside.
    Raises UnknownNameError for a kind, format or baseline that is not there, and StoreError where
    there is no record or `out_dir` can't be written. Nothing is written before all is rendered.
    """
    from longseq_bench.reports.base import FORMATS, KINDS, Source

    if not records:
        raise StoreError("there is no record to report on")
    build, renderers = KINDS.get(kind), {name: FORMATS.get(name) for name in formats}
    document = build(Source(records, baseline, tuple(notes), elsewhere))
    texts = {Path(out_dir) / f"report.{name}": make(document) for name, make in renderers.items()}
    try:
        Path(out_dir).mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StoreError(f"report folder {out_dir} can't be written: {error.strerror}") from None
    return list(texts)
