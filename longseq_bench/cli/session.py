"""Parts that commands share: printing, progress, the default results folder, exit codes."""

from __future__ import annotations

import json
import platform
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO, cast

from rich.console import Console
from typing_extensions import override

from longseq_bench.api.progress import Reporter, RunWatcher
from longseq_bench.cli import FAILED_TRIALS
from longseq_bench.cli.progress import SearchProgress, SweepProgress
from longseq_bench.cli.stdout import keep_exit_code, stop_writing
from longseq_bench.core.model import Record, Trial
from longseq_bench.core.plain_text import escape_surrogates
from longseq_bench.reports.document import Document
from longseq_bench.reports.render.terminal import print_document
from longseq_bench.reports.render.terminal_text import plain

FAILED = ("wrong", "crashed", "error")


def console(stderr: bool = False) -> Console:
    """Return a rich console on stdout or stderr."""

    class Piped(Console):
        def on_broken_pipe(self) -> None:  # rich would exit with its own code
            stop_writing(cast("TextIO", self.file), BrokenPipeError())

    return Piped(stderr=stderr, highlight=False, soft_wrap=stderr)


def print_json(document: Any) -> None:
    """Print one JSON document on stdout. Raises ValueError for NaN and infinity."""
    print(json.dumps(document, indent=2, allow_nan=False), flush=True)


def print_lines(lines: Iterable[str], style: str = "") -> None:
    """Print lines on stderr; markup in them is printed as it is."""
    screen = console(stderr=True)
    for line in lines:
        screen.print(plain(line, style))


def print_notes(notes: Iterable[str]) -> None:
    """Print notes on what could not be read, on stderr."""
    print_lines(notes, "yellow")


def print_answer(
    as_json: bool, data: Callable[[], Any], document: Callable[[], Document],
    hint: str = "a wider terminal or report.md has them", code: int = 0,
) -> int:  # fmt: skip
    """Print a command's answer on stdout, as JSON or as a document, and return its exit code.

    hint: where to find the columns that do not fit in a narrow terminal.
    """
    with keep_exit_code(code):
        if as_json:
            print_json(data())
        else:
            print_document(document(), console(), hint)
    return code


def print_records(
    records: list[Record], as_json: bool, data: Callable[[list[Record]], Any],
    brief: Callable[[list[Record]], Document],
) -> int:  # fmt: skip
    """Print the answer of a command that ran trials, and return its exit code."""
    code = exit_code(records)
    return print_answer(as_json, lambda: data(records), lambda: brief(records), code=code)


def default_out() -> Path:
    """Return a new folder under results/, named by date and machine."""
    host = re.sub(r"[^A-Za-z0-9.]+", "-", platform.node()) or "machine"
    return Path("results") / f"{datetime.now():%Y-%m-%dT%H%M%S}-{host}"


class ConsoleReporter(Reporter):
    """Progress on stderr, drawn on a terminal."""

    def __init__(self) -> None:
        self.command = escape_surrogates(shlex.join(["longseq", *sys.argv[1:]]))

    @override
    def say(self, lines: Iterable[str]) -> None:
        print_lines(lines)

    @override
    def note(self, lines: Iterable[str]) -> None:
        print_notes(lines)

    @override
    def waiting(self, text: str) -> AbstractContextManager[object]:
        return console(stderr=True).status(text)

    @override
    def watch_sweep(
        self, trials: Sequence[Trial], rounds: int, heading: str, baseline: str | None
    ) -> RunWatcher:
        return SweepProgress(console(stderr=True), trials, rounds, heading)

    @override
    def watch_search(self, trials: Sequence[Trial], heading: str) -> RunWatcher:
        return SearchProgress(console(stderr=True), trials, heading)


def exit_code(records: Iterable[Record]) -> int:
    """Return 3 if a trial ended wrong, crashed or error; else 0."""
    return FAILED_TRIALS if any(r.outcome.status in FAILED for r in records) else 0
