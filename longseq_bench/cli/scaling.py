"""`longseq scaling`: longest lengths and times over numbers of ranks, compared with theory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from longseq_bench.cli import options
from longseq_bench.cli.maxlen import DEFAULT_TIME_S

if TYPE_CHECKING:
    from longseq_bench.core.model import Record

ROUNDS = 1


def scaling(
    impl: options.Implementations,
    option: options.ImplementationOptions = None,
    world_sizes: Annotated[
        str, typer.Option(help="Numbers of ranks to compare, with commas: 1,2,4.")
    ] = "1,2",
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
    threads: options.Threads = None,
    seed: options.Seed = 0,
    out: options.Out = None,
    as_json: options.AsJson = False,
) -> int:
    """Measure how the longest length and the time of a pass scale with ranks and tokens.

    Searches the longest length for each number of ranks. Then times an eighth, a quarter and half
    of the shortest of them on all numbers of ranks. The table compares theory (the floor of all
    ranks), expectation (one rank's length times the ranks) and measurement, and fits the exponents
    of tokens and ranks.
    """
    from longseq_bench.cli.progress import SearchProgress
    from longseq_bench.cli.session import (
        build_trials,
        console,
        describe_devices,
        exit_code,
        make_launcher,
        make_predictor,
        run_and_report,
    )
    from longseq_bench.cli.stdout import keep_exit_code
    from longseq_bench.core.units import parse_bytes, parse_seconds
    from longseq_bench.search import strategy

    worlds = _parse_world_sizes(world_sizes)
    options.check_keep(keep, mode)
    shape = options.workload_fields(
        batch=batch, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, causal=causal,
        mode=mode,
    )  # fmt: skip
    with make_launcher() as launcher:
        with console(stderr=True).status("looking at this machine …"):
            catalogue = launcher.catalogue()
        trials = build_trials(
            catalogue, impl, option or [], out, max(worlds), workload=shape, device=device.value,
            memory_budget=parse_bytes(memory_budget) if memory_budget else None,
            time_budget=parse_seconds(time_budget) if time_budget else DEFAULT_TIME_S,
            threads=threads, seed=seed, keep=keep.value, allocator=allocator.value,
        )  # fmt: skip
        spread = [trial.replace(world_size=ranks) for trial in trials for ranks in worlds]
        launcher.check(spread)
        predictor = make_predictor(launcher, catalogue, trials[0].device, out)
        heading = describe_devices(catalogue, trials)
        watcher = SearchProgress(console(stderr=True), spread, heading)
        schedule = strategy.scaling(trials, worlds, ROUNDS, None, predictor)
        records = run_and_report(schedule, launcher, out, watcher)
    with keep_exit_code(exit_code(records)):
        _print_study(records, as_json)
    return exit_code(records)


def _parse_world_sizes(text: str) -> list[int]:
    """Return the numbers of ranks, ascending. Raises UserError for anything else."""
    from longseq_bench.core.errors import UserError

    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise UserError(f"--world-sizes: {text!r} is no list of numbers of ranks, like 1,2,4")
    return sorted({int(part) for part in parts})


def _print_study(records: list[Record], as_json: bool) -> None:
    """Print maxima and times over ranks, with the exponents that fit them."""
    from dataclasses import asdict

    from longseq_bench.analysis.frames import sweep_json
    from longseq_bench.analysis.scaling import complexities, reached
    from longseq_bench.analysis.searches import search_rows
    from longseq_bench.analysis.sweeps import sweep_rows
    from longseq_bench.cli.session import console, print_json
    from longseq_bench.reports.brief import scaling_brief
    from longseq_bench.reports.render.terminal import REPORT_HINT, print_document

    rows = sweep_rows(records)
    maxima, times = reached(search_rows(records)), complexities(rows)
    if as_json:
        found, fits = [asdict(one) for one in maxima], [asdict(one) for one in times]
        timed = sweep_json(records)["rows"]
        print_json({"schema": 1, "maxima": found, "rows": timed, "complexity": fits})
        return
    print_document(scaling_brief(records), console(), REPORT_HINT)
