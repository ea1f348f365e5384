"""`longseq_bench.maxlen`: search for the longest sequence that an attention can take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from longseq_bench.api import machine
from longseq_bench.api.arguments import MAXLEN
from longseq_bench.api.implementations import Implementations, Options, read_implementations
from longseq_bench.api.progress import Reporter, make_reporter
from longseq_bench.api.results import Results
from longseq_bench.api.running import build_trials, each_shard, run_search
from longseq_bench.api.shards import choose_shard, shard_folder
from longseq_bench.api.workloads import accept
from longseq_bench.core.errors import UserError
from longseq_bench.core.settings import SEARCH, SHAPE
from longseq_bench.core.units import parse_tokens
from longseq_bench.search import strategy


@accept(MAXLEN | SEARCH | SHAPE)
@each_shard
def maxlen(
    implementations: Implementations,
    *,
    options: Options | None = None,
    out: str | Path | None = None,
    progress: bool | Reporter = True,
    **given: Any,
) -> Results:
    """Search for the longest sequence that each implementation can take here.

    The keywords have the names and meanings of the options of `longseq maxlen`.

    Args:
        implementations: A name, a function, a pair (either, {option: value}), or a list of these.
        options: Options for every implementation that has them.
        out: Folder for records and report; default: results are in memory only.
        progress: True prints a line per run on stderr, False prints nothing.
        **given: What to search for; shape of q, k, v, kind of pass, budgets and device.

    Raises:
        UserError: a value that can't be used; the sentence names it.
        LauncherError: processes can't be started.
    """
    ranks, shared = given.get("world_size", machine.default_ranks()), dict(options or {})
    ceiling = parse_target(given.get("ceiling"), "--ceiling")
    if ceiling and ceiling < ranks:
        problem = f"--ceiling {given['ceiling']} is smaller than --world-size {ranks}"
        raise UserError(f"{problem}; use at least {ranks}")
    reporter, folder = make_reporter(progress), Path(out) if out else None
    chosen, shard = read_implementations(implementations, folder), given.get("shard")
    with machine.open_launcher(reporter, dict(chosen)) as (launcher, catalogue):
        place = shard_folder(folder, shard)
        workers = given.get("workers")
        trials = build_trials(catalogue, chosen, shared, given, place, [ranks], reporter, workers)
        launcher.check(trials)
        if given.get("fit_only"):
            fit_trials = [t.replace(fit_only=True, time_budget=None) for t in trials]
            trials = [trial for pair in zip(fit_trials, trials, strict=True) for trial in pair]
        settings = f"{given.get('memory_budget')} {ceiling}"
        folder, trials = choose_shard(trials, folder, shard, settings)
        return run_search(
            launcher, catalogue, trials, folder,
            lambda part, predictor: strategy.maxlen(part, ceiling, predictor), reporter, workers,
        )  # fmt: skip


def parse_target(text: str | int | None, option: str = "--target") -> int | None:
    """Return the tokens of an option, if given. Raises UserError if they are no number."""
    return parse_tokens(text, option) if text else None
