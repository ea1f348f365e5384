"""`longseq_bench.maxlen`: search for the longest sequence that an attention can take."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Literal

from typing_extensions import Unpack

from longseq_bench.api import machine
from longseq_bench.api.implementations import Implementations, Options, read_implementations
from longseq_bench.api.progress import Reporter, make_reporter
from longseq_bench.api.results import Results
from longseq_bench.api.running import build_trials, run_search
from longseq_bench.api.workloads import WorkloadArguments, check_keywords, show_keywords
from longseq_bench.core.errors import UserError
from longseq_bench.core.model import Allocator, DeviceChoice
from longseq_bench.core.units import parse_tokens


@show_keywords
def maxlen(
    implementations: Implementations,
    *,
    options: Options | None = None,
    memory_budget: str | int | None = None,
    time_budget: str | float = "10s",
    world_size: int | None = None,
    ceiling: str | int | None = None,
    sparsity: Literal["auto"] | None = None,
    target: str | int | None = None,
    fit_only: bool = False,
    device: DeviceChoice = "auto",
    allocator: Allocator = "default",
    threads: int | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    progress: bool | Reporter = True,
    **workload: Unpack[WorkloadArguments],
) -> Results:
    """Search for the longest sequence that each implementation can take here.

    The keywords have the names and meanings of the options of `longseq maxlen`.

    Args:
        implementations: A name, a function, a pair (either, {option: value}), or a list of these.
        options: Options for every implementation that has them.
        memory_budget: Bytes that a rank may allocate: 2**28 or "256MiB"; default: 80 % of the free
            memory.
        time_budget: Limit of one pass: seconds, or "2min".
        world_size: Ranks that share a sequence; default: 1.
        ceiling: Longest length to try, in tokens: 65536 or "64k".
        sparsity: "auto": find the lowest sparsity with which `target` tokens fit.
        target: Tokens that must fit, with sparsity="auto".
        fit_only: Also search for the longest length that fits in memory, with shortened loops.
        device: auto, cpu or cuda.
        allocator: default, expandable (CUDA) or fresh (CPU).
        threads: CPU threads per rank; default: cores / ranks.
        seed: Seed of the random inputs.
        out: Folder for records and report; default: results are in memory only.
        progress: True prints a line per run on stderr, False prints nothing.
        **workload: Shape of q, k, v and the kind of pass, see WorkloadArguments.

    Raises:
        UserError: a value that can't be used; the sentence names it.
        LauncherError: processes can't be started.
    """
    from longseq_bench.search import strategy

    check_keywords(workload, "maxlen")
    ranks, shared = world_size or machine.default_ranks(), dict(options or {})
    ceiling_tokens = _parse_ceiling(ceiling, ranks)
    tokens = _parse_sparsity_target(sparsity, target, shared)
    _check_combination(tokens, ceiling_tokens, fit_only)
    reporter, folder = make_reporter(progress), Path(out) if out else None
    chosen = read_implementations(implementations, folder)
    settings: dict[str, Any] = {
        "device": device, "memory_budget": memory_budget, "time_budget": time_budget,
        "allocator": allocator, "threads": threads, "seed": seed,
    }  # fmt: skip
    with machine.open_launcher(reporter) as (launcher, catalogue):
        trials = build_trials(
            catalogue, chosen, shared, settings, workload, folder, [ranks], reporter
        )
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


def _check_combination(tokens: int | None, ceiling: int | None, fit_only: bool) -> None:
    if tokens and ceiling:
        raise UserError(
            "--ceiling can't be combined with --target, which fixes the length; remove --ceiling"
        )
    if tokens and fit_only:
        raise UserError(
            "--fit-only can't be combined with --sparsity auto: memory hardly depends on "
            "sparsity; remove --fit-only"
        )


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
