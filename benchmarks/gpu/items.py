"""Items of a step: each is run once, its result is kept as JSON, and the next call continues."""

import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from longseq_bench.core.units import format_bytes
from longseq_bench.environment import commit_of
from longseq_bench.launchers.local import LocalLauncher

ROOT = Path(__file__).parents[2]
PLUGINS = ROOT / "tests" / "plugins"
"""Implementations with one fault each."""

SCHEMA = 2
DRY_RUN = "a dry run"
_TRACE_LINES = 8
_MOST_OF_A_CALL = 0.8
TOY_S = 12

Figures = dict[str, Any]
Status = Literal["ok", "failed"]


class Unfinished(Exception):
    """The deadline ended an item that has made progress; the next call continues it."""


class ItemFailed(Exception):
    """An item that failed. figures: what it measured before."""

    def __init__(self, text: str, figures: Figures | None = None) -> None:
        super().__init__(text)
        self.figures = figures or {}


@dataclass(frozen=True)
class Item:
    """A part of a step. run: returns its figures; any exception is a failure that is kept.

    seconds: what it takes on an H100, at most in most cases; it is not started with less left.
    tier: 1 for what `brief` runs first.
    """

    name: str
    run: Callable[[], Figures]
    seconds: float = 15
    tier: int = 1


@dataclass(frozen=True)
class Result:
    """The kept result of an item."""

    item: str
    status: Status
    seconds: float
    figures: Figures
    error: str | None = None


Table = Sequence[Sequence[object]]
"""Rows of cells; the first one is the heading."""


@dataclass
class Session:
    """One call of the command.

    out: folder of all results.  device: cuda, or cpu in a dry run.  minutes: time for this call.
    retry: run failed items again.
    """

    out: Path
    device: Literal["cuda", "cpu"]
    dry_run: bool = False
    minutes: float = 12.0
    retry: bool = False
    left: list[str] = field(default_factory=list)
    """Items that the deadline left for the next call."""

    def __post_init__(self) -> None:
        self._end = time.monotonic() + 60 * self.minutes

    def seconds_left(self) -> float:
        """Return the seconds until the deadline, at least 0."""
        return max(0.0, self._end - time.monotonic())

    def cut(self, text: str, limit: float, progress: bool = False) -> Exception:
        """Return the exception for an item that was ended after `limit` seconds.

        Without progress in most of a call's time, the next call would not get further either.
        """
        if progress or limit < _MOST_OF_A_CALL * 60 * self.minutes:
            return Unfinished(text)
        return ItemFailed(f"{text}; {limit:.0f} s are too short, use --minutes")

    @cached_property
    def commit(self) -> str | None:
        """The commit of this checkout, None without git."""
        return commit_of(ROOT / "longseq_bench")

    @cached_property
    def hardware(self) -> str:
        """The name of the GPU; results of different ones never share a folder."""
        return DRY_RUN if self.dry_run else self.launcher.catalogue().devices["cuda"].name

    @cached_property
    def capability(self) -> int:
        """The compute capability of the first GPU, 90 for 9.0; that of an H100 in a dry run."""
        if self.dry_run:
            return 90
        import torch

        major, minor = torch.cuda.get_device_capability()
        return 10 * major + minor

    @cached_property
    def launcher(self) -> LocalLauncher:
        """The launcher of trials; it also knows the implementations with a fault."""
        # before the fork server starts: its children find plug-ins on its path
        sys.path.insert(0, str(PLUGINS))
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PLUGINS), before]))
        try:
            launcher = LocalLauncher()
            launcher.catalogue()
        finally:
            if before is None:
                del os.environ["PYTHONPATH"]
            else:
                os.environ["PYTHONPATH"] = before
        return launcher


@dataclass(frozen=True)
class Step:
    """A step of the command.

    items: lists its items.  table: the rows that are printed last, made from all kept results.
    """

    name: str
    items: Callable[[Session], Sequence[Item]]
    table: Callable[[Sequence[Result]], Table]


