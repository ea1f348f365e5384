"""`longseq scaling`: longest lengths and times over numbers of ranks, compared with the floor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from longseq_bench.cli import options
from longseq_bench.core.errors import UserError
from longseq_bench.core.settings import SEARCH, SHAPE
from longseq_bench.core.units import MAX_RANKS

if TYPE_CHECKING:
    from longseq_bench.api.results import Results


@options.declare(SEARCH | SHAPE)
def scaling(
    impl: options.Implementations,
    option: options.ImplementationOptions = None,
    *,
    world_sizes: str = "1,2",
    out: options.Out = None,
    as_json: options.AsJson = False,
    **given: Any,
) -> int:
    """Measure how the longest length and the time of a pass scale with ranks and tokens.

    Search for the longest length on each number of ranks. Let L be the shortest of these. Then time
    L/8, L/4 and L/2 on every number of ranks. Tables compare the floor of all ranks,
    expectation (one rank's length times the ranks) and measurement, and give the fitted exponents
    of tokens and ranks.

    Options:
        world_sizes: Numbers of ranks to compare, separated by commas: 1,2,4.
    """
    from longseq_bench.api import machine
    from longseq_bench.api.running import build_trials, run_search
    from longseq_bench.api.shards import choose_shard
    from longseq_bench.cli import session
    from longseq_bench.core.options import parse_assignments
    from longseq_bench.reports.brief import scaling_brief
    from longseq_bench.search import strategy

    try:
        worlds = sorted({int(size) for size in options.split_names(world_sizes)})
    except ValueError:
        worlds = []
    if not worlds or worlds[0] < 1 or worlds[-1] > MAX_RANKS:
        most = f"from 1 to {MAX_RANKS:,}, such as 1,2,4"
        raise UserError(f"--world-sizes {world_sizes!r} is not a list of numbers of ranks {most}")
    folder = out or session.default_out()
    reporter, assignments = session.make_reporter(), parse_assignments(option or [])
    chosen: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in impl]
    with machine.open_launcher(reporter, impl) as (launcher, catalogue):
        trials = build_trials(catalogue, chosen, assignments, given, folder, worlds, reporter)
        launcher.check(trials)
        place, trials = choose_shard(trials, folder, None, "")
        found = run_search(
            launcher, catalogue, trials, place,
            lambda chosen, predictor: strategy.scaling(chosen, 1, predictor), reporter,
        )  # fmt: skip
    return session.print_results(
        found, as_json, lambda: _study_json(found), lambda: scaling_brief(found.records)
    )


def _study_json(results: Results) -> dict[str, Any]:
    from dataclasses import asdict

    from longseq_bench.analysis.frames import rows_json
    from longseq_bench.analysis.scaling import complexities, maxima_on_ranks

    return {
        "maxima": [asdict(one) for one in maxima_on_ranks(results.maxima)],
        "complexity": [asdict(one) for one in complexities(results.rows)],
        **rows_json(results.rows, "rows"),
    }
