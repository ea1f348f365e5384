"""Step speed: `longseq sweep configs/h200-speed.yaml`, which the next call continues."""

from collections.abc import Sequence
from functools import partial

from benchmarks.gpu.items import (
    ROOT,
    Figures,
    Item,
    ItemFailed,
    Result,
    Session,
    Step,
    Table,
    or_dash,
)
from benchmarks.gpu.processes import run_with_records
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.analysis.sweeps import sweep_rows_with_records
from longseq_bench.core.model import Record
from longseq_bench.core.units import format_rate, format_seconds, format_share, format_tokens

CONFIG = ROOT / "configs" / "h200-speed.yaml"
TOY = """\
device: cpu
memory_budget: 256MiB
workload: {heads: 2, head_dim: 16, dtype: float32}
tokens: [512]
implementations:
  - sdpa
  - block-sparse: {sparsity: 0.9, block: 64}
rounds: 1
repeats: 2
time_cap: 50ms
"""
FINE = ("ok", "oom", "limit", "unsupported", "timeout")
"""Statuses that are an answer; the others are faults."""


def list_items(session: Session) -> Sequence[Item]:
    """Return the one item: the sweep."""
    return [Item("sweep", partial(run_sweep, session))]


def run_sweep(session: Session) -> Figures:
    """Run the sweep; raises Unfinished at the deadline if at least one trial has ended."""
    folder = session.out / "speed" / "sweep"
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIG
    if session.dry_run:
        config = folder.with_suffix(".yaml")
        config.write_text(TOY, encoding="utf-8")
    arguments = ["sweep", str(config.absolute())]
    records, _ = run_with_records(session, arguments, "speed/sweep", "trials")
    rows = [describe(row, facts) for row, facts in _rows(records)]
    figures = {"trials": len(rows), "rows": rows}
    bad = [f"{row['name']} {row['tokens']}: {row['reason']}" for row in rows
           if row["status"] not in FINE]  # fmt: skip
    if bad:
        raise ItemFailed(f"{len(bad)} trials failed: {'; '.join(bad)}", figures)
    return figures


def _rows(records: list[Record]) -> list[tuple[SweepRow, str]]:
    """Return the rows, each with the kernel that ran."""
    return [(row, kernel_of(group[0])) for row, group in sweep_rows_with_records(records)]


def kernel_of(record: Record) -> str:
    """Return the kernel that the record names; that of `sdpa` is called its backend."""
    facts = record.outcome.facts
    return str(facts.get("kernel") or facts.get("backend") or "")


def describe(row: SweepRow, kernel: str) -> Figures:
    """Return what the table says about a trial."""
    return {
        "name": row.label, "tokens": row.tokens, "status": row.status, "reason": row.reason,
        "kernel": kernel, "time_s": row.time_s, "flops_per_s": row.effective_flops,
        "share_of_peak": row.share_of_peak, "share_of_ideal": row.share_of_ideal,
        "peak_bytes": row.peak_bytes,
    }  # fmt: skip


def make_table(results: Sequence[Result]) -> Table:
    """Return a row per trial."""
    rows: list[tuple[object, ...]] = [
        ("implementation", "tokens", "status", "kernel", "time", "FLOP/s", "of peak", "of ideal")
    ]
    for result in results:
        rows += map(_cells, result.figures.get("rows", ()))
    return rows


def _cells(row: Figures) -> tuple[object, ...]:
    return (
        row["name"], format_tokens(row["tokens"]), row["status"], row["kernel"],
        or_dash(row["time_s"], format_seconds),
        or_dash(row["flops_per_s"], lambda rate: format_rate(rate, "FLOP/s")),
        or_dash(row["share_of_peak"], format_share), or_dash(row["share_of_ideal"], format_share),
    )  # fmt: skip


STEP = Step("speed", list_items, make_table)
