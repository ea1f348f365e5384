"""Step ranks: every implementation for many ranks, one rank per GPU, and how ranks fail."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks.gpu.faults import Fault, check_statuses
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
from longseq_bench.analysis.sweeps import sweep_rows
from longseq_bench.core.model import Record, Trial, Workload
from longseq_bench.core.units import format_bytes, format_seconds, format_share
from longseq_bench.environment import collect
from longseq_bench.runner import run_schedule
from longseq_bench.search.strategy import sweep
from longseq_bench.store import Store

DRY_RUN = ("ring", "ulysses")
TOKENS_PER_RANK = {"cuda": 2**16, "cpu": 2**8}
FAULT_TOKENS_PER_RANK = 2048
BUDGET = {"cuda": 16 * 2**30, "cpu": 128 * 2**20}


FAULTS = {
    "kill -9 of a rank": Fault("rank-kills-itself", ("crashed",)),
    "SIGSTOP of a rank": Fault("rank-stops", ("hang", "timeout")),
    "a rank waits for nobody": Fault("gpu-rank-waits", ("hang", "timeout")),
    "a rank is out of memory": Fault("gpu-rank-eats", ("oom",)),
}


def list_items(session: Session) -> Sequence[Item]:
    """Return an item per implementation and fault; with one GPU a single item that says so."""
    catalogue = session.launcher.catalogue()
    count = 2 if session.dry_run else catalogue.devices["cuda"].count
    if count < 2:
        note: Figures = {"devices": count, "note": "several GPUs are needed"}
        return [Item("devices", lambda: note)]
    names = DRY_RUN if session.dry_run else many_rank_implementations()
    faults = list(FAULTS.items())[: 1 if session.dry_run else None]
    return [
        *(Item(name, partial(measure, session, name, count)) for name in names),
        *(Item(text, partial(provoke, session, fault, count)) for text, fault in faults),
    ]


def many_rank_implementations() -> list[str]:
    """Return the names of the built-in implementations that run on several ranks."""
    from longseq_bench.attention.base import IMPLEMENTATIONS

    known = [n for n in IMPLEMENTATIONS.names() if IMPLEMENTATIONS.unavailable_reason(n) is None]
    makes = {name: IMPLEMENTATIONS.get(name) for name in known}
    return [
        name for name, make in makes.items()
        if make.many_ranks and make.__module__.startswith("longseq_bench.")
    ]  # fmt: skip


def measure(session: Session, name: str, count: int) -> Figures:
    """Time an implementation over all ranks; the record has the share of exposed communication."""
    record = _run(session, name, count, TOKENS_PER_RANK[session.device], repeats=10, time_cap=1.0)
    (row,) = sweep_rows([record])
    outside = list(map(int, record.outcome.samples("outside_allocator")))
    figures: Figures = {
        "ranks": count, "tokens": row.tokens, "status": row.status, "reason": row.reason,
        "time_s": row.time_s, "exposed_share": row.exposed_share, "bytes_sent": row.bytes_sent,
        "peak_bytes": row.peak_bytes, "outside_allocator": outside,
    }  # fmt: skip
    if row.status not in ("ok", "unsupported"):
        raise ItemFailed(f"{row.status}: {row.reason}", figures)
    return figures


def provoke(session: Session, fault: Fault, count: int) -> Figures:
    """Run a trial in which one rank fails, then a correct trial on all ranks."""
    record = _run(session, fault.implementation, count, FAULT_TOKENS_PER_RANK, time_budget=2.0)
    outcome = record.outcome
    following = _run(session, "ring", count, FAULT_TOKENS_PER_RANK).outcome
    figures: Figures = {
        "status": outcome.status, "reason": outcome.reason, "next_status": following.status
    }  # fmt: skip
    check_statuses(fault, outcome, following, figures)
    return figures


def _run(session: Session, name: str, count: int, tokens: int, **settings: Any) -> Record:
    """Run one trial, keep its record, and return it."""
    device = session.device
    workload = Workload(
        seq_len=count * tokens, heads=8, head_dim=64, causal=True, batch=count,
        dtype="bfloat16" if device == "cuda" else "float32",
    )  # fmt: skip
    trial = Trial(
        implementation=name, options=session.launcher.catalogue().options(name, {}),
        workload=workload, device=device, world_size=count, memory_budget=BUDGET[device],
        **{"repeats": 0, **settings},
    )  # fmt: skip
    with Store(session.out / "ranks" / slug(name)) as store:
        (record,) = run_schedule(sweep([trial], 1), session.launcher, store, collect)
    return record


def make_table(results: Sequence[Result]) -> Table:
    """Return a row per item."""
    rows: list[tuple[object, ...]] = [
        ("item", "status", "trial", "time", "exposed", "peak per rank", "outside the allocator")
    ]
    for one in results:
        figures = one.figures
        outside = max(figures.get("outside_allocator") or [None], key=lambda size: size or 0)
        rows.append((
            one.item, one.status, figures.get("status") or figures.get("note") or "–",
            or_dash(figures.get("time_s"), format_seconds),
            or_dash(figures.get("exposed_share"), format_share),
            or_dash(figures.get("peak_bytes"), format_bytes), or_dash(outside, format_bytes),
        ))  # fmt: skip
    return rows


STEP = Step("ranks", list_items, make_table)
