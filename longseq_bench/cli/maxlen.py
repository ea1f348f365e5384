"""`longseq maxlen`: search for the longest sequence that an attention can take."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from longseq_bench.cli import options
from longseq_bench.core.errors import UserError
from longseq_bench.core.units import format_seconds, parse_tokens

if TYPE_CHECKING:
    from longseq_bench.analysis.search_row import SearchRow
    from longseq_bench.core.model import Record
    from longseq_bench.reports.document import Document


@options.expand_options
def maxlen(
    search: options.SearchOptions,
    workload: options.WorkloadOptions,
    world_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Ranks that share a sequence; on cuda each has a device. Default: 1, or all ranks "
            "of the launch under `longseq launch`.",
        ),
    ] = None,
    ceiling: Annotated[
        str | None,
        typer.Option(
            help="Longest length to try, in tokens: 1M. Default and maximum: twice the length "
            "whose q, k, v and output (in training also gradients) fill the budget. With "
            "offload=host: 1G, without a maximum."
        ),
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
        typer.Option(help="Tokens that must fit, with --sparsity auto: 1M. Default: none."),
    ] = None,
    fit_only: Annotated[
        bool,
        typer.Option(
            "--fit-only",
            help="Also search for the longest length that fits in memory: loops are shortened, "
            "outputs are not checked. Default: complete passes only.",
        ),
    ] = False,
    out: options.Out = None,
    as_json: options.AsJson = False,
) -> int:
    """Search for the longest sequence that each implementation can take here.

    The result is a bracket: the longest length that passed and was confirmed in a fresh process,
    and the shortest that failed, with what limited it: memory, time, a kernel's limit, numerics.
    If memory is the limit, the two lengths differ by at most 1 % or 64 tokens, whichever is larger
    (more if runs contradict each other). Tokens are those of all ranks together.
    """
    from longseq_bench.analysis.frames import maxlen_json, rows_json
    from longseq_bench.analysis.searches import density_rows
    from longseq_bench.cli import session
    from longseq_bench.reports.brief import density_brief
    from longseq_bench.search import strategy

    ranks = world_size or session.default_ranks()
    ceiling_tokens = _parse_ceiling(ceiling, ranks)
    tokens = _parse_sparsity_target(sparsity, target, search.option or [])
    if tokens and ceiling_tokens:
        raise UserError(
            "--ceiling can't be combined with --target, which fixes the length; remove --ceiling"
        )
    if tokens and fit_only:
        raise UserError(
            "--fit-only can't be combined with --sparsity auto: memory hardly depends on "
            "sparsity; remove --fit-only"
        )
    with session.open_launcher() as (launcher, catalogue):
        trials = session.build_trials(catalogue, search, workload, out, [ranks])
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
        records = session.run_search(launcher, catalogue, trials, out, schedule)
    if tokens:
        return session.print_records(
            records, as_json, lambda run: rows_json(density_rows(run), "density"), density_brief
        )
    code = session.print_records(records, as_json, maxlen_json, _maxima)
    _check_time_budget(records)
    return code


def _parse_sparsity_target(
    sparsity: str | None, target: str | None, assignments: list[str]
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
    if any(word.startswith("sparsity=") for word in assignments):
        raise UserError("--sparsity auto and -o sparsity both set the sparsity; remove one")
    return options.parse_target(target)


def _parse_ceiling(text: str | None, ranks: int) -> int | None:
    """Return the ceiling in tokens. Raises UserError for fewer tokens than ranks."""
    tokens = parse_tokens(text) if text else None
    if tokens is not None and tokens < ranks:
        problem = f"--ceiling {text} is smaller than --world-size {ranks}"
        raise UserError(f"{problem}; use at least {ranks}")
    return tokens


def _maxima(records: list[Record]) -> Document:
    from longseq_bench.analysis.searches import search_rows
    from longseq_bench.reports.brief import search_brief

    sentences = [text for row in search_rows(records) if (text := bracket_sentence(row))]
    return search_brief(records, sentences)


def bracket_sentence(row: SearchRow) -> str | None:
    """Describe the bracket and its width in a sentence; None without a bracket."""
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

    for row in search_rows(records):
        if row.max_tokens == 0 and row.limited_by == "time":
            shortest = row.first_failure
            raise UserError(
                f"time budget {row.time_budget or 0:.3g} s is shorter than one run of "
                f"{row.name}: {shortest} token(s) took longer; raise --time-budget"
            )
