"""`longseq_bench.sweep`: run a grid, from a file or from keywords."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from longseq_bench.analysis.labels import find_baseline_label, find_short_labels
from longseq_bench.api import machine
from longseq_bench.api.implementations import (
    Implementations,
    Options,
    check_shared,
    read_implementations,
)
from longseq_bench.api.progress import Reporter, RunProgress, make_reporter
from longseq_bench.api.results import Results
from longseq_bench.api.running import each_shard, run_and_report
from longseq_bench.api.shards import choose_shard, shard_folder
from longseq_bench.api.side_by_side import Run, choose_workers, cpu_workers
from longseq_bench.api.workloads import accept
from longseq_bench.config.loader import SourceFile, load_config, read_values
from longseq_bench.config.trials import SweepConfig, make_sweep
from longseq_bench.core.catalogue import Catalogue, DeviceInfo
from longseq_bench.core.errors import ConfigError, UserError
from longseq_bench.core.model import Trial
from longseq_bench.core.settings import TRIAL, WORKLOAD
from longseq_bench.core.units import MAX_RANKS, parse_seconds
from longseq_bench.launchers.base import Launcher
from longseq_bench.search import strategy
from longseq_bench.search.cheapest_first import cheapest_first
from longseq_bench.search.estimate import SweepEstimate, estimate_sweep
from longseq_bench.search.rates import RateModel

CALL = "this sweep"  # in messages, where a file would have its path


@accept(WORKLOAD | TRIAL)
@each_shard
def sweep(
    config: str | Path | None = None,
    *,
    tokens: int | str | Sequence[int | str] | None = None,
    implementations: Implementations | None = None,
    options: Options | None = None,
    baseline: str | None = None,
    rounds: int | None = None,
    within: float | str | None = None,
    shard: str | None = None,
    workers: int | str | None = None,
    out: str | Path | None = None,
    progress: bool | Reporter = True,
    profile: str | Path | None = None,
    **given: Any,
) -> Results:
    """Run every combination of a grid, interleaved.

    The keywords have the names and meanings of the keys of a sweep file (docs: Configuration); a
    list is an axis of the grid. The options of an implementation may be lists too.

    Args:
        config: A sweep file; beside it rounds, shard, workers, out, progress, profile and timing
            may be given.
        tokens: Sequence lengths over all ranks: 4096 or "4k".
        implementations: A name, a function, a pair (either, {option: value or values}), or a list
            of these.
        options: Options for every implementation that has them, {"sparsity": [0.9, 0.99]}.
        baseline: Implementation or label whose speed is 1.
        rounds: Repetitions of the grid.
        within: Time that all runs may take, 150 or "3min": one round, the cheapest runs first,
            shorter lengths too; the other times are predicted. Default: run all.
        shard: Part of the trials to run, "2/4". Default: all, or all shards of a folder of shards.
        workers: Parts of the grid that run side by side, each on devices of its own: a number, or
            "auto": as many as there are GPUs for. Default: 1.
        out: Folder for records, report and config. Finished trials in it are not run again.
            Default: results are in memory only.
        progress: True prints a line per trial on stderr, False prints nothing.
        profile: File for the trace of one pass of the first trial that times passes, after them.
        **given: Keys of a sweep file and of its workload.

    Raises:
        UserError: a value that can't be used; the sentence names it.
        LauncherError: processes can't be started.
    """
    folder, reporter = Path(out) if out else None, make_reporter(progress)
    named = dict[str, Any](tokens=tokens, implementations=implementations, baseline=baseline)
    named |= {"options": options or None, **given}
    parsed = _parse(config, {n: v for n, v in named.items() if v is not None}, rounds, folder)
    if profile:
        # it is new, and can be written: before anything runs
        Path(profile).open("xb").close()
        Path(profile).unlink()
    limit_s = parse_seconds(within, "within") if within else None
    if (profile or limit_s) and str(workers or 1) != "1":
        raise UserError("profile and within are for one worker; leave --workers out")
    place = shard_folder(folder, shard)
    opened = _open(parsed, options or {}, place, rounds, reporter, workers)
    with opened as (launcher, catalogue, loaded, heading):
        memory = str(parsed.data.get("memory_budget"))
        folder, trials = choose_shard(loaded.trials, folder, shard, memory, loaded.rounds)
        count = 0 if limit_s else loaded.rounds
        watcher = RunProgress(reporter.console, trials, heading, count)

        def schedule(part: Sequence[Trial], own: Launcher) -> strategy.Schedule:
            if not limit_s:
                return strategy.sweep(part, loaded.rounds)
            predictor = machine.make_predictor(own, catalogue, part[0].device)
            return cheapest_first(part, predictor, limit_s)

        run = Run(trials, schedule, launcher, False, *choose_workers(workers, trials, launcher))
        launcher.profile = os.path.abspath(profile) if profile else ""
        results = run_and_report(run, folder, watcher, reporter, loaded.baseline, loaded.text)
        if profile:
            missing = "no profile was written: no trial of this run timed passes"
            reporter.say([missing if launcher.profile else f"wrote {profile}"])
    return results


def plan_sweep(
    config: str | Path | None,
    rounds: int | None,
    out: Path | None,
    reporter: Reporter,
    shard: str | None = None,
    **given: Any,
) -> tuple[SweepConfig, str, SweepEstimate]:
    """Return the trials of a sweep or shard, a sentence on devices, and what a run would take."""
    parsed, shared = _parse(config, given, rounds, out), given.get("options", {})
    place = shard_folder(out, shard)
    with _open(parsed, shared, place, rounds, reporter) as (launcher, catalogue, loaded, heading):
        _, trials = choose_shard(loaded.trials, None, shard, "", loaded.rounds)
        loaded = replace(loaded, trials=tuple(trials))
        past = machine.past_records(Path("results"))
        rates: dict[str, RateModel] = {}
        for device in {trial.device for trial in loaded.trials}:
            rates[device] = RateModel(machine.hardware_here(catalogue, device), past)
        with reporter.waiting("dry runs …"):
            estimate = estimate_sweep(loaded.trials, loaded.rounds, launcher.dry_run, rates)
    return loaded, heading, estimate


def check_sweep(config: str | Path | None, reporter: Reporter, **given: Any) -> None:
    """Raise UserError for a grid that no machine runs, as far as that shows without a GPU."""
    parsed, shared = _parse(config, given, None, None), given.get("options", {})
    with machine.open_launcher(reporter, parsed.names) as (_, here):
        devices = here.devices | {"cuda": DeviceInfo(count=MAX_RANKS)}
        elsewhere = here.model_copy(update={"devices": devices})
    found = make_sweep(_with_options(parsed, elsewhere, shared) if shared else parsed, elsewhere)
    if found.baseline:
        find_baseline_label(found.trials, find_short_labels(found.trials), found.baseline)


def _parse(
    config: str | Path | None, keys: Mapping[str, Any], rounds: int | None, folder: Path | None
) -> SourceFile:
    """Return the grid of a file, or of keys without their `options`. Raises UserError."""
    if config is None:
        named = {name: value for name, value in keys.items() if name != "options"}
        named |= {"rounds": rounds} if rounds else {}
        return read_values(_sweep_values(named, folder), CALL)
    if more := sorted(keys.keys() - {"timing"}):
        raise UserError(f"a sweep file and {', '.join(more)} exclude each other; leave one out")
    return load_config(config, **keys)


@contextmanager
def _open(
    parsed: SourceFile,
    shared: Options,
    out: Path | None,
    rounds: int | None,
    reporter: Reporter,
    workers: int | str | None = None,
) -> Iterator[tuple[Launcher, Catalogue, SweepConfig, str]]:
    """Start the launcher, and make the trials on this machine, with a sentence on devices.

    shared: options for every implementation that has them.
    Raises UserError for a baseline that matches no label or several.
    """
    with machine.open_launcher(reporter, parsed.names) as (launcher, catalogue):
        loaded = make_sweep(
            _with_options(parsed, catalogue, shared) if shared else parsed,
            catalogue,
            machine.default_ranks(),
            lambda device, ranks: machine.default_memory(
                device, out, ranks, cpu_workers(workers, device)
            ),
        )
        trials = loaded.trials
        reporter.say(model.describe() for model in loaded.models)
        launcher.check(trials)
        if loaded.baseline:
            find_baseline_label(trials, find_short_labels(trials), loaded.baseline)
        loaded = replace(loaded, rounds=rounds or loaded.rounds)
        yield launcher, catalogue, loaded, machine.describe_devices(catalogue, trials)


def _with_options(source: SourceFile, catalogue: Catalogue, shared: Options) -> SourceFile:
    """Return a sweep whose implementations have the shared options that they know."""
    specs = {name: {s.name: s for s in catalogue.entry(name).options} for name in source.names}
    check_shared(specs, shared)
    items = []
    for name, own in (pair for item in source.data["implementations"] for pair in item.items()):
        usable = {o: _option_values(v) for o, v in shared.items() if o in specs[name]}
        for option, values in usable.items():
            if isinstance(values, str) and specs[name][option].kind != "ints":
                usable[option] = values.split(",")
        items.append({name: usable | own})
    return read_values(source.data | {"implementations": items}, source.name)


def _sweep_values(keys: Mapping[str, Any], folder: Path | None) -> dict[str, Any]:
    for name in ("tokens", "implementations"):
        if name not in keys:
            raise ConfigError(f"{CALL}: {name} is missing; give it, or the path of a sweep file")
    plain = {name: _plain(v) for name, v in keys.items() if name != "implementations"}
    shape = {name: plain.pop(name) for name in WORKLOAD if name in plain}
    items = [
        {name: {option: _option_values(value) for option, value in options.items()}}
        for name, options in read_implementations(keys["implementations"], folder)
    ]
    return plain | {"implementations": items} | ({"workload": shape} if shape else {})


def _plain(value: Any) -> Any:
    """Return a value as a file has it: lists, and no numbers of numpy. A truth is no number."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(one) for one in value]
    return value


def _option_values(value: Any) -> Any:
    """Return an option's values. A tuple is one value: numbers that belong together."""
    if isinstance(value, tuple):
        return ",".join(str(_plain(one)) for one in value)
    return [_option_values(one) for one in value] if isinstance(value, list) else _plain(value)
