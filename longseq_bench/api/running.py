"""Run a schedule: into a results folder with its report, or in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from longseq_bench.api import machine
from longseq_bench.api.implementations import Options, choose_options
from longseq_bench.api.progress import Reporter, RunWatcher
from longseq_bench.api.results import Results
from longseq_bench.api.workloads import WorkloadArguments, build_workload, make_trial, model_of
from longseq_bench.core.catalogue import Catalogue
from longseq_bench.core.errors import StoreError
from longseq_bench.core.model import Trial
from longseq_bench.core.own_functions import source_of
from longseq_bench.core.units import parse_memory_budget, parse_seconds
from longseq_bench.launchers.base import Launcher
from longseq_bench.runner import run_schedule
from longseq_bench.search.prediction import Predictor
from longseq_bench.search.strategy import Schedule
from longseq_bench.store import Store


def build_trials(
    catalogue: Catalogue, chosen: Sequence[tuple[str, Options]], options: Options,
    settings: Mapping[str, Any], workload: WorkloadArguments, out: Path | None,
    worlds: Sequence[int], reporter: Reporter,
) -> list[Trial]:  # fmt: skip
    """Return a trial of one token for each implementation and number of ranks.

    options: for every implementation that has them.  settings: device, memory_budget, time_budget,
    allocator, threads and seed.
    Raises UserError for a device, dtype, name or option that is not available.
    """
    ranks = max(worlds)
    device = catalogue.resolve_device(settings["device"], ranks)
    shape = build_workload(workload, catalogue.default_dtype(device))
    if model := model_of(workload):
        reporter.say([model.describe(shape)])
    budget = parse_memory_budget(settings["memory_budget"]) if settings["memory_budget"] else None
    time_budget = parse_seconds(settings["time_budget"], "time budget")
    catalogue.check_device(device)
    catalogue.check_dtype(device, shape.dtype)
    catalogue.check_ranks(device, ranks, "--world-size")
    implementations = choose_options(catalogue, chosen, options)
    budget = budget or machine.default_memory(device, out, ranks)
    same = {name: settings[name] for name in ("threads", "seed", "allocator")}
    return [
        make_trial(
            implementation=name, options=values, workload=shape, device=device, world_size=world,
            memory_budget=budget, time_budget=time_budget, repeats=0,
            keep=workload.get("keep", "all"), source=source_of(name), **same,
        )
        for name, values in implementations for world in worlds
    ]  # fmt: skip


def run_search(
    launcher: Launcher, catalogue: Catalogue, trials: Sequence[Trial], out: Path | None,
    make_schedule: Callable[[Predictor], Schedule], reporter: Reporter,
) -> Results:  # fmt: skip
    """Run a search over the trials."""
    predictor = machine.make_predictor(launcher, catalogue, trials[0].device, out)
    watcher = reporter.watch_search(trials, machine.describe_devices(catalogue, trials))
    return run_and_report(make_schedule(predictor), launcher, out, watcher, reporter)


def run_and_report(
    schedule: Schedule,
    launcher: Launcher,
    out: Path | None,
    watcher: RunWatcher,
    reporter: Reporter,
    baseline: str | None = None,
    config: str | None = None,
) -> Results:
    """Run a schedule; with a folder, write records and report there.

    config: the text of a sweep file, which is written there too.
    Raises StoreError for a folder that can't be used.
    """
    from longseq_bench.environment import collect
    from longseq_bench.reports import write_documents

    with Store(out) if out else nullcontext() as store:
        if store:
            reporter.note(store.notes)
            if config is not None:
                _write_config(config, store.folder)
        with _name_folder_at_interrupt(store, reporter), watcher:
            records = run_schedule(schedule, launcher, store, collect, [watcher], reporter.command)
        notes = tuple(store.notes) if store else ()
        results = Results(records, out, baseline, notes)
        if store and records:
            store.check_in_place()  # writing would create the folder anew
            paths = write_documents(results.documents(), store.folder, attachments=False)
            reporter.say(f"wrote {path}" for path in [store.path, *paths])
            reporter.say([f"charts and a page: longseq report {store.folder} --format md,html"])
    return results


@contextmanager
def _name_folder_at_interrupt(store: Store | None, reporter: Reporter) -> Iterator[None]:
    """Say on Ctrl-C where the records are; without --out its user has not seen the folder."""
    try:
        yield
    except KeyboardInterrupt:
        if store:
            reporter.say(
                [f"records: {store.path}; the same command with --out {store.folder} continues"]
            )
        raise


def _write_config(config: str, folder: Path) -> None:
    path = folder / "config.yaml"
    try:
        path.write_text(config, encoding="utf-8", newline="\n")
    except OSError as error:
        reason = f"{error.strerror} ({path})"
        raise StoreError(f"results folder {folder} can't be written: {reason}") from None
