"""Parts that commands share: printing, progress, the default results folder, exit codes."""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from longseq_bench.api.progress import Reporter
from longseq_bench.api.results import Results
from longseq_bench.cli import FAILED_TRIALS
from longseq_bench.core.errors import UserError, escape_surrogates
from longseq_bench.reports.document import Document
from longseq_bench.reports.render.terminal import print_document


def make_reporter() -> Reporter:
    """Return a reporter on stderr; the command line is recorded with every trial."""
    return Reporter(escape_surrogates(shlex.join(["longseq", *sys.argv[1:]])))


def print_lines(lines: Iterable[str], style: str = "") -> None:
    """Print lines on stderr; markup in them is printed as it is."""
    Reporter().say(lines, style)


@contextmanager
def until_closed() -> Iterator[None]:
    """Print on stdout within the block until its reader goes away, as `| head` does.

    Raises UserError where stdout can't be written for another reason, such as a full disk.
    """
    try:
        yield
        print(end="", flush=True)
    except SystemExit:  # rich's answer to a closed stdout
        return
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left is lost, also at the exit
        if error.errno != errno.EPIPE:
            raise UserError(f"the output can't be written: {error.strerror}") from None


def print_documents(documents: Iterable[Document], **hint: str) -> None:
    """Print documents on stdout, with two empty lines between."""
    screen = Console(highlight=False)
    with until_closed():
        for i, document in enumerate(documents):
            if i:
                screen.print("\n")
            print_document(document, screen, **hint)


def print_answer(
    as_json: bool,
    data: Callable[[], Any],
    document: Callable[[], Document | None],
    hint: str = "a wider terminal or report.md has them",
    code: int = 0,
) -> int:
    """Print a command's answer on stdout, as JSON or as a document, and return its exit code.

    hint: where to find the columns that do not fit in a narrow terminal.
    """
    if as_json:
        with until_closed():
            print(json.dumps(data(), indent=2, allow_nan=False))
    elif found := document():
        print_documents([found], hint=hint)
    return code


def print_results(
    results: Results,
    as_json: bool,
    data: Callable[[], Any],
    document: Callable[[], Document] | None = None,
) -> int:
    """Print the answer of a command that ran trials, and return its exit code.

    It is 3 if a trial ended wrong, crashed or error. document: default: the table of the results.
    Raises UserError if the time budget was shorter than every run.
    """
    records = results.records
    is_failed = any(r.outcome.status in ("wrong", "crashed", "error") for r in records)
    code = FAILED_TRIALS if is_failed else 0
    print_answer(as_json, data, document or results.table, code=code)
    budgets = [r.trial.time_budget for r in records if r.trial.time_budget]
    if budgets and all(r.outcome.status == "timeout" for r in records):
        raise UserError(f"time_budget {max(budgets):.3g} s is shorter than any run; raise it")
    return code


def default_out(shard: str | None = None) -> Path:
    """Return a new folder under results/, named by date and machine; UserError for a shard."""
    if shard:
        raise UserError("--shard needs --out: the same folder for all shards")
    host = re.sub(r"[^A-Za-z0-9.]+", "-", platform.node()) or "machine"
    return Path("results") / f"{datetime.now():%Y-%m-%dT%H%M%S}-{host}"
