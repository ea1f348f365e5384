"""`longseq sweep CONFIG`: run a grid, write every record, end with a report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from longseq_bench.cli import options
from longseq_bench.core import units
from longseq_bench.core.errors import UserError


def sweep(
    config: Path,
    out: options.Out = None,
    rounds: Annotated[int | None, typer.Option(min=1, max=units.MAX_ROUNDS)] = None,
    dry_run: bool = False,
    cold: bool = False,
    graph: bool = False,
    profile: Path | None = None,
    as_json: options.AsJson = False,
    verbose: options.Verbose = False,
) -> int:
    """Run every combination of a config, interleaved, and report.

    A list in the config is an axis of the grid: tokens, dtype, mode, world_size (number of ranks;
    every rank gets the full memory budget), an implementation's options.

    Run it again with the same --out to continue where it stopped: finished trials are kept.

    Options:
        config: Sweep file in YAML, such as configs/quickstart.yaml of the repository.
        rounds: Repetitions of the grid, each in fresh processes. Default: as in the file.
        dry_run: List the trials, and estimate runs, time and memory; run and write nothing.
            Default: run them.
        cold: Flush the caches before each timed pass (`timing: cold`). Default: as in the file.
        graph: Time replays of a CUDA graph of the pass (`timing: graph`). Default: as in the file.
        profile: New file for the trace of one pass, in Chrome's format (.gz: compressed), of the
            first trial of this run that times passes, after them. Default: none.
    """
    from longseq_bench.analysis.frames import sweep_json
    from longseq_bench.api import grid
    from longseq_bench.cli import session
    from longseq_bench.cli.documents import trials_document

    if cold and graph:
        raise UserError("--cold and --graph exclude each other; leave one out")
    timing = {"timing": "cold" if cold else "graph"} if cold or graph else {}
    reporter = session.make_reporter(verbose)
    if not dry_run:
        out = out or session.default_out()
        results = grid.sweep(
            config, rounds=rounds, out=out, progress=reporter, profile=profile, **timing
        )
        return session.print_results(results, as_json, sweep_json)
    loaded, heading, estimate = grid.plan_sweep(config, rounds, out, reporter, **timing)
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
