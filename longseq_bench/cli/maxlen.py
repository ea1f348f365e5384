"""`longseq maxlen`: the longest sequence that an attention takes, as a bracket."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longseq_bench.cli import options as asked

if TYPE_CHECKING:
    from longseq_bench.analysis.search_row import SearchRow
    from longseq_bench.core.catalogue import Catalogue
    from longseq_bench.core.model import Record, Trial
    from longseq_bench.launchers.base import Launcher
    from longseq_bench.search.prediction import Outlook

DEFAULT_TIME_S = 10.0
"""Default time limit of one pass (s): the search then ends within two minutes on most machines."""


def maxlen(
    impl: Annotated[list[str], typer.Option(help="Implementation; give it again for more.")],
    option: asked.Options = None,
    memory_budget: Annotated[
        str | None, typer.Option(help="A rank's: 7.9GiB, 512MiB. Default: 80 % of what is free.")
    ] = None,
    time_budget: asked.TimeBudget = None,
    dtype: Annotated[asked.DTypeName, typer.Option()] = asked.DTypeName.float32,
    heads: asked.Heads = 8,
    kv_heads: asked.KvHeads = None,
    head_dim: Annotated[int, typer.Option()] = 64,
    batch: Annotated[int, typer.Option()] = 1,
    causal: asked.Causal = False,
    mode: asked.Mode = asked.ModeName.forward,
    keep: asked.Keep = asked.KeepName.all,
    device: Annotated[asked.DeviceName, typer.Option()] = asked.DeviceName.cpu,
    allocator: asked.Allocator = asked.AllocatorName.default,
    world_size: Annotated[
        int | None, typer.Option(min=1, help="Ranks that share a sequence; on cuda a device each.")
    ] = None,
    ceiling: Annotated[
        str | None, typer.Option(help="Ask for no more tokens than this: 1M.")
    ] = None,
    sparsity: Annotated[
        str | None,
        typer.Option(help="auto: the least with which --target fits. Else: -o sparsity=0.99."),
    ] = None,
    target: Annotated[str | None, typer.Option(help="Tokens, with --sparsity auto: 1M.")] = None,
    fit_only: Annotated[
        bool,
        typer.Option("--fit-only", help="Also how far memory alone goes: loops capped, unchecked."),
    ] = False,
    threads: asked.Threads = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    out: asked.Out = None,
    as_json: asked.AsJson = False,
) -> int:
    """Search for the longest sequence each implementation takes here.

    The answer is a bracket: the longest length that was run, passed and was confirmed in a fresh
    process, and the shortest that was run and failed, within 1 % or 64 tokens, with what limited
    it: memory, time, a kernel's limit, numerics. Tokens are those of all ranks together.
    """
    from longseq_bench.cli.session import default_ranks
    from longseq_bench.core.units import parse_bytes, parse_seconds

    ranks = world_size or default_ranks()
    asked.check_keep(keep, mode)
    shape = asked.workload(
        batch=batch, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, causal=causal,
        mode=mode,
    )  # fmt: skip
    far = _Limits(_ceiling(ceiling, ranks), _target(sparsity, target, option or []), fit_only)
    return _answer(
        impl, option or [], far, out, as_json,
        workload=shape, device=device.value, world_size=ranks, threads=threads, seed=seed,
        memory_budget=parse_bytes(memory_budget) if memory_budget else None,
        time_budget=parse_seconds(time_budget) if time_budget else DEFAULT_TIME_S,
        keep=keep.value, allocator=allocator.value,
    )  # fmt: skip


@dataclass(frozen=True)
class _Limits:
    """How far to search: tokens at most; or the least sparsity for so many; memory alone too."""

    ceiling: int | None
    target: int | None
    fit_only: bool


def _answer(
    names: list[str], assignments: list[str], limits: _Limits, out: Path | None, as_json: bool,
    **fields: Any,
) -> int:  # fmt: skip
    """Ask the machine, make the trials, search."""
    from longseq_bench.cli.session import console, make_launcher, outlook
    from longseq_bench.core.errors import UserError

    if limits.target and limits.ceiling:
        raise UserError("--ceiling is for a search of tokens; --target says how many there are")
    if limits.target and limits.fit_only:
        raise UserError("--fit-only looks at memory, which no sparsity changes; leave it out")
    with make_launcher() as launcher:
        with console(stderr=True).status("looking at this machine …"):
            catalogue = launcher.catalogue()
        trials = _trials(catalogue, names, assignments, out, **fields)
        launcher.check(trials)
        ahead = outlook(launcher, catalogue, trials[0].device, out)
        if limits.target:
            return _densest(trials, limits.target, launcher, ahead, out, as_json)
        if limits.fit_only:
            alone = [t.but(fit_only=True, time_budget=None) for t in trials]
            trials = [one for pair in zip(alone, trials, strict=True) for one in pair]
        return _search(trials, limits.ceiling, launcher, ahead, out, as_json)


def _target(sparsity: str | None, target: str | None, assignments: list[str]) -> int | None:
    """The length for which the least sparsity is wanted; None where none is. Raises UserError for
    half a question."""
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
    return asked.tokens("--target", target)


def _densest(
    trials: list[Trial], tokens: int, launcher: Launcher, ahead: Outlook, out: Path | None,
    as_json: bool,
) -> int:  # fmt: skip
    """Search the least sparsity of each. Raises UserError for what has none."""
    from longseq_bench.analysis.frames import density_rows_json
    from longseq_bench.analysis.searches import density_rows
    from longseq_bench.cli.progress import SearchProgress
    from longseq_bench.cli.session import carry_out, console, exit_code, print_json
    from longseq_bench.cli.stdout import ends
    from longseq_bench.core.errors import UserError
    from longseq_bench.reports.brief import density_brief
    from longseq_bench.reports.render.terminal import REPORT_HINT, print_document
    from longseq_bench.search import strategy

    for trial in trials:
        if "sparsity" not in trial.options:
            raise UserError(f"{trial.implementation} has no sparsity; block-sparse has")
    watcher = SearchProgress(console(stderr=True))
    steps = strategy.densest([t.at(tokens) for t in trials], ahead)
    records = carry_out(steps, launcher, out, watcher)
    rows = density_rows(records)
    with ends(exit_code(records)):
        if as_json:
            print_json(density_rows_json(rows))
        else:
            print_document(density_brief(records), console(), REPORT_HINT)
    return exit_code(records)


def _ceiling(text: str | None, ranks: int) -> int | None:
    """In tokens. Raises UserError where no length under it has a token for every rank."""
    from longseq_bench.core.errors import UserError
    from longseq_bench.core.units import parse_tokens

    tokens = parse_tokens(text) if text else None
    if tokens is not None and tokens < ranks:
        least = f"with --world-size {ranks} the least is {ranks}"
        raise UserError(f"--ceiling {text} is less than a token a rank; {least}")
    return tokens


def _trials(
    catalogue: Catalogue, names: list[str], assignments: list[str], out: Path | None, **fields: Any
) -> list[Trial]:
    """One trial an implementation. An option goes to every implementation that has it."""
    from longseq_bench.cli.session import check_device, default_memory
    from longseq_bench.core.model import Trial

    device, ranks = fields["device"], fields["world_size"]
    check_device(catalogue, device, fields["workload"]["dtype"], ranks)
    implementations = asked.chosen(catalogue, names, assignments)
    fields["memory_budget"] = fields["memory_budget"] or default_memory(device, out, ranks)
    return [
        Trial(implementation=name, options=options, repeats=0, **fields)
        for name, options in implementations.items()
    ]


def _search(
    trials: list[Trial], ceiling: int | None, launcher: Launcher, ahead: Outlook,
    out: Path | None, as_json: bool,
) -> int:  # fmt: skip
    from longseq_bench.analysis.frames import maxlen_json
    from longseq_bench.cli.progress import SearchProgress
    from longseq_bench.cli.session import carry_out, console, exit_code, print_json
    from longseq_bench.cli.stdout import ends
    from longseq_bench.search import strategy

    watcher = SearchProgress(console(stderr=True))
    records = carry_out(strategy.maxlen(trials, ceiling, ahead), launcher, out, watcher)
    with ends(exit_code(records)):
        if as_json:
            print_json(maxlen_json(records))
        else:
            _show(records)
    _refuse_hopeless_time(records)
    return exit_code(records)


def _show(records: list[Record]) -> None:
    """Print the table of maxima and the width of each bracket."""
    from longseq_bench.analysis.searches import search_rows
    from longseq_bench.cli.session import console
    from longseq_bench.reports.brief import search_brief
    from longseq_bench.reports.render.terminal import REPORT_HINT, print_document

    brackets = [one for row in search_rows(records) if (one := bracket_sentence(row))]
    print_document(search_brief(records, brackets), console(), REPORT_HINT)


def bracket_sentence(row: SearchRow) -> str | None:
    """Say between which lengths the edge is, and how far apart they are; None without a bracket."""
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


def _refuse_hopeless_time(records: list[Record]) -> None:
    """Raises UserError where the time budget was shorter than any run at all."""
    from longseq_bench.analysis.searches import search_rows
    from longseq_bench.core.errors import UserError

    for row in search_rows(records):
        if row.max_tokens == 0 and row.limited_by == "time":
            shortest = row.first_failure
            raise UserError(
                f"time budget {row.time_budget or 0:.3g} s is shorter than one run of "
                f"{row.name}: {shortest} token(s) took longer; raise --time-budget"
            )
