"""`longseq sweep CONFIG`: run a grid, write every record, end with a report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from longseq_bench.cli import options

if TYPE_CHECKING:
    from longseq_bench.cli.live_server import LivePage
    from longseq_bench.cli.progress import SweepProgress
    from longseq_bench.config.trials import SweepConfig
    from longseq_bench.core.model import Device, Record
    from longseq_bench.launchers.base import Launcher
    from longseq_bench.search.prediction import Predictor


def sweep(
    config: Annotated[
        Path, typer.Argument(help="Sweep file in YAML, such as configs/quickstart.yaml.")
    ],
    out: options.Out = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="List the trials; run and write nothing. Default: run them."
        ),
    ] = False,
    as_json: options.AsJson = False,
    live: Annotated[
        bool,
        typer.Option(
            "--live",
            help="Serve the report as a page on 127.0.0.1 while the sweep runs. Default: no page.",
        ),
    ] = False,
    port: Annotated[
        int | None, typer.Option(help="TCP port of --live, 1 to 65535. Default: any free port.")
    ] = None,
) -> int:
    """Run every combination of a config, interleaved, and report.

    A list in the config is an axis of the grid: tokens, dtype, mode, world_size (ranks of a trial,
    each with the memory budget to itself), an implementation's options.

    Run it again with the same --out to continue where it stopped: finished trials are kept.
    """
    from longseq_bench.cli.progress import SweepProgress
    from longseq_bench.cli.session import (
        console,
        default_ranks,
        describe_devices,
        make_launcher,
        make_predictor,
    )
    from longseq_bench.config.trials import load_config
    from longseq_bench.core.errors import UserError

    if port is not None and not live:
        raise UserError("--port is for --live, which is not given; add --live")
    if dry_run and live:
        raise UserError("--dry-run runs nothing that --live could show; leave one of them out")
    screen = console(stderr=True)
    with make_launcher() as launcher:
        with screen.status("looking at this machine …"):
            catalogue = launcher.catalogue()
            loaded = _set_budgets(load_config(config, catalogue, default_ranks()), out)
            launcher.check(loaded.trials)
            _check_baseline(loaded)
        if dry_run:
            return _list_trials(loaded, as_json)
        predictor = make_predictor(launcher, catalogue, loaded.trials[0].device, out)
        heading = describe_devices(catalogue, loaded.trials)
        watcher = SweepProgress(screen, loaded.trials, loaded.rounds, heading)
        page = _make_live_page(watcher, loaded.baseline, port or 0) if live else None
        return _run(loaded, launcher, predictor, watcher, page, out, as_json)


def _set_budgets(config: SweepConfig, out: Path | None) -> SweepConfig:
    """Give trials without a memory budget the machine's default, so that none can exhaust it.

    All get the same, by the most ranks of any, so that trials on few and many ranks compare.
    """
    from dataclasses import replace

    from longseq_bench.cli.session import default_memory

    ranks: dict[Device, int] = {}
    for trial in config.trials:
        if trial.memory_budget is None:
            ranks[trial.device] = max(trial.world_size, ranks.get(trial.device, 1))
    budgets = {device: default_memory(device, out, most) for device, most in ranks.items()}
    trials = tuple(
        t if t.memory_budget else t.replace(memory_budget=budgets[t.device]) for t in config.trials
    )
    return replace(config, trials=trials)


def _check_baseline(config: SweepConfig) -> None:
    """Raise UserError, before anything runs, for a baseline that matches no or several labels."""
    from longseq_bench.analysis.labels import find_baseline_label, find_labels

    if config.baseline:
        labels = zip(find_labels(config.trials), config.trials, strict=True)
        find_baseline_label({label: t.implementation for label, t in labels}, config.baseline)


def _run(
    config: SweepConfig, launcher: Launcher, predictor: Predictor, watcher: SweepProgress,
    page: LivePage | None, out: Path | None, as_json: bool,
) -> int:  # fmt: skip
    from longseq_bench.analysis.frames import sweep_json
    from longseq_bench.cli.session import exit_code, print_json, run_and_report
    from longseq_bench.cli.stdout import keep_exit_code
    from longseq_bench.search import strategy

    schedule = strategy.sweep(config.trials, config.rounds, predictor)
    records = run_and_report(schedule, launcher, out, watcher, config.baseline, config.text, page)
    with keep_exit_code(exit_code(records)):
        if as_json:
            print_json(sweep_json(records))
        else:
            _show(records, config.baseline)
    _check_time_budget(records)
    return exit_code(records)


def _make_live_page(watcher: SweepProgress, baseline: str | None, port: int) -> LivePage:
    """Return a page of the sweep that prints its address when it is served."""
    from longseq_bench.cli.live_server import LivePage
    from longseq_bench.core.errors import UserError
    from longseq_bench.reports import documents
    from longseq_bench.reports.document import Document
    from longseq_bench.reports.render.html import page

    def draw(records: list[Record], running: bool, status: str) -> str:
        if not records:
            made = [Document("summary", "A sweep", ["No trial has ended yet."], [])]
        else:
            try:
                made = documents(records, baseline=baseline)
            except UserError:  # the baseline has not run yet, or has no label of its own so far
                made = documents(records)
        return page(made[0], live=running, running=status)

    return LivePage(
        draw,
        lambda: watcher.summary,
        port,
        watcher.expected,
        announce=lambda url: watcher.console.print(f"live: {url}"),
    )


def _check_time_budget(records: list[Record]) -> None:
    """Raise UserError if the time budget was shorter than every run."""
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
