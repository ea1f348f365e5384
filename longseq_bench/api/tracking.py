"""Results in an experiment tracker: Weights & Biases, or trackio, which has the same functions."""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any

from longseq_bench.analysis.frames import finite
from longseq_bench.api.results import Results
from longseq_bench.core.errors import UnknownNameError, UserError
from longseq_bench.reports.base import FORMATS
from longseq_bench.reports.document import Document

TRACKERS = ("trackio", "wandb")
PROJECT = "longseq"


def track(results: Results, document: Document, destination: str) -> None:
    """Write the rows, the longest lengths and a report of results as one run of a tracker.

    document: the report, which becomes an HTML page.
    destination: `trackio` or `wandb`, and the project: `wandb:my-project`; default: `longseq`. The
    tracker decides where it keeps a run: trackio on this machine, wandb on its server.
    Raises UserError for another tracker, or one that is not installed.
    """
    name, _, project = destination.partition(":")
    if name not in TRACKERS:
        raise UnknownNameError("tracker", name, TRACKERS)
    try:
        tracker: Any = import_module(name)
    except ImportError:
        raise UserError(f"--track {name} needs the package {name}: pip install {name}") from None
    found: dict[str, Any] = {}
    if results.rows:
        found["rows"] = tracker.Table(dataframe=results.to_pandas("rows").map(_cell))
    if results.maxima:
        found["maxima"] = tracker.Table(dataframe=results.to_pandas("maxima").map(_cell))
    page = next(iter(FORMATS.get("html")(document).values()))
    environment = results.records[0].environment.model_dump(mode="json")
    run = results.folder.name if results.folder else None
    tracker.init(project=project or PROJECT, name=run, config=environment)
    tracker.log({**found, "page": tracker.Html(page)})
    tracker.finish()


def _cell(value: Any) -> Any:
    """Return a value of a column as a tracker's table can hold it: a number or text."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return json.dumps(finite(value), default=str)