def run_steps(steps: Sequence[Step], session: Session) -> dict[Step, list[Result]]:
    """Run the items that are not finished, tier by tier, and return the kept results of all.

    A failed item is finished too, unless the session retries. Items that the deadline leaves are
    added to `session.left`.
    """
    results: dict[Step, list[Result]] = {step: [] for step in steps}
    items = [(step, item) for step in steps for item in _list_items(step, session)]
    for step, item in sorted(items, key=lambda pair: pair[1].tier):
        path = session.out / step.name / f"{slug(item.name)}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = read_result(path)
        if kept is None or (kept.status == "failed" and session.retry):
            kept = _run_item(item, step.name, path, session)
        if kept is not None:
            results[step].append(kept)
    return results


def _list_items(step: Step, session: Session) -> Sequence[Item]:
    """Return the items; one that fails with the reason if they can't be listed."""
    try:
        return step.items(session)
    except Exception as error:
        text = _describe(error)

        def fail() -> Figures:
            raise ItemFailed(f"the items of {step.name} can't be listed: {text}")

        return [Item("items", fail)]


def _run_item(item: Item, step: str, path: Path, session: Session) -> Result | None:
    """Run an item and keep its result; None if the deadline leaves it for the next call."""
    name = f"{step} {item.name}"
    # toys take a moment
    needed = min(item.seconds, TOY_S) if session.dry_run else item.seconds
    if session.seconds_left() < needed:
        session.left.append(f"{name} ({needed:.0f} s)")
        return None
    started_at, start = datetime.now(UTC), time.monotonic()
    status: Status = "ok"
    figures: Figures = {}
    error = None
    try:
        figures = item.run()
    except Unfinished as unfinished:
        session.left.append(f"{name}: {unfinished}")
        print(f"[{name}] {unfinished}", flush=True)
        return None
    except Exception as caught:
        status, error = "failed", _describe(caught)
        figures = caught.figures if isinstance(caught, ItemFailed) else {}
    result = Result(item.name, status, round(time.monotonic() - start, 2), figures, error)
    _write(path, result, step, started_at, session)
    print(f"[{name}] {status}, {result.seconds:.1f} s{f': {error}' if error else ''}", flush=True)
    return result


def _write(path: Path, result: Result, step: str, started_at: datetime, session: Session) -> None:
    document = {
        "schema": SCHEMA, "step": step, "item": result.item, "status": result.status,
        "error": result.error, "figures": result.figures, "seconds": result.seconds,
        "started_at": started_at.isoformat(timespec="seconds"), "device": session.device,
        "hardware": session.hardware, "commit": session.commit,
    }  # fmt: skip
    # a call that is killed here leaves no incomplete file
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def read_result(path: Path) -> Result | None:
    """Return the kept result of an item, or None if there is none."""
    document = read_document(path)
    if document is None:
        return None
    names = ("item", "status", "seconds", "figures", "error")
    return Result(**{name: document[name] for name in names})


def read_document(path: Path) -> dict[str, Any] | None:
    """Return the JSON of an item; None if the file is missing or of another command."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) and document.get("schema") == SCHEMA else None


def _describe(error: Exception) -> str:
    if isinstance(error, ItemFailed):
        return str(error)
    lines = "".join(traceback.format_exception(error)).splitlines()
    return "\n".join(lines[-_TRACE_LINES:])


def slug(name: str) -> str:
    """Return a name without the characters that a file name can't have."""
    return re.sub(r"[^A-Za-z0-9.=_-]+", "-", name).strip("-")


def format_table(rows: Table) -> str:
    """Return the lines of a table with aligned columns."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in cells)
    return "\n".join(line.rstrip() for line in lines)


def plain_table(results: Sequence[Result]) -> Table:
    """Return a row per item: its status and its single figures, or the end of its error."""
    rows = [("item", "status", "figures")]
    for result in results:
        figures = [
            format_figure(name, value)
            for name, value in result.figures.items()
            if isinstance(value, str | int | float)
        ]
        text = last_line(result.error) or ", ".join(figures)
        rows.append((result.item, result.status, text))
    return rows


def format_figure(name: str, value: str | float) -> str:
    """Return a figure as text; bytes of memory with their unit."""
    if name.startswith("memory_") and not isinstance(value, str):
        return f"{name} {format_bytes(value)}"
    return f"{name} {value}"


def last_line(error: str | None) -> str:
    """Return the last line of an error, "" without one; that of a traceback names the cause."""
    return error.splitlines()[-1] if error else ""


def or_dash(value: float | None, write: Callable[[float], str]) -> str:
    """Return a value as text, or a dash for a value that was not measured."""
    return "–" if value is None else write(value)
