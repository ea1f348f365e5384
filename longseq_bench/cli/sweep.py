"""`longseq sweep`: run a grid, from a file or from options, write every record, and report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from longseq_bench.cli import options, submission
from longseq_bench.core import units
from longseq_bench.core.settings import TRIAL, WORKLOAD

LISTS = ("tokens", "memory_budget", "time_budget")  # commas separate values, as in options


@options.declare(WORKLOAD | TRIAL | submission.SUBMIT)
def sweep(
    config: Annotated[Path | None, typer.Argument()] = None,
    impl: options.SomeImplementations = None,
    option: options.ImplementationOptions = None,
    tokens: str | None = None,
    *,
    out: options.Out = None,
    rounds: Annotated[int | None, typer.Option(min=1, max=units.MAX_ROUNDS)] = None,
    shard: str | None = None,
    workers: str | None = None,
    dry_run: bool = False,
    profile: Path | None = None,
    as_json: options.AsJson = False,
    **given: Any,
) -> int:
    """Run every combination of a grid, interleaved, and report.

    The grid is a sweep file, or `--tokens 32k,128k --impl ring --impl block-sparse -o
    sparsity=0.95,0.99`: tokens, budgets and options may have several values. A list in a file is
    an axis of the grid: tokens, dtype, mode, world_size (number of ranks; every rank gets the full
    memory budget), an implementation's options. The folder of results has the file of either.

    Run it again with the same --out to continue where it stopped: finished trials are kept.

    Options:
        config: Sweep file in YAML, such as configs/quickstart.yaml of the repository; beside it
            only --timing changes the grid. Default: the grid is in the options.
        tokens: Sequence lengths, 32k,128k. Default: those of the file.
        rounds: Repetitions of the grid, each in fresh processes. Default: as in the file, or 3.
        shard: Part of the trials to run, INDEX/COUNT: 2/4. The shards of a run have the same --out.
            Default: all, or all shards of a folder of shards.
        workers: Parts of the grid that run side by side, each on devices of its own: a number;
            auto: as many as there are GPUs for. Default: 1.
        dry_run: List the trials, and estimate runs, time and memory; run and write nothing.
            Default: run them.
        profile: New file for the trace of one pass, in Chrome's format (.gz: compressed), of the
            first trial of this run that times passes, after them. Default: none.
    """
    from longseq_bench.analysis.frames import rows_json
    from longseq_bench.api import grid
    from longseq_bench.cli import session
    from longseq_bench.cli.documents import trials_document
    from longseq_bench.core.options import parse_assignments

    named = {"implementations": impl, "options": parse_assignments(option or []), "tokens": tokens}
    given |= {name: value for name, value in named.items() if value}
    given |= {n: given[n].split(",") for n in LISTS if n in given}
    reporter = session.make_reporter()
    here = {"--shard": shard, "--dry-run": dry_run, "--profile": profile}
    results = submission.run(given, out, here, lambda: grid.check_sweep(config, reporter, **given))
    if not dry_run:
        out = out or session.default_out(shard)
        given |= {"rounds": rounds, "out": out, "progress": reporter, "profile": profile}
        results = results or grid.sweep(config, shard=shard, workers=workers, **given)
        return session.print_results(results, as_json, lambda: rows_json(results.rows, "rows"))
    loaded, heading, estimate = grid.plan_sweep(config, rounds, out, reporter, shard, **given)
    return session.print_answer(
        as_json,
        lambda: {
            "schema": 1,
            "trials": [trial.model_dump(mode="json") for trial in loaded.trials],
            "estimate": estimate.as_json(),
        },
        lambda: trials_document(loaded.trials, loaded.rounds, heading, estimate.sentence()),
        "a wider terminal or --json has them",
    )
