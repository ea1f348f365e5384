"""`longseq maxlen`: search for the longest sequence that an attention can take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from longseq_bench.cli import options

if TYPE_CHECKING:
    from pathlib import Path

    from longseq_bench.analysis.search_row import SearchRow
    from longseq_bench.cli.progress import SearchProgress
    from longseq_bench.core.model import Record, Trial
    from longseq_bench.launchers.base import Launcher
    from longseq_bench.search.prediction import Predictor

DEFAULT_TIME_S = 10.0
"""Default time limit of one pass (s): the search then ends within two minutes on most machines."""


def maxlen(
    impl: options.Implementations,
    option: options.ImplementationOptions = None,
    memory_budget: options.MemoryBudget = None,
    time_budget: options.TimeBudget = None,
    dtype: options.DType = None,
    heads: options.Heads = 8,
    kv_heads: options.KvHeads = None,
    head_dim: options.HeadDim = 64,
    batch: options.Batch = 1,
    causal: options.Causal = False,
    mode: options.Mode = options.ModeName.forward,
    keep: options.Keep = options.KeepName.all,
    device: options.Device = options.DeviceName.auto,
    allocator: options.Allocator = options.AllocatorName.default,
    world_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Ranks that share a sequence; on cuda each has a device. Default: 1; under "
            "`longseq launch` all.",
        ),
    ] = None,
    ceiling: Annotated[
        str | None,
        typer.Option(help="Longest length to try, in tokens: 1M. Default: twice the floor."),
    ] = None,
    sparsity: Annotated[
        str | None,
        typer.Option(
            help="auto: find the lowest sparsity with which --target fits. Default: find the "
            "longest length; -o sparsity=0.99 sets a fixed sparsity."
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(help="Tokens that have to fit, with --sparsity auto: 1M. Default: none."),
    ] = None,
    fit_only: Annotated[
        bool,
        typer.Option(
            "--fit-only",
            help="Also search the longest length that fits in memory: loops are cut short, "
            "results are not checked. Default: whole passes only.",
        ),
    ] = False,
    threads: options.Threads = None,
    seed: options.Seed = 0,
    out: options.Out = None,
    as_json: options.AsJson = False,
) -> int:
    """Search for the longest sequence that each implementation can take here.

    The result is a bracket: the longest length that passed and was confirmed in a fresh process,
    and the shortest that failed, with what limited it: memory, time, a kernel's limit, numerics.
    Where memory limits, they are within 1 % or 64 tokens. Tokens are those of all ranks together.
    """
    from longseq_bench.cli.progress import SearchProgress
    from longseq_bench.cli.session import (
        build_trials,
        console,
        default_ranks,
        describe_devices,
        make_launcher,
        make_predictor,
    )
    from longseq_bench.core.units import parse_bytes, parse_seconds

    ranks, assignments = world_size or default_ranks(), option or []
    options.check_keep(keep, mode)
    shape = options.workload_fields(
        batch=batch, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, causal=causal,
        mode=mode,
    )  # fmt: skip
    most = _parse_ceiling(ceiling, ranks)
    tokens = _parse_sparsity_target(sparsity, target, assignments)
    _check_exclusive(tokens, most, fit_only)
    with make_launcher() as launcher:
        with console(stderr=True).status("looking at this machine …"):
            catalogue = launcher.catalogue()
        trials = build_trials(
            catalogue, impl, assignments, out, ranks,
            workload=shape, device=device.value, world_size=ranks, threads=threads, seed=seed,
            memory_budget=parse_bytes(memory_budget) if memory_budget else None,
            time_budget=parse_seconds(time_budget) if time_budget else DEFAULT_TIME_S,
            keep=keep.value, allocator=allocator.value,
        )  # fmt: skip
        launcher.check(trials)
        predictor = make_predictor(launcher, catalogue, trials[0].device, out)
        if fit_only:
            alone = [t.replace(fit_only=True, time_budget=None) for t in trials]
            trials = [one for pair in zip(alone, trials, strict=True) for one in pair]
        heading = describe_devices(catalogue, trials)
        watcher = SearchProgress(console(stderr=True), trials, heading)
        if tokens:
            at_length = [trial.at(tokens) for trial in trials]
            return _search_sparsity(at_length, launcher, predictor, watcher, out, as_json)
        return _search_length(trials, most, launcher, predictor, watcher, out, as_json)


def _check_exclusive(target: int | None, ceiling: int | None, fit_only: bool) -> None:
    """Raise UserError for options of a search of lengths in a search of sparsity."""
    from longseq_bench.core.errors import UserError

    if target and ceiling:
        raise UserError("--ceiling is for a search of tokens; --target says how many there are")
    if target and fit_only:
        raise UserError("--fit-only looks at memory, which no sparsity changes; leave it out")


def _parse_sparsity_target(
    sparsity: str | None, target: str | None, assignments: list[str]
) -> int | None:
    """Return the length of a search for the lowest sparsity; None for a search of lengths.

    Raises UserError where one of the two options is missing.
    """
    from longseq_bench.core.errors import UserError

    if sparsity is None and target is None:
        return None
    if sparsity is None:
        raise UserError("--target is for --sparsity auto; a search goes to --ceiling at most")
    if sparsity != "auto":
        raise UserError(f"--sparsity {sparsity}: only auto; a value is an option, -o sparsity=0.99")
    if target is None:
        raise UserError("--sparsity auto needs --target, the tokens that have to fit")
    if any(word.startswith("sparsity=") for word in assignments):
        raise UserError("--sparsity auto searches what -o sparsity sets; leave one of them out")
    return options.parse_target("--target", target)


def _parse_ceiling(text: str | None, ranks: int) -> int | None:
    """Return the ceiling in tokens. Raises UserError for fewer tokens than ranks."""
    from longseq_bench.core.errors import UserError
    from longseq_bench.core.units import parse_tokens

    tokens = parse_tokens(text) if text else None
    if tokens is not None and tokens < ranks:
        least = f"with --world-size {ranks} the least is {ranks}"
        raise UserError(f"--ceiling {text} is less than a token a rank; {least}")
    return tokens


def _search_sparsity(
    trials: list[Trial], launcher: Launcher, predictor: Predictor, watcher: SearchProgress,
    out: Path | None, as_json: bool,
) -> int:  # fmt: skip
    """Search the lowest sparsity of each trial. Raises UserError for one without this option."""
    from longseq_bench.analysis.frames import density_rows_json
    from longseq_bench.analysis.searches import density_rows
    from longseq_bench.cli.session import console, exit_code, print_json, run_and_report
    from longseq_bench.cli.stdout import keep_exit_code
    from longseq_bench.core.errors import UserError
    from longseq_bench.reports.brief import density_brief
    from longseq_bench.reports.render.terminal import REPORT_HINT, print_document
    from longseq_bench.search import strategy

    for trial in trials:
        if "sparsity" not in trial.options:
            raise UserError(f"{trial.implementation} has no sparsity; block-sparse has")
    schedule = strategy.find_min_sparsity(trials, predictor)
    records = run_and_report(schedule, launcher, out, watcher)
    rows = density_rows(records)
    with keep_exit_code(exit_code(records)):
        if as_json:
            print_json(density_rows_json(rows))
        else:
            print_document(density_brief(records), console(), REPORT_HINT)
    return exit_code(records)


def _search_length(
    trials: list[Trial], ceiling: int | None, launcher: Launcher, predictor: Predictor,
    watcher: SearchProgress, out: Path | None, as_json: bool,
) -> int:  # fmt: skip
    """Search the longest length of each trial and print the brackets."""
    from longseq_bench.analysis.frames import maxlen_json
    from longseq_bench.cli.session import exit_code, print_json, run_and_report
    from longseq_bench.cli.stdout import keep_exit_code
    from longseq_bench.search import strategy

    schedule = strategy.maxlen(trials, ceiling, predictor)
    records = run_and_report(schedule, launcher, out, watcher)
    with keep_exit_code(exit_code(records)):
        if as_json:
            print_json(maxlen_json(records))
        else:
            _print_maxima(records)
    _check_time_budget(records)
    return exit_code(records)


def _print_maxima(records: list[Record]) -> None:
    """Print the table of maxima and the width of each bracket."""
    from longseq_bench.analysis.searches import search_rows
    from longseq_bench.cli.session import console
    from longseq_bench.reports.brief import search_brief
    from longseq_bench.reports.render.terminal import REPORT_HINT, print_document

    brackets = [one for row in search_rows(records) if (one := bracket_sentence(row))]
    print_document(search_brief(records, brackets), console(), REPORT_HINT)


def bracket_sentence(row: SearchRow) -> str | None:
    """Describe the bracket of the edge and its width; None without a bracket."""
    from longseq_bench.core.units import format_seconds

    passed, failed = row.max_tokens, row.first_failure
    if not passed or not failed:
        return None
    width = (failed - passed) / passed
    sentence = f"bracket: {passed:,} passed, {failed:,} failed, {width:.1%} apart"
    if row.limited_by == "time" and row.time_budget:
        limit = format_seconds(row.time_budget)
        sentence += f"; the time limit was {limit} a pass (--time-budget changes it)"
    return sentence


def _check_time_budget(records: list[Record]) -> None:
    """Raise UserError if the time budget was shorter than every run."""
    from longseq_bench.analysis.searches import search_rows
    from longseq_bench.core.errors import UserError

    for row in search_rows(records):
        if row.max_tokens == 0 and row.limited_by == "time":
            shortest = row.first_failure
            raise UserError(
                f"time budget {row.time_budget or 0:.3g} s is shorter than one run of "
                f"{row.name}: {shortest} token(s) took longer; raise --time-budget"
            )
