"""`longseq maxlen`: the longest sequence that an attention takes, as a bracket."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from longseq_bench.catalogue import Catalogue
    from longseq_bench.launchers.base import Launcher
    from longseq_bench.model import Record, Trial

DEFAULT_TIME_S = 30.0
"""Seconds a pass where none are asked: the command then ends in minutes on any machine."""


class DeviceName(StrEnum):
    """Kinds of device."""

    cpu = "cpu"
    cuda = "cuda"


class DTypeName(StrEnum):
    """Element types."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class ModeName(StrEnum):
    """What a pass is."""

    forward = "forward"
    train = "train"


def maxlen(
    impl: Annotated[list[str], typer.Option(help="Implementation; give it again for more.")],
    option: Annotated[
        list[str] | None,
        typer.Option("--option", "-o", help="An option of theirs, NAME=VALUE; more than once."),
    ] = None,
    memory_budget: Annotated[
        str | None, typer.Option(help="A rank's: 7.9GiB, 512MiB. Default: 80 % of what is free.")
    ] = None,
    time_budget: Annotated[
        str | None, typer.Option(help="Seconds one pass may take: 60s, 2min. Default: 30s.")
    ] = None,
    dtype: Annotated[DTypeName, typer.Option()] = DTypeName.float32,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 8,
    kv_heads: Annotated[
        int | None, typer.Option(help="Key and value heads. Default: as many as heads.")
    ] = None,
    head_dim: Annotated[int, typer.Option()] = 64,
    batch: Annotated[int, typer.Option()] = 1,
    causal: Annotated[bool, typer.Option("--causal")] = False,
    mode: Annotated[ModeName, typer.Option(help="train: forward and backward.")] = ModeName.forward,
    device: Annotated[DeviceName, typer.Option()] = DeviceName.cpu,
    world_size: Annotated[
        int | None, typer.Option(min=1, help="Ranks that share a sequence; on cuda a device each.")
    ] = None,
    ceiling: Annotated[
        str | None, typer.Option(help="Ask for no more tokens than this: 1M.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads a rank.")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for records and report. Default: a new one under results/."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON document on stdout, progress on stderr.")
    ] = False,
) -> int:
    """Search for the longest sequence each implementation takes here.

    The answer is a bracket: the longest length that was run, passed and was confirmed in a fresh
    process, and the shortest that was run and failed, within 1 % or 64 tokens, with what limited
    it: memory, time, a kernel's limit, numerics. Tokens are those of all ranks together.
    """
    from longseq_bench.cli.common import console, default_ranks, make_launcher
    from longseq_bench.units import parse_bytes, parse_seconds

    memory = parse_bytes(memory_budget) if memory_budget else None
    seconds = parse_seconds(time_budget) if time_budget else DEFAULT_TIME_S
    ranks = world_size or default_ranks()
    most = _ceiling(ceiling, ranks)
    shape = _workload(
        batch=batch, heads=heads, kv_heads=kv_heads if kv_heads is not None else heads,
        head_dim=head_dim, dtype=dtype.value, causal=causal, mode=mode.value,
    )  # fmt: skip
    with make_launcher() as launcher:
        with console(stderr=True).status("looking at this machine …"):
            catalogue = launcher.catalogue()
        trials = _trials(
            catalogue, impl, option or [],
            workload=shape, device=device.value, world_size=ranks, memory_budget=memory,
            time_budget=seconds, threads=threads, seed=seed, out=out,
        )  # fmt: skip
        launcher.check(trials)
        return _search(trials, most, launcher, out, as_json)


def _ceiling(text: str | None, ranks: int) -> int | None:
    """In tokens. Raises UserError where no length under it has a token for every rank."""
    from longseq_bench.errors import UserError
    from longseq_bench.units import parse_tokens

    tokens = parse_tokens(text) if text else None
    if tokens is not None and tokens < ranks:
        least = f"with --world-size {ranks} the least is {ranks}"
        raise UserError(f"--ceiling {text} is less than a token a rank; {least}")
    return tokens


def _workload(**fields: Any) -> dict[str, Any]:
    """The workload's fields, checked. Raises UserError with the sentence of the first fault."""
    from pydantic import ValidationError

    from longseq_bench.errors import UserError
    from longseq_bench.model import Workload

    try:
        Workload(seq_len=1, **fields)
    except ValidationError as error:
        first = error.errors()[0]
        name = "--" + "-".join(str(p) for p in first["loc"]).replace("_", "-")
        said = first["msg"].removeprefix("Value error, ")
        raise UserError(f"{name}: {said}" if first["loc"] else said) from None
    if fields["kv_heads"] == 0:
        raise UserError("--kv-heads: 0 heads can't hold keys; leave it out for as many as heads")
    return {"seq_len": 1, **fields}


def _trials(
    catalogue: Catalogue, names: list[str], assignments: list[str], out: Path | None, **fields: Any
) -> list[Trial]:
    """One trial an implementation. An option goes to every implementation that has it."""
    from longseq_bench.cli.common import check_device, default_memory
    from longseq_bench.config import parse_assignments
    from longseq_bench.model import Trial
    from longseq_bench.options import unknown_option

    device, ranks = fields["device"], fields["world_size"]
    check_device(catalogue, device, fields["workload"]["dtype"], ranks)
    given = parse_assignments(assignments)
    known = {n: {s.name for s in catalogue.entry(n, "--impl").options} for n in names}
    for name in given:
        if not any(name in options for options in known.values()):
            every = {o for options in known.values() for o in options}
            raise unknown_option(name, given[name], every, ", ".join(names))
    fields["memory_budget"] = fields["memory_budget"] or default_memory(device, out, ranks)
    return [
        Trial(
            implementation=name,
            options=catalogue.options(name, {k: v for k, v in given.items() if k in known[name]}),
            repeats=0,
            **fields,
        )
        for name in dict.fromkeys(names)
    ]


def _search(
    trials: list[Trial], ceiling: int | None, launcher: Launcher, out: Path | None, as_json: bool
) -> int:
    from longseq_bench import plan
    from longseq_bench.cli.common import carry_out, console, exit_code, print_json
    from longseq_bench.cli.watch import SearchProgress
    from longseq_bench.table import maxlen_json

    watcher = SearchProgress(console(stderr=True))
    records = carry_out(plan.maxlen(trials, ceiling), launcher, out, watcher)
    if as_json:
        print_json(maxlen_json(records))
    else:
        _show(records)
    _refuse_hopeless_time(records)
    return exit_code(records)


def _show(records: list[Record]) -> None:
    from longseq_bench.cli.common import console
    from longseq_bench.cli.tables import maxima_table

    console().print(maxima_table(records))


def _refuse_hopeless_time(records: list[Record]) -> None:
    """Raises UserError where the time budget was shorter than any run at all."""
    from longseq_bench.errors import UserError
    from longseq_bench.reports.groups import name_of
    from longseq_bench.table import maximum_rows

    for row in maximum_rows(records):
        if row["max_tokens"] == 0 and row["limited_by"] == "time":
            shortest = row["first_failure"]
            raise UserError(
                f"time budget {row['time_budget']:.3g} s is shorter than one run of "
                f"{name_of(row)}: {shortest} token(s) took longer; raise --time-budget"
            )
