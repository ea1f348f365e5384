"""`longseq_bench.recommend`: which attention for these lengths, and how far each one goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longseq_bench.api import machine
from longseq_bench.api.arguments import RECOMMEND
from longseq_bench.api.grid import open_grid, parse_grid
from longseq_bench.api.implementations import Implementations, Options
from longseq_bench.api.progress import Reporter, RunProgress, make_reporter
from longseq_bench.api.results import Results
from longseq_bench.api.running import run_and_report
from longseq_bench.api.workloads import accept
from longseq_bench.core.settings import SEARCH, SHAPE
from longseq_bench.core.units import parse_seconds
from longseq_bench.search.cheapest_first import cheapest_first, fit_trial

TOKENS = ("8k", "32k")
USUAL: tuple[tuple[str, dict[str, Any]], ...] = (
    ("sdpa", {}),
    ("ring", {}),
    ("block-sparse", {"sparsity": 0.99}),
    ("block-sparse", {"sparsity": 0.99, "pattern": "sink-window"}),
    ("block-sparse-adaptive", {"sparsity": 0.99}),
    ("dilated", {"segments": (2048, 8192), "dilation": (1, 4)}),
    ("hilbert", {"segments": (2048, 8192), "dilation": (1, 4)}),
)
"""One implementation of each kind that needs no other library: exact attention by torch and in
minimal memory; a window (Longformer, arXiv 2004.05150), a window with sinks (StreamingLLM,
2309.17453), blocks by content, LongNet's dilation (2307.02486), the same along a curve."""
FEW_PASSES = {"repeats": 3, "time_cap": "500ms", "time_budget": SEARCH["time_budget"].default}


@accept(RECOMMEND | SEARCH | SHAPE)
def recommend(
    implementations: Implementations | None = None,
    *,
    tokens: int | str | Sequence[int | str] = TOKENS,
    options: Options | None = None,
    out: str | Path | None = None,
    progress: bool | Reporter = True,
    **given: Any,
) -> Results:
    """Time implementations at some lengths, and find the longest length that fits in memory.

    What would take too long is predicted from shorter runs, and marked. The keywords have the names
    and meanings of the options of `longseq recommend`.

    Args:
        implementations: As for `sweep`. Default: the list of `longseq recommend --help`.
        tokens: Sequence lengths over all ranks: 4096 or "4k".
        options: Options for every implementation that has them, {"sparsity": [0.9, 0.99]}.
        out: Folder for records, report and config. Finished trials in it are not run again.
            Default: results are in memory only.
        progress: True prints a line per trial on stderr, False prints nothing.
        **given: The time that runs may take; shape of q, k, v, kind of pass, budgets and device.

    Raises:
        UserError: a value that can't be used; the sentence names it.
        LauncherError: processes can't be started.
    """
    folder, reporter, shared = Path(out) if out else None, make_reporter(progress), options or {}
    limit_s = parse_seconds(given.pop("within", RECOMMEND["within"].default), "within")
    usual = [(name, {o: v for o, v in own.items() if o not in shared}) for name, own in USUAL]
    grid = {"tokens": tokens, "implementations": implementations or usual}
    parsed = parse_grid(None, FEW_PASSES | grid | given, 1, folder)
    with open_grid(parsed, shared, folder, 1, reporter) as (launcher, catalogue, loaded, heading):
        trials = loaded.trials
        predictor = machine.make_predictor(launcher, catalogue, trials[0].device)
        watcher = RunProgress(reporter.console, [*trials, *map(fit_trial, trials)], heading)
        schedule = cheapest_first(trials, predictor, limit_s)
        return run_and_report(schedule, launcher, folder, watcher, reporter, config=loaded.text)
