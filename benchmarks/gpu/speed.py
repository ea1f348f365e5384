"""Step speed: times of every implementation that runs, one `longseq sweep` per cell.

A cell is a shape, mask, mode and length. Its config stays under --out/speed, to run it by hand.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

from benchmarks.gpu.items import (
    Figures,
    Item,
    ItemFailed,
    Result,
    Session,
    Step,
    Table,
    or_dash,
    slug,
)
from benchmarks.gpu.processes import run_with_records
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.analysis.sweeps import sweep_rows_with_records
from longseq_bench.core.model import Record
from longseq_bench.core.units import format_rate, format_seconds, format_share, parse_tokens

Choices = list[dict[str, dict[str, Any]]]
"""Implementations with their options, as in a config."""

SHAPES: dict[str, dict[str, int]] = {
    "8x64": {"heads": 8, "head_dim": 64},
    "8x128": {"heads": 8, "head_dim": 128},
    "32-8x128": {"heads": 32, "kv_heads": 8, "head_dim": 128},
}
SEGMENTS = {"segments": "8192,32768", "dilation": "1,4"}
SPARSITY = 0.95
MAIN: Choices = [
    {"sdpa": {"backend": "cudnn"}},
    {"fused": {"kernel": "flash-attn-4"}},
    {"ring": {}},
    {"block-sparse": {"sparsity": SPARSITY, "kernel": "triton"}},
    {"dilated": SEGMENTS},
    {"hilbert": SEGMENTS},
    {"block-sparse-adaptive": {"sparsity": 0.99}},
]
MORE: Choices = [
    {"block-sparse": {"sparsity": 0.999, "kernel": "triton"}},
    {"block-sparse": {"sparsity": SPARSITY, "kernel": "triton", "pattern": "sink-window"}},
]
"""Beside all other kernels, and all other implementations with their defaults."""

TRIAL_S, RATE, LIMIT_S = 4, 4.5e14, 20
"""For estimates: a trial without its passes; FLOP/s of dense attention; longest pass."""
FINE = ("ok", "oom", "limit", "unsupported", "timeout")
"""Statuses that are an answer; the others are faults."""
TOY = {"heads": 2, "head_dim": 16, "dtype": "float32"}


@dataclass(frozen=True)
class Cell:
    """A sweep of one length. step: whose folder has its records."""

    step: str
    name: str
    tokens: str
    implementations: Choices
    workload: dict[str, Any]
    tier: int = 1
    seconds: float = 60
    settings: dict[str, Any] = field(
        default_factory=lambda: {"memory_budget": "64GiB", "time_budget": f"{LIMIT_S}s"}
    )

    def item(self, session: Session) -> Item:
        """Return the item that runs the sweep."""
        return Item(self.name, partial(run_cell, session, self), self.seconds, self.tier)


def list_items(session: Session) -> Sequence[Item]:
    """Return an item per cell: first 128k tokens of the usual implementations, last the others."""
    if session.dry_run:
        sparse = {"block-sparse": {"sparsity": 0.9, "block": 64}}
        return [toy("speed", "toy", [{"sdpa": {}}, sparse], TOY).item(session)]
    main, more = available(session, MAIN), available(session, others(session))
    cells = []
    for tokens, shape, causal, mode in product(
        ("128k", "32k", "512k"), SHAPES, (False, True), ("forward", "train")
    ):
        sizes = SHAPES[shape]
        workload = {**sizes, "dtype": "bfloat16", "causal": causal, "mode": mode}
        name = f"{tokens} {shape} {describe_pass(mode, causal)}"
        pairs = parse_tokens(tokens) ** 2 * (0.5 if causal else 1)
        flops = 4 * pairs * sizes["heads"] * sizes["head_dim"] * (3.5 if mode == "train" else 1)
        # four passes of three dense implementations
        seconds = TRIAL_S * (len(main) + 1) + 12 * min(flops / RATE, LIMIT_S)
        is_first = tokens == "128k" and shape != "32-8x128"
        cells += [
            Cell("speed", name, tokens, main, workload, 1 if is_first else 2, seconds),
            Cell("speed", f"{name} others", tokens, more, workload, 3, 3 * seconds),
        ]
    return [cell.item(session) for cell in cells]


def toy(step: str, name: str, choices: Choices, workload: dict[str, Any], **settings: Any) -> Cell:
    """Return a cell for a CPU."""
    settings = {"memory_budget": "256MiB", **settings}
    return Cell(step, name, "512", choices, workload, settings=settings)


def describe_pass(mode: str, causal: bool) -> str:
    """Return mode and mask in words."""
    return f"{mode} causal" if causal else mode


def others(session: Session) -> Choices:
    """Return MORE, and the kernels and implementations that MAIN lacks."""
    catalogue = session.launcher.catalogue()
    entries, known = catalogue.implementations, {name for choice in MAIN for name in choice}
    options = {option.name: option for option in entries["block-sparse"].options}
    seldom = ("auto", "native", "torch", "triton")
    kernels = [name for name in options["kernel"].choices if name not in seldom]
    exact = [name for name, kernel in catalogue.kernels.items() if kernel.device == "cuda"]
    names = [
        name for name, entry in entries.items() if entry.source == "built-in" and name not in known
    ]
    return [
        *MORE,
        *({"block-sparse": {"sparsity": SPARSITY, "kernel": kernel}} for kernel in kernels),
        *({"fused": {"kernel": kernel}} for kernel in exact if kernel != "flash-attn-4"),
        *({name: dict[str, Any]()} for name in names),
    ]


def available(session: Session, choices: Choices) -> Choices:
    """Return the choices whose implementation and kernel this machine has."""
    catalogue = session.launcher.catalogue()
    kernels, entries = catalogue.kernels, catalogue.implementations
    return [
        choice for choice in choices
        for name, options in choice.items()
        if name in entries and session.device not in entries[name].unavailable
        and not (options.get("kernel") in kernels and kernels[options["kernel"]].unavailable)
    ]  # fmt: skip


def run_cell(session: Session, cell: Cell) -> Figures:
    """Run a sweep; raises Unfinished at the deadline if at least one trial has ended."""
    folder = session.out / cell.step / slug(cell.name)
    config = folder.with_suffix(".yaml")
    document = {
        "device": session.device, **cell.settings, "workload": cell.workload,
        "tokens": [cell.tokens], "implementations": cell.implementations, "rounds": 1,
        "repeats": 2 if session.dry_run else 10, "time_cap": "50ms" if session.dry_run else "300ms",
    }  # fmt: skip
    # JSON is YAML too
    config.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    arguments = ["sweep", str(config.absolute())]
    records, _ = run_with_records(session, arguments, f"{cell.step}/{folder.name}", "trials")
    rows = [describe(row, group[0]) for row, group in sweep_rows_with_records(records)]
    figures = {"trials": len(rows), "rows": rows}
    bad = [f"{row['name']} {row['tokens']}: {row['reason']}" for row in rows
           if row["status"] not in FINE]  # fmt: skip
    if bad:
        raise ItemFailed(f"{len(bad)} trials failed: {'; '.join(bad)}", figures)
    return figures


def describe(row: SweepRow, record: Record) -> Figures:
    """Return what the tables say about a trial; the backend of `sdpa` is its kernel."""
    facts = record.outcome.facts
    return {
        "name": row.label, "tokens": row.tokens, "status": row.status, "reason": row.reason,
        "kernel": str(facts.get("kernel") or facts.get("backend") or ""), "time_s": row.time_s,
        "unstable": row.unstable, "flops_per_s": row.effective_flops,
        "share_of_peak": row.share_of_peak, "share_of_ideal": row.share_of_ideal,
        "share_of_bandwidth": row.share_of_bandwidth, "exposed_share": row.exposed_share,
        "peak_bytes": row.peak_bytes,
    }  # fmt: skip


def make_table(results: Sequence[Result]) -> Table:
    """Return a row per trial."""
    rows: list[tuple[object, ...]] = [
        ("cell", "implementation", "status", "kernel", "time", "FLOP/s", "of peak", "of ideal",
         "of bandwidth"),
    ]  # fmt: skip
    write_rate = partial(format_rate, unit="FLOP/s")
    for result in results:
        for row in result.figures.get("rows", ()):
            shares = (row[f"share_of_{name}"] for name in ("peak", "ideal", "bandwidth"))
            rows.append((
                result.item, row["name"], row["status"], row["kernel"],
                or_dash(row["time_s"], format_seconds), or_dash(row["flops_per_s"], write_rate),
                *(or_dash(share, format_share) for share in shares),
            ))  # fmt: skip
    return rows


STEP = Step("speed", list_items, make_table)
