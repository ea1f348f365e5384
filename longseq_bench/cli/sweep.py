"""`longseq sweep CONFIG`: run a grid, write every record, end with a report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from longseq_bench.cli.live_server import Live
    from longseq_bench.cli.progress import SweepProgress
    from longseq_bench.config.trials import SweepConfig
    from longseq_bench.core.model import Device, Record
    from longseq_bench.launchers.base import Launcher
    from longseq_bench.search.prediction import Outlook


def sweep(
    config: Annotated[Path, typer.Argument(help="YAML file; configs/quickstart.yaml is one.")],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for records and report. Default: a new one under results/."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the trials; run and write nothing.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON document on stdout, progress on stderr.")
    ] = False,
    live: Annotated[
        bool, typer.Option("--live", help="Serve the report as a page on 127.0.0.1 meanwhile.")
    ] = False,
    port: Annotated[
        int | None, typer.Option(help="Of --live. Default: any that is free.", show_default=False)
    ] = None,
) -> int:
    """Run every combination of a config, interleaved, and report.

    A list in the config is an axis of the grid: tokens, dtype, mode, world_size (the ranks of a
    trial; each has the memory budget to itself), an implementation's options.

    Run it again with the same --out to go on where it stopped: what is finished is not run again.
    """
    from longseq_bench.cli.session import console, default_ranks, make_launcher, outlook
    from longseq_bench.config.trials import load_config
    from longseq_bench.core.errors import UserError

    if port is not None and not live:
        raise UserError("--port is that of --live, which is not given")
    if dry_run and live:
        raise UserError("--dry-run runs nothing that --live could show; leave one of them out")
    screen = console(stderr=True)
    with make_launcher() as launcher:
        with screen.status("looking at this machine …"):
            asked = _with_budget(load_config(config, launcher.catalogue(), default_ranks()), out)
            launcher.check(asked.trials)
            _check_baseline(asked)
        if dry_run:
            return _list_trials(asked, as_json)
        ahead = outlook(launcher, launcher.catalogue(), asked.trials[0].device, out)
        return _run(asked, launcher, ahead, out, as_json, (port or 0) if live else None)


def _with_budget(config: SweepConfig, out: Path | None) -> SweepConfig:
    """Trials without a memory budget get the machine's default, so that none can exhaust it: one
    for all, by the most ranks of any, so that trials on few and on many can be compared."""
    from dataclasses import replace

    from longseq_bench.cli.session import default_memory

    ranks: dict[Device, int] = {}
    for trial in config.trials:
        if trial.memory_budget is None:
            ranks[trial.device] = max(trial.world_size, ranks.get(trial.device, 1))
    budgets = {device: default_memory(device, out, most) for device, most in ranks.items()}
    trials = tuple(
        t if t.memory_budget else t.but(memory_budget=budgets[t.device]) for t in config.trials
    )
    return replace(config, trials=trials)


def _check_baseline(config: SweepConfig) -> None:
    """Raises UserError, before anything runs, where the baseline means none or several."""
    from longseq_bench.analysis.labels import find_baseline_label, find_labels

    if config.baseline:
        labels = zip(find_labels(config.trials), config.trials, strict=True)
        find_baseline_label({label: t.implementation for label, t in labels}, config.baseline)


def _run(
    config: SweepConfig, launcher: Launcher, ahead: Outlook, out: Path | None, as_json: bool,
    port: int | None,
) -> int:  # fmt: skip
    from longseq_bench.analysis.frames import sweep_json
    from longseq_bench.cli.progress import SweepProgress
    from longseq_bench.cli.session import carry_out, console, exit_code, print_json
    from longseq_bench.cli.stdout import ends
    from longseq_bench.search import strategy

    watcher = SweepProgress(console(stderr=True), config.trials, config.rounds)
    steps = strategy.sweep(config.trials, config.rounds, ahead)
    page = None if port is None else _live(watcher, config.baseline, port)
    records = carry_out(steps, launcher, out, watcher, config.baseline, config.text, page)
    with ends(exit_code(records)):
        if as_json:
            print_json(sweep_json(records))
        else:
            _show(records, config.baseline)
    _refuse_hopeless_time(records)
    return exit_code(records)


def _live(watcher: SweepProgress, baseline: str | None, port: int) -> Live:
    """A page of the sweep, which says where it is before anything runs."""
    from longseq_bench.cli.live_server import Live
    from longseq_bench.core.errors import UserError
    from longseq_bench.reports import documents
    from longseq_bench.reports.document import Document
    from longseq_bench.reports.render.html import page

    def draw(records: list[Record], running: bool, said: str) -> str:
        if not records:
            made = [Document("summary", "A sweep", ["No trial has ended yet."], [])]
        else:
            try:
                made = documents(records, baseline=baseline)
            except UserError:  # the baseline has not run yet, or has no label of its own so far
                made = documents(records)
        return page(made[0], live=running, running=said)

    return Live(
        draw,
        lambda: watcher.said,
        port,
        watcher.expected,
        tell=lambda url: watcher.console.print(f"live: {url}"),
    )


def _refuse_hopeless_time(records: list[Record]) -> None:
    """Raises UserError where the time budget was shorter than any run at all."""
    from longseq_bench.core.errors import UserError

    budgets = {r.trial.time_budget for r in records if r.trial.time_budget}
    if budgets and all(r.outcome.status == "timeout" for r in records):
        longest = max(budgets)
        raise UserError(f"time_budget {longest:.3g} s is shorter than any run; raise it")


def _show(records: list[Record], baseline: str | None) -> None:
    from longseq_bench.cli.session import console
    from longseq_bench.reports.brief import sweep_brief
    from longseq_bench.reports.render.terminal import REPORT_HINT, print_document

    print_document(sweep_brief(records, baseline), console(), REPORT_HINT)


def _list_trials(config: SweepConfig, as_json: bool) -> int:
    from longseq_bench.cli.documents import trials_document
    from longseq_bench.cli.session import console, print_json
    from longseq_bench.reports.render.terminal import print_document

    if as_json:
        print_json({"schema": 1, "trials": [t.model_dump(mode="json") for t in config.trials]})
    else:
        document = trials_document(config.trials, config.rounds)
        print_document(document, console(), "a wider terminal or --json has them")
    return 0
