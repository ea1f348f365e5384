"""`longseq sweep CONFIG`: run a grid, write every record, end with a report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longseq_bench.cli import options
from longseq_bench.core.errors import UserError

if TYPE_CHECKING:
    from longseq_bench.cli.live_server import LivePage
    from longseq_bench.cli.progress import SweepProgress
    from longseq_bench.config.trials import SweepConfig
    from longseq_bench.core.model import Device, Record


def sweep(
    config: Annotated[
        Path, typer.Argument(help="Sweep file in YAML, such as configs/quickstart.yaml.")
    ],
    out: options.Out = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            min=1, help="Repetitions of the grid, each in fresh processes. Default: as in the file."
        ),
    ] = None,
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

    A list in the config is an axis of the grid: tokens, dtype, mode, world_size (number of ranks;
    every rank gets the full memory budget), an implementation's options.

    Run it again with the same --out to continue where it stopped: finished trials are kept.
    """
    from dataclasses import replace

    from longseq_bench.analysis.frames import sweep_json
    from longseq_bench.cli import session
    from longseq_bench.cli.progress import SweepProgress
    from longseq_bench.config.trials import load_config
    from longseq_bench.reports.brief import sweep_brief
    from longseq_bench.search import strategy

    if port is not None and not live:
        raise UserError("--port needs --live; add --live")
    if dry_run and live:
        raise UserError("--live can't be combined with --dry-run, which runs nothing; remove one")
    with session.open_launcher() as (launcher, catalogue):
        loaded = _set_budgets(load_config(config, catalogue, session.default_ranks()), out)
        loaded = replace(loaded, rounds=rounds or loaded.rounds)
        trials, baseline = loaded.trials, loaded.baseline
        session.print_lines(model.describe() for model in loaded.models)
        launcher.check(trials)
        _check_baseline(loaded)
        heading = session.describe_devices(catalogue, trials)
        if dry_run:
            return _list_trials(loaded, heading, as_json)
        predictor = session.make_predictor(launcher, catalogue, trials[0].device, out)
        watcher = SweepProgress(session.console(stderr=True), trials, loaded.rounds, heading)
        page = _make_live_page(watcher, baseline, port or 0) if live else None
        schedule = strategy.sweep(trials, loaded.rounds, predictor)
        records = session.run_and_report(
            schedule, launcher, out, watcher, baseline, loaded.text, page
        )
    code = session.print_records(
        records, as_json, sweep_json, lambda found: sweep_brief(found, baseline)
    )
    budgets = {r.trial.time_budget for r in records if r.trial.time_budget}
    if budgets and all(r.outcome.status == "timeout" for r in records):
        raise UserError(f"time_budget {max(budgets):.3g} s is shorter than any run; raise it")
    return code


def _set_budgets(config: SweepConfig, out: Path | None) -> SweepConfig:
    """Give trials without a memory budget the default one, so that no trial exhausts the machine.

    All get the default of the trial with the most ranks, so that they are comparable.
    """
    from dataclasses import replace

    from longseq_bench.cli.session import default_memory

    max_ranks: dict[Device, int] = {}
    for trial in config.trials:
        if trial.memory_budget is None:
            max_ranks[trial.device] = max(trial.world_size, max_ranks.get(trial.device, 1))
    budgets = {device: default_memory(device, out, n) for device, n in max_ranks.items()}
    trials = tuple(
        t if t.memory_budget else t.replace(memory_budget=budgets[t.device]) for t in config.trials
    )
    return replace(config, trials=trials)


def _check_baseline(config: SweepConfig) -> None:
    """Raise UserError for a baseline that matches no label or several, before anything runs."""
    from longseq_bench.analysis.labels import find_baseline_label
    from longseq_bench.analysis.short_labels import find_short_labels

    if config.baseline:
        find_baseline_label(config.trials, find_short_labels(config.trials), config.baseline)


def _make_live_page(watcher: SweepProgress, baseline: str | None, port: int) -> LivePage:
    """Return a page of the sweep that prints its address when it is served."""
    from longseq_bench.cli.live_server import LivePage
    from longseq_bench.reports import documents
    from longseq_bench.reports.document import Document
    from longseq_bench.reports.render.html import page

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


def _list_trials(config: SweepConfig, heading: str, as_json: bool) -> int:
    from longseq_bench.cli.documents import trials_document
    from longseq_bench.cli.session import print_answer

    def data() -> dict[str, Any]:
        return {"schema": 1, "trials": [t.model_dump(mode="json") for t in config.trials]}

    hint = "a wider terminal or --json has them"
    return print_answer(
        as_json, data, lambda: trials_document(config.trials, config.rounds, heading), hint
    )
