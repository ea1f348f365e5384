"""`longseq scaling`: maxima and times over ranks, beside theory and expectation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longseq_bench.cli import options as asked
from longseq_bench.cli.maxlen import DEFAULT_TIME_S

if TYPE_CHECKING:
    from longseq_bench.core.catalogue import Catalogue
    from longseq_bench.core.model import Trial
    from longseq_bench.launchers.base import Launcher
    from longseq_bench.search.prediction import Outlook

ROUNDS = 1


def scaling(
    impl: Annotated[list[str], typer.Option(help="Implementation; give it again for more.")],
    option: asked.Options = None,
    world_sizes: Annotated[str, typer.Option(help="Numbers of ranks: 1,2,4.")] = "1,2",
    memory_budget: Annotated[
        str | None, typer.Option(help="A rank's: 512MiB. Default: 80 % of what is free, shared.")
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
    threads: asked.Threads = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    out: asked.Out = None,
    as_json: asked.AsJson = False,
) -> int:
    """How the longest length and the time of a pass go with ranks and tokens.

    Searches the longest length in each world, then times an eighth, a quarter and half of the least
    of them in every world. The table sets theory (the floor of all ranks), expectation (one rank's
    times the ranks) and what was found side by side, and fits exponents of tokens and ranks.
    """
    from longseq_bench.cli.session import console, make_launcher, outlook
    from longseq_bench.core.units import parse_bytes, parse_seconds

    worlds = _worlds(world_sizes)
    asked.check_keep(keep, mode)
    shape = asked.workload(
        batch=batch, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, causal=causal,
        mode=mode,
    )  # fmt: skip
    seconds = parse_seconds(time_budget) if time_budget else DEFAULT_TIME_S
    with make_launcher() as launcher:
        with console(stderr=True).status("looking at this machine …"):
            catalogue = launcher.catalogue()
        trials = _trials(
            catalogue, impl, option or [], max(worlds), out, workload=shape, device=device.value,
            memory_budget=parse_bytes(memory_budget) if memory_budget else None,
            time_budget=seconds, threads=threads, seed=seed, keep=keep.value,
            allocator=allocator.value,
        )  # fmt: skip
        launcher.check([t.but(world_size=ranks) for t in trials for ranks in worlds])
        ahead = outlook(launcher, catalogue, device.value, out)
        return _study(trials, worlds, launcher, ahead, out, as_json)


def _trials(
    catalogue: Catalogue, names: list[str], assignments: list[str], most: int, out: Path | None,
    **fields: Any,
) -> list[Trial]:  # fmt: skip
    from longseq_bench.cli.session import check_device, default_memory
    from longseq_bench.core.model import Trial

    device = fields["device"]
    check_device(catalogue, device, fields["workload"]["dtype"], most)
    fields["memory_budget"] = fields["memory_budget"] or default_memory(device, out, most)
    return [
        Trial(implementation=name, options=options, repeats=0, **fields)
        for name, options in asked.chosen(catalogue, names, assignments).items()
    ]


def _worlds(text: str) -> list[int]:
    """Raises UserError for what is no list of numbers of ranks."""
    from longseq_bench.core.errors import UserError

    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise UserError(f"--world-sizes: {text!r} is no list of numbers of ranks, like 1,2,4")
    return sorted({int(part) for part in parts})


def _study(
    trials: list[Trial], worlds: list[int], launcher: Launcher, ahead: Outlook,
    out: Path | None, as_json: bool,
) -> int:  # fmt: skip
    from dataclasses import asdict

    from longseq_bench.analysis.frames import sweep_json
    from longseq_bench.analysis.scaling import complexities, reached
    from longseq_bench.analysis.searches import search_rows
    from longseq_bench.analysis.sweeps import sweep_rows
    from longseq_bench.cli.progress import SearchProgress
    from longseq_bench.cli.session import carry_out, console, exit_code, print_json
    from longseq_bench.cli.stdout import ends
    from longseq_bench.reports.brief import scaling_brief
    from longseq_bench.reports.render.terminal import REPORT_HINT, print_document
    from longseq_bench.search import strategy

    watcher = SearchProgress(console(stderr=True))
    steps = strategy.scaling(trials, worlds, ROUNDS, None, ahead)
    records = carry_out(steps, launcher, out, watcher)
    maxima, times = reached(search_rows(records)), complexities(sweep_rows(records))
    with ends(exit_code(records)):
        if as_json:
            found, fits = [asdict(one) for one in maxima], [asdict(one) for one in times]
            rows = sweep_json(records)["rows"]
            print_json({"schema": 1, "maxima": found, "rows": rows, "complexity": fits})
        else:
            print_document(scaling_brief(records), console(), REPORT_HINT)
    return exit_code(records)
