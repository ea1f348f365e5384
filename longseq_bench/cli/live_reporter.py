"""The reporter of `longseq sweep --live`: progress on stderr, and a page of the records so far."""

from collections.abc import Sequence
from typing import Self

from typing_extensions import override

from longseq_bench.api.progress import RunWatcher
from longseq_bench.cli.live_server import LivePage
from longseq_bench.cli.progress import SweepProgress
from longseq_bench.cli.session import ConsoleReporter, console
from longseq_bench.core.errors import UserError
from longseq_bench.core.model import Record, Trial
from longseq_bench.reports import documents
from longseq_bench.reports.document import Document
from longseq_bench.reports.render.html import page
from longseq_bench.search.strategy import Step


class LiveReporter(ConsoleReporter):
    """A reporter that also serves the page. port: 0 for any free port."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self._port = port

    @override
    def watch_sweep(
        self, trials: Sequence[Trial], rounds: int, heading: str, baseline: str | None
    ) -> RunWatcher:
        lines = SweepProgress(console(stderr=True), trials, rounds, heading)
        return _LiveSweep(lines, _make_live_page(lines, baseline, self._port))


class _LiveSweep(RunWatcher):
    """Passes events on to the lines, then to the page."""

    def __init__(self, lines: SweepProgress, served: LivePage) -> None:
        self._lines, self._page = lines, served

    @override
    def __enter__(self) -> Self:
        self._lines.__enter__()
        try:
            self._page.__enter__()
        except BaseException:
            self._lines.__exit__()
            raise
        return self

    @override
    def __exit__(self, *error: object) -> None:
        try:
            self._page.__exit__(*error)  # type: ignore[arg-type]
        finally:
            self._lines.__exit__(*error)

    @override
    def starts(self, step: Step) -> None:
        self._lines.starts(step)
        self._page.starts(step)

    @override
    def phase(self, phase: str, part: str) -> None:
        self._lines.phase(phase, part)
        self._page.phase(phase, part)

    @override
    def skips_records(self, sentence: str) -> None:
        self._lines.skips_records(sentence)

    @override
    def ends(self, step: Step, record: Record, from_store: bool) -> None:
        self._lines.ends(step, record, from_store)
        self._page.ends(step, record, from_store)


def _make_live_page(watcher: SweepProgress, baseline: str | None, port: int) -> LivePage:
    """Return a page of the sweep that prints its address when it is served."""

    def render(records: list[Record], running: bool, status: str) -> str:
        if not records:
            document = Document("summary", "A sweep", ["No trial has ended yet."], [])
            return page(document, live=running, running=status)
        try:
            summary, *_ = documents(records, baseline=baseline)
        except UserError:  # the baseline has not run yet, or its label is not unique so far
            summary, *_ = documents(records)
        return page(summary, live=running, running=status)

    return LivePage(
        render,
        lambda: watcher.summary,
        port,
        watcher.expected,
        announce=lambda url: watcher.console.print(f"live: {url}"),
    )
