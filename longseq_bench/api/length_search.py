"""`longseq_bench.maxlen`: search for the longest sequence that an attention can take."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from longseq_bench.api import machine
from longseq_bench.api.arguments import MAXLEN
from longseq_bench.api.implementations import Implementations, Options, read_implementations
from longseq_bench.api.progress import Reporter, make_reporter
from longseq_bench.api.results import Results
from longseq_bench.api.running import build_trials, run_search
from longseq_bench.api.workloads import accept
from longseq_bench.core.errors import UserError
from longseq_bench.core.settings import SEARCH, SHAPE
from longseq_bench.core.units import parse_tokens


@accept(MAXLEN | SEARCH | SHAPE)
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
    from longseq_bench.search import strategy

    ranks, shared = given.get("world_size", machine.default_ranks()), dict(options or {})
    ceiling_tokens = _parse_ceiling(given.get("ceiling"), ranks)
    tokens = _parse_sparsity_target(given.get("sparsity"), given.get("target"), shared)
    fit_only = given.get("fit_only", False)
    if tokens and ceiling_tokens:
        raise UserError(
            "--ceiling can't be combined with --target, which fixes the length; remove --ceiling"
        )
    if tokens and fit_only:
        raise UserError(
            "--fit-only can't be combined with --sparsity auto: memory hardly depends on "
            "sparsity; remove --fit-only"
        )
    reporter, folder = make_reporter(progress), Path(out) if out else None
    chosen = read_implementations(implementations, folder)
    names = [name for name, _ in chosen]
    with machine.open_launcher(reporter, names) as (launcher, catalogue):
        trials = build_trials(catalogue, chosen, shared, given, folder, [ranks], reporter)
        launcher.check(trials)
        if tokens:
            for trial in trials:
                if "sparsity" not in trial.options:
                    raise UserError(f"{trial.implementation} has no sparsity; use block-sparse")
            trials = [trial.at(tokens) for trial in trials]
            schedule = partial(strategy.find_min_sparsity, trials)
        else:
            if fit_only:
                fit_trials = [t.replace(fit_only=True, time_budget=None) for t in trials]
                trials = [trial for pair in zip(fit_trials, trials, strict=True) for trial in pair]
            schedule = partial(strategy.maxlen, trials, ceiling_tokens)
        return run_search(launcher, catalogue, trials, folder, schedule, reporter)


def parse_target(text: str | int | None) -> int | None:
    """Return the tokens of a target, if given. Raises UserError if it is not a number of tokens."""
    return parse_tokens(text, "--target") if text else None


def _parse_sparsity_target(
    sparsity: str | None, target: str | int | None, options: Options
) -> int | None:
    """Return the length of a search for the lowest sparsity; None for a search for a length.

    Raises UserError if one of the two options is missing.
    """
    if sparsity is None and target is None:
        return None
    if sparsity is None:
        raise UserError("--target needs --sparsity auto; to limit other searches use --ceiling")
    if sparsity != "auto":
        raise UserError(f"--sparsity {sparsity}: must be auto; for a value use -o sparsity=0.99")
    if target is None:
        raise UserError("--sparsity auto needs --target, the number of tokens that must fit")
    if "sparsity" in options:
        raise UserError("--sparsity auto and -o sparsity both set the sparsity; remove one")
    return parse_target(target)


def _parse_ceiling(text: str | int | None, ranks: int) -> int | None:
    """Return the ceiling in tokens. Raises UserError for fewer tokens than ranks."""
    tokens = parse_tokens(text, "--ceiling") if text else None
    if tokens is not None and tokens < ranks:
        problem = f"--ceiling {text} is smaller than --world-size {ranks}"
        raise UserError(f"{problem}; use at least {ranks}")
    return tokens
