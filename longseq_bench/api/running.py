"""Run trials: into a results folder with their report, or in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial, wraps
from pathlib import Path
from typing import Any

from longseq_bench.api import machine
from longseq_bench.api.implementations import Options, choose_options
from longseq_bench.api.progress import Reporter, RunProgress
from longseq_bench.api.results import CONFIG, Results, load
from longseq_bench.api.shards import FINISHED, read_shards, run_folder
from longseq_bench.api.side_by_side import Run, choose_workers, cpu_workers
from longseq_bench.api.workloads import F, build_workload, make_trial, model_of, with_all_layers
from longseq_bench.core.catalogue import Catalogue
from longseq_bench.core.errors import StoreError, UserError
from longseq_bench.core.model import Trial, is_environment_failure
from longseq_bench.core.settings import SEARCH, SHAPE
from longseq_bench.core.units import format_bytes, parse_memory_budget, parse_seconds
from longseq_bench.launchers.base import Launcher
from longseq_bench.search.prediction import Predictor
from longseq_bench.search.strategy import Schedule
from longseq_bench.store import Store, unwritable


def build_trials(
    catalogue: Catalogue,
    chosen: Sequence[tuple[str, Options]],
    options: Options,
    given: Mapping[str, Any],
    out: Path | None,
    worlds: Sequence[int],
    reporter: Reporter,
    workers: int | str | None = None,
) -> list[Trial]:
    """Return a trial of one token for each implementation and number of ranks.

    options: for every implementation that has them.  given: settings; the others have defaults.
    Raises UserError for a device, dtype, name or option that is not available.
    """
    ranks = max(worlds)
    settings = {name: setting.default for name, setting in SEARCH.items()} | {**given}
    device = catalogue.resolve_device(settings["device"], ranks)
    shape = build_workload(given, catalogue.default_dtype(device))
    model = model_of(given)
    if model and shape.decode and not given.get("layer"):
        shape = with_all_layers(shape, model)
    catalogue.check_device(device)
    catalogue.check_dtype(device, shape.dtype)
    catalogue.check_ranks(device, ranks, "--world-size")
    # "none" is the default memory, and no limit of the time
    memory, time = (
        None if str(settings[name]).lower() == "none" else settings[name]
        for name in ("memory_budget", "time_budget")
    )
    if memory:
        budget = parse_memory_budget(memory)
    else:
        budget = machine.default_memory(device, out, ranks, cpu_workers(workers, device))
    if model and shape.weights >= budget:
        raise UserError(
            f"the weights of model {model.name} take {format_bytes(shape.weights)}, and the memory "
            f"budget of a rank is {format_bytes(budget)}, so nothing is left for caches; "
            "give a larger --memory-budget, or measure one layer with --layer"
        )
    if model:
        reporter.say([model.describe(shape), *filter(None, [model.parameters_reason])])
    trial = partial(
        make_trial,
        workload=shape,
        device=device,
        time_budget=None if time is None else parse_seconds(time, "time budget"),
        memory_budget=budget - shape.weights,
        repeats=0,
        keep=given.get("keep", SHAPE["keep"].default),
        **{name: settings[name] for name in ("threads", "seed", "allocator")},
    )
    return [
        trial(implementation=n, options=own, world_size=world, source=catalogue.entry(n).hash)
        for n, own in choose_options(catalogue, chosen, options)
        for world in worlds
    ]


def run_search(
    launcher: Launcher,
    catalogue: Catalogue,
    trials: Sequence[Trial],
    out: Path | None,
    make_schedule: Callable[[Sequence[Trial], Predictor], Schedule],
    reporter: Reporter,
    workers: int | str | None = None,
) -> Results:
    """Run a search over the trials."""
    device = trials[0].device if trials else "cpu"  # a shard may have none

    def predicted(part: Sequence[Trial], own: Launcher) -> Schedule:
        return make_schedule(part, machine.make_predictor(own, catalogue, device))

    run = Run(trials, predicted, launcher, True, *choose_workers(workers, trials, launcher))
    heading = machine.describe_devices(catalogue, trials)
    return run_and_report(run, out, RunProgress(reporter.console, trials, heading), reporter)


def each_shard(command: F) -> F:
    """Let `sweep` or `maxlen` continue all shards of its folder if it is asked for none of them."""

    @wraps(command)
    def running(*args: Any, out: str | Path | None = None, **given: Any) -> Any:
        found = read_shards(Path(out)) if out and not given.get("shard") else {}
        count = max((one.count for one in found.values()), default=0)
        for i in range(count):
            command(*args, out=out, **{**given, "shard": f"{i + 1}/{count}"})
        return load(out) if out and found else command(*args, out=out, **given)

    return running  # type: ignore[return-value]


def run_and_report(
    run: Run,
    out: Path | None,
    watcher: RunProgress,
    reporter: Reporter,
    baseline: str | None = None,
    config: str | None = None,
) -> Results:
    """Run trials; with a folder, write records and report there.

    config: the text of a sweep file, which is written to the folder of the run.
    Raises StoreError for a folder that can't be used.
    """
    if out and read_shards(out):
        raise StoreError(f"{out} holds the shards of another run; name another folder with --out")
    whole = run_folder(out) if out else None
    with Store(out) if out else nullcontext() as store:
        if store:
            reporter.say(store.notes, "yellow")
            if config is not None and whole:
                try:
                    (whole / CONFIG).write_text(config, encoding="utf-8", newline="\n")
                except OSError as error:
                    raise unwritable(whole, error) from None
        try:
            with watcher:
                records = run.start(store, watcher, reporter.command)
        except KeyboardInterrupt:
            if store:
                again = f"the same command with --out {whole} continues"
                reporter.say([f"records: {store.path}; {again}"])
            raise
        notes = tuple(store.notes) if store else ()
        results = Results(records, out, baseline, notes)
        if store and records:
            from longseq_bench.reports.kinds import write_documents

            store.check_in_place()  # writing would create the folder anew
            paths = write_documents(results.documents(), store.folder, charts=False)
            reporter.say(f"wrote {path}" for path in [store.path, *paths])
            reporter.say([f"charts and a page: longseq report {whole} --format md,html"])
        elif not records:
            reporter.say(["nothing to run: this shard has no trials"])
        # a trial that something else ended runs again
        if out and out != whole and not any(is_environment_failure(r.outcome) for r in records):
            (out / FINISHED).touch()
    return results
